"""Optimizer steps in PyTorch operations, in chunks that fit into a CPU's cache. `adamw` is other backends' reference.

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    p = p (1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)        (Loshchilov and Hutter, arXiv 1711.05101)

in float32, on the parameter's exact master; other optimizers have a `Rule` of their own. With `master="remainder"` that
is the bf16 parameter plus 16 bits. A master that does not round to its parameter, which somebody wrote since, is stale,
and the step starts from the parameter (`exact_values`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adamw.moments import GROUP, compress, expand, group_seeds, hashed
from octavo.numerics.formats import E4M3

CHUNK_ELEMENTS = 1 << 18  # Elements per chunk on a CPU
GPU_CHUNK_ELEMENTS = 1 << 26  # Elements per chunk on a GPU: few launches, and temporaries of some hundred MB
NAN_BITS = 0x7FC0  # Upper half of the canonical NaN
MAX_RATE = torch.finfo(torch.float32).max  # Largest factor of an update
MAX_GRADIENT = 2.0**62  # Largest magnitude of a finite gradient; its square is below float32's largest number
Moment = tuple[Tensor, ...]
"""Float32 values [R,C]; or codes [R,C], E4M3 if signed and uint8 if not, with hi and k of `moments.compress`."""


@dataclass(frozen=True, kw_only=True)
class HyperParams:
    lr: float  # Learning rate
    beta1: float  # Decay of the first moment
    beta2: float = 0.0  # Decay of the second moment
    eps: float = 0.0  # Added to the root of the second moment
    weight_decay: float  # Decoupled weight decay λ
    step: int  # Step count, from 1
    maximize: bool = False  # Ascend instead of descend
    factor: float = 1.0  # Multiplies the gradient, as clipping does


@dataclass(frozen=True, kw_only=True)
class ParamState:
    """A parameter as a matrix [R,C] with its gradient and states. All are views, which the step updates."""

    param: Tensor  # float32, bfloat16 or float16
    grad: Tensor  # Any floating dtype
    moments: tuple[Moment, ...]
    remainder: Tensor | None = None  # int16, the lower half of the master's bits, or None
    master: Tensor | None = None  # float32 master; None if the parameter is its own master, or with a remainder
    # Seed for stochastic rounding of moments and of a bf16 parameter without a master; None: to nearest.
    seed: int | None = None
    first: int = 0  # Index of the first of these rows in the whole parameter
    # The parameters whose rows these are, in groups of 128; empty for rows of one.
    members: tuple["ParamState", ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """Parameter, gradient, parts of the moments, and remainder or master."""
        parts = (self.param, self.grad, *(part for moment in self.moments for part in moment))
        return [*parts, *(part for part in (self.remainder, self.master) if part is not None)]

    def with_tensors(self, tensors: Iterator[Tensor]) -> "ParamState":
        """Replace the tensors, in the order of `tensors`."""
        return replace(
            self, param=next(tensors), grad=next(tensors),
            moments=tuple(tuple(next(tensors) for _ in moment) for moment in self.moments),
            remainder=None if self.remainder is None else next(tensors),
            master=None if self.master is None else next(tensors),
        )  # fmt: skip

    def chunks(self) -> Iterator[tuple["ParamState", slice]]:
        """Yield views of rows, which a step takes at a time, and which rows they are."""
        rows, columns = self.param.shape
        size = max((GPU_CHUNK_ELEMENTS if self.param.is_cuda else CHUNK_ELEMENTS) // max(columns, 1), 1)
        for start in range(0, rows, size):
            at = slice(start, min(start + size, rows))
            part = self.with_tensors(tensor[at] for tensor in self.tensors)
            yield replace(part, first=self.first + start), at


Work = list[tuple[ParamState, HyperParams]]
Rule = Callable[[Tensor, Tensor, list[Tensor], HyperParams], None]
"""Updates a master and moments, float32 [R,C], in place by a gradient: `rule(master, gradient, moments, hyper)`."""


def adamw(p: Tensor, grad: Tensor, moments: list[Tensor], hyper: HyperParams) -> None:
    """Update by the formulas of this module."""
    m, v = moments
    m.lerp_(grad, 1 - hyper.beta1)
    v.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    p.mul_(1 - hyper.lr * hyper.weight_decay)
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    root, rate = v.sqrt().div_(correction2**0.5).add_(hyper.eps), hyper.lr / correction1
    if rate > MAX_RATE:  # parameters overflow, not this number
        root, rate = root.mul_(correction1), min(hyper.lr, MAX_RATE)
    p.addcdiv_(m, root, value=-rate)


def step_all(work: Work, rule: Rule = adamw) -> None:
    """Take one step on each parameter, in place; small ones together, in fewer operations."""
    by_kind: dict[tuple[Any, ...], list[ParamState]] = {}
    for state, hyper in work:
        rows, columns = state.param.shape
        if columns % GROUP == 0 and 0 < 2 * rows * columns <= CHUNK_ELEMENTS:
            kind = hyper, *(t.dtype for t in state.tensors), state.seed is None, state.param.device
            by_kind.setdefault(kind, []).append(state)
        else:
            step(state, hyper, rule)
    for (hyper, *_), states in by_kind.items():
        batch: list[ParamState] = []
        for state in states:
            if sum(member.param.numel() for member in batch) + state.param.numel() > CHUNK_ELEMENTS:
                _step_together(batch, hyper, rule)
                batch = []
            batch.append(state)
        _step_together(batch, hyper, rule)


def _step_together(states: list[ParamState], hyper: HyperParams, rule: Rule) -> None:
    """Take one step on parameters of one kind, whose rows consist of whole groups."""
    if len(states) == 1:
        step(states[0], hyper, rule)
        return
    sizes = [state.param.numel() // GROUP for state in states]
    parts = [
        [tensor.view(size, -1) for tensor, size in zip(each, sizes, strict=True)]
        for each in zip(*(state.tensors for state in states), strict=True)
    ]
    wholes = [torch.cat(each) for each in parts]
    _step(replace(states[0].with_tensors(iter(wholes)), members=tuple(states)), hyper, rule)
    del parts[1], wholes[1]  # gradients, which stay as they are
    for each, whole in zip(parts, wholes, strict=True):
        torch._foreach_copy_(each, whole.split(sizes))


def step(state: ParamState, hyper: HyperParams, rule: Rule = adamw) -> None:
    for part, _ in state.chunks():
        _step(part, hyper, rule)


def _step(state: ParamState, hyper: HyperParams, rule: Rule) -> None:
    moments, p = read_moments(state), master_values(state)
    rule(p, gradient(state, hyper), moments, hyper)
    write_moments(state, moments)
    write_parameter(state, p)


def gradient(state: ParamState, hyper: HyperParams) -> Tensor:
    """Return the gradient that a step descends by: scaled, in float32, finite values clamped to `MAX_GRADIENT`."""
    grad = state.grad.float() if hyper.factor == 1.0 else state.grad.float() * hyper.factor
    if grad.numel() and not bool(torch.stack(grad.aminmax()).abs().amax() <= MAX_GRADIENT):
        grad = torch.where(grad.isinf(), grad, grad.clamp(-MAX_GRADIENT, MAX_GRADIENT))  # NaN and Inf stay
    return -grad if hyper.maximize else grad


def read_moments(state: ParamState) -> list[Tensor]:
    """Return the moments in float32: those of the state itself, or expanded from FP8."""
    return [
        moment[0] if len(moment) == 1 else expand(moment[0], moment[1], moment[2], moment[0].dtype == E4M3.dtype)
        for moment in state.moments
    ]


def write_moments(state: ParamState, values: list[Tensor]) -> None:
    """Store new values, which are overwritten, of the moments that are in FP8."""
    compact = [entry for entry in zip(state.moments, values, strict=True) if len(entry[0]) > 1]
    random = random_bits_of(state, 0) if compact else None  # 16 bits for each of two moments
    for number, (moment, new) in enumerate(compact):
        noise = random if random is None or number == 0 else random >> 16
        parts = compress(new, moment[0].dtype == E4M3.dtype, noise, overwrite=True)
        for old, part in zip(moment, parts, strict=True):
            old.copy_(part)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Split float32 into bf16 (rounded half up in magnitude) and the int16 remainder of its bits; NaN stays NaN."""
    bits = master.contiguous().view(torch.int32)
    nan = _nan(master)
    upper = _upper(bits + 0x8000, nan).to(torch.int16)
    remainder = bits.to(torch.int16)  # the lower half, as a signed number: what rounding half up leaves
    return upper.view(torch.bfloat16), remainder if nan is None else remainder.masked_fill_(nan, 0)


def _nan(values: Tensor) -> Tensor | None:
    """Return where values are NaN; None if none is, which a maximum shows faster."""
    return values.isnan() if values.numel() and bool(values.amax().isnan()) else None


def _upper(rounded: Tensor, nan: Tensor | None) -> Tensor:
    """Return the upper halves of rounded float32 bits as int32, `NAN_BITS` where `nan`."""
    upper = rounded.bitwise_right_shift_(16)
    return upper if nan is None else upper.masked_fill_(nan, NAN_BITS)


def random_bits_of(state: ParamState, which: int) -> Tensor | None:
    """Return random bits of these rows for both moments (0) or the parameter (1); None without a seed."""
    if state.seed is None:
        return None
    seeds = [
        group_seeds(part.param.shape[0], part.param.shape[1], part.first, (part.seed or 0) + which, part.param.device)
        for part in state.members or (state,)
    ]
    return hashed(torch.cat(seeds)).view(state.param.shape[0], -1, GROUP)


def exact_values(param: Tensor, remainder: Tensor | None, master: Tensor | None) -> Tensor:
    """Return the float32 values of a parameter: its master's, or its own where the master is stale."""
    # The result is `param` itself if that is float32, and otherwise a new tensor.
    if master is not None:
        return torch.where(master.to(param.dtype) == param, master, param.float())
    values = param.float()
    if remainder is None:
        return values
    exact = (values.contiguous().view(torch.int32) + remainder).view(torch.float32)
    return torch.where(exact.isnan() | values.isinf(), values, exact)


def master_values(state: ParamState) -> Tensor:
    """Return the float32 values of the parameter, for in-place updates; a master is renewed where it is stale."""
    values = exact_values(state.param, state.remainder, state.master)
    return values if state.master is None else state.master.copy_(values)


def write_parameter(state: ParamState, p: Tensor) -> None:
    """Write the master's new values to the parameter and the remainder."""
    if state.remainder is not None:
        upper, remainder = split(p)
        state.param.copy_(upper)
        state.remainder.copy_(remainder)
    elif state.param.dtype == torch.bfloat16 and state.master is None and state.seed is not None:
        random = random_bits_of(state, 1)
        assert random is not None
        random = random.view(p.shape[0], -1)[:, : p.shape[1]] & 0xFFFF
        state.param.view(torch.int16).copy_(_upper(p.view(torch.int32) + random, _nan(p)))
    elif p is not state.param:
        state.param.copy_(p)
