"""What breaks FP8, and what does not: models that are hard on it, in every recipe, beside bf16; docs/adversarial.md.

The cases are in `benchmarks.adversarial_cases`. Arms of one seed start from the same weights and see the same batches.
The loss is the mean of the last tenth of the steps, in nats per byte, without weights; SQNR and underflow are those of
the last step. Results of cases and arms that were not asked for stay in the file; with `--arms`, gaps are to a bf16 run
beside them, since the one in the file may be of another machine.

  python -m benchmarks adversarial
  python -m benchmarks adversarial --cases swiglu_growth --seeds 1 --out /tmp/one
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks.adversarial_cases import CASES
from benchmarks.adversarial_document import (
    BASELINE,
    EVERY,
    FP32,
    IMAGE,
    PLAINEST,
    RECIPES,
    SMOOTH,
    WITH_AUTOPILOT,
    WITHOUT_REPEATS,
    document,
    gaps,
    picture,
)
from benchmarks.adversarial_task import BYTES, TOKENS, Case, Stepper, Unwatched, losses
from benchmarks.environment import RESULTS, device_name, environment, write_json, write_text
from benchmarks.figures import save
from octavo.inspect import Autopilot, OperandStats, Watch

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "adversarial.md"
SUMMARY_FIELDS = ("case", "arm", "seed", "tail_mean", "diverged", "cpu_s")
"""What is kept of a run at another strength."""


class Watched(Unwatched):
    """A recipe for all linears but the head, with statistics of the steps that are forced."""

    def __init__(self, model: nn.Module, recipe: str) -> None:
        super().__init__()
        octavo.convert(model, recipe, skip=["head"], verbose=False)
        self._watch = Watch(model, every=0)

    @property
    def rows(self) -> Sequence[OperandStats]:  # type: ignore[override]
        """Statistics of the step just taken."""
        return self._watch.rows

    def step(self, number: int, *, force: bool) -> AbstractContextManager[None]:
        """A step of the watch."""
        return self._watch.step(number, force=force)


class Piloted(Unwatched):
    """One scale per tensor to begin with, and the autopilot."""

    def __init__(self, model: nn.Module, *, retakes: bool) -> None:
        super().__init__(retakes=retakes)
        octavo.convert(model, "tensorwise", skip=["head"], verbose=False)
        self._pilot = Autopilot(model, every=EVERY)

    @property
    def rows(self) -> Sequence[OperandStats]:  # type: ignore[override]
        """Statistics of the step just taken."""
        return self._pilot.watch.rows

    @property
    def moved(self) -> Sequence[Any]:  # type: ignore[override]
        """Layers moved in the step just taken."""
        return self._pilot.last_changes

    @property
    def moves(self) -> Sequence[Any]:  # type: ignore[override]
        """All of them."""
        return self._pilot.changes

    @property
    def should_repeat(self) -> bool:  # type: ignore[override]
        """Whether the step is to be taken again."""
        return self._pilot.should_repeat

    def step(self, number: int, *, force: bool) -> AbstractContextManager[None]:
        """A step of the autopilot."""
        return self._pilot.step(number, force=force)


ARMS: dict[str, Callable[[nn.Module], Stepper]] = {
    BASELINE: lambda model: Unwatched(),
    FP32: lambda model: Unwatched(autocast=False),
    **{recipe: partial(Watched, recipe=recipe) for recipe in RECIPES},
    WITH_AUTOPILOT: partial(Piloted, retakes=True),
    WITHOUT_REPEATS: partial(Piloted, retakes=False),
}
"""What is done to a model before it is trained; each returns what goes around its steps."""


def measured(case: Case, arm: str, seed: int, tokens: int = TOKENS) -> Row:
    """One row of the result file: an arm trained on a seed."""
    model = case.build(seed, case.strength)
    start = time.process_time()
    stepper = ARMS[arm](model)
    curve = losses(case, model, seed, stepper, tokens)
    took = time.process_time() - start
    tail = curve[-max(case.steps // 10, 1) :]
    loss = statistics.mean(tail)
    diverged = not math.isfinite(loss) or loss > math.log(BYTES)  # worse than a guess
    return {
        "case": case.name, "arm": arm, "seed": seed, "steps": len(curve), "tail_mean": None if diverged else loss,
        "diverged": diverged, "worst": _worst(stepper.rows), "cpu_s": round(took, 1),
        "moves": [str(move) for move in stepper.moves], "smoothed": _smoothed(curve),
    }  # fmt: skip


def _worst(rows: Sequence[OperandStats]) -> Row | None:
    """The lowest SQNR and the largest underflow of the last step, and where; None where nothing was measured."""
    rows = [row for row in rows if not math.isnan(row.sqnr)]
    if not rows:
        return None
    noisy, starved = min(rows, key=lambda row: row.sqnr), max(rows, key=lambda row: row.underflow)
    return {
        "sqnr": round(noisy.sqnr, 1), "sqnr_of": f"{noisy.layer}.{noisy.operand}",
        "underflow": round(starved.underflow, 4), "underflow_of": f"{starved.layer}.{starved.operand}",
    }  # fmt: skip


def _smoothed(curve: Sequence[float]) -> list[float | None]:
    """Means of `SMOOTH` steps each, None where a loss is not finite."""
    means = [statistics.mean(curve[at : at + SMOOTH]) for at in range(0, len(curve), SMOOTH)]
    return [round(mean, 4) if math.isfinite(mean) else None for mean in means]


def main(arguments: list[str]) -> None:
    """Train every arm of the cases on every seed, write `results/<device>/adversarial.json` and the document."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks adversarial", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="some of the cases only")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each arm (3)")
    parser.add_argument("--arms", nargs="+", choices=[arm for arm in ARMS if arm != BASELINE], help="some arms only")
    parser.add_argument("--out", type=Path, help="folder of the results, other than benchmarks/results/cpu")
    parser.add_argument("--document", action="store_true", help="only write the document, from the result file")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds is 1 or more; got {options.seeds}")
    cpu = torch.device("cpu")
    path = (options.out or RESULTS / device_name(cpu)) / "adversarial.json"
    if not options.document:
        torch.set_num_threads(1)
        arms = [BASELINE, *(options.arms or list(ARMS)[1:])]
        before = json.loads(path.read_text()) if path.exists() else {"rows": [], "strengths": []}
        strengths = [row for row in before["strengths"] if row["case"] not in options.cases or options.arms]
        replaced = set(options.arms or arms)
        rows = [row for row in before["rows"] if row["case"] not in options.cases or row["arm"] not in replaced]
        for name in options.cases:
            for seed in range(1, options.seeds + 1):
                trained: list[Row] = []
                for arm in arms:
                    trained.append(measured(CASES[name], arm, seed))
                    gap, took = gaps(trained, name, arm)[-1], trained[-1]["cpu_s"]
                    print(f"{name:<18} seed {seed}  {arm:<22} {gap:>+8.2f} %  {took} s", flush=True)
                beside = {} if options.arms is None else {"baseline": trained[0]["tail_mean"]}
                has_baseline = len(gaps(rows, name, BASELINE)) >= seed
                rows += [row | beside for row in trained if row["arm"] in replaced or not has_baseline]
            if options.arms is None:
                strengths += _strengths(CASES[name], options.seeds)
            write_json(path, _content(rows, strengths, before, options.arms))
    if options.document or options.out is None:
        content = json.loads(path.read_text())
        write_text(DOCUMENT, document(content))
        save(picture(content), DOCUMENT.parent / IMAGE)
        print(f"written: {DOCUMENT.relative_to(ROOT)}")


def _strengths(case: Case, seeds: int) -> list[Row]:
    """The two plainest recipes at other strengths of a case."""
    rows = []
    for strength in case.others:
        for seed in range(1, seeds + 1):
            for arm in (BASELINE, *PLAINEST):
                row = measured(replace(case, strength=strength), arm, seed)
                rows.append({key: row[key] for key in SUMMARY_FIELDS} | {"strength": strength})
        print(f"{case.name:<18} strength {strength:g}", flush=True)
    return rows


def _content(
    rows: Sequence[Row], strengths: Sequence[Row], before: Mapping[str, Any], arms: Sequence[str] | None
) -> Mapping[str, Any]:
    order = {key: number for number, key in enumerate([(case, arm) for case in CASES for arm in ARMS])}
    ordered = sorted(rows, key=lambda row: (order[row["case"], row["arm"]], row["seed"]))
    milder = sorted(strengths, key=lambda row: (list(CASES).index(row["case"]), row["strength"]))
    here = environment(torch.device("cpu"))
    later = {} if arms is None else before.get("later", {}) | dict.fromkeys(arms, here)
    whole = here if arms is None else before.get("environment", here)
    return {"environment": whole, "later": later, "rows": ordered, "strengths": milder}
