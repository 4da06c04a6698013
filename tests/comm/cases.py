"""Tensors that ranks send, and how far from them what arrives may be."""

import math

import torch
import torch.distributed as dist

from octavo.comm.encoding import as_rows, pack, parse_spec, unpack, width
from octavo.numerics.spec import ADAPTIVE, FULL

SPECS = ("fp8/1x128", "e4m3/1x128", "e4m3/row", "e4m3/tensor", "e4m3/1x32/e8m0", "e5m2/row", "e5m2/1x64/pow2")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((4, 256), (1, 200), (7, 131), (3, 1), (2, 5, 9), (0, 64), (5, 0), (1000,), (1,), (0,))


def values(shape, rank=None, seed=0, dtype=torch.float32):
    """What a rank has: Gaussian, over six orders of magnitude along the last dimension, some zeros."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    x = torch.randn(shape, generator=generator)
    if x.ndim and x.shape[-1] > 1:
        x = x * torch.logspace(-4, 2, x.shape[-1]) * (torch.rand(shape, generator=generator) > 0.05)
    return x.to(dtype)


def bound(x, spec, parts=1):
    """Largest distance of what arrives from each element of x, as `octavo.comm.encoding` has it, and of its dtype."""
    spec = parse_spec(spec)
    exact = x.double()
    rows = exact.reshape(parts, -1) if x.ndim < 2 else exact.reshape(x.shape[0], math.prod(x.shape[1:]))
    extent = spec.granularity.columns
    info = torch.finfo(x.dtype)
    if not x.numel():
        return exact.abs()
    if spec.granularity.rows == FULL:
        amax = rows.abs().amax().expand_as(rows)
    elif extent == FULL:
        amax = rows.abs().amax(1, keepdim=True).expand_as(rows)
    else:
        amax = torch.cat([part.abs().amax(1, keepdim=True).expand_as(part) for part in rows.split(extent, 1)], 1)
    if spec == ADAPTIVE:
        relative, smallest = of_formats(rows, amax)
        largest = torch.maximum(rows.abs() * relative, smallest).view(x.shape)
        return largest + exact.abs() * info.eps / 2 * (1 + 2**-4) + info.smallest_normal * info.eps
    scale = (amax / spec.format.max).clamp_min(2.0**-126)
    if spec.scale_rule != "amax":
        scale = 2.0 ** torch.ceil(torch.log2(scale) - 1e-6)
    relative, smallest = {"e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}[spec.format.name]
    largest = torch.maximum(rows.abs() * relative, scale * smallest).view(x.shape)
    return largest + exact.abs() * info.eps / 2 * (1 + relative) + info.smallest_normal * info.eps


def of_formats(rows, amax):
    """Largest relative and absolute errors of the formats that adaptive FP8 chooses, from its documentation."""
    relative, smallest = torch.full_like(rows, 2**-4), amax / 491_520
    for limit, fine, coarse in ((512, 2**-5, 3968), (64, 2**-6, 504)):
        below = (rows.abs() < amax / limit) & (rows != 0)
        fits = torch.cat([
            (8 * a.sum(1, keepdim=True) <= b.sum(1, keepdim=True)).expand_as(a)
            for a, b in zip(below.split(128, 1), (rows != 0).split(128, 1), strict=True)
        ], 1)  # fmt: skip
        relative, smallest = torch.where(fits, fine, relative), torch.where(fits, amax / coarse, smallest)
    return relative, (smallest * (1 + 2**-20)).clamp_min(2.0**-130)


def arrived(x, spec):
    """What a rank reads of a message of x."""
    rows, form = as_rows(x), parse_spec(spec)
    message = pack(rows, form)
    assert message.dtype == torch.uint8 and message.shape == (rows.shape[0], width(rows.shape[1], form))
    return unpack(message, rows.shape[1], form, x.dtype).view(x.shape)


def assert_within(result, exact, limit, what):
    assert result.shape == exact.shape, f"{what}: {list(result.shape)} for {list(exact.shape)}"
    over = (result.double() - exact.double()).abs() - limit
    assert not over.numel() or over.max() <= 0, f"{what}: {over.max():.3g} above the bound"


def assert_equal_on_all_ranks(x, what, group=None):
    mine = x.detach().contiguous().view(-1).view(torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    assert all(torch.equal(mine, other) for other in gathered), f"{what}: ranks have different bits"


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )  # fmt: skip
