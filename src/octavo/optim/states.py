"""`Optimizer`, what describes one, and states of one parameter: checks, and conversion from `torch.optim.AdamW`.

Every state is contiguous regardless of its parameter's strides: the step views it as a matrix of the logical rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from octavo.kernels.adamw.reference import GROUP, HyperParams, ParamState, Work, exact_values, groups, write_moments
from octavo.numerics import Precision
from octavo.numerics.formats import E4M3
from octavo.optim.sharded import local_rows, shard_like
from octavo.runtime.torch_compat import is_dtensor
from octavo.tensor import local_tensor, placed_like

# Ends of the names of a moment's tensors. FP8 codes have one, so that no other optimizer takes them for the moment.
_PARTS = ("", "_fp8", "_hi", "_k")
MIN_FP8_COLUMNS = 64  # Fewest columns for which FP8 moments save memory in spite of their scales
_OCTAVO_ONLY = ("states", "master", "stochastic_rounding", "nonfinite")  # Settings that `torch.optim.AdamW` lacks
_TORCH_ONLY = ("amsgrad", "decoupled_weight_decay")  # Settings that tell `torch.optim.AdamW` from other optimizers
_TORCH_CHOICES = ("foreach", "fused", "capturable", "differentiable")  # Its implementations, none of them Octavo's


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return a shape as [first dimension, rest]; [1, n] for fewer than two dimensions."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def matrix_view(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as `matrix_shape`; never a copy."""
    return tensor if tensor.ndim == 2 else tensor.view(matrix_shape(tensor.shape))


Group = Mapping[str, Any]  # Settings of a parameter group
Entry = tuple[Group, Tensor]  # A parameter, with its group


class Optimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` with compact states, that may hold exact float32 masters of its parameters.

    The planner and the trainer treat any other `torch.optim.Optimizer` as PyTorch's own: its states exist after a step.

    Attributes:
        step_allocates: Whether a step needs memory besides the states and gradients. If so, the planner takes a step
            under FakeTensorMode to measure it, so the step must not read values of tensors.

    Examples:
        >>> optimizer = octavo.AdamW(torch.nn.Linear(64, 64).parameters())
        >>> isinstance(optimizer, octavo.optim.Optimizer), optimizer.step_allocates
        (True, False)
    """

    step_allocates: ClassVar[bool] = True

    @abstractmethod
    def make_states(self) -> None:
        """Allocate missing states of all parameters before the first step, to measure their memory."""

    @abstractmethod
    def set_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Set exact float32 masters, by parameter, before training; parameters become the rounded values.

        Raises:
            ValueError: A parameter has no master, or a value has another shape or dtype.
        """


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """A row of `octavo.optim.OPTIMIZERS`: what the trainer and the planner need to know of an optimizer."""

    name: str  # Value of `optim.name`
    make: Callable[..., Any]  # Creates the `octavo.AdamW`, of groups with lr, betas, eps, states, master and nonfinite
    moments: Mapping[str, bool]  # Names of a parameter's moments, and whether they have signs
    step: Callable[[Work], None] | None = None  # Steps parameters of one device
    update: Callable[[Any, Sequence[Entry]], None] | None = None  # In place of `step`: steps parameters of an optimizer
    settings: tuple[str, ...] = ()  # Keys of `[optim]` that only some optimizers take, also arguments of `make`
    # Whether it takes the hidden matrices, whole ones, and leaves the rest to AdamW. A group has this under `name`.
    matrices: bool = False
    fused: type[torch.optim.Optimizer] | None = None  # PyTorch's optimizer of the same steps, for states in fp32
    traffic: float = 0.0  # Bytes per parameter that a step moves besides gradient, parameter and states
    flops: Callable[[Sequence[int]], float] = lambda shape: 0.0  # FLOPs of a step's matrix products, by shape

    def layout(self, param: Tensor, group: Group) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each state of a parameter, or of its local rows."""
        rows, columns = matrix_shape(param.shape)
        shape = tuple(param.shape)
        states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
        if group["states"] == "fp8" and param.ndim > 1 and columns >= MIN_FP8_COLUMNS:
            scales = rows, groups(columns)
            for name, signed in self.moments.items():
                states[f"{name}_fp8"] = shape, E4M3.dtype if signed else torch.uint8
                states |= {f"{name}_hi": (scales, torch.float32), f"{name}_k": (scales, torch.uint8)}
        else:
            states |= {name: (shape, torch.float32) for name in self.moments}
        if param.dtype != torch.float32 and group["master"] is not None:
            master = group["master"] == "fp32"
            states["master" if master else "remainder"] = shape, torch.float32 if master else torch.int16
        return states

    def initial_state(self, param: Tensor, group: Group) -> dict[str, Tensor]:
        """Return the states of a parameter before its first step."""
        rows = local_tensor(param)
        state = {}
        for name, (shape, dtype) in self.layout(rows, group).items():
            device = "cpu" if name == "step" else rows.device
            value = torch.full(shape, 16 if name.endswith("_k") else 0, dtype=dtype, device=device)
            state[name] = value if name == "step" else shard_like(param, value)
            if name == "master":
                value.copy_(rows.detach())
        return state

    def step_bytes(self, precision: Precision, dtype: torch.dtype = torch.bfloat16) -> float:
        """Return the bytes per parameter, in rows of whole groups, that a step moves."""
        # Parameter and states are read and written; the gradient is read by its norm and by the step. With fp32 moments
        # and masters of bf16 parameters: 2 · (2 + 8 + 4) + 2 · 2 = 32; with FP8 moments and remainders 16.2.
        param = torch.empty(1, GROUP, dtype=dtype, device="meta")
        master = None if precision.master == "none" else precision.master
        layout = self.layout(param, {"states": precision.states, "master": master})
        held = sum(math.prod(shape) * kind.itemsize for name, (shape, kind) in layout.items() if name != "step")
        return 2 * held / GROUP + 4 * dtype.itemsize + self.traffic


@torch.no_grad()
def master_values(param: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    """Return the float32 values of a parameter's local rows: those of its master, or its own where that is stale."""
    remainder, master = (local_tensor(state[name]) if name in state else None for name in ("remainder", "master"))
    return exact_values(local_tensor(param).detach(), remainder, master)


def as_bytes(param: Tensor, value: Tensor) -> Tensor:
    """Return a sharded state as bytes [..., item size] that share its memory, if process groups lack its dtype."""
    if not is_dtensor(value) or value.dtype in (torch.float32, torch.uint8):
        return value
    rows = local_tensor(value)
    return shard_like(param, rows.view(torch.uint8).view(*rows.shape, rows.element_size()))


def from_bytes(param: Tensor, value: object, dtype: torch.dtype) -> Any:
    """Return a state, whole or sharded, from what `as_bytes` returned; other values as they are."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != (*param.shape, dtype.itemsize):
        return value
    rows = local_tensor(value).contiguous()
    rows = rows.flatten(-2).view(dtype) if rows.numel() else rows.new_empty(rows.shape[:-1], dtype=dtype)
    if not is_dtensor(value):
        return rows
    return placed_like(value, rows, param.shape)  # sharded as it was, which may not be as the parameter is


def param_state(
    param: Tensor, dense: Tensor, state: Mapping[str, Tensor], moments: Iterable[str], seed: int | None = None
) -> ParamState:
    """View contiguous local rows of a parameter with its gradient, if any, and states as matrices."""
    views = {name: matrix_view(local_tensor(value)) for name, value in state.items() if name != "step"}
    return ParamState(
        param=matrix_view(dense),
        grad=matrix_view(dense if param.grad is None else local_tensor(param.grad).contiguous()),
        moments=tuple(tuple(views[f"{name}{part}"] for part in _PARTS if f"{name}{part}" in views) for name in moments),
        remainder=views.get("remainder"), master=views.get("master"), seed=seed,
    )  # fmt: skip


def hyper_params(group: Group, step: Tensor, factor: float) -> HyperParams:
    """Return the numbers of a step, by its count, of a group of Octavo's optimizers or PyTorch's AdamW."""
    (beta1, beta2), shared = group["betas"], {name: group[name] for name in ("eps", "weight_decay", "maximize")}
    return HyperParams(lr=float(group["lr"]), beta1=beta1, beta2=beta2, step=int(step.item()), factor=factor, **shared)


def check_state(index: int, param: Tensor, state: Mapping[str, Any], group: Group, spec: OptimizerSpec) -> None:
    """Raise ValueError unless a state fits a parameter and its group's settings."""
    where = f"the saved state of parameter {index} {list(param.shape)}"
    expected = {name: f"{dtype} {list(shape)}" for name, (shape, dtype) in spec.layout(param, group).items()}
    actual = {name: text_of(value) for name, value in state.items()}
    if expected != actual:
        name = next(n for n in (*expected, *actual) if expected.get(n) != actual.get(n))
        raise ValueError(
            f"{where} does not fit: {name} is {actual.get(name, 'none')}, expected {expected.get(name, 'none')}. It is "
            "the state of another model, or of other settings of `states` or `master`"
        )
    for name, (shape, _) in spec.layout(local_tensor(param), group).items():
        if is_dtensor(state[name]):
            _check_shard(where, name, local_tensor(state[name]), shape)


def _check_shard(where: str, name: str, rows: Tensor, shape: Sequence[int]) -> None:
    if list(rows.shape) != list(shape):
        raise ValueError(
            f"{where} is sharded over other ranks: this rank has {list(rows.shape)} of {name}, expected {list(shape)}. "
            "Save and load with torch.distributed.checkpoint, which reshards"
        )


def text_of(value: object) -> str:
    """Return the dtype and the shape of a tensor, or the type of another value."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def copy_rows(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Load tensors by name, of which shards take their rows. Raises KeyError for a missing one."""
    for name, value in own.items():
        rows, local = local_rows(value, saved[name]), local_tensor(value)
        if text_of(rows) != text_of(local):
            raise ValueError(f"the saved {name} is {text_of(rows)}, expected {text_of(local)}")
        local.copy_(rows)


def saved_parameters(state_dict: Mapping[str, Any], sizes: list[int]) -> list[list[Any]]:
    """Return the parameter keys of a state_dict, by group."""
    try:
        _, keys = state_dict["state"], [group["params"] for group in state_dict["param_groups"]]
    except (KeyError, TypeError) as error:
        raise ValueError(
            "this is not an optimizer's state_dict: it needs `state`, by parameter, and `param_groups` with `params`"
        ) from error
    if [len(group) for group in keys] != sizes:
        raise ValueError(
            f"this optimizer has groups of {sizes} parameters; the saved state has groups {keys}: it is the state of "
            "another model, or of other groups"
        )
    return keys


def converted_group(
    index: int, saved: dict[str, Any], own: dict[str, Any], names: tuple[str, ...], spec: OptimizerSpec
) -> tuple[dict[str, Any], bool]:
    """Convert a saved parameter group to the settings in `names`; also whether it is from `torch.optim.AdamW`."""
    is_torch = not any(name in saved for name in _OCTAVO_ONLY)
    required = [name for name in names if name not in _OCTAVO_ONLY] + list(_TORCH_ONLY) if is_torch else names
    missing = [name for name in required if name not in saved]
    if missing:
        raise ValueError(
            f"the saved parameter group {index} is of neither octavo.AdamW nor torch.optim.AdamW: it has no "
            f"{', '.join(missing)}. If an older torch.optim.AdamW saved it, add decoupled_weight_decay=True to its "
            "groups; otherwise start with new states"
        )
    if not is_torch:
        return dict(saved), False
    kinds = {
        "Adam (decoupled_weight_decay=False)": not saved["decoupled_weight_decay"],
        "AdamW with amsgrad=True": saved["amsgrad"],
        "torch.optim.AdamW": spec.fused is None,
    }
    for kind in (kind for kind, differs in kinds.items() if differs):
        raise ValueError(
            f"the saved parameter group {index} is of {kind}, and {'octavo.AdamW' if spec.fused else spec.name} "
            "computes another step: continue with the optimizer that saved it, or start with new states"
        )
    shared = {name: value for name, value in saved.items() if name not in (*_TORCH_ONLY, *_TORCH_CHOICES)}
    return {**shared, **{name: own[name] for name in _OCTAVO_ONLY}}, True


def from_torch(
    index: int, param: Tensor, state: Mapping[str, Any], group: Group, spec: OptimizerSpec
) -> dict[str, Tensor]:
    """Convert a state of `torch.optim.AdamW` to a group's `states` and `master`."""
    # Float32 moments are exact; FP8 moments are rounded to nearest, once. The master is the current parameter.
    where = f"the saved torch.optim.AdamW state of parameter {index} {list(param.shape)}"
    if set(state) != {"step", *spec.moments}:
        raise ValueError(f"{where} must have exactly step, {', '.join(spec.moments)}; got {', '.join(map(str, state))}")
    matrices = []
    for name in spec.moments:
        value = state[name]
        if value.shape != param.shape:
            raise ValueError(f"{where}: {name} must be a tensor of that shape; got {text_of(value)}")
        rows = local_rows(param, value).detach()
        _check_shard(where, name, rows, local_tensor(param).shape)
        rows = rows.to(local_tensor(param).device, torch.float32, copy=True, memory_format=torch.contiguous_format)
        if not rows.isfinite().all():  # nonfinite="skip" would skip every step
            raise ValueError(f"{where}: {name} must be finite")
        matrices.append(matrix_view(rows))
    converted = spec.initial_state(param, group)
    converted["step"].fill_(float(state["step"]))
    for part, rows_of in param_state(matrices[0], matrices[0], converted, spec.moments).chunks():
        moments = [matrix[rows_of] for matrix in matrices]
        for moment, value in zip(part.moments, moments, strict=True):
            moment[0].copy_(value)  # in float32; FP8 codes follow
        write_moments(part, moments)
    return converted
