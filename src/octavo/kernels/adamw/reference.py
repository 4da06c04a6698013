"""The AdamW step in PyTorch operations, in chunks that fit into a CPU's cache: the reference for other backends.

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    p = p (1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)        (Loshchilov and Hutter, arXiv 1711.05101)

in float32, on the parameter's exact master. With `master="remainder"` the master is the bf16 parameter plus 16 bits:
the parameter holds the upper half of float32's bits, rounded half up, and the signed remainder the difference. NaN
becomes bf16's canonical NaN with remainder 0, because a carry from rounding its bits would give infinity or zero.

A parameter may be written between steps: a pruning mask, a loaded checkpoint, merged adapters. A master that does not
round to its parameter is stale, and the step starts from the parameter (`exact_values`). A remainder is not used where
the sum of the bits is NaN, as beside a weight set to 0, or the parameter is infinite; beside any other written value it
is a number below half a step of bf16.

Finite gradients saturate at ±2⁶², so that their squares, and with them both moments, stay finite. Larger ones would
otherwise make the second moment infinite and a group of FP8 moments NaN.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.adamw.moments import GROUP, compress, expand, group_seeds, groups, hashed

CHUNK_ELEMENTS = 1 << 18
"""Elements per chunk."""
NAN_BITS = 0x7FC0
"""Upper half of the canonical NaN."""
MAX_RATE = torch.finfo(torch.float32).max
"""Largest factor of an update."""
MAX_GRADIENT = 2.0**62
"""Largest magnitude of a finite gradient; its square is below float32's largest number."""


@dataclass(frozen=True, kw_only=True)
class HyperParams:
    """Hyperparameters of one step of a parameter group."""

    lr: float  # Learning rate
    beta1: float  # Decay of the first moment
    beta2: float  # Decay of the second moment
    eps: float  # Added to the root of the second moment
    weight_decay: float  # Decoupled weight decay λ
    step: int  # Step count, from 1
    maximize: bool = False  # Ascend instead of descend
    factor: float = 1.0  # Multiplies the gradient, as clipping does


@dataclass(frozen=True, kw_only=True)
class ParamState:
    """A parameter as a matrix [R,C] with its gradient and states. All are views, which the step updates."""

    param: Tensor  # float32, bfloat16 or float16
    grad: Tensor  # Any floating dtype
    exp_avg: Tensor  # First moment: float32, or E4M3 codes
    exp_avg_sq: Tensor | None  # Second moment: float32, or codes (uint8); None with a momentum only (Muon)
    scales: tuple[Tensor, ...] | None  # hi and k of each moment from `moments.compress`; None for float32 moments
    remainder: Tensor | None  # int16, the lower half of the master's bits, or None
    master: Tensor | None  # float32 master; None if the parameter is its own master, or with a remainder
    # Seed for stochastic rounding of moments and of a bf16 parameter without a master; None: to nearest.
    seed: int | None = None
    first: int = 0  # Index of the first of these rows in the whole parameter
    # The parameters whose rows these are, in groups of 128; empty for rows of one.
    members: tuple["ParamState", ...] = ()

    def rows(self, start: int, end: int) -> "ParamState":
        """Return a view of some rows."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[start:end]

        return ParamState(
            param=self.param[start:end],
            grad=self.grad[start:end],
            exp_avg=self.exp_avg[start:end],
            exp_avg_sq=part(self.exp_avg_sq),
            scales=None if self.scales is None else tuple(s[start:end] for s in self.scales),
            remainder=part(self.remainder),
            master=part(self.master),
            seed=self.seed,
            first=self.first + start,
        )


def step_all(work: list[tuple[ParamState, HyperParams]]) -> None:
    """Take one step on each parameter, in place; small ones together, in fewer operations."""
    by_kind: dict[Any, list[ParamState]] = {}
    for state, hyper in work:
        rows, columns = state.param.shape
        if columns % GROUP == 0 and 0 < 2 * rows * columns <= CHUNK_ELEMENTS:
            by_kind.setdefault((hyper, _kind(state)), []).append(state)
        else:
            step(state, hyper)
    for (hyper, _), states in by_kind.items():
        batch: list[ParamState] = []
        for state in states:
            if sum(member.param.numel() for member in batch) + state.param.numel() > CHUNK_ELEMENTS:
                _step_together(batch, hyper)
                batch = []
            batch.append(state)
        _step_together(batch, hyper)


_TENSORS = ("param", "grad", "exp_avg", "exp_avg_sq", "remainder", "master")


def _kind(state: ParamState) -> tuple[Any, ...]:
    """Return what parameters that are stepped together have in common."""
    dtypes = (None if t is None else t.dtype for t in (getattr(state, name) for name in _TENSORS))
    return *dtypes, state.scales is None, state.seed is None, state.param.device


def _step_together(states: list[ParamState], hyper: HyperParams) -> None:
    """Take one step on parameters of one kind, whose rows consist of whole groups."""
    if len(states) == 1:
        step(states[0], hyper)
        return
    sizes = [state.param.numel() // GROUP for state in states]
    updated: list[tuple[list[Tensor], Tensor]] = []

    def joined(parts: list[Tensor]) -> Tensor:
        whole = torch.cat(parts)
        updated.append((parts, whole))
        return whole

    def of_each(name: str) -> Any:
        parts = [getattr(state, name) for state in states]
        return None if parts[0] is None else joined([part.view(-1, GROUP) for part in parts])

    scales = None
    if states[0].scales is not None:
        by_scale = zip(*(state.scales or () for state in states), strict=True)
        scales = tuple(joined([scale.view(-1, 1) for scale in parts]) for parts in by_scale)
    grad = torch.cat([state.grad.view(-1, GROUP) for state in states])
    tensors = {name: of_each(name) for name in _TENSORS if name != "grad"}
    _step(ParamState(**tensors, grad=grad, scales=scales, seed=states[0].seed, members=tuple(states)), hyper)
    for parts, whole in updated:
        for part, values in zip(parts, whole.split(sizes), strict=True):
            part.copy_(values)


def step(state: ParamState, hyper: HyperParams) -> None:
    """Take one step on a parameter, in place."""
    rows, columns = state.param.shape
    chunk_rows = max(CHUNK_ELEMENTS // max(columns, 1), 1)
    for start in range(0, rows, chunk_rows):
        _step(state.rows(start, min(start + chunk_rows, rows)), hyper)


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


def _step(state: ParamState, hyper: HyperParams) -> None:
    assert state.exp_avg_sq is not None
    grad = saturated(state.grad if hyper.factor == 1.0 else state.grad.float() * hyper.factor)
    if hyper.maximize:
        grad = -grad
    if state.scales is None:
        m, v = state.exp_avg, state.exp_avg_sq
    else:
        m = expand(state.exp_avg, state.scales[0], state.scales[1], True)
        v = expand(state.exp_avg_sq, state.scales[2], state.scales[3], False)
    m.lerp_(grad, 1 - hyper.beta1)
    v.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    p = master_values(state)
    p.mul_(1 - hyper.lr * hyper.weight_decay)
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    root, rate = v.sqrt().div_(correction2**0.5).add_(hyper.eps), hyper.lr / correction1
    if rate > MAX_RATE:  # parameters overflow, not this number
        root, rate = root.mul_(correction1), min(hyper.lr, MAX_RATE)
    p.addcdiv_(m, root, value=-rate)
    if state.scales is not None:
        random = random_bits_of(state, 0)
        for codes, hi, k, values in (
            (state.exp_avg, state.scales[0], state.scales[1], m),
            (state.exp_avg_sq, state.scales[2], state.scales[3], v),
        ):
            noise = random if random is None or values is m else random >> 16
            for old, new in zip((codes, hi, k), compress(values, values is m, noise, overwrite=True), strict=True):
                old.copy_(new)
    write_parameter(state, p)


def random_bits_of(state: ParamState, which: int) -> Tensor | None:
    """Return random bits of these rows for both moments (0) or the parameter (1); None without a seed."""
    if state.seed is None:
        return None
    if state.members:
        seeds = (_group_seeds(member, which) for member in state.members)
        return hashed(torch.cat(list(seeds))).unsqueeze(1)
    rows, columns = state.param.shape
    return hashed(_group_seeds(state, which)).view(rows, groups(columns), GROUP)


def _group_seeds(state: ParamState, which: int) -> Tensor:
    assert state.seed is not None
    rows, columns = state.param.shape
    return group_seeds(rows, columns, state.first, state.seed + which, state.param.device)


def saturated(grad: Tensor) -> Tensor:
    """Return a gradient in float32 with finite values clamped to `MAX_GRADIENT`; NaN and Inf stay."""
    grad = grad.float()
    if not grad.numel() or bool(torch.stack(grad.aminmax()).abs().amax() <= MAX_GRADIENT):
        return grad
    return torch.where(grad.isinf(), grad, grad.clamp(-MAX_GRADIENT, MAX_GRADIENT))


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
