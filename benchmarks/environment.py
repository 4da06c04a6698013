"""What a result file says about the machine it was measured on, and files that are written whole or not at all."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

import octavo

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("triton", "transformers", "torchao")


def device_name(device: torch.device) -> str:
    """Folder name of a device: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device).replace(" ", "-").lower() if device.type == "cuda" else "cpu"


def environment(device: torch.device) -> dict[str, Any]:
    gpu = device.type == "cuda"
    cpuinfo = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"^model name\s*: *(.*)$", cpuinfo, re.M)
    return {
        "device": torch.cuda.get_device_name(device) if gpu else f"CPU {cpu[1].strip() if cpu else 'unknown'}",
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))) if gpu else None,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) if gpu else None,
        "cpu_threads": torch.get_num_threads(),
        "cpu_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "cuda": torch.version.cuda,
        "octavo": octavo.__version__,
        "torch": torch.__version__,
        **{name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def unfinished(path: Path) -> Path:
    """Where the rows of a result file are while it is being measured anew: the old one stays until all are there."""
    return path.with_name(f"{path.name}.running")


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a result file; empty if there is none or it cannot be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def compile_caches(folder: Path | None) -> tuple[Path, dict[str, str]]:
    """Return a folder for compiled kernels, `folder` or one in the home, and the variables by which compilers find it.

    If it cannot be written, print a note and use a temporary one, also for what else goes to the cache of the home.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    caches, also = (folder or home / "octavo" / "benchmarks").resolve(), {}
    try:
        caches.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=caches):
            pass
    except OSError as error:
        broken, caches = caches, Path(tempfile.mkdtemp(prefix="octavo-caches-"))
        print(f"note: {broken} cannot be written ({error.strerror}): compiled kernels go to {caches}; see --caches")
        also = {"XDG_CACHE_HOME": str(caches)}
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return caches, {name: str(caches / kind) for name, kind in names.items()} | also


def write_text(path: Path, text: str) -> None:
    """Replace a file, once the new one is whole: a reader, an interrupt or a kill meets the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
