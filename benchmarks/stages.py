"""The stages of `python -m benchmarks gpu` and their parts: importance, price, and which of them fit into the time.

A price is what a part took in an earlier result file, compilation included, or else the estimate in `PARTS`.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import read_json
from benchmarks.session import part_of

ALL = "all"
"""Name of a part with the rows that no other part of its stage names."""


@dataclass(frozen=True)
class Part:
    """A part of a stage: `seconds` is its price with empty caches, without the start of the process."""

    stage: str
    name: str
    importance: int
    seconds: float


PARTS = (
    Part("smoke", ALL, 100, 15),
    Part("tests", ALL, 95, 90),
    Part("linear", "16384×4096×14336", 90, 40),
    Part("linear", "16384×8192×28672", 60, 45),
    Part("linear", ALL, 30, 180),
    Part("layer", "llama-3-8b", 85, 110),
    Part("layer", "dim-16384", 45, 90),
    Part("layer", "llama-2-7b", 40, 140),
    Part("run", ALL, 80, 180),
    Part("step", ALL, 75, 60),
    Part("published", ALL, 70, 180),
    Part("host_gpu", ALL, 65, 45),
    Part("kernels", "quantize", 58, 45),
    Part("kernels", "product", 57, 50),
    Part("kernels", "fused", 42, 30),
    Part("kernels", "config", 8, 240),
    Part("train", ALL, 33, 150),
    Part("calibrate", ALL, 28, 240),
    Part("compile", "layer", 26, 150),
    Part("compile", "linear", 24, 90),
    Part("ranks", ALL, 22, 45),
    Part("deep", ALL, 20, 120),
    Part("loss", ALL, 5, 180),
)
STAGES = tuple(dict.fromkeys(part.stage for part in PARTS))
"""A stage is a benchmark (`benchmarks/<stage>.py`), except `tests`, which is pytest."""
ON_REQUEST = ("calibrate",)
"""Products are chosen by heuristics, as where nobody has calibrated."""
START_S = 10.0
"""Estimated seconds before a stage's first row: imports, CUDA, ceilings."""
LEAST_S = 10.0
"""A stage is started only with so much time behind its start."""


class Prices:
    """Seconds of parts and of starts, from the first result file of a stage in some folders, or estimated.

    Where kernels are not compiled already (`warm`), nothing costs less than the estimate.
    """

    def __init__(self, folders: Sequence[Path] = (), *, warm: bool = False, quick: bool = False) -> None:
        self.starts = {"tests": 0.0}
        self._measured: dict[tuple[str, str], float] = {}
        self._sure: set[str] = set()
        for stage in STAGES:
            files = (read_json(folder / f"{stage}.json") for folder in folders)
            content = next((each for each in files if each and "note" not in each), {})
            names, seconds = {part.name for part in PARTS if part.stage == stage}, Counter[str]()
            for row in content.get("rows", []):
                seconds[part_of(row) if part_of(row) in names else ALL] += row.get("took_s", 0.0)
            seconds[ALL] += content.get("seconds", 0.0)  # pytest's
            self._measured |= {(stage, name): cost for name, cost in seconds.items() if cost}
            self.starts |= {stage: content["start_s"]} if "start_s" in content else {}
            if warm and content.get("stopped") == "done" and ("--quick" in content.get("arguments", [])) <= quick:
                self._sure.add(stage)

    def of(self, part: Part) -> float:
        """Seconds of a part. A measurement of some of its rows or with warm caches does not lower the estimate."""
        measured = self._measured.get((part.stage, part.name), part.seconds)
        return measured if part.stage in self._sure else max(measured, part.seconds)

    def total(self, parts: Sequence[Part]) -> float:
        """Seconds of some parts, with a start for each stage among them."""
        starts = (self.starts.get(stage, START_S) for stage in {part.stage for part in parts})
        return sum(map(self.of, parts)) + sum(starts)

    def choose(self, parts: Iterable[Part], left: float) -> list[Part]:
        """The parts that fit into `left` seconds, greedily by importance; if none does, the most important one for
        which a start is worth it.
        """
        chosen: list[Part] = []
        ordered = sorted(parts, key=lambda part: -part.importance)
        for part in ordered:
            if self.total([*chosen, part]) <= left:
                chosen.append(part)
        return chosen or [part for part in ordered if self.starts.get(part.stage, START_S) + LEAST_S <= left][:1]

    def listing(self, parts: Iterable[Part], left: float) -> str:
        """Importance and price of each part, and whether it fits, as text."""
        chosen = self.choose(parts, left)
        lines = [f"{'stage':<10} {'part':<18} {'importance':>10} {'start s':>8} {'s':>6}  {'price':<9} fits"]
        for part in sorted(parts, key=lambda part: -part.importance):
            source = "measured" if self._measured.get((part.stage, part.name)) == self.of(part) else "estimate"
            fits = ("yes" if self.total(chosen) <= left else "in part") if part in chosen else "no"
            numbers = f"{part.importance:>10} {self.starts.get(part.stage, START_S):>8.0f} {self.of(part):>6.0f}"
            lines.append(f"{part.stage:<10} {part.name:<18} {numbers}  {source:<9} {fits}")
        return "\n".join([*lines, f"{len(chosen)} parts, {self.total(chosen):.0f} s with the starts of their stages"])
