"""parallelize: the entry point to data-parallel training on many devices, by FSDP2, DDP, or both (HSDP)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from octavo.comm import DEFAULT_SPEC
from octavo.nn.convert import apply_plan, rule_plan
from octavo.nn.equalized import reduce_scales
from octavo.nn.linear_subclasses import is_converted
from octavo.nn.report import check_module
from octavo.numerics.precision import Precision
from octavo.numerics.suggestions import check_choice
from octavo.parallel.agreement import agree_on_adamw, check_on_all_ranks
from octavo.parallel.combinations import check_model
from octavo.parallel.ddp import replicate
from octavo.parallel.expert_parallel import check_expert_mesh, distributed_experts, has_expert_names
from octavo.parallel.fsdp import shard
from octavo.runtime.swap import all_or_nothing
from octavo.runtime.torch_compat import composable_modules, flattened

FP8_COMM = ("auto", "on", "gather", "off")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Data parallelism of a run, as in the `[parallel]` section of a configuration.

    Attributes:
        dp_replicate: Copies of the model, each sharded or not.
        dp_shard: Ranks that share one copy; -1 for all that remain.
        reshard_after_forward: Free gathered weights between forward and backward (ZeRO-3), or not (ZeRO-2).
        cpu_offload: Keep shards, gradients and optimizer states in host memory.
        fp8_comm: FP8 communication of weights and gradients: `"on"`, `"off"`; `"gather"`, weights only; or `"auto"`:
            weights if they cross machines, and gradients if each machine has one rank, because an all-to-all of many
            ranks sends more between machines than a ring (docs/scaling.md).

    Examples:
        >>> octavo.parallel.Parallel(dp_replicate=2, fp8_comm="on").sizes(world_size=8)
        (2, 4)
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    fp8_comm: Literal["auto", "on", "gather", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.dp_replicate < 1 or (self.dp_shard < 1 and self.dp_shard != -1):
            raise ValueError(
                "parallel.dp_replicate is 1 or more, and parallel.dp_shard 1 or more, or -1 for the rest; got "
                f"{self.dp_replicate} and {self.dp_shard}"
            )
        check_choice("parallel.fp8_comm", self.fp8_comm, FP8_COMM)

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Return (dp_replicate, dp_shard) for a world size.

        Raises:
            ValueError: If they do not divide it.
        """
        shard = world_size // self.dp_replicate if self.dp_shard == -1 else self.dp_shard
        if shard < 1 or self.dp_replicate * shard != world_size:
            fitting = [n for n in range(1, world_size + 1) if world_size % n == 0]
            raise ValueError(
                f"parallel.dp_replicate = {self.dp_replicate} × parallel.dp_shard = {self.dp_shard} does not equal the "
                f"world size {world_size}: take dp_replicate from {fitting} and dp_shard = -1"
            )
        return self.dp_replicate, shard


def parallelize(
    model: nn.Module, mesh: DeviceMesh | Parallel | None = None, *, precision: Precision | None = None,
    fp8_comm: Literal["auto", "on", "gather", "off"] | None = None, reshard_after_forward: bool | None = None,
    cpu_offload: bool | None = None, dtype: torch.dtype | None = None, reduce_dtype: torch.dtype = torch.float32,
) -> nn.Module:  # fmt: skip
    """Distribute a model over the ranks of a process group. Create the optimizer afterwards.

    Args:
        model: Any module, converted or not, on the mesh's device. The same on every rank.
        mesh: A mesh [dp_shard], [dp_replicate, dp_shard], or [dp_replicate] with that name; [efsdp, ep] with these
            names, after `octavo.parallel.expert_parallel`; or a `Parallel`, over all ranks. None: one shard group.
        precision: Converts the model first; leave it out if the model is converted already.
        fp8_comm: See `Parallel`. Default: that of `mesh` if it is a `Parallel`, else `"auto"`.
        reshard_after_forward: See `Parallel`.
        cpu_offload: See `Parallel`; the optimizer then steps on the CPU.
        dtype: Dtype in which parameters are gathered and computed if it is not their own, such as bf16 for fp32 ones.
        reduce_dtype: Dtype in which gradients are reduced.

    Returns:
        The model itself, with its parameters sharded; for DDP, a `DistributedDataParallel` around it.

    Raises:
        ValueError: On every rank, for a mesh that misfits the world, an unsupported combination, or ranks that differ.
        TypeError: As `octavo.convert`, or if `dtype` or `reduce_dtype` is no floating-point type of 16 bits or more.

    If an error is raised, the model is left as it was.

    Examples:
        Under `torchrun`, on each rank:

        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        >>> model = octavo.parallelize(model, precision=octavo.Precision.level("fp8"), fp8_comm="on")
        >>> optimizer = octavo.AdamW(model.parameters())
        >>> type(model[0].weight).__name__
        'DTensor'
    """
    if not dist.is_initialized():
        check_module("parallelize", model)
        raise ValueError(
            "parallelize needs a process group: start with torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group() first"
        )
    changes = {"fp8_comm": fp8_comm, "reshard_after_forward": reshard_after_forward, "cpu_offload": cpu_offload}
    with _all_or_nothing(model):
        given = {name: value for name, value in changes.items() if value is not None}
        return _parallelize(model, mesh, precision, given, dtype, reduce_dtype)


def _parallelize(
    model: nn.Module, mesh: DeviceMesh | Parallel | None, precision: Precision | None, changes: dict[str, Any],
    dtype: torch.dtype | None, reduce_dtype: torch.dtype,
) -> nn.Module:  # fmt: skip
    def check() -> tuple[tuple[Parallel, int, int], list[Any]]:
        if mesh is not None and not isinstance(mesh, DeviceMesh | Parallel):
            raise TypeError(f"parallelize takes a DeviceMesh, an octavo.parallel.Parallel, or None; got {mesh!r}")
        layout = Parallel(**(vars(mesh if isinstance(mesh, Parallel) else Parallel()) | changes))
        replicas, shards = _sizes(mesh) if isinstance(mesh, DeviceMesh) else layout.sizes(dist.get_world_size())
        for name, kind in {"dtype": torch.float32 if dtype is None else dtype, "reduce_dtype": reduce_dtype}.items():
            if not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
                raise TypeError(f"{name} is a floating-point type of 16 bits or more, as torch.bfloat16; got {kind!r}")
        _check_model(model, layout, replicas if shards == 1 else 1, dtype)
        check_expert_mesh(model, mesh)
        if precision is not None:
            rule = rule_plan(model, precision=precision)
            apply_plan(model, rule, keep_weights=precision.keep_weights, verbose=dist.get_rank() == 0)
        if layout.fp8_comm in ("on", "gather") and (shards > 1 or replicas == 1):
            _check_recipes(model, layout.fp8_comm)
        exchanges = [m.octavo_exchange.fp8 for m in distributed_experts(model)]
        return (layout, replicas, shards), [vars(layout), replicas, shards, dtype, reduce_dtype, exchanges]

    layout, replicas, shards = check_on_all_ranks("parallelize", model, mesh, check)
    if not isinstance(mesh, DeviceMesh):
        device_type = next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")
        mesh = init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("dp_replicate", "dp_shard"))
    agree_on_adamw(torch.device("cpu" if layout.cpu_offload else mesh.device_type), mesh)
    # torchrun numbers a machine's ranks in a row. Those of tp are neighbours, so a mesh beside may cross all machines.
    on_each = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    machines = [rank // on_each for rank in mesh.mesh.flatten().tolist()] if layout.fp8_comm == "auto" else []
    crosses_machines = len(set(machines)) > 1
    fp8 = layout.fp8_comm == "on" or (crosses_machines and len(set(machines)) == len(machines))
    if shards == 1 and replicas > 1:
        _share_scales(model, mesh)
        return replicate(model, mesh, fp8=DEFAULT_SPEC if fp8 else None)
    if has_expert_names(mesh):
        shard_mesh: DeviceMesh = flattened(mesh, "dp_shard")
    else:
        shard_mesh = mesh if mesh.ndim == 1 or replicas > 1 else mesh["dp_shard"]
    shard(
        model, shard_mesh, expert_mesh=mesh["efsdp"] if has_expert_names(mesh) else None,
        fp8_gather=fp8 or crosses_machines or layout.fp8_comm == "gather", fp8_reduce=DEFAULT_SPEC if fp8 else None,
        dtype=dtype, reduce_dtype=reduce_dtype, reshard_after_forward=layout.reshard_after_forward,
        cpu_offload=layout.cpu_offload,
    )  # fmt: skip
    _share_scales(model, mesh)  # last, so that its hook runs before FSDP2's gathers weights
    return model


def _share_scales(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give equalized layers the same channel scales on all ranks, from what all measured, at each training forward."""
    # Each forward looks for such layers, because `octavo.nn.change_recipe` can make some.
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    device = torch.device(mesh.device_type)

    def all_reduce_max(maxima: Tensor) -> None:
        for group in groups:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)

    def before_forward(module: nn.Module, inputs: object) -> None:
        if module.training and torch.is_grad_enabled():
            reduce_scales(module, all_reduce_max, device)

    model.register_forward_pre_hook(before_forward, prepend=True)


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """`octavo.runtime.swap.all_or_nothing`, for what FSDP2 remembers of modules as well."""
    if not isinstance(model, nn.Module):
        yield  # to an error
        return
    states = composable_modules()
    before = set(states)
    try:
        with all_or_nothing(model):
            yield
    except BaseException:
        for module in set(model.modules()) - before:
            states.pop(module, None)
        raise


def _sizes(mesh: DeviceMesh) -> tuple[int, int]:
    if has_expert_names(mesh):
        return 1, mesh.size()
    names = mesh.mesh_dim_names or (("dp_shard",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    if mesh.ndim > 2 or not set(names) <= {"dp_replicate", "dp_shard"}:
        raise ValueError(
            "parallelize takes a mesh [dp_shard], [dp_replicate] or [dp_replicate, dp_shard], or [efsdp, ep] after "
            f"expert_parallel; got dimensions {names}: pass its data-parallel part, such as "
            "mesh['dp_replicate', 'dp_shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("a two-dimensional mesh needs names: mesh_dim_names=('dp_replicate', 'dp_shard')")
    sizes = dict(zip(names, mesh.shape, strict=True))
    return sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1)


def _check_model(model: nn.Module, layout: Parallel, copies: int, dtype: torch.dtype | None) -> None:
    check_model("parallelize", model)
    if copies > 1:
        check_model("DDP", model)
    if copies > 1 and layout.cpu_offload:
        raise ValueError("cpu_offload needs shards, and this mesh has copies only: add a dp_shard dimension")
    if copies > 1 and dtype is not None and any(p.dtype != dtype for p in model.parameters()):
        raise ValueError(
            f"dtype={dtype} needs shards, and this mesh has copies only: cast the model, or train it under "
            "torch.autocast"
        )


def _check_recipes(model: nn.Module, fp8_comm: str) -> None:
    layers = [m for m in model.modules() if is_converted(m) and not m.weight_is_transposed]
    unsupported = {layer.recipe.name for layer in layers if not layer.recipe.supports_fp8_gather}
    if unsupported:
        raise ValueError(
            f"fp8_comm={fp8_comm!r} with recipe {', '.join(sorted(unsupported))}: its weights have another format for "
            "each product, or blocks across rows, and cannot be gathered in FP8. Nearest: recipe 'rowwise'; or "
            "fp8_comm='off'"
        )
