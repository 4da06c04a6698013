"""Differences between supported torch releases, and private torch names without a public counterpart.

Entries name the releases that need them; `pyproject.toml` has the range, `make test-versions` tests both ends.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from itertools import chain
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.modules.module as torch_module
from torch import Tensor
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:  # `torch.distributed` re-exports them where they exist, which no checker sees
    from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
    from torch.distributed.device_mesh import DeviceMesh
else:
    GradBucket, PrefixStore, Store = (getattr(dist, name, None) for name in ("GradBucket", "PrefixStore", "Store"))

__all__ = [
    "FakeCopyMode", "FakeTensor", "FakeTensorMode", "FunctionalTensor", "FunctionalTensorMode", "GradBucket",
    "PrefixStore", "Store", "TorchDispatchMode", "current_dispatch_mode", "disable_current_modes",
    "is_traceable_wrapper_subclass", "tree_leaves", "tree_map", "unset_fake_temporarily",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")

function_modes = torch._C._len_torch_function_stack
dispatch_modes = torch._C._len_torch_dispatch_stack
current_graph_task_id = torch._C._current_graph_task_id
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
saved_tensors_hooks_disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
is_written: Callable[[Tensor], bool] = cast(Any, torch)._functionalize_has_data_mutation
"""Whether an operation in place wrote to the storage of a functional tensor that AOTAutograd traces."""
sequence_number = torch._C._autograd._get_sequence_nr
top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
tracing_state = torch._C._get_tracing_state
cuda_driver_version: Callable[[], int] = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)
"""The newest CUDA that the driver supports, as 12080; 0 without a driver."""
has_bf16_instructions = torch.cpu._is_avx512_bf16_supported

_DISTRIBUTED = {  # Private names of packages that are slow to import: imported when they are asked for
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    "get_default_store": "torch.distributed.distributed_c10d:_get_default_store",
    "get_schedule_ops": "torch.distributed.pipelining._schedule_visualizer:get_schedule_ops",
}


def __getattr__(name: str) -> Any:
    if name not in _DISTRIBUTED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve_name(_DISTRIBUTED[name])
    return value


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup | None) -> None:
    """Set the timeout of a process group's collectives; torch >= 2.14 has a public name for it."""
    public = getattr(torch.distributed, "set_timeout", None)
    (public or import_module("torch.distributed.distributed_c10d")._set_pg_timeout)(timeout, group)


def gradients_of_stage(stage: Any, which: str) -> list[bool]:
    """Return which "inputs" or "outputs" of a pipeline stage require a gradient. torch >= 2.13: private metadata."""
    return [meta.requires_grad for meta in getattr(stage._stage_meta, which)]


def has_freed_weights(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 shards a module, or one inside it, and has no gathered weights now. torch >= 2.13."""
    fsdp = import_module("torch.distributed.fsdp").FSDPModule
    return any(group.is_sharded for m in module.modules() if isinstance(m, fsdp) for group in _fsdp_groups(m))


def fsdp_groups(module: torch.nn.Module) -> list[list[Any]]:
    """Return the parameters that FSDP2 gathers together for a module, as `FSDPParam`s; [] without `fully_shard`."""
    return [group.fsdp_params for group in _fsdp_groups(module)] if hasattr(module, "_get_fsdp_state") else []


def forget_gathered(parameter: Any) -> None:
    """Drop what an `FSDPParam` has gathered into: FSDP2 allocates it at the next gather, of another size if need be."""
    parameter.all_gather_outputs = []
    parameter._unsharded_inner_tensors = []
    vars(parameter).pop("_unsharded_param", None)


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):  # torch >= 2.13
        return list(state._fsdp_param_groups)
    return [group for group in [state._fsdp_param_group] if group is not None]


def composable_modules() -> dict[torch.nn.Module, Any]:
    """Return the states of the modules that `fully_shard` or `replicate` was called on; {} if neither is imported."""
    states = sys.modules.get("torch.distributed._composable_state")
    return {} if states is None else states._module_state_mapping


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor. Does not import DTensor."""
    return hasattr(tensor, "_local_tensor")


def local_part(tensor: object) -> Any:
    """Return what a DTensor holds on this rank, without autograd; any other tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)


def ignore_in_ddp(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Exclude parameters of a model from the synchronization of a `DistributedDataParallel` made later."""
    ddp: Any = import_module("torch.nn.parallel").DistributedDataParallel
    ignored = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *names}
    ddp._set_params_and_buffers_to_ignore_for_model(model, ignored)


def is_under_join(model: Any) -> bool:
    """Return whether a `DistributedDataParallel` is under `join()`. All releases."""
    return bool(model._join_config.enable)


def divides_by_active_ranks(model: Any) -> bool:
    """Return whether a `DistributedDataParallel` is under `join(divide_by_initial_world_size=False)`. All releases."""
    return is_under_join(model) and not getattr(model, "_divide_by_initial_world_size", True)


def global_module_hooks() -> Iterable[Any]:
    """Return the hooks that run around the forward and backward of every module."""
    if not torch_module._has_any_global_hook():
        return ()
    kinds = "forward", "forward_pre", "backward", "backward_pre"
    return chain.from_iterable(getattr(torch_module, f"_global_{kind}_hooks").values() for kind in kinds)


def held_for_backward(node: object, name: str) -> Any:
    """Return what autograd holds for a tensor that a node saved: the tensor, or the result of a pack hook."""
    # Calls no unpack hook. None if the node saved no tensor of this name.
    return getattr(getattr(node, f"_raw_saved_{name}", None), "data", None)


def all_held_for_backward(node: object) -> list[Any]:
    """Return what autograd holds for every tensor that a node saved, as `held_for_backward`."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_")]
    return [one.data for one in tree_leaves(saved) if one is not None]


def missing_in_pipelining() -> list[str]:
    """Return the private names of `torch.distributed.pipelining` that FP8 stages need and this release lacks."""
    # Before 2.13 stages exchange shapes only, and treat each floating-point tensor as if it required a gradient.
    stage = import_module("torch.distributed.pipelining").PipelineStage
    internals = import_module("torch.distributed.pipelining._utils")
    names = ("_prepare_forward_infra", "_prepare_backward_infra")
    missing = [name for name in names if not hasattr(stage, name)]
    return missing + ([] if hasattr(internals, "_StageMeta") else ["_StageMeta"])


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Have torch.compile call a function and take its result as a constant, instead of tracing it."""
    # `torch.compiler.assume_constant_result` sets the same attribute, but imports the compiler, which takes a second.
    vars(function)["_dynamo_marked_constant"] = True
    return function


def never_compiled(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that runs eagerly where compiled code calls it; `fullgraph=True` raises with the reason."""

    # As `torch.compiler.disable`, which imports the compiler where it decorates. PyTorch's optimizers use the same.
    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        eager: Any = torch._compile._disable_dynamo(function)
        eager._torchdynamo_disable, eager._torchdynamo_disable_msg = True, reason
        return cast(Callable[P, R], eager)

    return decorate


def run_eagerly() -> AbstractContextManager[Any]:
    """Run compiled modules eagerly inside, if torch.compile is in use."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compilation_error() -> type[Exception]:
    """Return the base class of the errors of torch.compile. All releases: private."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def compiled_graphs(function: Any) -> int:
    """Return how many graphs torch.compile holds of the code of a Python function. All releases: private."""
    return len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(function.__code__))


def allow_shared_graphs(graphs: int) -> None:
    """Let torch.compile make this many graphs of one function that equal modules share, not cut at DDP's buckets."""
    from torch._dynamo import config

    config.skip_nnmodule_hook_guards = config.optimize_ddp = False
    config.recompile_limit = max(config.recompile_limit, graphs)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, graphs)


def measure_compilations(timed: Callable[[str], AbstractContextManager[None]]) -> None:
    """Run every compilation of torch.compile inside `timed("compile")`. All releases: private."""
    from torch._dynamo.callback import callback_handler

    start, end = _compilation_callbacks(timed)
    if start not in callback_handler.start_callbacks:  # `torch._dynamo.reset` removes it
        callback_handler.register_start_callback(start)
        callback_handler.register_end_callback(end)


@cache
def _compilation_callbacks(timed: Callable[[str], AbstractContextManager[None]]) -> tuple[Any, Any]:
    running: list[AbstractContextManager[None]] = []

    def start(_: object) -> None:
        running.append(timed("compile"))
        running[-1].__enter__()

    return start, lambda _: running.pop().__exit__(None, None, None)


def is_exporting() -> bool:
    """Return whether torch.export traces. torch 2.11: Dynamo takes `torch.compiler.is_exporting` for true always."""
    return torch.compiler._is_exporting_flag


@constant_in_graphs  # torch 2.11 cannot trace torch.amp.is_autocast_available
def _has_autocast(device_type: str) -> bool:
    """Whether a device type has autocast. "meta" has none, and `is_autocast_enabled` raises for it."""
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return autocast's dtype of products on a device type, or None if it is off. Traceable by torch.compile."""
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Disable autocast for a device type, if it has autocast."""
    return torch.autocast(device_type, enabled=False) if _has_autocast(device_type) else nullcontext()


def flattened(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """Return a `DeviceMesh` of one dimension with the ranks of a mesh. All releases: there is no public function."""
    return mesh._flatten(name)


@contextmanager
def fake_process_group(size: int) -> Iterator[None]:
    """A process group of so many ranks, of which this process is the first and the others do not exist."""
    # Its collectives send nothing. DTensor infers shapes by an operation on whole tensors, once for each, which
    # dispatch modes do not see: they record what a rank runs.
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("a plan of several ranks runs in one process: start it without torchrun")
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def propagate_unseen(self: Any, op_schema: Any) -> Any:
        with disable_current_modes():
            return propagate(self, op_schema)

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    propagator: Any = ShardingPropagator
    propagator._propagate_tensor_meta_non_cached = propagate_unseen
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = propagate
        dist.destroy_process_group()


def queue_callback(callback: Callable[[], None]) -> None:
    """Call a function when the backward that runs ends. All releases."""
    # Looked up in the call: compiled autograd recognizes it there.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


cuda_sleep: Callable[[int], None] = torch.cuda._sleep
"""Keep the current stream busy for a number of GPU clock cycles. All releases."""


def in_backward() -> bool:
    """Whether this thread runs inside the autograd engine. All releases."""
    return current_graph_task_id() != -1


def explain_freed_nodes(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Class decorator: give `torch.autograd.grad` from a freed node of the function a clear error."""
    # torch 2.11 frees the node with its output, which zero-bubble schedules detach, and raises an error about legacy
    # functions. torch 2.13 keeps the node alive.
    node: Any = function._backward_cls

    def input_metadata(self: object) -> Any:
        try:
            return super(node, self)._input_metadata
        except RuntimeError as error:
            raise RuntimeError(
                f"octavo: {node.__name__} was freed with its output: before torch 2.13 zero-bubble schedules cannot "
                "use it. Take a newer torch, or another schedule, such as Schedule1F1B"
            ) from error

    node._input_metadata = property(input_metadata)
    return function


def short_backward(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """Class decorator: let the engine call `backward` without the look-ups of the node's own `apply`. All releases."""
    annotated: Any = function
    annotated._backward_cls.apply = vars(function)["backward"].__func__
    return function


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return `function.apply` without its support of functorch, whose wrappers and transforms the caller excludes."""
    # All releases: saves a tenth of the time of a small autograd function.
    return cast(Any, super(torch.autograd.Function, function)).apply  # type: ignore[no-any-return]


def required_gradients(ctx: Any, inputs: int) -> tuple[bool, ...]:
    """Return whether this backward uses the gradients of the first inputs of an autograd function."""
    # `torch.autograd.grad(y, x)` and zero-bubble pipelines use only some of the gradients that `ctx.needs_input_grad`
    # has, and autograd discards the others: the engine marks the nodes that it will execute. All releases.
    required: tuple[bool, ...] = ctx.needs_input_grad[:inputs]
    if torch.compiler.is_compiling():
        return required
    # One entry per tensor input; the node is None if no gradient is required.
    executed = []
    for needed, (node, _) in zip(required, ctx.next_functions):  # noqa: B905
        if needed:
            try:
                needed = will_execute(node)
            except RuntimeError:  # no backward, or a leaf whose gradient `torch.autograd.grad` returns
                pass
        executed.append(needed)
    return (*executed, *required[len(executed) :])


will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


def eager_signature(*tensors: Tensor | None, records: bool = False) -> tuple[Any, ...] | None:
    """Return dtype, shape, strides and device of tensors, on which checks and allocations of an op depend."""
    # None unless the dispatcher would call the op's kernel directly, below autograd: if a compiler, tracer, dispatch
    # mode (fake tensors, selective checkpointing), function mode, functorch transform or level of forward-mode
    # derivatives is active, if autograd records (unless `records` allows that), or if a tensor is a subclass, a lazy
    # negation, a lazy zero, nested, sparse or a wrapper that outlived its transform. All releases: most is private.
    if (
        (not records and torch.is_grad_enabled()) or torch.compiler.is_compiling() or dispatch_modes()
        or function_modes() or has_transforms() or tracing_state() is not None
        or in_forward_mode()
    ):  # fmt: skip
        return None
    signature: tuple[Any, ...] = ()
    for x in tensors:
        if x is None:
            signature += (None,)
        elif (
            type(x) in _NO_SUBCLASS and not x.is_neg() and not x._is_zerotensor() and not is_wrapped(x)
            and not is_nested_or_sparse(x)
        ):  # fmt: skip
            signature += x.dtype, x.shape, x.stride(), x.device
        else:
            return None
    return signature


def guard_of(*tensors: Tensor) -> Callable[..., bool]:
    """Return a fast check whether tensors have the `eager_signature` of these: torch.compile's own. All releases."""
    # In one call it compares types, dtypes, shapes, strides, devices, whether gradients are required, and dispatch
    # keys. These include lazy negations, lazy zeros and wrappers, and what the thread adds or removes: functorch
    # transforms, tracers, inference mode, autocast. Compilers, dispatch and function modes and grad mode are the
    # caller's to check: some dispatch modes, such as those of fake tensors, are hidden from guards.
    guards: Any = torch._C._dynamo.guards
    return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[no-any-return]


_NO_SUBCLASS = {Tensor, torch.nn.Parameter}


def is_wrapped(x: Tensor) -> bool:
    """Whether a tensor is one of torch.func, or a batch of gradients (`is_grads_batched`)."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def is_nested_or_sparse(x: Tensor) -> bool:
    """Whether a tensor has no sizes or strides of its own."""
    return x.is_nested or x.layout is not torch.strided


def has_dense_rows(x: Any) -> bool:
    """Whether a tensor is jagged, with a last dimension that is not the ragged one: `values()` has its rows."""
    return x.layout is torch.jagged and x._ragged_idx < x.ndim - 1


def jagged_like(x: Any, values: Tensor) -> Tensor:
    """Return values with the ragged dimension of another jagged tensor. All releases: reads cached lengths only."""
    sizes = x._ragged_idx, x._maybe_min_seqlen, x._maybe_max_seqlen
    return torch.nested.nested_tensor_from_jagged(values, x.offsets(), x.lengths(), *sizes)


def in_forward_mode() -> bool:
    """Whether a level of forward-mode derivatives is entered. All releases."""
    return torch.autograd.forward_ad._current_level >= 0


has_transforms = torch._C._are_functorch_transforms_active


def empty_strided_on(device: torch.device) -> Callable[[Any, Any, torch.dtype], Tensor]:
    """Return a function of size, strides and dtype that allocates a tensor, as `torch.empty_strided`."""
    # While it is called, a CUDA device has to be the current one. It bypasses PyTorch's dispatcher, as the code that
    # Inductor generates does, in a third of the time. So no dispatch mode sees the allocation: use it only where none
    # is active, or inside the implementation of an op. All releases: there is no public function for it.
    function: Any = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    return function or (lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device))


reinterpreted: Callable[[Tensor, Any, Any, int], Tensor] = cast(Any, torch._C._dynamo.guards)._reinterpret_tensor
"""`torch.as_strided` below the dispatcher, for operands of one op: the result has a version counter of its own."""


class own_saved_tensors_hooks(torch.autograd.graph.saved_tensors_hooks):
    """`saved_tensors_hooks` for the library's own hooks, which selective checkpointing ignores.

    torch >= 2.14 warns if hooks are active around selective checkpointing, which concerns a user's offloading hooks. It
    skips hooks with these two attributes and uses the user's; older releases ignore them.
    """

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        hook: Any = partial(pack)  # accepts attributes, unlike a bound method
        hook._checkpoint_internal = True
        super().__init__(hook, unpack)

    def __enter__(self) -> None:
        outer: Any = top_saved_tensors_hooks(False)
        if outer is not None and getattr(outer[0], "_checkpoint_internal", False):
            outer = outer[0]._user_hooks
        vars(self.pack_hook)["_user_hooks"] = outer
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        del vars(self.pack_hook)["_user_hooks"]  # autograd holds the hook as long as the graph
        super().__exit__(*args)

    @property
    def in_force(self) -> bool:
        """Whether these are the innermost hooks, which autograd calls."""
        top = top_saved_tensors_hooks(False)
        return top is not None and top[0] is self.pack_hook


def has_values(x: Tensor) -> bool:
    """Whether a tensor is neither meta nor fake."""
    return not (x.is_meta or isinstance(x, FakeTensor))


@contextmanager
def outside_autograd() -> Iterator[None]:
    """Leave autograd and modes: selective checkpointing needs forward and recompute alike, and this runs only once."""
    with torch.inference_mode(False), torch.no_grad(), disable_current_modes():
        yield
