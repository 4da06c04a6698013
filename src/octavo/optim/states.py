"""States of one parameter: their shapes and dtypes, fresh ones, and those of `torch.optim.AdamW` in our form.

Every state is contiguous, whatever the strides of its parameter: the step reads it as a matrix of the parameter's
logical rows, and writes into that view.
"""

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adamw import compress, groups
from octavo.numerics.formats import E4M3
from octavo.optim.sharded import is_sharded, like, rows_of
from octavo.tensor import plain

SMALLEST_ROW = 64
"""Columns from which on FP8 moments pay for their scales."""
MOMENTS = ("exp_avg", "exp_avg_sq")
_TORCH = ("step", *MOMENTS)
"""States of `torch.optim.AdamW`."""
_OURS = ("states", "master", "stochastic_rounding", "nonfinite")
"""Settings that `torch.optim.AdamW` has not."""
_TORCH_ONLY = ("amsgrad", "decoupled_weight_decay")
"""Settings of `torch.optim.AdamW` that tell it from other optimizers."""
_TORCH_CHOICES = ("foreach", "fused", "capturable", "differentiable")
"""Its choices of execution."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """Rows and columns of a tensor as [first dimension, rest]; [1, n] for fewer than two dimensions."""
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def as_matrix(tensor: Tensor) -> Tensor:
    """View of a contiguous tensor as `matrix_shape`. Never a copy: what writes into it writes into the tensor."""
    return tensor.view(matrix_shape(tensor.shape))


def layout(param: Tensor, group: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each state of a parameter, or of rows of one."""
    rows, columns = matrix_shape(param.shape)
    shape = tuple(param.shape)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"step": ((), torch.float32)}
    if group["states"] == "fp8" and param.ndim > 1 and columns >= SMALLEST_ROW:
        found |= {"exp_avg": (shape, E4M3.dtype), "exp_avg_sq": (shape, torch.uint8)}
        for name in MOMENTS:
            scales = rows, groups(columns)
            found |= {f"{name}_hi": (scales, torch.float32), f"{name}_k": (scales, torch.uint8)}
    else:
        found |= {name: (shape, torch.float32) for name in MOMENTS}
    if param.dtype != torch.float32 and group["master"] is not None:
        master = group["master"] == "fp32"
        found["master" if master else "remainder"] = shape, torch.float32 if master else torch.int16
    return found


def fresh_state(param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """State of a parameter before its first step."""
    rows = plain(param)
    state = {}
    for name, (shape, dtype) in layout(rows, group).items():
        if name == "step":
            state[name] = torch.zeros((), dtype=dtype)
            continue
        value = torch.full(shape, 16 if name.endswith("_k") else 0, dtype=dtype, device=rows.device)
        if name == "master":
            value.copy_(rows.detach())
        state[name] = like(param, value)
    return state


def check_state(index: int, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Raise ValueError for a state that is not one of this parameter under these settings."""
    expected = layout(param, group)
    actual = {name: _shape_and_dtype(value) for name, value in state.items()}
    if expected != actual:
        name = next(n for n in (*expected, *actual) if expected.get(n) != actual.get(n))
        here, there = (
            value if isinstance(value, str) else "none" if value is None else f"{value[1]} {list(value[0])}"
            for value in (expected.get(name), actual.get(name))
        )
        raise ValueError(
            f"the saved state of parameter {index} {list(param.shape)} does not fit: {name} is {here} here and "
            f"{there} there. It is the state of another model, or of other settings of `states` or `master`"
        )
    local = layout(plain(param), group)
    for name, value in state.items():
        if is_sharded(value) and tuple(plain(value).shape) != local[name][0]:
            raise ValueError(
                f"the saved state of parameter {index} {list(param.shape)} is sharded over other ranks: this rank has "
                f"{list(plain(value).shape)} of {name}, and wants {list(local[name][0])}. Save and load with "
                "torch.distributed.checkpoint, which reshards"
            )


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype] | str:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else f"a {type(value).__name__}"


def saved_parameters(state_dict: Any, sizes: list[int]) -> list[list[Any]]:
    """Keys of the parameters of a state_dict, by group.

    Raises:
        ValueError: Where it is no optimizer's, has groups of other sizes than `sizes`, or states of no parameter.
    """
    try:
        states, keys = state_dict["state"], [list(group["params"]) for group in state_dict["param_groups"]]
        unknown = [key for key in states if not any(key in some for some in keys)]
        foreign = [key for key, state in states.items() if not isinstance(state, Mapping)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            "an optimizer's state_dict has `state`, by parameter, and `param_groups` with their `params`; this is none"
        ) from error
    found, count = sum(map(len, keys)), sum(sizes)
    if found != count:
        raise ValueError(
            f"this optimizer state is for {found} parameters; this optimizer has {count}: it is the state of another "
            "model"
        )
    if [len(some) for some in keys] != sizes or len(set(chain(*keys))) != found:
        raise ValueError(
            f"this optimizer has groups of {sizes} parameters; the saved state has groups {keys}: make the optimizer "
            "with the groups that were saved"
        )
    if unknown or foreign:
        raise ValueError(f"the saved state has entries that are no parameter's state: {(unknown or foreign)[:5]}")
    return keys


def fitting_group(
    index: int, saved: dict[str, Any], own: dict[str, Any], names: tuple[str, ...]
) -> tuple[dict[str, Any], bool]:
    """A saved parameter group with all settings that `names` lists, and whether it is one of `torch.optim.AdamW`.

    Raises:
        ValueError: For a group of another optimizer, or one that lacks a setting.
    """
    is_torch = not any(name in saved for name in _OURS)
    required = [name for name in names if name not in _OURS] + list(_TORCH_ONLY) if is_torch else names
    missing = [name for name in required if name not in saved]
    if missing:
        raise ValueError(
            f"the saved parameter group {index} is of neither octavo.AdamW nor torch.optim.AdamW: it has no "
            f"{', '.join(missing)}. If an older torch.optim.AdamW saved it, add decoupled_weight_decay=True to its "
            "groups; else begin with fresh states"
        )
    if not is_torch:
        return dict(saved), False
    if saved["amsgrad"] or not saved["decoupled_weight_decay"]:
        kind = "AdamW with amsgrad=True" if saved["decoupled_weight_decay"] else "Adam (decoupled_weight_decay=False)"
        raise ValueError(
            f"the saved parameter group {index} is of {kind}, and octavo.AdamW computes another step: go on with "
            "the optimizer that saved it, or begin with fresh states"
        )
    kept = {name: value for name, value in saved.items() if name not in (*_TORCH_ONLY, *_TORCH_CHOICES)}
    return {**kept, **{name: own[name] for name in _OURS}}, True


def from_torch(index: int, param: Tensor, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Tensor]:
    """State of `torch.optim.AdamW` in the form that a group's `states` and `master` ask for.

    Float32 moments are exact; FP8 moments are rounded to nearest, once. The master is the parameter as it is now.

    Raises:
        ValueError: For states of another optimizer or another parameter, and for moments that no AdamW has.
    """
    where = f"the saved torch.optim.AdamW state of parameter {index} {list(param.shape)}"
    if set(state) != set(_TORCH):
        raise ValueError(f"{where} has {', '.join(_TORCH)} and nothing else; got {', '.join(map(str, state))}")
    step = state["step"]
    count = float(step) if isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1) else -1.0
    if not (count >= 0 and count.is_integer()):
        raise ValueError(f"{where}: step is a whole number from 0 up; got {step!r}")
    converted = fresh_state(param, group)
    converted["step"].fill_(count)
    for name in MOMENTS:
        value = state[name]
        if not isinstance(value, Tensor) or value.shape != param.shape or not value.is_floating_point():
            raise ValueError(f"{where}: {name} is a float tensor of that shape; got {_shape_and_dtype(value)}")
        rows = rows_of(param, value)
        if rows.shape != plain(param).shape:
            raise ValueError(
                f"{where} is sharded over other ranks: this rank has {list(rows.shape)} of {name}, and wants "
                f"{list(plain(param).shape)}. Save and load with torch.distributed.checkpoint, which reshards"
            )
        signed = name == "exp_avg"
        values = torch.empty(rows.shape, dtype=torch.float32, device=plain(param).device).copy_(rows.detach())
        if not bool((values.isfinite() & (True if signed else values >= 0)).all()):
            raise ValueError(f"{where}: {name} is finite{'' if signed else ' and not negative'}; without it")
        if f"{name}_hi" not in converted:
            plain(converted[name]).copy_(values)
            continue
        forms = compress(as_matrix(values), signed) if values.numel() else ()
        for form, compressed in zip((name, f"{name}_hi", f"{name}_k"), forms, strict=False):
            local = plain(converted[form])
            local.copy_(compressed.view(local.shape))
    return converted
