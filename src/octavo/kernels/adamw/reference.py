"""Optimizer steps in PyTorch operations, in chunks that fit into a CPU's cache. `adamw` is other backends' reference.

    m = β₁ m + (1 − β₁) g        v = β₂ v + (1 − β₂) g²
    p = p (1 − lr·λ) − lr/(1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)        (Loshchilov and Hutter, arXiv 1711.05101)

in float32, on the parameter's exact master; other optimizers have a `Rule` of their own. With `master="remainder"` that
is the bf16 parameter plus 16 bits. A master that does not round to its parameter, which somebody wrote since, is stale,
and the step starts from the parameter (`exact_values`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.numerics.formats import E4M3, widen
from octavo.runtime.torch_compat import outside_autograd

# FP8 moments of AdamW: groups of 128 of a row, each expanded to the format's range before rounding (docs/kernels.md).
#
#     hi = max|m|,  lo = min|m| over non-zeros,  k = ⌊16·L / log2(hi/lo)⌋ / 16
#     q  = round( sign(m) · top · (|m| / hi)^k )            m ≈ sign(q) · hi · (|q| / top)^(1/k)
#
# Only hi (float32) and k (one byte, in sixteenths) are stored beside q.


GROUP = 128  # Elements that share hi and k

TOP_SIGNED, RANGE_SIGNED = E4M3.max, math.log2(E4M3.max**2 / 2)
TOP_UNSIGNED = 2.0**15 * 31 / 16
RANGE_UNSIGNED = math.log2(TOP_UNSIGNED * 16 / 17)
_MAX_K = 255  # Largest k in sixteenths
_STRIDE = 0x9E3779B1  # Difference between the seeds of consecutive elements


def groups(columns: int) -> int:
    return -(-columns // GROUP)


def compress(
    values: Tensor, signed: bool, noise: Tensor | None = None, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compress float32 moments to FP8."""
    rows, columns = values.shape
    grouped = _grouped(values)
    size = grouped.abs_() if overwrite and not signed else grouped.abs()
    hi, lo = size.amax(-1, keepdim=True), size.amin(-1, keepdim=True)
    # All ones where a magnitude is zero: a mask of booleans takes ten times as long on a CPU.
    zeros = None if bool((lo > 0).all()) else (size.view(torch.int32) - 1).bitwise_right_shift_(31)
    if zeros is not None:
        lo = _where_zero(size, zeros, torch.inf).amin(-1, keepdim=True)
    empty = hi == 0
    log_hi = hi.masked_fill(empty, 1.0).log2()
    spread = log_hi - lo.masked_fill(empty, 1.0).log2()
    reach = RANGE_SIGNED if signed else RANGE_UNSIGNED
    k = (16 * reach / spread).floor_().clamp_(1, _MAX_K)  # 255 if all are equal: the quotient is infinite
    top = TOP_SIGNED if signed else TOP_UNSIGNED
    if zeros is not None:
        size = _where_zero(size, zeros, 1.0)  # the logarithm of zero is ten times slower on a CPU
    stretched = size.log2_().sub_(log_hi).mul_(k / 16).exp2_().mul_(top)
    if zeros is not None:
        stretched.view(torch.int32).bitwise_and_(zeros.bitwise_not_())
    codes = _signed_codes(stretched, grouped, noise) if signed else _unsigned_codes(stretched, noise, zeros)
    codes = codes.view(rows, groups(columns) * GROUP)[:, :columns].contiguous()
    return codes, hi.squeeze(-1), k.squeeze(-1).to(torch.uint8)


def expand(codes: Tensor, hi: Tensor, k: Tensor, signed: bool) -> Tensor:
    """Expand the result of `compress` to float32 moments [R,C]."""
    rows, columns = codes.shape
    indices = _grouped(codes.view(torch.uint8)).int().add_(k.int().bitwise_left_shift_(8).unsqueeze(-1))
    roots = _shared_half_roots if type(codes) is Tensor else _half_roots  # fake tensors mix with no real ones
    half = roots(signed, codes.device).index_select(0, indices.flatten()).view(indices.shape)
    values = (half * hi.unsqueeze(-1)).mul_(half.abs_() if signed else half)
    return values.view(rows, hi.shape[1] * GROUP)[:, :columns]


def _half_roots(signed: bool, device: torch.device) -> Tensor:
    """Return (|q| / top)^(1/2k) with the sign of q, for each k in sixteenths and code of q, float32 [256 · 256]."""
    # The whole root may underflow. A table takes a fifth of the time of logarithms and powers of each element.
    codes = torch.arange(256, dtype=torch.uint8, device="cpu")
    values = widen(codes.view(E4M3.dtype)) if signed else _unsigned_values(codes)
    root = 16.0 / torch.arange(256, dtype=torch.float32, device="cpu").unsqueeze(-1)
    ratio = values.abs().div_(TOP_SIGNED if signed else TOP_UNSIGNED).clamp_(min=2.0**-20)  # below every code
    half = ratio.log2_().mul(root / 2).exp2_().mul_(values != 0).copysign_(values)
    return half.flatten().to(device)


# One table for the process, whatever modes the first caller is in.
_shared_half_roots = lru_cache(maxsize=8)(outside_autograd()(_half_roots))


def _grouped(values: Tensor) -> Tensor:
    rows, columns = values.shape
    padded = F.pad(values, (0, -columns % GROUP)) if columns % GROUP else values
    return padded.reshape(rows, groups(columns), GROUP)


def group_seeds(rows: int, columns: int, first: int, seed: int, device: torch.device) -> Tensor:
    """Return what `hashed` makes random bits of, int32 [rows · groups], for rows from `first` on of a matrix."""
    # Bits are a hash of element index and seed (MurmurHash3's finalizer): independent of order, chunking and device.
    start = seed_after(seed, first * groups(columns) * GROUP)
    indices = torch.arange(rows * groups(columns), dtype=torch.int32, device=device)
    return indices.mul_(_signed(GROUP * _STRIDE)).add_(_signed(start))


def hashed(seeds: Tensor) -> Tensor:
    """Return the random bits of groups, int32 [n, 128], of `group_seeds` [n]."""
    lanes = torch.arange(GROUP, dtype=torch.int32, device=seeds.device).mul_(_signed(_STRIDE))
    bits = seeds.unsqueeze(-1) + lanes
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x85EBCA6B))
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_signed(0xC2B2AE35))
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def seed_after(seed: int, elements: int) -> int:
    """Return the seed that gives the tail of a matrix the random bits that it has in the whole matrix."""
    return (seed + elements * _STRIDE) % 2**32


def _signed(number: int) -> int:
    """Return the low 32 bits as a signed integer."""
    return ((number + 2**31) % 2**32) - 2**31


def _where_zero(size: Tensor, zeros: Tensor, value: float) -> Tensor:
    """Replace zeros, of which `zeros` is the mask, by a positive value."""
    bits = int(torch.tensor(value, dtype=torch.float32, device="cpu").view(torch.int32))
    return (zeros & bits).bitwise_or_(size.view(torch.int32)).view(torch.float32)


def _signed_codes(size: Tensor, values: Tensor, noise: Tensor | None) -> Tensor:
    if noise is not None:
        bits = size.view(torch.int32).add_(_low_bits(noise, 20)).bitwise_and_(-(1 << 20))
        size = bits.view(torch.float32).clamp_(max=TOP_SIGNED)
    return size.copysign_(values).to(E4M3.dtype)


def _unsigned_codes(size: Tensor, noise: Tensor | None, nonzeros: Tensor | None) -> Tensor:
    """Encode numbers from 1 to 2¹⁵·31/16, overwritten, with four exponent and mantissa bits, zero as code 0."""
    # `nonzeros`: a mask of all ones where numbers are not zero; None if none is.
    bits = size.view(torch.int32).add_(1 << 18 if noise is None else _low_bits(noise, 19))
    codes = bits.bitwise_right_shift_(19).sub_(127 << 4).clamp_(1, 255)
    return (codes if nonzeros is None else codes.bitwise_and_(nonzeros)).to(torch.uint8)


def _unsigned_values(codes: Tensor) -> Tensor:
    bits = codes.to(torch.int32).add_(127 << 4).__ilshift__(19)
    return bits.view(torch.float32).mul_(codes != 0)


def _low_bits(noise: Tensor, dropped: int) -> Tensor:
    """Return 16 random bits as the upper ones of `dropped`: added to a number, they round it at random."""
    return (noise & 0xFFFF).bitwise_left_shift_(dropped - 16)


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
