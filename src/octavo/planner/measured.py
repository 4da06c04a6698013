"""Measurements: times of products and quantizations on one GPU, as `octavo calibrate` keeps them, for the roofline.

A time holds for the shape it was measured at. Between two measured shapes that differ in one dimension only, by at most
`BETWEEN` in all, it is interpolated along that dimension: so few tiles apart times are nearly straight lines. Nothing
is extrapolated, and no time is scaled from one GPU to another; where nothing was measured the roofline answers.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.kernels.calibration import Entry, read

Case = tuple[str, ...]
Shape = tuple[int, ...]

BETWEEN = 2.0
"""Largest factor between two measured sizes between which a time is interpolated."""


class Measurements:
    """Times by op, case and shape.

    Args:
        device: Name of the GPU, as its driver gives it.
        entries: What was measured there.
    """

    def __init__(self, device: str, entries: Iterable[Entry]) -> None:
        self.device = device
        self._times: dict[tuple[str, Case], dict[Shape, float]] = {}
        for entry in entries:
            self._times.setdefault((entry.op, entry.case), {})[entry.shape] = entry.microseconds * 1e-6

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def seconds(self, op: str, case: Case, shape: Shape) -> float | None:
        """The time of one call; None where it was measured neither at this shape nor around it."""
        known = self._times.get((op, case), {})
        if shape in known:
            return known[shape]
        for dim in range(len(shape)):
            alike = {s[dim]: t for s, t in known.items() if s[:dim] == shape[:dim] and s[dim + 1 :] == shape[dim + 1 :]}
            if (found := _between(alike, shape[dim])) is not None:
                return found
        return None


def read_measurements(path: Path) -> Measurements:
    """The table of a file that `octavo calibrate` wrote. Raises ValueError for any other."""
    try:
        device, entries = read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the calibration cannot be read from {path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is no table of `octavo calibrate` ({type(error).__name__}: {error}); the last line that it prints "
            "says where it keeps one"
        ) from None
    return Measurements(device, entries)


def _between(known: dict[int, float], size: int) -> float | None:
    sizes: Sequence[int] = sorted(known)
    at = bisect_left(sizes, size)
    if not 0 < at < len(sizes) or sizes[at] > BETWEEN * sizes[at - 1]:
        return None
    low, high = sizes[at - 1], sizes[at]
    return known[low] + (known[high] - known[low]) * (size - low) / (high - low)
