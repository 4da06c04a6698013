"""FSDP2 with FP8 on the wire: what `torch.distributed.fsdp.fully_shard` shards, and in which form it travels.

    weights of converted linears    gathered as FP8 bytes and scales, which the products read (`octavo.nn.gathered`)
    everything else                 gathered in the dtype of computation, as FSDP2 does
    gradients                       FP8 all-to-all and a sum in float32, through FSDP2's own reduce-scatter hook

With copies of the shards (HSDP), what a shard group has added up is added up over the copies in `reduce_dtype`: FSDP2
lets nobody else do that.

Weights travel in FP8 where one form serves all products and each rank can make its rows of it: recipes by row, without
another exchange, and by tensor, with one of the largest magnitudes of all weights per optimizer step. Other recipes
(blocks across rows, other blocks for dgrad) are gathered as they would be without.
"""

import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.comm import reduce_scatter
from octavo.nn.gathered import Form, GlobalScales, ShardedWeight, sharded_weights
from octavo.nn.linear import Linear
from octavo.numerics.spec import TENSOR
from octavo.runtime.blocks import find_blocks
from octavo.tensor import local_tensor

_SCALES: "weakref.WeakSet[GlobalScales]" = weakref.WeakSet()
"""Of the sharded models there are."""


class Fp8ReduceScatter:
    """What `FSDPModule.set_custom_reduce_scatter` takes: gradients leave in FP8 and are added up in float32.

    Args:
        spec: FP8 form on the wire; see `octavo.comm`.
    """

    def __init__(self, spec: str) -> None:
        self.spec = spec

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what FSDP2 copies the gradients into, and for their sum."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce [W·n] to this rank's [n].

        `set_gradient_divide_factor(f)` makes FSDP ask for a sum of what is multiplied by 1/f. The sum is multiplied
        here, in float32: the factor adds no error but its own rounding, and none where it is a power of two.

        Raises:
            ValueError: For an operation that is no sum.
        """
        if not any(op == known for known in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PREMUL_SUM)):
            raise ValueError(f"gradients in FP8 are added up or averaged; FSDP asks for {op}: use fp8_comm='gather'")
        with torch.no_grad():
            result = reduce_scatter(input_tensor, group, op="avg" if op == dist.ReduceOp.AVG else "sum", spec=self.spec)
            if op == dist.ReduceOp.PREMUL_SUM:
                result = result.float() * op.__getstate__()[1]
            output_tensor.copy_(result)


def shard(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    fp8_gather: bool,
    fp8_reduce: str | None,
    dtype: torch.dtype | None,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    cpu_offload: bool,
) -> nn.Module:
    """`fully_shard` the repeated blocks of a model, then the rest of it, in place.

    Blocks that share parameters with anything else belong to the rest, as one group of FSDP2 has to own them.

    Args:
        model: Converted or not.
        mesh: [dp_shard], or [dp_replicate, dp_shard] for HSDP.
        fp8_gather: Gather the weights of converted linears in FP8 where their recipe allows it.
        fp8_reduce: FP8 form in which gradients travel; None for `reduce_dtype`.
        dtype: What parameters are computed in, as FSDP2's `param_dtype`; None for their own.
        reduce_dtype: What gradients are added up in.
        reshard_after_forward: Free gathered weights of blocks between forward and backward (ZeRO-3), or keep them
            (ZeRO-2). The rest, which backward begins with, is kept.
        cpu_offload: Shards, gradients and optimizer states stay in host memory.
    """
    scales = None
    if fp8_gather:
        group = mesh.get_group(mesh.ndim - 1)
        scales = GlobalScales(group)
        _mark(model, dtype, scales)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    sharded = []
    for block in _alone(model, find_blocks(model)):
        sharded.append(fully_shard(block, reshard_after_forward=reshard_after_forward, **options))
    sharded.append(fully_shard(model, reshard_after_forward=False, **options))
    if fp8_reduce is not None:
        reducer: Any = Fp8ReduceScatter(fp8_reduce)
        for module in sharded:
            module.set_custom_reduce_scatter(reducer)
    if scales is not None:
        _keep_up(model, scales)
    return model


def _alone(model: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Blocks that share no parameter with another or with what is around them."""
    owners: dict[int, set[int]] = {}
    for place, block in enumerate([*blocks, model]):
        inside = {id(module) for other in blocks for module in other.modules()} if block is model else set()
        for module in block.modules():
            if id(module) not in inside:
                for parameter in module.parameters(recurse=False):
                    owners.setdefault(id(parameter), set()).add(place)
    return [block for block in blocks if all(len(owners[id(p)]) == 1 for p in block.parameters())]


def _mark(model: nn.Module, dtype: torch.dtype | None, scales: GlobalScales) -> None:
    """Make the weights that can be gathered in FP8 say so, before they are sharded."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(id(parameter), []).append((module, name))
    for places in owners.values():
        linears = [module for module, name in places if isinstance(module, Linear) and name == "weight"]
        recipes = {linear.recipe for linear in linears}
        if len(linears) != len(places) or len(recipes) != 1:
            continue  # of no converted linear, or of other modules as well
        recipe, weight = recipes.pop(), linears[0].weight
        if recipe.gathers_w:
            by_tensor = scales if recipe.w.granularity == TENSOR else None
            form = Form(recipe.w, dtype, weight.shape[0], by_tensor)
            form.follow = partial(_follow_recipes, weakref.ref(model), form, linears, scales)
            marked = nn.Parameter(ShardedWeight(weight.detach(), form), requires_grad=weight.requires_grad)
            for linear in linears:
                linear.weight = marked


def _follow_recipes(
    model: "weakref.ref[nn.Module]", form: Form, linears: Iterable[nn.Module], scales: GlobalScales
) -> None:
    """Gather a weight as the recipe that its layers have now reads it: in high precision where that is none."""
    recipes = {linear.recipe if isinstance(linear, Linear) else None for linear in linears}
    recipe = recipes.pop() if len(recipes) == 1 else None
    spec = recipe.w if recipe is not None and recipe.gathers_w else None
    root = model()
    if spec == form.spec or root is None:
        return
    for module in root.modules():
        state: Any = module._get_fsdp_state() if isinstance(module, FSDPModule) else None
        group = state and state._fsdp_param_group
        for parameter in group.fsdp_params if group else []:
            if getattr(parameter._sharded_local_tensor, "form", None) is form:
                cast(FSDPModule, module).reshard()
                # What it has been gathered into has another size: FSDP makes both anew where there are none.
                parameter.all_gather_outputs = []
                parameter._unsharded_inner_tensors = []
                vars(parameter).pop("_unsharded_param", None)
                sharded = parameter.sharded_param
    scales.drop(form)
    by_tensor = spec is not None and spec.granularity == TENSOR
    form.spec, form.scale, form.scales = spec, None, scales if by_tensor else None
    if by_tensor:
        scales.add(sharded, form)


def _keep_up(model: nn.Module, scales: GlobalScales) -> None:
    """Keep plain tensors in `state_dict`, and the scales by tensor up to date."""
    model.register_state_dict_post_hook(_plain_state)
    for _, parameter in sharded_weights(model):
        form = parameter._local_tensor.form  # type: ignore[attr-defined]
        if form.scales is not None:
            scales.add(parameter, form)
    _follow_optimizers()
    _SCALES.add(scales)
    model.register_load_state_dict_post_hook(lambda *_: setattr(scales, "stale", True))
    model.register_forward_pre_hook(lambda *_: scales.refresh(), prepend=True)


@cache
def _follow_optimizers() -> None:
    """Make scales by tensor stale when an optimizer has stepped, with one hook for all models of the process.

    Which optimizer steps which model is not known when the model is sharded.
    """

    def changed(*_: Any) -> None:
        for scales in _SCALES:
            scales.stale = True

    register_optimizer_step_post_hook(changed)


def _plain_state(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A checkpoint's tensors are plain shards: what gathers them is no business of who reads it."""
    for name, value in state.items():
        local = getattr(value, "_local_tensor", None)
        if isinstance(local, ShardedWeight):
            state[name] = type(value)(local_tensor(value), value._spec, requires_grad=False)


def parameters_in_fp8(model: nn.Module) -> Iterable[str]:
    """Names of the parameters that are gathered in FP8."""
    return [name for name, p in sharded_weights(model) if p._local_tensor.form.spec is not None]  # type: ignore[attr-defined]
