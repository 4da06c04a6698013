"""What all ranks must agree on before they train one model."""

import hashlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.comm.checks import gather_objects, has_detailed_checks
from octavo.kernels.adamw import ADAMW, CASE
from octavo.nn.experts import is_converted_experts
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.report import check_module
from octavo.nn.resident import ResidentWeight
from octavo.runtime.torch_compat import has_values, is_dtensor, unset_fake_temporarily
from octavo.tensor import local_tensor

T = TypeVar("T")


def gather_reports(report: object, mesh: object) -> list[Any]:
    """Return the reports of all ranks of a mesh; of all ranks of the world if it has them, or is not a `DeviceMesh`."""
    reports, groups = [report], list[dist.ProcessGroup | None]([None])
    if isinstance(mesh, DeviceMesh) and mesh.size() < dist.get_world_size():
        groups = [*mesh.get_all_groups()]
    for group in groups:
        with unset_fake_temporarily():  # of a plan
            reports = [report for part in gather_objects(reports, group) for report in part]
    return reports


def check_mesh(function: str, mesh: object, data: str, name: str) -> None:
    """Raise TypeError or ValueError, with names of an example, unless `mesh` is a `DeviceMesh` of one dimension."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{function} takes a torch DeviceMesh, such as init_device_mesh('cuda', (2, 4), "
            f"mesh_dim_names=({data!r}, {name!r}))[{name!r}]; got {mesh!r}"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"{function} takes one dimension of a mesh; got {mesh.ndim}, named {mesh.mesh_dim_names}: pass the one for "
            f"it, such as mesh[{name!r}]"
        )


class EqualShapes:
    """Compares the shapes that the ranks of a mesh have in a first call, as it waits for the device."""

    def __init__(self, mesh: DeviceMesh, kind: str) -> None:
        self._mesh, self._kind, self._compared = mesh, kind, False

    def __deepcopy__(self, memo: object) -> "EqualShapes":
        return EqualShapes(self._mesh, self._kind)  # meshes do not copy

    def __call__(self, x: Tensor) -> Tensor:
        """Return the tensor. Raises ValueError on every rank unless all have one shape."""
        if self._compared and not has_detailed_checks():
            return x
        shapes = gather_reports(list(x.shape), self._mesh)
        if any(shape != shapes[0] for shape in shapes):
            raise ValueError(
                f"the ranks of {self._kind} have parts of a sequence of different shapes: {shapes}. Give each an equal "
                f"part: pad the sequence to a multiple of {self._mesh.size()}"
            )
        self._compared = True
        return x


def check_on_all_ranks(
    function: str, model: nn.Module, mesh: object, check: Callable[[], tuple[T, list[Any]]], *,
    compare_values: bool = False,
) -> T:  # fmt: skip
    """Check the arguments of a function that all ranks call; raise on every rank if one has an error or they differ."""
    problem, digests = None, dict[str, str]()
    try:
        check_module(function, model)
        result, settings = check()
        digests = _digests(model, settings, compare_values)
    except Exception as error:  # of any kind: the others wait for this rank
        problem = error
    kind = "" if isinstance(problem, TypeError | ValueError) else f"{type(problem).__name__}: "
    reports = gather_reports((dist.get_rank(), problem and f"{kind}{problem}", digests), mesh)
    if problem is not None:
        raise problem
    for rank, message, _ in reports:
        if message is not None:
            raise ValueError(f"{function} fails on rank {rank}: {message}")
    first, _, expected = reports[0]
    for rank, _, other in reports:
        if (differing := next((name for name in expected if other[name] != expected[name]), None)) is not None:
            shown = f" ({other[differing]} and {expected[differing]})" if differing == "settings" else ""
            raise ValueError(
                f"rank {rank} and rank {first} call {function} with different {differing}{shown}: all ranks must agree"
            )
    return result


def _digests(model: nn.Module, settings: list[Any], compare_values: bool) -> dict[str, str]:
    """Return what all ranks have to have in common, by its name in messages."""
    converted = {name: m for name, m in model.named_modules() if is_converted(m) or is_converted_experts(m)}
    parameters = dict(model.named_parameters())
    values = {
        "recipes of layers": {name: str(m.recipe.to_json()) for name, m in converted.items()},
        "parameters": {name: [list(p.shape), p.dtype, p.requires_grad] for name, p in parameters.items()},
    }
    if compare_values:
        known = [p for p in parameters.values() if has_values(p) and not is_dtensor(p)]
        values["values of parameters (build the model from one seed)"] = checksums(known).tolist() if known else []
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in values.items()}
    return {"settings": repr(settings)[1:-1]} | digests  # settings in full, for the message


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor's bits, which changes with its values; version counters miss some writes."""
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
    rows = (tensor.detach().contiguous() for tensor in tensors)
    return torch.stack([row.view(bits[row.element_size()]).sum(dtype=torch.int64) for row in rows])


@torch.no_grad()
def broadcast_values(tensors: Iterable[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of a group the first one's values of tensors, or of their shards; meta tensors have none."""
    for local in map(local_tensor, tensors):
        for part in (local.data_, local.scale) if isinstance(local, ResidentWeight) else (local,):
            if not part.is_meta and part.numel():
                values = part.detach().to(device).contiguous()
                dist.broadcast(values.view(-1).view(torch.uint8), dist.get_global_rank(group, 0), group)  # any dtype
                part.copy_(values)


def agree_on_adamw(device: torch.device, mesh: DeviceMesh) -> None:
    """Have `octavo.AdamW` step on one backend on all ranks, with a warning if they would choose different ones."""
    # Triton's step is not bitwise the reference's: copies of a parameter that step on both would drift apart.
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
