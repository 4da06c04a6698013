"""What was measured to be fastest on this device: a table on disk, written by `octavo calibrate`, read by the registry.

    <cache>/octavo/calibration/<device>-torch…-triton…-cuda….json        <cache>: $XDG_CACHE_HOME or ~/.cache

A table is for one device name and one set of versions: another torch or Triton brings other kernels. It is read once a
process, when the first op with a shape runs on a GPU. A shape that was not measured takes the nearest one of its op and
case, where no dimension is more than `NEAR` times larger or smaller; beyond that nothing is known, and the registry's
order decides. Nothing is measured but by `octavo calibrate`: not in training, not under torch.compile, not while a CUDA
graph is captured.

A table that cannot be read is never fatal and never silent: a damaged one is taken away with a warning that names it.
"""

import json
import math
import os
import re
import tempfile
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

NEAR = 1.7
"""A measurement holds for dimensions up to this factor away."""

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is fastest for one op, case and shape.

    Attributes:
        op: As in `torch.ops.octavo`.
        case: As the registry has it.
        shape: Rows and columns of a matrix, or m, n, k of a product.
        backend: The fastest backend.
        config: Its configuration, an index; None where it has none.
        microseconds: Median time of one call.
        others: Median times of what lost, by label.
    """

    op: str
    case: tuple[str, ...]
    shape: tuple[int, ...]
    backend: str
    config: int | None
    microseconds: float
    others: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "Entry":
        """Read what `asdict` gave; raises KeyError, TypeError or ValueError for anything else."""
        config = fields["config"]
        return Entry(
            op=str(fields["op"]),
            case=tuple(str(part) for part in fields["case"]),
            shape=tuple(int(size) for size in fields["shape"]),
            backend=str(fields["backend"]),
            config=None if config is None else int(config),
            microseconds=float(fields["microseconds"]),
            others={str(label): float(time) for label, time in fields["others"].items()},
        )


def best(device: torch.device, op: str, case: tuple[str, ...], shape: tuple[int, ...]) -> Entry | None:
    """The entry for a shape, or for the nearest one that was measured; None where nothing near was, and on a CPU."""
    if device.type != "cuda":
        return None
    measured = _table(device).get((op, case), {})
    if shape in measured or not measured or 0 in shape:
        return measured.get(shape)
    distance, nearest = min((_distance(shape, other), other) for other in measured)
    return measured[nearest] if distance <= math.log(NEAR) else None


@lru_cache(maxsize=4096)
def config(device: torch.device, op: str, case: tuple[str, ...], rows: int, columns: int) -> int:
    """Index of the configuration to run an op on a matrix with; 0, the default, where nothing near was measured."""
    entry = best(device, op, case, (rows, columns))
    return 0 if entry is None or entry.config is None else entry.config


def path(device: torch.device) -> Path:
    """Where the table of a GPU is, whether or not there is one; raises RuntimeError where there is no home folder."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    cache = Path(root) if os.path.isabs(root) else Path.home() / ".cache"
    versions = "-".join(f"{name}{version}" for name, version in _versions().items())
    name = re.sub(r"[^a-z0-9._]+", "-", f"{torch.cuda.get_device_name(device)}-{versions}".lower())
    return cache / "octavo" / "calibration" / f"{name}.json"


def entries(device: torch.device) -> list[Entry]:
    """Everything in the table of a GPU."""
    return [entry for shapes in _table(device).values() for entry in shapes.values()]


def prepare(device: torch.device) -> Path:
    """Make the folder of the table; raises OSError that says what to do where it cannot be written."""
    file = path(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            return file
    except OSError as error:
        raise OSError(
            f"calibration is kept in {file.parent}, which cannot be written ({error.strerror}); set XDG_CACHE_HOME to "
            "a folder that can"
        ) from None


def save(device: torch.device, measured: Iterable[Entry]) -> Path:
    """Add entries to the table on disk in one step, replacing those of the same op, case and shape; gives its path."""
    file = prepare(device)
    forget()
    kept = {(e.op, e.case, e.shape): e for e in [*entries(device), *measured]}
    content = {
        "format": FORMAT,
        "device": torch.cuda.get_device_name(device),
        "versions": _versions(),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "entries": [asdict(entry) for entry in kept.values()],
    }
    handle, temporary = tempfile.mkstemp(dir=file.parent, suffix=".partial")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(content, stream, indent=1)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    forget()
    return file


def summary(device: torch.device) -> str:
    """One line for `octavo doctor`: where the table is and what is in it."""
    if device.type != "cuda":
        return f"calibration: nothing to measure on device type {device.type!r}"
    try:
        file = path(device)
    except RuntimeError as error:
        return f"calibration: no place to keep it: {error}"
    found = entries(device)
    if not found:
        return f"calibration: none; `octavo calibrate` measures what is fastest here and keeps it in {file}"
    shapes = len({entry.shape for entry in found})
    return f"calibration: {len(found)} measured choices for {shapes} shapes, in {file}"


def forget() -> None:
    """Read the table again when it is next asked for."""
    _table.cache_clear()
    config.cache_clear()


Table = dict[tuple[str, tuple[str, ...]], dict[tuple[int, ...], Entry]]


@lru_cache(maxsize=32)
def _table(device: torch.device) -> Table:
    """Entries by op and case, then by shape; empty where there are none."""
    table: Table = {}
    for entry in _read(device):
        table.setdefault((entry.op, entry.case), {})[entry.shape] = entry
    return table


def _read(device: torch.device) -> list[Entry]:
    try:
        file = path(device)
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, RuntimeError) as error:
        _warn(f"the calibration table cannot be opened ({error}); running without it")
        return []
    except UnicodeDecodeError:
        text = ""
    try:
        return _parse(text)[1]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _warn(
            f"the calibration table {file} is damaged ({type(error).__name__}: {error}) and is taken away; running "
            "without it, `octavo calibrate` measures again"
        )
        with suppress(OSError):
            file.unlink()
        return []


def read(file: Path) -> tuple[str, list[Entry]]:
    """Name of the device and entries of any table. Raises OSError, UnicodeDecodeError, ValueError, KeyError, TypeError
    or AttributeError where the file is none.
    """
    return _parse(file.read_text(encoding="utf-8"))


def _parse(text: str) -> tuple[str, list[Entry]]:
    content = json.loads(text)
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']!r}, not {FORMAT}")
    return str(content["device"]), [Entry.from_json(fields) for fields in content["entries"]]


def _warn(text: str) -> None:
    warnings.warn(f"octavo: {text}", RuntimeWarning, stacklevel=2)


def _distance(a: tuple[int, ...], b: tuple[int, ...]) -> float:
    """Logarithm of the largest factor between two shapes."""
    if len(a) != len(b):
        return math.inf
    return max(abs(math.log(x / y)) for x, y in zip(a, b, strict=True))


def _versions() -> dict[str, str]:
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {"torch": str(torch.__version__), "triton": triton, "cuda": str(torch.version.cuda)}
