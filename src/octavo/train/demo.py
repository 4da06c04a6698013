"""The paired demonstration: one small model, trained in BF16 and again in FP8, and what came of it.

Both arms have the same seed, initial weights, data and order of the data; only `precision.level` differs. The
configuration is `demo.toml` beside this file, so that it is there after `pip install` too; `configs/demo.toml` is its
copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import count
from pathlib import Path

from octavo.train.config import ConfigError, TrainConfig, load_config
from octavo.train.diagnose import NonFiniteError
from octavo.train.loop import run
from octavo.train.metrics import Progress, RunResult
from octavo.train.report import ReportFiles, write_report

BASELINE, CANDIDATE = "bf16", "O1"
SET_BY_DEMO = ("precision.level", "run.out")


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """Both arms, as far as they got; `files` is None where the first was stopped before the second began."""

    out: Path
    arms: list[RunResult]
    files: ReportFiles | None


def demo_configs(overrides: Sequence[str] = ()) -> tuple[TrainConfig, TrainConfig]:
    """Return the configurations of the BF16 and the FP8 arm, with `overrides` (`section.key=value`) applied to both.

    Raises:
        ConfigError: An override is wrong, or sets what the demonstration sets itself.
    """
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in SET_BY_DEMO:
            raise ConfigError(
                f"{key} is set by the demo, which compares {BASELINE} with {CANDIDATE}: use `octavo train`"
            )
    with resources.as_file(resources.files("octavo.train") / "demo.toml") as path:
        baseline, candidate = (
            load_config(path, [*overrides, f"precision.level={level}"]) for level in (BASELINE, CANDIDATE)
        )
    return baseline, candidate


def free_folder(wanted: Path) -> Path:
    """Return `wanted` if nothing is there, else the first of `wanted-2`, `wanted-3`, … that is free."""
    if not wanted.exists():
        return wanted
    return next(path for n in count(2) if not (path := wanted.with_name(f"{wanted.name}-{n}")).exists())


def run_demo(configs: Sequence[TrainConfig], out: Path, progress: Progress) -> DemoResult:
    """Train each config into `out/<level>` and write the report into `out`.

    An arm that stops on a loss that is not finite is a result like any other: it is in the report, without a verdict.

    Raises:
        ConfigError: `out` holds something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty, and a demo overwrites nothing: give another folder with --out")
    arms: list[RunResult] = []
    folders: list[Path] = []
    for config in configs:
        folders.append(out / config.precision.level)
        try:
            arms.append(run(config, out=folders[-1], progress=progress))
        except NonFiniteError as error:
            progress.note(str(error))
            arms.append(RunResult.read(folders[-1]))
        if arms[-1].stopped == "sigterm":
            return DemoResult(out=out, arms=arms, files=None)
    return DemoResult(out=out, arms=arms, files=write_report(folders, out))
