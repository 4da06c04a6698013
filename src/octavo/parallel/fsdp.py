"""FSDP2 with FP8 communication: what `fully_shard` shards, and in which format it is communicated.

Weights are gathered in FP8 if one format serves all products and each rank can quantize its rows alone: by row, and by
tensor, with one all_reduce of the amaxes of an FSDP2 group before its gather. Sums of a shard group are reduced over
the copies of HSDP in `reduce_dtype`: FSDP2 offers no hook for that.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from octavo.comm import reduce_scatter
from octavo.kernels.grouped import is_grouped
from octavo.nn.equalized import shared_scales
from octavo.nn.experts import STACKED, Experts, is_converted_experts
from octavo.nn.gathered import AmaxGroup, GatherFormat, ShardedWeight, sharded_weights
from octavo.nn.linear_like import LinearLike
from octavo.nn.resident import as_resident, resident_weights
from octavo.numerics.equalization import ChannelScales
from octavo.numerics.spec import QuantSpec
from octavo.parallel.agreement import broadcast_values
from octavo.runtime.blocks import CALLED_OUTSIDE, find_blocks
from octavo.runtime.torch_compat import forget_gathered, fsdp_groups, local_part
from octavo.tensor import local_tensor, placed_like


class Fp8ReduceScatter:
    """Reduce-scatter for `FSDPModule.set_custom_reduce_scatter`: sends gradients in FP8 and sums them in float32."""

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate memory for FSDP2's copy of the gradients, or for their sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce [W·n] to this rank's [n]."""
        # With `set_gradient_divide_factor(f)` FSDP requests a sum of values multiplied by 1/f. Here the sum is
        # multiplied, in float32: the factor adds only its own rounding error, and none if it is a power of two.
        if not any(op == sum_op for sum_op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)):
            raise ValueError(f"gradients in FP8 support sum and average; FSDP requests {op}: use fp8_comm='gather'")
        with torch.no_grad():
            result = reduce_scatter(input_tensor, group, op="avg" if op == dist.ReduceOp.AVG else "sum", spec=self.spec)
            if op == dist.ReduceOp.PREMUL_SUM:
                result = result.float() * op.__getstate__()[1]
            output_tensor.copy_(result)


def shard(
    model: nn.Module, mesh: DeviceMesh, *, expert_mesh: DeviceMesh | None = None, fp8_gather: bool,
    fp8_reduce: str | None, dtype: torch.dtype | None, reduce_dtype: torch.dtype, reshard_after_forward: bool,
    cpu_offload: bool,
) -> nn.Module:  # fmt: skip
    """Apply `fully_shard` to the repeated blocks of a model, then to the rest, in place."""
    # A module whose parameters have another dtype than most of its block, such as a router that Transformers keeps in
    # float32, is its own group: FSDP2 groups have one dtype. Its gradients are reduced in `reduce_dtype`.
    if fp8_gather:
        expert_ranks = 1 if expert_mesh is None else expert_mesh.size()
        _mark_fp8_weights(model, dtype, mesh.size(mesh.ndim - 1), expert_ranks)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    if not cpu_offload:
        _move_resident(model, mesh)
    sharded = []
    # Their inputs keep their dtypes: routing weights may be wider than the experts.
    inside = options | {"mp_policy": replace(policy, cast_forward_inputs=False)}
    if expert_mesh is not None:
        for experts in filter(is_converted_experts, list(model.modules())):
            options_of_experts = inside | {"mesh": expert_mesh}
            sharded.append(fully_shard(experts, reshard_after_forward=reshard_after_forward, **options_of_experts))
    blocks = _unshared_blocks(model, find_blocks(model))
    for other in _of_other_dtypes(model, blocks):
        fully_shard(other, reshard_after_forward=reshard_after_forward, **inside)
    for block in blocks:
        sharded.append(fully_shard(block, reshard_after_forward=reshard_after_forward, **options))
    sharded.append(fully_shard(model, reshard_after_forward=False, **options))
    if mesh.ndim == 2:
        device = torch.device(mesh.device_type)
        broadcast_values((*model.parameters(), *model.buffers()), mesh.get_group(0), device)
    if fp8_reduce is not None:
        reducer: Any = Fp8ReduceScatter(fp8_reduce)
        for module in sharded:
            module.set_custom_reduce_scatter(reducer)
    if fp8_gather:
        model.register_state_dict_post_hook(_unwrap_shards)
        for group in (group for module in model.modules() for group in fsdp_groups(module)):
            weights = [parameter.sharded_param for parameter in group]
            AmaxGroup(weight for weight in weights if isinstance(local_part(weight), ShardedWeight))
    return model


def _move_resident(model: nn.Module, mesh: DeviceMesh) -> None:
    """Move weights that are resident in FP8 to the device of a mesh: FSDP2 would unfreeze them to move them."""
    device = torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(resident_weights(module)):
            if weight.device not in (device, torch.device("meta")):
                key = id(module._parameters[name])
                moved.setdefault(key, nn.Parameter(weight.to(device), requires_grad=False))
                module._parameters[name] = moved[key]


def _of_other_dtypes(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return modules that train parameters of another dtype than most of their block, or of the rest of the model."""
    names, others, done = {module: name for name, module in model.named_modules()}, [], set[nn.Module]()
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for group in (*blocks, model):
        modules: dict[torch.dtype, list[nn.Module]] = {}
        sizes: Counter[torch.dtype] = Counter()
        for module in group.modules():
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            if module not in done and not isinstance(module, FSDPModule):
                done.add(module)
                for parameter in trained:
                    sizes[parameter.dtype] += parameter.numel()
                for dtype in {parameter.dtype for parameter in trained}:
                    modules.setdefault(dtype, []).append(module)
        for dtype, _ in sizes.most_common()[1:]:
            for module in reversed(modules[dtype]):  # children first
                inside = [p for p in module.parameters() if p.requires_grad]
                if len({p.dtype for p in inside}) > 1 or any(owners[id(p)] > 1 for p in inside):
                    name = names[module] or type(module).__name__
                    raise ValueError(
                        f"{name} trains parameters in {dtype}, and most of those beside it are in another dtype, but "
                        "an FSDP2 group has one. It cannot be sharded by itself, because it has parameters of several "
                        "dtypes, or some that another module shares: give them the dtype of the others before "
                        "parallelize"
                    )
                others.append(module)
    return others


def _unshared_blocks(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no parameter with another module, and of which no part is called outside."""
    owners: dict[int, set[int]] = {}
    for place, block in enumerate([*blocks, model]):
        inside = {id(module) for other in blocks for module in other.modules()} if block is model else set()
        for module in block.modules():
            if id(module) not in inside:
                for parameter in module.parameters(recurse=False):
                    owners.setdefault(id(parameter), set()).add(place)
    alone = [block for block in blocks if all(len(owners[id(p)]) == 1 for p in block.parameters())]
    return [block for block in alone if not any(getattr(m, CALLED_OUTSIDE, False) for m in block.modules())]


def _mark_fp8_weights(model: nn.Module, dtype: torch.dtype | None, ranks: int, expert_ranks: int) -> None:
    """Replace weights that can be gathered in FP8 by `ShardedWeight`, before sharding over so many ranks."""
    # One rank gathers nothing; FSDP2 would pass it the bytes without their scales.
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for places in owners.values():
        layers = [module for module, name in places if _may_gather(module, name)]
        recipes = {layer.recipe for layer in layers}
        if len(layers) != len(places) or len(recipes) != 1:
            continue  # not a converted layer's, or shared with other modules
        module, name = places[0]
        spec, weight = _gathered_spec(module), module.get_parameter(name)
        if as_resident(weight) is not None:
            continue  # gathers itself
        distributed = is_converted_experts(module) and isinstance(weight, DTensor)
        if spec is None or (expert_ranks if distributed else ranks) == 1:
            continue
        gather_format = GatherFormat(spec, dtype, local_tensor(weight).shape[0])
        gather_format.transposed = bool(getattr(module, "is_transposed", False))
        gather_format.channels = partial(_channels, layers)
        gather_format.follow = partial(_update_recipe, weakref.ref(model), gather_format, layers)
        part = ShardedWeight(local_tensor(weight.detach()), gather_format)
        placed = placed_like(weight, part) if isinstance(weight, DTensor) else part  # by tensor or expert parallelism
        marked = nn.Parameter(placed, requires_grad=weight.requires_grad)
        for module, name in places:
            setattr(module, name, marked)


def _may_gather(module: nn.Module, name: str) -> TypeGuard[LinearLike | Experts]:
    """Return whether a parameter is a weight that FP8 products read, with rows along dimension 0 or experts."""
    if isinstance(module, LinearLike):
        return not module.weight_is_transposed and name == "weight"
    return is_converted_experts(module) and name in STACKED


def _gathered_spec(layer: nn.Module) -> QuantSpec | None:
    """Return the FP8 spec in which the weight of a layer is gathered, None for high precision."""
    if is_converted_experts(layer):
        return layer.recipe.w if is_grouped(layer.recipe) else None
    return layer.recipe.w if isinstance(layer, LinearLike) and layer.recipe.supports_fp8_gather else None


def _channels(linears: Iterable[nn.Module]) -> ChannelScales | None:
    scales = {shared_scales(linear) for linear in linears}
    return scales.pop() if len(scales) == 1 else None


def _update_recipe(model: "weakref.ref[nn.Module]", gather_format: GatherFormat, layers: Iterable[nn.Module]) -> None:
    """Gather a weight in the format of its layers' current recipe, or in high precision without one."""
    recipes = {getattr(layer, "recipe", None) for layer in layers}
    spec = _gathered_spec(next(iter(layers))) if len(recipes) == 1 else None
    root = model()
    if spec == gather_format.spec or root is None:
        return
    for module in root.modules():
        for parameter in chain.from_iterable(fsdp_groups(module)):
            if getattr(local_part(parameter.sharded_param), "gather_format", None) is gather_format:
                cast(FSDPModule, module).reshard()
                forget_gathered(parameter)  # the new format has another size
    gather_format.spec, gather_format.scale = spec, None


def _unwrap_shards(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for name, value in state.items():
        if isinstance(local_part(value), ShardedWeight):
            state[name] = placed_like(value, local_tensor(value))


def parameters_in_fp8(model: nn.Module) -> Iterable[str]:
    return [name for name, p in sharded_weights(model) if local_part(p).gather_format.spec is not None]
