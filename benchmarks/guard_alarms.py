"""How often does the spike guard see what is not there, and miss what is? Its table is in docs/autopilot.md.

Losses and gradient norms are drawn step by step: a curve that falls, times noise. Healthy kinds have noise of many
distributions, domains of other losses, steps of a curriculum, humps of the learning rate; spikes rise at a known step
in plain noise. The guard that runs have, with its default window and `spike` = 8, looks at each step.

  python -m benchmarks guard_alarms
  python -m benchmarks guard_alarms --document       # only the table, from the result file
"""

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.environment import RESULTS, device_name, environment, write_json, write_text
from octavo.train.config.sections import GuardConfig
from octavo.train.guard import STEPS_PER_ALARM, SpikeError, SpikeGuard
from octavo.train.record.metrics import StepMetrics

DOCUMENT = Path(__file__).parent.parent / "docs" / "autopilot.md"
BEGIN, END = "<!-- guard_alarms: begin -->\n", "<!-- guard_alarms: end -->\n"
RUN = 5000
"""Steps of a run; each begins anew."""
STEPS = 1_000_000
SPIKES = 1000
Step = tuple[float, float]
"""Factors of the loss and of the gradient norm."""
Kind = Callable[[random.Random, int], Step]


def _plain(rng: random.Random, step: int) -> Step:
    return 1 + 0.02 * rng.gauss(0, 1), math.exp(0.1 * rng.gauss(0, 1))


def _domain(share: float, harder: float) -> Kind:
    """A share of the batches is from a domain of a higher loss."""

    def drawn(rng: random.Random, step: int) -> Step:
        loss, norm = _plain(rng, step)
        return (loss * (1 + harder), norm * (1 + harder)) if rng.random() < share else (loss, norm)

    return drawn


def _curriculum(higher: float) -> Kind:
    """The loss has a new level every 500 steps."""

    def drawn(rng: random.Random, step: int) -> Step:
        loss, norm = _plain(rng, step)
        level = 1 + higher * (step // 500 % 2)
        return loss * level, norm * level

    return drawn


def _student(degrees: int) -> Kind:
    """Student's t noise, of the loss and of the logarithm of the norm."""

    def t(rng: random.Random) -> float:
        return rng.gauss(0, 1) / math.sqrt(sum(rng.gauss(0, 1) ** 2 for _ in range(degrees)) / degrees)

    def drawn(rng: random.Random, step: int) -> Step:
        return max(1 + 0.02 * t(rng), 0.1), math.exp(min(0.3 * t(rng), 50.0))

    return drawn


def _pareto(rng: random.Random, step: int) -> Step:
    return 0.95 + 0.05 * rng.paretovariate(1.5), rng.paretovariate(1.5)


def _blocks(rng: random.Random, step: int) -> Step:
    """Shards of 40 steps, of which one in ten is 30 % harder."""
    loss, norm = _plain(rng, step)
    harder = 1.3 if random.Random(step // 40).random() < 0.1 else 1.0
    return loss * harder, norm * harder


def _hump(rng: random.Random, step: int) -> Step:
    """A warm-up that is too fast for a while: the loss rises by 20 %, the gradient norm to its double."""
    loss, norm = _plain(rng, step)
    height = math.exp(-(((step - 400) / 60) ** 2))
    return loss * (1 + 0.2 * height), norm * (1 + height)


def _tiny_batches(rng: random.Random, step: int) -> Step:
    return math.exp(0.3 * rng.gauss(0, 1)), math.exp(0.8 * rng.gauss(0, 1))


HEALTHY: dict[str, Kind] = {
    "normal noise of 2 %": _plain,
    "5 % of batches 30 % harder": _domain(0.05, 0.3),
    "20 % of batches 100 % harder": _domain(0.2, 1.0),
    "1 % of batches 10 times harder": _domain(0.01, 9.0),
    "curriculum, ±20 % every 500 steps": _curriculum(0.2),
    "curriculum, ±60 % every 500 steps": _curriculum(0.6),
    "shards of 40 steps, 1 in 10 of 30 % more": _blocks,
    "hump of the learning rate, +20 %": _hump,
    "Student's t, 3 degrees of freedom": _student(3),
    "Cauchy noise": _student(1),
    "Pareto noise, α = 1.5": _pareto,
    "tiny batches, log-normal noise of 30 %": _tiny_batches,
}
SPIKING: dict[str, tuple[float, float]] = {
    "loss × 1.4, gradient norm × 10": (1.4, 10.0),
    "loss × 1.5, gradient norm × 5": (1.5, 5.0),
    "loss × 2.5, gradient norm × 1": (2.5, 1.0),
    "loss × 3, gradient norm / 10": (3.0, 0.1),
    "loss × 1.2, gradient norm × 1": (1.2, 1.0),
}
"""From one step on. The last one does no damage that lasts, as the guard sees it: it is a new level."""


def row(step: int, loss: float, norm: float) -> StepMetrics:
    """What the guard looks at."""
    return StepMetrics(
        step=step, tokens=step, loss=loss, lr=1e-3, grad_norm=norm, loss_scale=None, skipped=False, step_s=1.0,
        tokens_per_s=1.0,
    )  # fmt: skip


def steps(kind: Kind, seed: int, count: int = RUN) -> Iterator[StepMetrics]:
    """The steps of a run."""
    rng = random.Random(seed)
    for step in range(count):
        loss, norm = kind(rng, step)
        yield row(step + 1, (2 + 4 * math.exp(-step / 300)) * loss, (0.5 + math.exp(-step / 100)) * norm)


def alarms(kind: Kind, count: int) -> int:
    """False alarms in so many steps; after each a new guard goes on."""
    alarm_count = 0
    for seed in range(-(-count // RUN)):
        guard = SpikeGuard(GuardConfig(spike=8.0))
        for taken in steps(kind, seed, min(RUN, count)):
            try:
                guard.check(taken)
            except SpikeError:
                alarm_count += 1
                guard = SpikeGuard(GuardConfig(spike=8.0))
    return alarm_count


def detected(factors: Step, seed: int) -> int | None:
    """Steps from the beginning of a spike until it is recognized; None where it is not in 50 steps."""
    guard, at = SpikeGuard(GuardConfig(spike=8.0)), 200 + seed % 300
    for taken in steps(_plain, seed, at + 50):
        assert taken.loss is not None
        assert taken.grad_norm is not None
        up = factors if taken.step > at else (1.0, 1.0)
        try:
            guard.check(row(taken.step, taken.loss * up[0], taken.grad_norm * up[1]))
        except SpikeError as error:
            return taken.step - at if error.first == at + 1 else None
    return None


def document(content: dict[str, Any]) -> str:
    """The tables."""
    lines = ["| healthy | false alarms | in steps |", "|---|---:|---:|"]
    lines += [f"| {r['kind']} | {r['alarms']} | {r['steps']:,} |" for r in content["healthy"]]
    lines += ["", "| from one step on | recognized | after steps |", "|---|---:|---:|"]
    for r in content["spikes"]:
        after = f"{r['after']}" if r["after"] is not None else "–"
        lines.append(f"| {r['kind']} | {100 * r['recognized'] / r['runs']:.1f} % of {r['runs']} | {after} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Simulate, write `results/<device>/guard_alarms.json`, and the table in the document."""
    import torch

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks guard_alarms", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each healthy kind ({STEPS})")
    parser.add_argument("--document", action="store_true", help="only write the table, from the result file")
    options = parser.parse_args(arguments)
    path = RESULTS / device_name(torch.device("cpu")) / "guard_alarms.json"
    if not options.document:
        healthy, spikes = [], []
        for name, kind in HEALTHY.items():
            healthy.append({"kind": name, "alarms": alarms(kind, options.steps), "steps": options.steps})
            print(healthy[-1], flush=True)
        for name, factors in SPIKING.items():
            after = [steps_after for seed in range(SPIKES) if (steps_after := detected(factors, seed)) is not None]
            median = sorted(after)[len(after) // 2] if after else None
            spikes.append({"kind": name, "recognized": len(after), "runs": SPIKES, "after": median})
            print(spikes[-1], flush=True)
        facts = {"steps_per_alarm": STEPS_PER_ALARM, "healthy": healthy, "spikes": spikes}
        write_json(path, {"environment": environment(torch.device("cpu")), **facts})
    text = DOCUMENT.read_text()
    before, after_it = text.partition(BEGIN)[0], text.partition(END)[2]
    write_text(DOCUMENT, before + BEGIN + document(json.loads(path.read_text())) + END + after_it)
