"""parallelize: the front door to training on many devices, data-parallel.

    [dp_shard]                    FSDP2: ZeRO-3, or ZeRO-2 with reshard_after_forward=False; Gemini with cpu_offload
    [dp_replicate]                DDP
    [dp_replicate, dp_shard]      HSDP

What was not tested together is refused here, with the nearest combination that works, and not met in the middle of a
run. All ranks must ask for the same: settings, recipes and parameters are compared first, and what stops one rank
stops all.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

from octavo.comm import WIRE
from octavo.nn.convert import convert
from octavo.nn.linear import Linear
from octavo.nn.report import check_module, is_converted
from octavo.numerics.names import nearest
from octavo.numerics.precision import Precision
from octavo.parallel.ddp import replicate
from octavo.parallel.delayed import share_histories
from octavo.parallel.fsdp import shard
from octavo.runtime.swap import all_or_nothing

FP8_COMM = ("auto", "on", "gather", "off")


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Data parallelism of a run, as `[parallel]` of a configuration has it.

    Attributes:
        dp_replicate: Copies of the model, each sharded or not.
        dp_shard: Ranks that share one copy; -1 for all that are left.
        reshard_after_forward: Free gathered weights between forward and backward (ZeRO-3), or keep them (ZeRO-2).
        cpu_offload: Shards, gradients and optimizer states in host memory.
        fp8_comm: Weights and gradients in FP8 on the wire: `"on"`, `"off"`; `"gather"`, weights alone; or `"auto"`,
            weights where they leave a machine, and gradients where each machine has one rank: an all-to-all of many
            ranks sends more between machines than a ring does (docs/scaling.md).
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    reshard_after_forward: bool = True
    cpu_offload: bool = False
    fp8_comm: Literal["auto", "on", "gather", "off"] = "auto"

    def __post_init__(self) -> None:
        if self.dp_replicate < 1 or (self.dp_shard < 1 and self.dp_shard != -1):
            raise ValueError(
                "parallel.dp_replicate is 1 or more, and parallel.dp_shard 1 or more, or -1 for what is left; got "
                f"{self.dp_replicate} and {self.dp_shard}"
            )
        if self.fp8_comm not in FP8_COMM:
            hint = nearest(str(self.fp8_comm), FP8_COMM)
            raise ValueError(f"parallel.fp8_comm is 'auto', 'on', 'gather' or 'off'; got {self.fp8_comm!r}{hint}")

    def sizes(self, world: int) -> tuple[int, int]:
        """(dp_replicate, dp_shard) for a world.

        Raises:
            ValueError: Where they do not divide it.
        """
        shard = world // self.dp_replicate if self.dp_shard == -1 else self.dp_shard
        if shard < 1 or self.dp_replicate * shard != world:
            fitting = [n for n in range(1, world + 1) if world % n == 0]
            raise ValueError(
                f"parallel.dp_replicate = {self.dp_replicate} × parallel.dp_shard = {self.dp_shard} does not make the "
                f"{world} ranks there are: take dp_replicate from {fitting} and dp_shard = -1"
            )
        return self.dp_replicate, shard


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh | Parallel | None = None,
    *,
    precision: Precision | None = None,
    fp8_comm: Literal["auto", "on", "gather", "off"] | None = None,
    reshard_after_forward: bool | None = None,
    cpu_offload: bool | None = None,
    dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Spread a model over the ranks of a process group. Make the optimizer afterwards.

    Args:
        model: Any module, converted or not, on the mesh's device. The same on every rank.
        mesh: [dp_shard]; [dp_replicate, dp_shard]; [dp_replicate], named so; or `Parallel`, from which a mesh over all
            ranks is made. None: one shard group of all ranks.
        precision: Converts the model first; one that is converted already needs none.
        fp8_comm: See `Parallel`. Default: that of `mesh` where it is a `Parallel`, else `"auto"`.
        reshard_after_forward: See `Parallel`.
        cpu_offload: See `Parallel`; the optimizer then steps on the CPU.
        dtype: What parameters are gathered and computed in where that is not their own dtype, as bf16 for fp32 ones.
        reduce_dtype: What gradients are added up in.

    Returns:
        The model itself, its parameters sharded; or around it, for DDP, a `DistributedDataParallel`.

    Raises:
        ValueError: For a mesh that does not fit the world, what does not go together, or ranks that ask for different
            things; on every rank.
        TypeError: As `octavo.convert`, or `dtype` or `reduce_dtype` is no floating-point type of 16 bits or more.

    Whatever is raised, the model is left as it was.
    """
    check_module("parallelize", model)
    if not dist.is_initialized():
        raise ValueError(
            "parallelize needs a process group: start with torchrun --nproc-per-node N, and call "
            "torch.distributed.init_process_group() first"
        )
    changes = {"fp8_comm": fp8_comm, "reshard_after_forward": reshard_after_forward, "cpu_offload": cpu_offload}
    with _all_or_nothing(model):
        return _parallelize(model, mesh, precision, _given(changes), dtype, reduce_dtype)


def _parallelize(
    model: nn.Module, mesh: DeviceMesh | Parallel | None, precision: Precision | None, changes: dict[str, Any],
    dtype: torch.dtype | None, reduce_dtype: torch.dtype,
) -> nn.Module:  # fmt: skip
    wanted, problem = Parallel(), None
    try:
        wanted = Parallel(**(vars(mesh if isinstance(mesh, Parallel) else wanted) | changes))
        replicas, shards = _sizes(mesh) if isinstance(mesh, DeviceMesh) else wanted.sizes(dist.get_world_size())
        _check_dtypes(dtype=dtype, reduce_dtype=reduce_dtype)
        _check(model, wanted, replicas if shards == 1 else 1, dtype)
        if precision is not None:
            convert(model, precision=precision, verbose=dist.get_rank() == 0)
        if wanted.fp8_comm in ("on", "gather") and (shards > 1 or replicas == 1):
            _check_recipes(model, wanted.fp8_comm)
    except (TypeError, ValueError) as error:
        problem = error
    _agree(model, [vars(wanted), dtype, reduce_dtype], problem, mesh)
    if not isinstance(mesh, DeviceMesh):
        mesh = make_mesh(wanted, _device_type(model))
    apart = wanted.fp8_comm == "auto" and _leaves_a_machine(replicas * shards)
    fp8 = wanted.fp8_comm == "on" or (apart and _ranks_of_a_machine(replicas * shards) == 1)
    share_histories(model, mesh)
    if shards == 1 and replicas > 1:
        return replicate(model, mesh, fp8=WIRE if fp8 else None)
    return shard(
        model,
        mesh if mesh.ndim == 2 and replicas > 1 else _last(mesh),
        fp8_gather=fp8 or apart or wanted.fp8_comm == "gather",
        fp8_reduce=WIRE if fp8 else None,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        reshard_after_forward=wanted.reshard_after_forward,
        cpu_offload=wanted.cpu_offload,
    )


@contextmanager
def _all_or_nothing(model: nn.Module) -> Iterator[None]:
    """`octavo.runtime.swap.all_or_nothing`, for what FSDP2 remembers of modules as well."""
    states = _composable_state._module_state_mapping
    before = set(states)
    try:
        with all_or_nothing(model):
            yield
    except BaseException:
        for module in set(model.modules()) - before:
            states.pop(module, None)
        raise


def make_mesh(parallel: Parallel, device_type: str) -> DeviceMesh:
    """The mesh [dp_replicate, dp_shard] over all ranks."""
    sizes = parallel.sizes(dist.get_world_size())
    return init_device_mesh(device_type, sizes, mesh_dim_names=("dp_replicate", "dp_shard"))


def _last(mesh: DeviceMesh) -> DeviceMesh:
    return mesh if mesh.ndim == 1 else mesh["dp_shard"]


def _sizes(mesh: DeviceMesh) -> tuple[int, int]:
    names = mesh.mesh_dim_names or (("dp_shard",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    if mesh.ndim > 2 or not set(names) <= {"dp_replicate", "dp_shard"}:
        raise ValueError(
            f"parallelize takes a mesh [dp_shard], [dp_replicate] or [dp_replicate, dp_shard]; got dimensions {names}: "
            "give the part of it over which data is parallel, as mesh['dp_replicate', 'dp_shard']"
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError("name the dimensions of a mesh of two: mesh_dim_names=('dp_replicate', 'dp_shard')")
    sizes = dict(zip(names, mesh.shape, strict=True))
    return sizes.get("dp_replicate", 1), sizes.get("dp_shard", 1)


def _device_type(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters() if p.device.type != "meta"), "cpu")


def _given(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in changes.items() if value is not None}


def _check_dtypes(**dtypes: Any) -> None:
    """Raise for what parameters cannot be computed, or gradients added up, in; None is the dtype they have."""
    for name, dtype in dtypes.items():
        fits = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        if not fits and (dtype is not None or name == "reduce_dtype"):
            raise TypeError(f"{name} is a floating-point type of 16 bits or more, as torch.bfloat16; got {dtype!r}")


def _check(model: nn.Module, wanted: Parallel, copies: int, dtype: torch.dtype | None) -> None:
    """Raise for a model that is parallel already, and for what copies alone (DDP) cannot do."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"{name or 'the model'} is a {kind}"
        if kind == "FullyShardedDataParallel":
            raise ValueError(f"{where} (FSDP1), which Octavo does not support: give parallelize the model inside it")
        if isinstance(module, FSDPModule | nn.parallel.DistributedDataParallel):
            raise ValueError(f"{where} already: call parallelize once, on the whole model, before fully_shard or DDP")
    if copies > 1 and wanted.cpu_offload:
        raise ValueError("cpu_offload needs shards, and this mesh has copies only: give it a dp_shard dimension")
    if copies > 1 and dtype is not None and any(p.dtype != dtype for p in model.parameters()):
        raise ValueError(
            f"dtype={dtype} is for shards, and a mesh of copies only has none: cast the model, or train it under "
            "torch.autocast"
        )


def _check_recipes(model: nn.Module, fp8_comm: str) -> None:
    kept = {m.recipe.name for m in model.modules() if isinstance(m, Linear) and not m.recipe.gathers_w}
    if kept:
        raise ValueError(
            f"fp8_comm={fp8_comm!r} with recipe {', '.join(sorted(kept))}: its weights have another form for each "
            "product, or blocks across rows, and cannot be gathered in FP8. Nearest: recipe 'rowwise'; or "
            "fp8_comm='off'"
        )


def _agree(model: nn.Module, settings: list[Any], problem: Exception | None, mesh: Any) -> None:
    """Raise on every rank where one has a problem, or where ranks ask for different things."""
    recipes = {name: str(m.recipe.to_json()) for name, m in model.named_modules() if is_converted(m)}
    parameters = {name: [list(p.shape), p.dtype, p.requires_grad] for name, p in model.named_parameters()}
    what = {"settings": settings, "recipes of layers": recipes, "parameters": parameters}
    digests = {name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in what.items()}
    found: list[Any] = [{"rank": dist.get_rank(), "problem": problem and str(problem), **digests}]
    for group in mesh.get_all_groups() if isinstance(mesh, DeviceMesh) else [None]:
        parts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group)
        found = [each for part in parts for each in part]
    if problem is not None:
        raise problem
    for theirs in found:
        if theirs["problem"] is not None:
            raise ValueError(f"rank {theirs['rank']} cannot parallelize its model: {theirs['problem']}")
    for theirs in found:
        if (differs := next((name for name in what if theirs[name] != found[0][name]), None)) is not None:
            raise ValueError(
                f"rank {theirs['rank']} and rank {found[0]['rank']} call parallelize with different {differs}: all "
                "ranks must agree"
            )


def _leaves_a_machine(size: int) -> bool:
    """Whether a group of so many ranks has members on several machines, as torchrun lays them out."""
    return size > _ranks_of_a_machine(size)


def _ranks_of_a_machine(size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", size))
