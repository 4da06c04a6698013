"""The project's targets on an H200, and what became of them: met, missed or not measured, from the result files."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import shapes
from benchmarks.session import Row

Files = Mapping[str, Mapping[str, Any]]
SMALL, LARGE = (shapes.label(shape) for shape in shapes.TARGETS)
CUBES = tuple(shapes.label(shape) for shape in shapes.SETS["cubes"][:3])


@dataclass(frozen=True)
class Target:
    """What is compared, the figure to reach and its unit, the result file that tells, and how (None: it does not)."""

    what: str
    goal: float
    unit: str
    benchmark: str
    reach: Callable[[Sequence[Row]], float | None]
    least: bool = True

    def reached(self, files: Files) -> float | None:
        content = files.get(self.benchmark)
        return None if content is None or not content.get("timed") else self.reach(content["rows"])


def rows_like(rows: Sequence[Row], **key: Any) -> list[Row]:
    return [row for row in rows if key.items() <= row.items() and row.get("kernel_ms")]


def ratio(first: str, second: str, where: Sequence[str], *, worst: Any = min) -> Any:
    """Time of the first arm over time of the second, each an arm and its mode; the worst of the shapes with both."""

    def reach(rows: Sequence[Row]) -> float | None:
        values = []
        for shape in where:
            times = []
            for arm, mode in (text.split(", ") for text in (first, second)):
                times += [row["kernel_ms"] for row in rows_like(rows, shape=shape, arm=arm, mode=mode)][:1]
            values += [times[0] / times[1]] if len(times) == 2 else []
        return worst(values) if values else None

    return reach


def _slowest_quantizer(rows: Sequence[Row]) -> float | None:
    shares = [row["percent"] for row in rows_like(rows, stage="quantize") if row["arm"] != "torch"]
    return min(shares, default=None)


def _best_backend(rows: Sequence[Row]) -> float | None:
    each = ([row.get("of_cublas", 0.0) for row in rows_like(rows, shape=shape, case="rowwise forward")]
            for shape in CUBES)  # fmt: skip
    return min((max(ratios) for ratios in each if ratios), default=None)


def _ahead_of_torchao(rows: Sequence[Row]) -> float | None:
    matching = rows_like(rows, shape="llama-3-8b", mode="compiled")
    octavo, torchao = (
        min((row["kernel_ms"] for row in matching if row["arm"].startswith(kind)), default=None)
        for kind in ("octavo", "torchao")
    )
    return torchao / octavo if octavo and torchao else None


BOTH = (SMALL, LARGE)
TARGETS = (
    Target(f"linear {SMALL}, eager, rowwise over bf16", 1.45, "×", "linear",
           ratio("bf16, eager", "octavo rowwise, eager", (SMALL,))),
    Target(f"linear {LARGE}, eager, rowwise over bf16", 1.60, "×", "linear",
           ratio("bf16, eager", "octavo rowwise, eager", (LARGE,))),
    Target("linear, eager, rowwise over torchao tensorwise compiled", 1.10, "×", "linear",
           ratio("torchao tensorwise, compiled", "octavo rowwise, eager", BOTH)),
    Target("linear, eager, rowwise over torchao rowwise compiled", 1.25, "×", "linear",
           ratio("torchao rowwise, compiled", "octavo rowwise, eager", BOTH)),
    Target("linear, time of rowwise over time of tensorwise", 1.05, "×", "linear",
           ratio("octavo rowwise, eager", "octavo tensorwise, eager", BOTH, worst=max), least=False),
    Target("linear, time of tensorwise over the delayed-scaling bound", 1.10, "×", "linear",
           ratio("octavo tensorwise, eager", "given tensorwise, eager", BOTH, worst=max), least=False),
    Target("linear, time of rowwise over the delayed-scaling bound", 1.10, "×", "linear",
           ratio("octavo rowwise, eager", "given tensorwise, eager", BOTH, worst=max), least=False),
    Target("quantizers, slowest of all, share of copy bandwidth", 85.0, "%", "kernels", _slowest_quantizer),
    Target("FP8 product with row scales over cuBLAS by tensor, 4096³-16384³", 0.97, "×", "kernels", _best_backend),
    Target("Llama 3 8B layer, compiled, rowwise over bf16", 1.35, "×", "layer",
           ratio("bf16, compiled", "octavo rowwise, compiled", ("llama-3-8b",))),
    Target("Llama 3 8B layer, compiled, best of octavo over best of torchao", 1.0, "×", "layer", _ahead_of_torchao),
    Target("block at dim 16384, compiled, rowwise over bf16 (torchao published 1.51)", 1.51, "×", "layer",
           ratio("bf16, compiled", "octavo rowwise, compiled", ("dim-16384",))),
)  # fmt: skip


def table(files: Files) -> list[tuple[str, str, str, str]]:
    lines = []
    for target in TARGETS:
        value, sign = target.reached(files), "≥" if target.least else "≤"
        reached, verdict = "–", "not measured"
        if value is not None:
            reached = f"{value:.{1 if target.unit == '%' else 3}f} {target.unit}"
            verdict = "met" if (value >= target.goal if target.least else value <= target.goal) else "missed"
        lines.append((target.what, f"{sign} {target.goal:g} {target.unit}", reached, verdict))
    return lines
