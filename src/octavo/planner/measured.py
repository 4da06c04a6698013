"""Measurements: times of products and quantizations on one GPU, read by the roofline. `octavo calibrate` writes them;
those of an H100 come with Octavo (`python -m benchmarks rates`).

A time holds for its measured shape. Between two measured shapes that differ in one dimension only, by a factor of at
most `MAX_INTERPOLATION_FACTOR`, it is interpolated along that dimension; over so few tiles times are nearly linear.
Nothing is extrapolated, and no time is scaled from one GPU to another. Without a measurement the roofline predicts.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from pathlib import Path

from octavo.kernels.calibration import Entry, UnknownFormatError, read
from octavo.kernels.registry import Case, Shape

MAX_INTERPOLATION_FACTOR = 2.0  # Largest ratio of two neighbouring measured sizes to interpolate between


class Measurements:
    """Times by op, case and shape."""

    def __init__(self, device: str, entries: Iterable[Entry]) -> None:
        self.device = device
        self._times: dict[tuple[str, Case], dict[Shape, float]] = {}
        for entry in entries:
            self._times.setdefault((entry.op, entry.case), {})[entry.shape] = entry.microseconds * 1e-6

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def seconds(self, op: str, case: Case, shape: Shape) -> float | None:
        """Return the time of one call; None without a measurement at or around this shape."""
        times = self._times.get((op, case), {})
        if shape in times:
            return times[shape]
        for dim in range(len(shape)):
            line = {s[dim]: t for s, t in times.items() if s[:dim] == shape[:dim] and s[dim + 1 :] == shape[dim + 1 :]}
            if (seconds := _interpolated(line, shape[dim])) is not None:
                return seconds
        return None


def read_measurements(path: Path) -> Measurements:
    """Read a file that `octavo calibrate` wrote."""
    try:
        device, entries = read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the calibration from {path}: {error}") from None
    except UnknownFormatError as error:
        raise ValueError(
            f"{path} has {error}: another release of Octavo wrote it. Run `octavo calibrate` on that GPU again"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a table of `octavo calibrate` ({type(error).__name__}: {error}); the last line that it "
            "prints names its table"
        ) from None
    return Measurements(device, entries)


def _interpolated(times: dict[int, float], size: int) -> float | None:
    sizes: Sequence[int] = sorted(times)
    at = bisect_left(sizes, size)
    if not 0 < at < len(sizes) or sizes[at] > MAX_INTERPOLATION_FACTOR * sizes[at - 1]:
        return None
    low, high = sizes[at - 1], sizes[at]
    return times[low] + (times[high] - times[low]) * (size - low) / (high - low)
