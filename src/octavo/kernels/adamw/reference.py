"""One AdamW step in plain PyTorch, in pieces that stay in a CPU's cache: the definition of the numbers.

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    p = p (1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)        (Loshchilov and Hutter, arXiv 1711.05101)

in float32, on the parameter's exact master. With `master="remainder"` that master is the bf16 parameter and 16 bits
more: the parameter holds the upper half of float32's bits, rounded half up, the remainder (signed) what that left. NaN
becomes bf16's canonical NaN and remainder 0: its bits cannot be rounded, a carry would make them infinity or zero.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.adamw.moments import compress, expand, random_bits

PIECE = 1 << 18
"""Elements handled at a time."""
NAN_BITS = 0x7FC0
"""Upper half of a NaN, whatever its sign and payload."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Numbers of one step, the same for all parameters of a group.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay λ.
        step: Number of this step, from 1.
        maximize: Climb rather than descend.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    maximize: bool = False


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A parameter as a matrix [R,C] with its gradient and states, all views that the step writes into.

    Attributes:
        param: float32, bfloat16 or float16.
        grad: Any floating dtype.
        exp_avg: First moment: float32, or E4M3 codes.
        exp_avg_sq: Second moment: float32, or codes (uint8).
        scales: hi and k of both moments, as `moments.compress` gives them; None for float32 moments.
        remainder: int16, the lower half of the master's bits; None without.
        master: float32 master; None where the parameter is its own, or with a remainder.
        seed: Rounds moments, and a bf16 parameter without a master, at random; None: to nearest.
        first: Row of the whole parameter that these rows begin with.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    scales: tuple[Tensor, Tensor, Tensor, Tensor] | None
    remainder: Tensor | None
    master: Tensor | None
    seed: int | None = None
    first: int = 0

    def rows(self, start: int, end: int) -> "Slot":
        """The same for some of the rows."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[start:end]

        return Slot(
            param=self.param[start:end],
            grad=self.grad[start:end],
            exp_avg=self.exp_avg[start:end],
            exp_avg_sq=self.exp_avg_sq[start:end],
            scales=None if self.scales is None else tuple(s[start:end] for s in self.scales),  # type: ignore[arg-type]
            remainder=part(self.remainder),
            master=part(self.master),
            seed=self.seed,
            first=self.first + start,
        )


def step_all(work: list[tuple[Slot, Hyper]]) -> None:
    """Take one step on each parameter, in place."""
    for slot, hyper in work:
        step(slot, hyper)


def step(slot: Slot, hyper: Hyper) -> None:
    """Take one step on a parameter, in place."""
    rows, columns = slot.param.shape
    at_once = max(PIECE // max(columns, 1), 1)
    for start in range(0, rows, at_once):
        _step(slot.rows(start, min(start + at_once, rows)), hyper)


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 values as bf16 (rounded half up in magnitude) and the int16 remainder of their bits; NaN stays NaN."""
    bits = master.contiguous().view(torch.int32)
    upper = _upper(bits + 0x8000, master)
    half = upper.to(torch.int16).view(torch.bfloat16)
    remainder = upper.bitwise_left_shift_(16).neg_().add_(bits).masked_fill_(master.isnan(), 0)
    return half, remainder.to(torch.int16)


def _upper(rounded: Tensor, values: Tensor) -> Tensor:
    """Upper halves of float32 bits to which a rounding was added, as int32; those of NaN where `values` are."""
    return rounded.bitwise_right_shift_(16).masked_fill_(values.isnan(), NAN_BITS)


def _step(slot: Slot, hyper: Hyper) -> None:
    grad = slot.grad.float()
    if hyper.maximize:
        grad = -grad
    if slot.scales is None:
        m, v = slot.exp_avg, slot.exp_avg_sq
    else:
        m = expand(slot.exp_avg, slot.scales[0], slot.scales[1], True)
        v = expand(slot.exp_avg_sq, slot.scales[2], slot.scales[3], False)
    m.lerp_(grad, 1 - hyper.beta1)
    v.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    p = _master(slot)
    p.mul_(1 - hyper.lr * hyper.weight_decay)
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    p.addcdiv_(m, v.sqrt().div_(correction2**0.5).add_(hyper.eps), value=-hyper.lr / correction1)
    if slot.scales is not None:
        drawn = _noise(slot, 0)
        for codes, hi, k, values in (
            (slot.exp_avg, slot.scales[0], slot.scales[1], m),
            (slot.exp_avg_sq, slot.scales[2], slot.scales[3], v),
        ):
            noise = drawn if drawn is None or values is m else drawn >> 16
            for old, new in zip((codes, hi, k), compress(values, values is m, noise), strict=True):
                old.copy_(new)
    _write(slot, p)


def _noise(slot: Slot, which: int) -> Tensor | None:
    """Random bits for both moments (0), or the parameter (1), of these rows."""
    if slot.seed is None:
        return None
    rows, columns = slot.param.shape
    return random_bits(rows, columns, slot.first, slot.seed + which, slot.param.device)


def _master(slot: Slot) -> Tensor:
    """Float32 values of the parameter, to be changed in place."""
    if slot.master is not None:
        return slot.master
    if slot.remainder is not None:
        bits = slot.param.view(torch.int16).int().bitwise_left_shift_(16).add_(slot.remainder)
        return bits.view(torch.float32)
    return slot.param if slot.param.dtype == torch.float32 else slot.param.float()


def _write(slot: Slot, p: Tensor) -> None:
    """Put the master's new values into the parameter, and into the remainder."""
    if slot.remainder is not None:
        upper, remainder = split(p)
        slot.param.copy_(upper)
        slot.remainder.copy_(remainder)
    elif slot.param.dtype == torch.bfloat16 and slot.master is None and slot.seed is not None:
        random = _noise(slot, 1)
        assert random is not None
        random = random.view(p.shape[0], -1)[:, : p.shape[1]] & 0xFFFF
        slot.param.view(torch.int16).copy_(_upper(p.view(torch.int32) + random, p))
    elif p is not slot.param:
        slot.param.copy_(p)
