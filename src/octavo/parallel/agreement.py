"""What all ranks must agree on before they train one model."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from octavo.kernels.adamw import ADAMW, CASE


def gather_reports(report: Any, mesh: Any) -> list[Any]:
    """Return the reports of all ranks of a mesh; of all ranks of the world if it is not a `DeviceMesh`."""
    reports = [report]
    for group in mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [None]:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, reports, group)
        reports = [report for part in parts for report in part]
    return reports


def agree_on_adamw(device: torch.device, mesh: Any) -> None:
    """Have `octavo.AdamW` step on one backend on all ranks, with a warning if they would choose different ones.

    Triton's step is not bitwise the reference's. Ranks that hold copies of a parameter and step it on different
    backends would drift apart.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = ADAMW.choose(device, CASE).name
    others = [backend for backend in ADAMW.backends.values() if backend.name != chosen]
    reasons = {backend.name: ADAMW.unavailable_reason(backend, device, CASE) for backend in others}
    details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason is not None)
    reports = gather_reports((dist.get_rank(), chosen, details), mesh)
    if len({name for _, name, _ in reports}) == 1:
        return
    ADAMW.pin("reference", device, CASE)
    listed = ", ".join(f"rank {rank} {name}" + (f" ({why})" if why else "") for rank, name, why in sorted(reports))
    warnings.warn(
        f"octavo: AdamW runs on the backend 'reference' on all ranks, because they choose different ones, whose bits "
        f"differ: {listed}. It is slow on a GPU: repair the ranks without Triton's",
        RuntimeWarning,
        stacklevel=2,
    )
