"""Paired runs: some arms, each on the same seeds, from one configuration (docs/compare.md).

Seeds are the outer loop, so other load affects all arms of a seed. Under torchrun all runs share one process group.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.experiments.compare_report import FILES, write_comparison
from octavo.experiments.compare_verdict import ArmRuns, Comparison, compare_arms
from octavo.experiments.curves import Curves
from octavo.inspect.paired_test import CONFIDENCE, MOST_SEEDS, check_limits
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.checkpoint.store import read_trainer_state
from octavo.train.config.run_config import Change, ConfigError, TrainConfig, load_config, parse_config, resume_of
from octavo.train.config.sections import IGNORED_ON_RESUME
from octavo.train.diagnose import NonFiniteError
from octavo.train.loop import run
from octavo.train.ranks import Ranks, join_ranks
from octavo.train.record.metrics import CONFIG_FILE, METRICS_FILE, RESULT_FILE, RUN_MARKERS, RunResult, read_metrics
from octavo.train.record.progress import Progress

SHARED_SECTIONS = ("run", "model", "data", "eval")  # Sections that all arms share
SHARED_KEYS = ("optim.batch",)
OWN_KEYS = ("model.attention",)  # Of shared sections: how the same model is computed
NOT_FOR_ARMS = {
    "run.restarts": "is for octavo train: the command of a comparison that was killed goes on, so leave it out",
    "eval.patience": "would end arms after unequal steps: leave it out",
    "run.epochs": "is for octavo train: give a comparison run.steps",
}
ARM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
SETTING_SEPARATOR = re.compile(r"\s+(?=\w+(?:\.\w+)+\s*=)")


@dataclass(frozen=True, kw_only=True)
class Arm:
    name: str
    settings: tuple[str, ...]
    configs: Mapping[int, TrainConfig]

    def folder(self, seed: int) -> str:
        return f"{self.name}-seed{seed}"


def make_arms(
    config: str | Path, overrides: Sequence[str], arms: Sequence[str], seeds: str, change: Change = dict
) -> list[Arm]:
    """Read a configuration and make the arms of a comparison; the first is the baseline."""
    base = load_config(config, overrides, change=change)
    for key, problem in NOT_FOR_ARMS.items():
        if value := base.flat.get(key):
            raise ConfigError(f"{key} = {value:g} {problem}")
    chosen_seeds = parse_seeds(seeds, base.run.seed)
    parsed = [parse_arm(arm) for arm in arms]
    names = [name for name, _ in parsed]
    if len(parsed) < 2:
        problem = f"there is only {names[0]!r}" if names else "there is none"
        raise ConfigError(f"a comparison takes two arms or more, the baseline first, and {problem}: give --arm again")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"two arms are named {twice[0]!r}: each needs a name of its own, which names its folders too")
    result = []
    for name, settings in parsed:
        try:
            arm_config = load_config(config, [*overrides, *settings], change=change)
        except ConfigError as error:
            raise ConfigError(f"arm {name!r}: {error}") from None
        for key, (base_value, value) in _differences(base, arm_config).items():
            if (key.partition(".")[0] in SHARED_SECTIONS and key not in OWN_KEYS) or key in SHARED_KEYS:
                problem = f"arm {name!r} sets {key} = {value!r} (the others: {base_value!r})"
                reason = "arms share model, data, batch, seeds and steps, else their losses cannot be compared"
                raise ConfigError(f"{problem}: {reason} seed by seed. Set it for all arms, after CONFIG")
        tables = arm_config.model_dump(exclude_none=True)
        tables["run"].pop("out", None)
        configs = {
            seed: parse_config(tables | {"run": tables["run"] | {"seed": seed, "name": f"{name}-seed{seed}"}})
            for seed in chosen_seeds
        }
        result.append(Arm(name=name, settings=settings, configs=configs))
    return result


def parse_arm(text: str) -> tuple[str, tuple[str, ...]]:
    """`"name:optim.lr=1 optim.eps=2"` → `("name", ("optim.lr=1", "optim.eps=2"))`. Raises ConfigError."""
    name, _, settings = (part.strip() for part in text.partition(":"))
    if not ARM.fullmatch(name):
        remedy = "write NAME:section.key=value, as rowwise:precision.level=fp8"
        names = "a name of letters, digits and . _ + - (it names the folders of the runs)"
        raise ConfigError(f"arm {text!r}: {remedy}, with {names}; the baseline may be a name alone")
    return name, tuple(SETTING_SEPARATOR.split(settings)) if settings else ()


def parse_seeds(text: str, first: int) -> tuple[int, ...]:
    """`"3"` → three seeds from `first` on; `"1,2,5"` → these. Raises ConfigError, also for fewer than two."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ConfigError(f"seeds are a number of them, as 3, or a list, as 1,2,5; got {text!r}")
    seeds = [int(word) for word in words]
    if len(seeds) == 1:
        seeds = list(range(first, first + seeds[0]))
    if repeated := [seed for seed in seeds if seeds.count(seed) > 1]:
        raise ConfigError(f"seed {repeated[0]} is given twice: repeated runs add no information")
    if len(seeds) < 2:
        problem = f"a comparison takes two seeds or more; got {text!r}. One seed cannot tell an effect from chaos"
        reason = "how far apart two runs end that differ in rounding alone is known from several pairs"
        raise ConfigError(f"{problem}: {reason}. `octavo demo` shows one pair")
    return tuple(seeds)


def _differences(one: TrainConfig, other: TrainConfig) -> dict[str, tuple[object, object]]:
    """The settings that differ, with both values; None for an unset one."""
    first, second = one.flat, other.flat
    keys = dict.fromkeys([*first, *second])
    return {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}


def compare(
    arms: Sequence[Arm], out: Path, *, margin: float | None = None, confidence: float = CONFIDENCE,
    max_seeds: int | None = None, progress: Progress | None = None,
) -> Comparison | None:  # fmt: skip
    """Train every arm on every seed into `out/<arm>-seed<k>`, or read its finished run, and compare."""
    # Writes `compare.json` and `report.html` into `out`. Call it again to go on, or with more arms or seeds.
    check_limits(margin, confidence, MOST_SEEDS if max_seeds is None else max_seeds)
    configs = {arm.folder(seed): arm.configs[seed] for seed in arms[0].configs for arm in arms}
    with join_ranks(arms[0].configs[min(arms[0].configs)]) as ranks:
        ranks.run_on_rank0(lambda: check_folders(out, configs))
        planned = ranks.run_on_rank0(lambda: planned_seeds(out, max_seeds))
        results: dict[str, RunResult] = {}
        for folder, config in configs.items():
            result = _train_or_read(out / folder, config, ranks, progress)
            if result.stopped == "sigterm":
                return None
            results[folder] = result

        def judge() -> Comparison:
            _check_data([out / folder for folder in results])
            runs = []
            for arm in arms:
                ends = {seed: results[arm.folder(seed)] for seed in arm.configs}
                curves = {seed: _curves(out / arm.folder(seed), result) for seed, result in ends.items()}
                runs.append(ArmRuns(name=arm.name, settings=arm.settings, results=ends, curves=curves))
            comparison = compare_arms(runs, margin=margin, confidence=confidence, max_seeds=planned)
            write_comparison(comparison, [next(iter(arm.configs.values())).to_toml() for arm in arms], out)
            return comparison

        return ranks.run_on_rank0(judge)


def planned_seeds(out: Path, max_seeds: int | None) -> int:
    """The planned maximum of seeds, from the comparison in `out` if there is one. Raises ConfigError."""
    path = out / FILES[0]
    planned = json.loads(path.read_text()).get("planned_seeds") if path.exists() else None
    if planned is not None and max_seeds not in (None, planned):
        problem = f"{path} was planned for at most {planned} seeds, and its results are known"
        reason = "a plan that changes with them does not hold its error rates"
        remedy = f"Leave out --max-seeds {max_seeds} (more seeds than planned are marked)"
        raise ConfigError(f"{problem}: {reason}. {remedy}, or compare into another folder (--out)")
    return planned or max_seeds or MOST_SEEDS


def check_folders(out: Path, configs: Mapping[str, TrainConfig]) -> None:
    """Raise ConfigError if `out` holds files that a comparison would overwrite, or other runs."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file: give a folder with --out")
    existing = [name for name in (*RUN_MARKERS, *FILES) if (out / name).exists()]
    if existing and not (out / FILES[0]).exists():
        problem = f"{out} holds {existing[0]} but no {FILES[0]}, so it is no comparison"
        raise ConfigError(f"{problem}: give another folder with --out")
    for name, config in configs.items():
        folder = out / name
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            continue
        if not (folder / CONFIG_FILE).exists():
            problem = f"{folder} has files but no {CONFIG_FILE}, so it is no run"
            raise ConfigError(f"{problem}: give another folder with --out")
        for key, (saved, requested) in _differences(load_config(folder / CONFIG_FILE), config).items():
            if resume_of(key) != IGNORED_ON_RESUME or key == "data.source":
                problem = f"{folder} holds a run of another configuration: {key} is {saved!r} there, {requested!r} here"
                remedy = "Give another folder with --out, or another name to the arm; nothing was overwritten"
                raise ConfigError(f"{problem}. {remedy}")


def _train_or_read(folder: Path, config: TrainConfig, ranks: Ranks, progress: Progress | None) -> RunResult:
    if (result := ranks.run_on_rank0(lambda: finished(folder, config.run.steps))) is not None:
        return result
    try:
        return run(config, out=folder, resume=ranks.run_on_rank0(folder.exists), progress=progress)
    except NonFiniteError as error:
        if ranks.is_main and progress is not None:
            progress.note(str(error).partition(". ")[0])
        return ranks.run_on_rank0(lambda: RunResult.read(folder))


def finished(folder: Path, steps: int) -> RunResult | None:
    """The result of a run that ended after `steps` steps or on a non-finite value; else None."""
    if not (folder / RESULT_FILE).exists():
        return None
    result = RunResult.read(folder)
    complete = result.stopped == "done" and result.steps == steps
    return result if complete or result.stopped == "non-finite" else None


def _curves(folder: Path, result: RunResult) -> Curves:
    """The steps of a run. Raises ConfigError if some are missing."""
    curves = Curves.of(read_metrics(folder))
    if (last := int(curves.step[-1]) if len(curves.step) else 0) != result.steps:
        problem = f"{folder / METRICS_FILE} ends at step {last}, the run at step {result.steps}: the file was changed"
        raise ConfigError(f"{problem}. Remove {folder}, and the same command trains it anew")
    return curves


def _check_data(folders: Sequence[Path]) -> None:
    """Raise ConfigError if runs with a checkpoint were trained on different data."""
    folder_of_data: dict[str, Path] = {}
    for folder in folders:
        if (checkpoint := latest_checkpoint(folder)) is not None:
            folder_of_data.setdefault(read_trainer_state(checkpoint)["data"], folder)
    if len(folder_of_data) > 1:
        first, second, *_ = folder_of_data.values()
        reason = "the content of data.source has changed in between. Compare into another folder (--out)"
        raise ConfigError(f"{first} and {second} were trained on different data: {reason}")
