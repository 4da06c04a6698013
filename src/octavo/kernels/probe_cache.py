"""Probes that passed, on disk, by device, versions, driver and sources: another process need not run them again.

A probe that failed runs again in the next process. A file that cannot be read or written costs probes, nothing else.
"""

import json
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import torch

from octavo.kernels import calibration
from octavo.runtime.torch_compat import cuda_driver_version

SOURCES = "kernels", "numerics", "runtime"  # Subpackages whose code decides what a probe finds
DRIVER = Path("/proc/driver/nvidia/version")  # The driver's version; CUDA reports only the newest CUDA that it supports
Key = tuple[str, ...]  # Op, backend and texts of the case


def path(device: torch.device) -> Path | None:
    """Return the file of a device, existing or not; None where there is none."""
    if device.type != "cuda" or not (supported := cuda_driver_version()):
        return None
    with suppress(OSError, RuntimeError):  # no home folder
        driver = DRIVER.read_text() if DRIVER.exists() else ""
        text = f"{torch.cuda.get_device_capability(device)} {supported} {driver} {_digest_of_sources()}"
        file = calibration.path(device)
        return file.parents[1] / "probes" / f"{file.stem}-{sha256(text.encode()).hexdigest()[:16]}.json"
    return None


def has_passed(device: torch.device, key: Key) -> bool:
    return key in _read(device)


def add(device: torch.device, key: Key) -> None:
    if (file := path(device)) is None:
        return
    _read.cache_clear()  # other processes add theirs
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        calibration.replace_file(file, json.dumps(sorted({*_read(device), key}), indent=0))
    _read.cache_clear()


def forget(device: torch.device) -> None:
    """Remove the file of a device: its probes run again."""
    if (file := path(device)) is not None:
        with suppress(OSError):
            file.unlink()
    _read.cache_clear()


@lru_cache(maxsize=32)
def _read(device: torch.device) -> frozenset[Key]:
    file = path(device)
    with suppress(OSError, ValueError, TypeError):  # of a file that is not there, or damaged
        return frozenset(tuple(map(str, key)) for key in json.loads(file.read_text() if file else "[]"))
    return frozenset()


@lru_cache(maxsize=1)
def _digest_of_sources() -> str:
    root = Path(__file__).parents[1]
    files = sorted(file for name in SOURCES for file in (root / name).rglob("*.py"))
    return sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
