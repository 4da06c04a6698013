"""What a result file says about its machine, and how it is written: never half of one in the place of a whole one."""

import datetime
import json
import os
import platform
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

import octavo

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("triton", "transformers", "torchao")


def device_name(device: torch.device) -> str:
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
        **{name: version(name) if find_spec(name) else None for name in PACKAGES},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a result file; empty if there is none or it cannot be read."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content


def compile_caches(folder: Path | None) -> dict[str, str]:
    """Make a folder for compiled kernels, `folder` or one in the home; return variables that name it to compilers."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    caches = (folder or home / "octavo" / "benchmarks").resolve()
    caches.mkdir(parents=True, exist_ok=True)
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {name: str(caches / kind) for name, kind in names.items()}


def write_text(path: Path, text: str) -> None:
    """Write a file that takes the place of the old one once it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def write_json(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")
