"""Device code of cross_entropy; `triton` launches it."""

import triton
import triton.language as tl

from octavo.kernels.fused.device import round_to, to_float32


@triton.jit
def _logits_of(values, scale, softcap, CAPPED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return scaled and capped logits, and the slope of the cap."""
    x = to_float32(values, INTERPRETED) * scale
    slope = tl.full(x.shape, 1.0, tl.float32)
    if CAPPED:
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0)
        x, slope = tanh * softcap, 1.0 - tanh * tanh
    return x, slope


@triton.jit
def cross_entropy_kernel(
    z, target, loss, columns, stride, ignore_index, scale, softcap,
    CAPPED: tl.constexpr, TILE_C: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write the loss of a row of logits, and its gradient in their place: a row is read twice and written once."""
    row = tl.program_id(0).to(tl.int64)
    at, index = z + row * stride, tl.arange(0, TILE_C)
    one = row + tl.arange(0, 1)
    t = tl.load(target + one)
    ignored, known = t == ignore_index, (t >= 0) & (t < columns)
    # Before the barriers of the first pass: after them a faster warp may have overwritten it.
    own, _own_slope = _logits_of(tl.load(at + t, mask=known, other=0.0), scale, softcap, CAPPED, INTERPRETED)
    # First pass: the largest logit so far, and the sum of exponentials below it.
    largest, total = -float("inf"), 0.0
    for start in range(0, columns, TILE_C):
        inside = start + index < columns
        x, slope = _logits_of(tl.load(at + start + index, mask=inside, other=0.0), scale, softcap, CAPPED, INTERPRETED)
        x = tl.where(inside, x, -float("inf"))
        new = tl.maximum(largest, tl.max(x, axis=0))
        base = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(x - base), axis=0)
        largest = new
    lse = tl.where(largest == -float("inf"), 0.0, largest) + tl.log(total)
    tl.store(loss + one, tl.where(ignored, 0.0, tl.where(known, lse - own, float("nan"))))
    # Second pass: softmax less one at the target.
    for start in range(0, columns, TILE_C):
        inside = start + index < columns
        x, slope = _logits_of(tl.load(at + start + index, mask=inside, other=0.0), scale, softcap, CAPPED, INTERPRETED)
        g = (tl.exp(x - lse) - tl.where(start + index == t, 1.0, 0.0)) * slope * scale
        g = tl.where(ignored, 0.0, g)
        tl.store(at + start + index, round_to(g, z.dtype.element_ty, INTERPRETED), mask=inside)
