"""The table of fastest backends and configurations on a GPU: `octavo calibrate` writes it, the registry reads it.

It is `<cache>/octavo/calibration/<device>-octavo…-torch…-triton…-cuda….json`, <cache> $XDG_CACHE_HOME or ~/.cache.
"""

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path

import torch

from octavo._version import __version__

MAX_SHAPE_RATIO = 1.7  # Largest ratio of dimensions between a shape and the measured shape it uses
FORMAT = 2  # 1 had no host times and chose by kernel time alone


class UnknownFormatError(ValueError): ...


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The fastest choice for one op, case and shape."""

    op: str  # Name in `torch.ops.octavo`
    case: tuple[str, ...]  # Case of the registry
    shape: tuple[int, ...]  # Rows and columns of a matrix, or m, n, k of a product
    backend: str  # The backend with the shortest wait (`octavo.kernels.timing`)
    config: int | None  # Index of its configuration, or None
    microseconds: float  # Median time of one call on the GPU; on the host, if the op is "host"
    # Median time until a call returns; None if it was not measured beside the GPU's.
    host_microseconds: float | None = None
    # What a caller would wait for the other candidates, in microseconds, by label.
    others: dict[str, float] = field(default_factory=dict)


def best(device: torch.device, op: str, case: tuple[str, ...], shape: tuple[int, ...]) -> Entry | None:
    """Return the entry for a shape or for the nearest measured one; None if there is none near, and on a CPU."""
    if device.type != "cuda":
        return None
    measured = _table(device).get((op, case), {})
    if shape in measured or not measured or 0 in shape:
        return measured.get(shape)
    # The largest ratio of dimensions to each measured shape with as many.
    alike = [other for other in measured if len(other) == len(shape)]
    ratios = [(max(max(x / y, y / x) for x, y in zip(shape, other, strict=True)), other) for other in alike]
    ratio, nearest = min(ratios, default=(math.inf, ()))
    return measured[nearest] if ratio <= MAX_SHAPE_RATIO else None


@lru_cache(maxsize=4096)
def config(device: torch.device, op: str, case: tuple[str, ...], rows: int, columns: int) -> int | None:
    """Return the index of the fastest configuration of an op on a matrix; None without a measurement nearby."""
    entry = best(device, op, case, (rows, columns))
    return None if entry is None else entry.config


def path(device: torch.device) -> Path:
    """Return the path of a GPU's table, existing or not; raises RuntimeError without a home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    versions = "-".join(f"{name}{version}" for name, version in _versions().items())
    name = re.sub(r"[^a-z0-9._]+", "-", f"{torch.cuda.get_device_name(device)}-{versions}".lower())
    return cache / "octavo" / "calibration" / f"{name}.json"


def entries(device: torch.device) -> list[Entry]:
    return [entry for shapes in _table(device).values() for entry in shapes.values()]


def make_folder(device: torch.device) -> Path:
    """Create the table's folder and return the table's path; raises OSError if the folder cannot be written."""
    file = path(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            return file
    except OSError as error:
        raise OSError(
            f"the calibration folder {file.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a "
            "writable folder"
        ) from None


def save(device: torch.device, measured: Iterable[Entry]) -> Path:
    """Add entries to the table atomically, replacing those of the same op, case and shape; returns its path."""
    from filelock import FileLock  # which torch requires

    file = make_folder(device)
    with FileLock(file.with_suffix(".lock")):
        clear_cache()
        merged = {(e.op, e.case, e.shape): e for e in [*entries(device), *measured]}
        content = {
            "format": FORMAT, "device": torch.cuda.get_device_name(device), "versions": _versions(),
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "entries": [asdict(entry) for entry in merged.values()],
        }  # fmt: skip
        replace_file(file, json.dumps(content, indent=1))
        clear_cache()
    return file


def replace_file(file: Path, text: str) -> None:
    """Write a file that other processes see whole, in its old or new state."""
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def summary(device: torch.device) -> str:
    """Return one line for `octavo doctor`: path and size of the table."""
    if device.type != "cuda":
        return f"calibration: nothing to measure on device type {device.type!r}"
    try:
        file = path(device)
    except RuntimeError as error:
        return f"calibration: no folder for the table: {error}"
    table = entries(device)
    if not table:
        return f"calibration: none; `octavo calibrate` measures the fastest choices and saves them in {file}"
    shapes = len({entry.shape for entry in table})
    return f"calibration: {len(table)} measured choices for {shapes} shapes, in {file}"


def clear_cache() -> None:
    """Drop the cached table; the next lookup reads it again."""
    _table.cache_clear()
    config.cache_clear()


CalibrationTable = dict[tuple[str, tuple[str, ...]], dict[tuple[int, ...], Entry]]


@lru_cache(maxsize=32)
def _table(device: torch.device) -> CalibrationTable:
    table: CalibrationTable = {}
    measured, problem = list[Entry](), ""
    try:
        file = path(device)
        measured = read(file)[1]
    except (FileNotFoundError, NotADirectoryError):  # none was written
        pass
    except RuntimeError as error:  # there is no home folder
        problem = f"cannot be opened ({error}); running without it. Set XDG_CACHE_HOME"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        problem = f"{file} cannot be read ({why}); running without it. `octavo calibrate` replaces it"
    if problem:
        warnings.warn(f"octavo: the calibration table {problem}", RuntimeWarning, stacklevel=2)
    for entry in measured:
        table.setdefault((entry.op, entry.case), {})[entry.shape] = entry
    return table


def read(file: Path) -> tuple[str, list[Entry]]:
    """Return the device name and the entries of a table."""
    # Raises OSError, ValueError, KeyError, TypeError or AttributeError for any other file.
    content = json.loads(file.read_text(encoding="utf-8"))
    if content["format"] != FORMAT:
        raise UnknownFormatError(f"format {content['format']!r}, not {FORMAT}")
    rows = [e | {"case": tuple(e["case"]), "shape": tuple(map(int, e["shape"]))} for e in content["entries"]]
    return str(content["device"]), [Entry(**row) for row in rows]


def _versions() -> dict[str, str]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"octavo": __version__, "torch": str(torch.__version__), "triton": triton, "cuda": str(torch.version.cuda)}
