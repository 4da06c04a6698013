"""States of one parameter: layout, initial values, checks, and conversion from `torch.optim.AdamW`.

Every state is contiguous regardless of its parameter's strides: the step reads and writes a view as a matrix of the
parameter's logical rows.
"""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adamw import compress, exact_values, groups
from octavo.numerics.formats import E4M3
from octavo.optim.sharded import local_rows, shard_like
from octavo.runtime.torch_compat import is_dtensor
from octavo.tensor import local_tensor, placed_like

MIN_FP8_COLUMNS = 64
"""Fewest columns for which FP8 moments save memory in spite of their scales."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_TORCH = ("step", *MOMENTS)
"""States of `torch.optim.AdamW`."""
_OCTAVO_ONLY = ("states", "master", "stochastic_rounding", "nonfinite")
"""Settings that `torch.optim.AdamW` does not have."""
_TORCH_ONLY = ("amsgrad", "decoupled_weight_decay")
"""Settings of `torch.optim.AdamW` that distinguish it from other optimizers."""
_TORCH_CHOICES = ("foreach", "fused", "capturable", "differentiable")
"""Its implementation settings, which do not apply here."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Return a shape as [first dimension, rest]; [1, n] for fewer than two dimensions."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def matrix_view(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as `matrix_shape`; never a copy."""
    return tensor.view(matrix_shape(tensor.shape))


def moments_of(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the moments of a group's parameters: Muon has the first one only."""
    return MOMENTS[:1] if group.get("muon") else MOMENTS


def state_layout(param: Tensor, group: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each state of a parameter, or of its local rows."""
    rows, columns = matrix_shape(param.shape)
    shape = tuple(param.shape)
    states: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
    if group["states"] == "fp8" and param.ndim > 1 and columns >= MIN_FP8_COLUMNS:
        for name in moments_of(group):
            states[name] = shape, E4M3.dtype if name == "exp_avg" else torch.uint8
        for name in moments_of(group):
            scales = rows, groups(columns)
            states |= {f"{name}_hi": (scales, torch.float32), f"{name}_k": (scales, torch.uint8)}
    else:
        states |= {name: (shape, torch.float32) for name in moments_of(group)}
    if param.dtype != torch.float32 and group["master"] is not None:
        master = group["master"] == "fp32"
        states["master" if master else "remainder"] = shape, torch.float32 if master else torch.int16
    return states


def initial_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """Return the states of a parameter before its first step."""
    rows = local_tensor(param)
    state = {}
    for name, (shape, dtype) in state_layout(rows, group).items():
        if name == "step":
            state[name] = torch.zeros((), dtype=dtype, device="cpu")
            continue
        value = torch.full(shape, 16 if name.endswith("_k") else 0, dtype=dtype, device=rows.device)
        if name == "master":
            value.copy_(rows.detach())
        state[name] = shard_like(param, value)
    return state


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


def from_bytes(param: Tensor, value: Any, dtype: torch.dtype) -> Any:
    """Return a state, whole or sharded, from what `as_bytes` returned; other values as they are."""
    if not isinstance(value, Tensor) or value.dtype != torch.uint8 or value.shape != (*param.shape, dtype.itemsize):
        return value
    rows = local_tensor(value).contiguous()
    rows = rows.flatten(-2).view(dtype) if rows.numel() else rows.new_empty(rows.shape[:-1], dtype=dtype)
    if not is_dtensor(value):
        return rows
    return placed_like(value, rows, param.shape)  # sharded as it was, which may not be as the parameter is


def check_state(index: int, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise ValueError unless a state fits a parameter and its group's settings."""
    expected = state_layout(param, group)
    actual = {name: _shape_and_dtype(value) for name, value in state.items()}
    if expected != actual:
        name = next(n for n in (*expected, *actual) if expected.get(n) != actual.get(n))
        expected_text, saved_text = (
            value if isinstance(value, str) else "none" if value is None else f"{value[1]} {list(value[0])}"
            for value in (expected.get(name), actual.get(name))
        )
        raise ValueError(
            f"the saved state of parameter {index} {list(param.shape)} does not fit: {name} is {saved_text}, "
            f"expected {expected_text}. It is the state of another model, or of other settings of `states` or `master`"
        )
    local = state_layout(local_tensor(param), group)
    for name, value in state.items():
        if is_dtensor(value) and tuple(local_tensor(value).shape) != local[name][0]:
            raise ValueError(
                f"the saved state of parameter {index} {list(param.shape)} is sharded over other ranks: this rank has "
                f"{list(local_tensor(value).shape)} of {name}, expected {list(local[name][0])}. Save and load with "
                "torch.distributed.checkpoint, which reshards"
            )


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype] | str:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def saved_parameters(state_dict: Any, sizes: list[int]) -> list[list[Any]]:
    """Return the parameter keys of a state_dict, by group."""
    try:
        states, keys = state_dict["state"], [list(group["params"]) for group in state_dict["param_groups"]]
        unknown = [key for key in states if not any(key in group for group in keys)]
        foreign = [key for key, state in states.items() if not isinstance(state, Mapping)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            "this is not an optimizer's state_dict: it needs `state`, by parameter, and `param_groups` with `params`"
        ) from error
    saved_count, count = sum(map(len, keys)), sum(sizes)
    if saved_count != count:
        raise ValueError(
            f"this optimizer state is for {saved_count} parameters; this optimizer has {count}: it is the state of "
            "another model"
        )
    if [len(group) for group in keys] != sizes or len(set(chain(*keys))) != saved_count:
        raise ValueError(
            f"this optimizer has groups of {sizes} parameters; the saved state has groups {keys}: create the optimizer "
            "with the saved groups"
        )
    if unknown or foreign:
        raise ValueError(f"the saved state has entries that are no parameter's state: {(unknown or foreign)[:5]}")
    return keys


def converted_group(
    index: int, saved: dict[str, Any], own: dict[str, Any], names: tuple[str, ...]
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
    if saved["amsgrad"] or not saved["decoupled_weight_decay"]:
        kind = "AdamW with amsgrad=True" if saved["decoupled_weight_decay"] else "Adam (decoupled_weight_decay=False)"
        raise ValueError(
            f"the saved parameter group {index} is of {kind}, and octavo.AdamW computes another step: continue with "
            "the optimizer that saved it, or start with new states"
        )
    shared = {name: value for name, value in saved.items() if name not in (*_TORCH_ONLY, *_TORCH_CHOICES)}
    return {**shared, **{name: own[name] for name in _OCTAVO_ONLY}}, True


def from_torch(index: int, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    """Convert a state of `torch.optim.AdamW` to a group's `states` and `master`."""
    # Float32 moments are exact; FP8 moments are rounded to nearest, once. The master is the current parameter.
    where = f"the saved torch.optim.AdamW state of parameter {index} {list(param.shape)}"
    if set(state) != set(_TORCH):
        raise ValueError(f"{where} must have exactly {', '.join(_TORCH)}; got {', '.join(map(str, state))}")
    step = state["step"]
    count = float(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else -1.0
    if not (count >= 0 and count.is_integer()):
        raise ValueError(f"{where}: step must be a whole number of 0 or more; got {step!r}")
    converted = initial_state(param, group)
    converted["step"].fill_(count)
    for name in MOMENTS:
        value = state[name]
        if not isinstance(value, Tensor) or value.shape != param.shape or not value.is_floating_point():
            raise ValueError(f"{where}: {name} must be a float tensor of that shape; got {_shape_and_dtype(value)}")
        rows = local_rows(param, value)
        if rows.shape != local_tensor(param).shape:
            raise ValueError(
                f"{where} is sharded over other ranks: this rank has {list(rows.shape)} of {name}, expected "
                f"{list(local_tensor(param).shape)}. Save and load with torch.distributed.checkpoint, which reshards"
            )
        signed = name == "exp_avg"
        values = torch.empty(rows.shape, dtype=torch.float32, device=local_tensor(param).device).copy_(rows.detach())
        if not bool((values.isfinite() & (True if signed else values >= 0)).all()):
            raise ValueError(f"{where}: {name} must be finite{'' if signed else ' and not negative'}")
        if f"{name}_hi" not in converted:
            local_tensor(converted[name]).copy_(values)
            continue
        parts = compress(matrix_view(values), signed) if values.numel() else ()
        for key, part in zip((name, f"{name}_hi", f"{name}_k"), parts, strict=False):
            local = local_tensor(converted[key])
            local.copy_(part.view(local.shape))
    return converted
