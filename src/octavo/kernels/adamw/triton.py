"""The AdamW step on a GPU: one launch for all parameters of a kind, that is of the same dtypes and states.

Not bit for bit the reference: the hardware's logarithms and powers of two have errors of 2⁻²².
"""

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.adamw import reference
from octavo.kernels.adamw.device import adamw_kernel
from octavo.kernels.adamw.reference import GROUP, HyperParams, ParamState, Work, groups
from octavo.kernels.launch import INTERPRETED, Launch

PER = 16  # Groups per program: 2048 elements, 16 per thread

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

LaunchKey = tuple[Any, ...]


def step(work: Work) -> None:
    kinds: dict[LaunchKey, Work] = {}
    for state, hyper in work:
        if state.param.numel():
            kinds.setdefault(_kind(state), []).append((state, hyper))
    for kind, of_kind in kinds.items():
        device = of_kind[0][0].param.device
        shapes = tuple((state.param.shape[0], state.param.shape[1]) for state, _ in of_kind)
        programs = _programs(shapes, device)
        rows = [[*shape, groups(shape[1]), state.seed or 0] for shape, (state, _) in zip(shapes, of_kind, strict=True)]
        arguments = {
            "pointers": _on(device, [_pointers(state) for state, _ in of_kind], torch.int64),
            "numbers": _on(device, [_numbers(hyper) for _, hyper in of_kind], torch.float32),
            "shapes": _on(device, rows, torch.int64),
            "work": programs,
        }
        launch(kind).run((programs.shape[0],), arguments)


def _kind(state: ParamState) -> LaunchKey:
    master = 1 if state.remainder is not None else 2 if state.master is not None else 0  # times 2 bytes
    aligned = state.param.shape[1] % GROUP == 0 and all(address % 16 == 0 for address in _pointers(state))
    return state.param.dtype, state.grad.dtype, len(state.moments[0]) > 1, master, state.seed is not None, aligned


@lru_cache(maxsize=64)
def launch(kind: LaunchKey) -> Launch:
    param, grad, moments, master, noise, aligned = kind
    constants = {
        "PARAM": _TYPES[param], "GRAD": _TYPES[grad], "MOMENTS": moments, "MASTER": master, "NOISE": noise,
        "TOP": reference.TOP_SIGNED, "REACH": reference.RANGE_SIGNED, "TOP_T": reference.TOP_UNSIGNED,
        "REACH_T": reference.RANGE_UNSIGNED,
        "PER": PER, "ALIGNED": aligned, "INTERPRETED": INTERPRETED,
    }  # fmt: skip
    return Launch(kernel=adamw_kernel, constants=constants, num_warps=4)


def _on(device: torch.device, rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
    table = torch.tensor(rows, dtype=dtype, device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=64)
def _programs(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the parameter and first group of each program, int32 [programs, 2]."""
    parts = []
    for which, (rows, columns) in enumerate(shapes):
        first = torch.arange(0, rows * groups(columns), PER, dtype=torch.int32, device="cpu")
        parts.append(torch.stack((torch.full_like(first, which), first), 1))
    return torch.cat(parts).to(device)


def _pointers(state: ParamState) -> list[int]:
    rest = state.remainder if state.remainder is not None else state.master
    (first, *scales), (second, *second_scales) = state.moments
    scales = [*scales, *second_scales] or [state.param] * 4
    tensors = (state.param, state.grad, first, second, *scales, state.param if rest is None else rest)
    return [tensor.data_ptr() for tensor in tensors]


def _numbers(hyper: HyperParams) -> list[float]:
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    return [
        1 - hyper.lr * hyper.weight_decay, -hyper.lr / correction1, correction2**-0.5, hyper.eps, 1 - hyper.beta1,
        hyper.beta2, -hyper.factor if hyper.maximize else hyper.factor,
    ]  # fmt: skip
