"""What a result file says about the machine it was measured on."""

import datetime
import json
import platform
from pathlib import Path
from typing import Any

import torch

import octavo

RESULTS = Path(__file__).parent / "results"


def device_name(device: torch.device) -> str:
    """Folder name of a device: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device).replace(" ", "-").lower() if device.type == "cuda" else "cpu"


def environment(device: torch.device) -> dict[str, Any]:
    """Device, driver-relevant versions and date."""
    cpu = next((line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")), "unknown")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {cpu}",
        "cpu_threads": torch.get_num_threads(),
        "cpu_bf16": torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        "cuda": torch.version.cuda,
        "octavo": octavo.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def write(name: str, device: torch.device, rows: list[dict[str, Any]]) -> Path:
    """Write a result file and return its path."""
    path = RESULTS / device_name(device) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n")
    return path


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
