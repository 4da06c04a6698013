"""The project's targets on an H200, and what became of them: met, missed or not measured, from the result files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import shapes

Row = dict[str, Any]
Files = Mapping[str, Mapping[str, Any]]
SMALL, LARGE = (shapes.label(shape) for shape in shapes.TARGETS)
EARLIER = {"octavo delayed": "given tensorwise"}
"""What result files up to commit c6128ea have in the place of an arm: maxima given to `tensorwise`."""
CUBES = tuple(shapes.label(shape) for shape in shapes.SETS["cubes"][:3])


@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        what: What is compared.
        goal: The figure to reach.
        unit: Behind both figures.
        least: Whether more is better.
        reach: The figure from the rows of a result file; None where they do not hold it.
        benchmark: The result file, and the command that makes it.
    """

    what: str
    goal: float
    unit: str
    benchmark: str
    reach: Callable[[Sequence[Row]], float | None]
    least: bool = True

    def reached(self, files: Files) -> float | None:
        """The figure that was reached; None where it was not measured."""
        content = files.get(self.benchmark)
        return None if content is None or not content.get("timed") else self.reach(content["rows"])

    def verdict(self, files: Files) -> str:
        """`met`, `missed` or `not measured`."""
        value = self.reached(files)
        if value is None:
            return "not measured"
        return "met" if (value >= self.goal if self.least else value <= self.goal) else "missed"


def rows_like(rows: Sequence[Row], **key: Any) -> list[Row]:
    """Rows with these fields that were timed."""
    return [row for row in rows if key.items() <= row.items() and row.get("kernel_ms")]


def ratio(arms: tuple[str, str], modes: tuple[str, str], where: Sequence[str], *, worst: Any = min) -> Any:
    """Time of the first arm over time of the second; the worst of the shapes that have both."""

    def reach(rows: Sequence[Row]) -> float | None:
        values = []
        for shape in where:
            a, b = (
                rows_like(rows, shape=shape, arm=arm, mode=mode) or rows_like(rows, shape=shape, arm=EARLIER.get(arm))
                for arm, mode in zip(arms, modes, strict=True)
            )
            if a and b:
                values.append(a[0]["kernel_ms"] / b[0]["kernel_ms"])
        return worst(values) if values else None

    return reach


def _slowest_quantizer(rows: Sequence[Row]) -> float | None:
    shares = [row["percent"] for row in rows_like(rows, stage="quantize") if row["arm"] != "torch"]
    return min(shares) if shares else None


def _best_backend(rows: Sequence[Row]) -> float | None:
    """Of the backends the best, of the cubes the worst."""
    best = []
    for shape in CUBES:
        ratios = [row.get("of_cublas", 0.0) for row in rows_like(rows, shape=shape, case="rowwise forward")]
        best += [max(ratios)] if ratios else []
    return min(best) if best else None


def _ahead_of_torchao(rows: Sequence[Row]) -> float | None:
    matching = rows_like(rows, shape="llama-3-8b", mode="compiled")
    times = {
        kind: [row["kernel_ms"] for row in matching if row["arm"].startswith(kind)] for kind in ("octavo", "torchao")
    }
    return min(times["torchao"]) / min(times["octavo"]) if all(times.values()) else None


EAGER, COMPILED = ("eager", "eager"), ("compiled", "compiled")
MIXED = ("compiled", "eager")
BOTH = (SMALL, LARGE)

TARGETS = (
    Target(f"linear {SMALL}, eager, rowwise over bf16", 1.45, "×", "linear",
           ratio(("bf16", "octavo rowwise"), EAGER, (SMALL,))),
    Target(f"linear {LARGE}, eager, rowwise over bf16", 1.60, "×", "linear",
           ratio(("bf16", "octavo rowwise"), EAGER, (LARGE,))),
    Target("linear, eager, rowwise over torchao tensorwise compiled", 1.10, "×", "linear",
           ratio(("torchao tensorwise", "octavo rowwise"), MIXED, BOTH)),
    Target("linear, eager, rowwise over torchao rowwise compiled", 1.25, "×", "linear",
           ratio(("torchao rowwise", "octavo rowwise"), MIXED, BOTH)),
    Target("linear, time of rowwise over time of tensorwise", 1.05, "×", "linear",
           ratio(("octavo rowwise", "octavo tensorwise"), EAGER, BOTH, worst=max), least=False),
    Target("linear, time of tensorwise over the delayed-scaling bound", 1.10, "×", "linear",
           ratio(("octavo tensorwise", "octavo delayed"), EAGER, BOTH, worst=max), least=False),
    Target("linear, time of rowwise over the delayed-scaling bound", 1.10, "×", "linear",
           ratio(("octavo rowwise", "octavo delayed"), EAGER, BOTH, worst=max), least=False),
    Target("quantizers, slowest of all, share of copy bandwidth", 85.0, "%", "kernels", _slowest_quantizer),
    Target("FP8 product with row scales over cuBLAS by tensor, 4096³-16384³", 0.97, "×", "kernels", _best_backend),
    Target("Llama 3 8B layer, compiled, rowwise over bf16", 1.35, "×", "layer",
           ratio(("bf16", "octavo rowwise"), COMPILED, ("llama-3-8b",))),
    Target("Llama 3 8B layer, compiled, best of octavo over best of torchao", 1.0, "×", "layer", _ahead_of_torchao),
    Target("block at dim 16384, compiled, rowwise over bf16 (torchao published 1.51)", 1.51, "×", "layer",
           ratio(("bf16", "octavo rowwise"), COMPILED, ("dim-16384",))),
)  # fmt: skip


def table(files: Files) -> list[tuple[str, str, str, str]]:
    """Target, goal, reached, verdict: as text."""
    lines = []
    for target in TARGETS:
        value = target.reached(files)
        digits = 1 if target.unit == "%" else 3
        form = "{:.%df} {}" % digits  # noqa: UP031
        reached = "–" if value is None else form.format(value, target.unit)
        sign = "≥" if target.least else "≤"
        lines.append((target.what, f"{sign} {target.goal:g} {target.unit}", reached, target.verdict(files)))
    return lines
