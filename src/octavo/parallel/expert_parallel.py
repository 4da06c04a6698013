"""Expert parallelism: the experts of a mixture distributed over ranks, with FP8 messages (docs/parallel.md).

Each rank holds E/R experts of every layer, and tokens of its own. A forward sends a row [H] for each token and each of
its k experts to the rank of the expert, and returns the results by the same way. The numbers of rows travel first, in a
message that also carries what has to be equal on all ranks (`_call_code`).
"""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from octavo.comm import ADAPTIVE_SPEC
from octavo.comm.collectives import exchange_rows
from octavo.nn.experts import STACKED, Experts, gather_rows, inverse_order, is_converted_experts, looks_like_experts
from octavo.nn.resident import ResidentShard, ResidentWeight
from octavo.numerics.recipe import Recipe
from octavo.parallel.agreement import check_mesh, check_on_all_ranks
from octavo.parallel.combinations import check_model
from octavo.runtime.swap import all_or_nothing
from octavo.runtime.switch import SWITCH
from octavo.runtime.torch_compat import FakeTensor, autocast_dtype


def expert_parallel(model: nn.Module, mesh: DeviceMesh, *, fp8_comm: bool = True) -> nn.Module:
    """Distribute the experts of a converted model over the ranks of a mesh dimension, in place.

    Call it after `octavo.convert` and before `octavo.parallelize` or `fully_shard`, and create the optimizer last. The
    parameters of experts become DTensors with placement `Shard(0)`: states, checkpoints and norms of gradients follow
    from that. Each rank of `mesh` trains on its own tokens; other parameters are not touched.

    Args:
        model: The same on every rank, with all experts.
        mesh: One dimension, such as `mesh["ep"]`, whose size divides the number of experts.
        fp8_comm: Send rows in FP8, forward and backward; False to send them in their own dtype.

    Returns:
        The model itself.

    Raises:
        TypeError: If `model` is not a module or `mesh` not a `DeviceMesh`.
        ValueError: If the mesh has several dimensions, for experts that cannot be distributed (docs/parallel.md), or if
            ranks differ. On every rank of the mesh; the model is left as it was.

    Every rank must call the model equally often. If ranks call it differently (only some inside `octavo.disabled()`,
    `torch.no_grad()` or autocast, or with inputs of other dtypes), all raise RuntimeError. An error on one rank in
    between leaves the others waiting until the timeout of the process group.

    Examples:
        >>> mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("efsdp", "ep"))  # doctest: +SKIP
        >>> octavo.convert(model)  # doctest: +SKIP
        >>> octavo.parallel.expert_parallel(model, mesh["ep"])  # doctest: +SKIP
        >>> octavo.parallelize(model, mesh)  # doctest: +SKIP
    """
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        raise ValueError(
            f"expert_parallel: rank {dist.get_rank()} is not in the mesh {mesh}: take a dimension of a mesh over all "
            "ranks, such as init_device_mesh('cuda', (2, 4), mesh_dim_names=('efsdp', 'ep'))['ep']"
        )

    def check() -> tuple[list[Any], list[Any]]:
        check_mesh("expert_parallel", mesh, "efsdp", "ep")
        _check_experts(model, mesh.size())
        return list(filter(is_converted_experts, model.modules())), [bool(fp8_comm), tuple(mesh.shape)]

    experts = check_on_all_ranks("expert_parallel", model, mesh, check)
    with all_or_nothing(model):
        exchange = ExpertExchange(mesh, fp8=bool(fp8_comm))
        for module in experts:
            for name, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, _shard(parameter, mesh))
            module.octavo_exchange = exchange
    return model


def has_expert_names(mesh: object) -> TypeGuard[DeviceMesh]:
    return isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names == ("efsdp", "ep")


def distributed_experts(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_converted_experts(module) and module.octavo_exchange]


def check_expert_mesh(model: nn.Module, mesh: object) -> None:
    """Raise ValueError unless `mesh` is [efsdp, ep] exactly if the experts of a model are distributed over its ep."""
    distributed: list[Any] = [module.down_proj for module in distributed_experts(model)]
    expert_mesh = mesh["ep"] if has_expert_names(mesh) else None
    if expert_mesh is not None and not distributed:
        raise ValueError(
            "a mesh [efsdp, ep] is for a model whose experts are distributed: call "
            "octavo.parallel.expert_parallel(model, mesh['ep']) first"
        )
    if any(weight.device_mesh != expert_mesh for weight in distributed):
        raise ValueError(
            "expert_parallel distributed the experts of this model over one dimension of a mesh: give parallelize that "
            "mesh, with dimensions named 'efsdp' and 'ep', such as init_device_mesh('cuda', (2, 4), "
            f"mesh_dim_names=('efsdp', 'ep')); got {mesh}"
        )


class ExpertExchange:
    """Carries the rows of `octavo.nn.Experts` between ranks that hold equal parts of the experts, in rank order."""

    def __init__(self, mesh: DeviceMesh, *, fp8: bool) -> None:
        self.mesh, self.fp8 = mesh, fp8

    def local(self, parameter: Tensor) -> Tensor:
        """Return this rank's experts of a DTensor. Backward divides the gradient by the number of ranks."""
        assert isinstance(parameter, DTensor)
        local: Tensor = _MeanGradient.apply(parameter.to_local(), self.mesh.size())
        return local

    def __call__(
        self, on_rows: Callable[[Tensor, Tensor], Tensor], rows: Tensor, offsets: Tensor, recipe: Recipe
    ) -> Tensor:
        """Return `on_rows` of rows that are sorted by expert, [M,H] → [M,H]; zero from `offsets[-1]` on."""
        group, ranks = self.mesh.get_group(), self.mesh.size()
        counts = offsets.diff(prepend=offsets.new_zeros(1)).view(ranks, -1)
        message = F.pad(counts, (0, 1), value=_call_code(rows))
        arriving = torch.empty_like(message)
        dist.all_to_all_single(arriving, message, group=group)
        arriving, codes = arriving[:, :-1], arriving[:, -1]  # [R,E/R]: rows from each rank for each expert that is here
        if isinstance(offsets, FakeTensor):  # the numbers are unknown: equal ones, to count memory and bytes
            sent = received = [rows.shape[0] // ranks] * ranks
        else:
            numbers = torch.stack((counts.sum(1), arriving.sum(1), codes))
            sent, received, codes = numbers.tolist()  # waits for the device
            _compare_calls(codes, self.mesh)
        x_spec = recipe.x.text if recipe.x.granularity.rows == 1 else ADAPTIVE_SPEC
        x = exchange_rows(rows[: sum(sent)], sent, received, group, fp8=self.fp8, spec=x_spec)
        here = torch.arange(counts.shape[1], device=counts.device).repeat(ranks)
        order = here.repeat_interleave(arriving.flatten(), output_size=sum(received)).argsort(stable=True)
        inverse, ends = inverse_order(order), arriving.sum(0).cumsum(0).int()
        y = gather_rows(on_rows(gather_rows(x, order, inverse), ends), inverse, order)
        y = exchange_rows(y, received, sent, group, fp8=self.fp8)
        dropped = rows.shape[0] - y.shape[0]
        return F.pad(y, (0, 0, 0, dropped)) if dropped else y


_CALL = ("inside octavo.disabled()", "gradients enabled", "an input that requires gradients", "dtype", "autocast")
"""What has to be equal on all ranks in a call."""
_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16, torch.float64)


def _call_code(rows: Tensor) -> int:
    code = _DTYPES.index(autocast_dtype(rows.device.type)) * 8 + _DTYPES.index(rows.dtype)
    return code * 8 + rows.requires_grad * 4 + torch.is_grad_enabled() * 2 + bool(SWITCH.off)


def _compare_calls(codes: list[int], mesh: DeviceMesh) -> None:
    if len(set(codes)) == 1:
        return
    states = [(*(bool(c & bit) for bit in (1, 2, 4)), _DTYPES[c // 8 % 8], _DTYPES[c // 64]) for c in codes]
    differing = [
        f"{name}: " + ", ".join(f"rank {rank} {value}" for rank, value in zip(mesh.mesh.tolist(), values, strict=True))
        for name, values in zip(_CALL, zip(*states, strict=True), strict=True)
        if len(set(values)) > 1
    ]
    raise RuntimeError(
        "octavo: ranks called the same distributed experts differently, so they cannot exchange rows ("
        f"{'; '.join(differing)}): call the model in the same way on all ranks"
    )


class _MeanGradient(torch.autograd.Function):
    """The identity; backward divides the gradient. (Graphs of torch.compile have no hooks.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g / ctx.ranks, None


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    if isinstance(local, ResidentShard):
        local = ResidentWeight(local.data_, local.scale, local.spec, local.dtype)
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _check_experts(model: nn.Module, ranks: int) -> None:
    """Raise ValueError unless the ranks can share all converted experts of a model."""
    experts: dict[str, Experts] = {name: m for name, m in model.named_modules() if is_converted_experts(m)}
    if not experts:
        others = [name for name, module in model.named_modules() if looks_like_experts(module)]
        hint = "it has no module with 3-D gate_up_proj or up_proj, and down_proj"
        if others:
            hint = f"call octavo.convert(model) first; octavo.report(model) has the reason for {others[0]!r}"
        raise ValueError(
            "expert_parallel distributes experts that octavo.convert made compute in FP8, and this model has none: "
            f"{hint}"
        )
    check_model("expert_parallel", model)
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{part}".lstrip("."))
    for name, module in experts.items():
        count = module.down_proj.shape[0]
        if count % ranks:
            fitting = [n for n in range(1, count + 1) if count % n == 0]
            raise ValueError(
                f"{ranks} ranks cannot share the {count} experts of {name!r} equally: take a mesh dimension of one of "
                f"{fitting}"
            )
        if tied := [names for names in (owners[id(p)] for p in module.parameters()) if len(names) > 1]:
            raise ValueError(
                f"{' and '.join(map(repr, tied[0]))} are one parameter, of which expert_parallel would make several: "
                "untie them, or shard the model with octavo.parallelize instead"
            )
        if shared := [part for part, _ in module.named_parameters() if part.removesuffix("_bias") not in STACKED]:
            raise ValueError(
                f"all experts of {name!r} share its parameter {shared[0]!r}, which expert_parallel does not support: "
                "shard them with octavo.parallelize instead"
            )
