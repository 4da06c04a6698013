"""The AdamW step on a GPU: one launch for all parameters of a kind, instead of dozens for each.

Parameters of a kind have the same dtypes and states. Their addresses, shapes and numbers go to the GPU as three small
tables in each step (gradients move); which program works on which groups of which parameter is a fourth, kept as long
as the shapes stay.

Not bit for bit the reference: logarithms and powers of two are the hardware's, 2⁻²² off, so that one code in thousands
is the neighbouring one.
"""

from functools import lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from octavo.kernels.adamw.device import adamw_kernel
from octavo.kernels.adamw.moments import GROUP, RANGE_SIGNED, RANGE_UNSIGNED, TOP_SIGNED, TOP_UNSIGNED, groups
from octavo.kernels.adamw.reference import Hyper, Slot
from octavo.kernels.launch import INTERPRETED, Launch, Variant

PER = 16
"""Groups of one program: 2048 elements, 16 for each of its threads."""

_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Kind = tuple[Any, ...]


def step(work: list[tuple[Slot, Hyper]]) -> None:
    """Take one step on each parameter, in place."""
    kinds: dict[Kind, list[tuple[Slot, Hyper]]] = {}
    for slot, hyper in work:
        if slot.param.numel():
            kinds.setdefault(_kind(slot), []).append((slot, hyper))
    for kind, some in kinds.items():
        _launch_all(kind, some)


def _kind(slot: Slot) -> Kind:
    """What decides how the kernel is compiled."""
    master = 1 if slot.remainder is not None else 2 if slot.master is not None else 0
    aligned = slot.param.shape[1] % GROUP == 0 and all(address % 16 == 0 for address in _pointers(slot))
    return slot.param.dtype, slot.grad.dtype, slot.scales is not None, master, slot.seed is not None, aligned


@lru_cache(maxsize=64)
def launch(kind: Kind) -> Launch:
    """The kernel for a kind of parameters."""
    param, grad, moments, master, noise, aligned = kind
    constants = {
        "PARAM": _TYPES[param],
        "GRAD": _TYPES[grad],
        "MOMENTS": moments,
        "MASTER": master,
        "NOISE": noise,
        "TOP": TOP_SIGNED,
        "REACH": RANGE_SIGNED,
        "TOP_T": TOP_UNSIGNED,
        "REACH_T": RANGE_UNSIGNED,
        "PER": PER,
        "ALIGNED": aligned,
        "INTERPRETED": INTERPRETED,
    }
    return Launch(kernel=adamw_kernel, constants=constants, num_warps=4)


def _launch_all(kind: Kind, work: list[tuple[Slot, Hyper]]) -> None:
    device = work[0][0].param.device
    shapes = tuple((slot.param.shape[0], slot.param.shape[1]) for slot, _ in work)
    programs = _programs(shapes, device)
    arguments = {
        "pointers": _on(device, [_pointers(slot) for slot, _ in work], torch.int64),
        "numbers": _on(device, [_numbers(hyper) for _, hyper in work], torch.float32),
        "shapes": _on(
            device, [[*s, groups(s[1]), w[0].seed or 0] for s, w in zip(shapes, work, strict=True)], torch.int64
        ),
        "work": programs,
    }
    launch(kind).run((programs.shape[0],), arguments)


def _on(device: torch.device, rows: list[list[Any]], dtype: torch.dtype) -> Tensor:
    table = torch.tensor(rows, dtype=dtype)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@lru_cache(maxsize=64)
def _programs(shapes: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Parameter and first group of each program, int32 [programs, 2]."""
    parts = []
    for which, (rows, columns) in enumerate(shapes):
        first = torch.arange(0, rows * groups(columns), PER, dtype=torch.int32)
        parts.append(torch.stack((torch.full_like(first, which), first), 1))
    return torch.cat(parts).to(device)


def _pointers(slot: Slot) -> list[int]:
    rest = slot.remainder if slot.remainder is not None else slot.master
    scales = slot.scales or (slot.param,) * 4
    tensors = (slot.param, slot.grad, slot.exp_avg, slot.exp_avg_sq, *scales, slot.param if rest is None else rest)
    return [tensor.data_ptr() for tensor in tensors]


def _numbers(hyper: Hyper) -> list[float]:
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    return [
        1 - hyper.lr * hyper.weight_decay, -hyper.lr / correction1, correction2**-0.5, hyper.eps, 1 - hyper.beta1,
        hyper.beta2, -1.0 if hyper.maximize else 1.0,
    ]  # fmt: skip


def variants() -> list[Variant]:
    """The kinds that bf16 and float32 training ask for."""
    kinds = {
        "bf16, FP8 moments, remainder": (torch.bfloat16, torch.bfloat16, True, 1, True, True),
        "bf16, FP8 moments, float32 master": (torch.bfloat16, torch.bfloat16, True, 2, True, True),
        "float32, FP8 moments": (torch.float32, torch.float32, True, 0, True, True),
        "bf16, float32 moments, remainder": (torch.bfloat16, torch.bfloat16, False, 1, False, True),
    }
    bytes_moved = {"remainder": 4, "float32 master": 8}
    found = []
    for case, kind in kinds.items():
        param, grad, moments, *_ = kind
        moved = 2 * param.itemsize + grad.itemsize + (4.2 if moments else 16)
        moved += next((b for name, b in bytes_moved.items() if case.endswith(name)), 0)
        types = {"pointers": "*i64", "numbers": "*fp32", "shapes": "*i64", "work": "*i32"}
        found.append(
            Variant(
                op="adamw", case=case, config=0, launch=launch(kind), types=types, tile=PER * GROUP, device_bytes=moved
            )
        )
    return found
