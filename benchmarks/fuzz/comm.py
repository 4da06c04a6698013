"""Collectives of `octavo.comm` on two ranks beside torch.distributed's, in float64, within the documented bounds.

A value v in a group of scale s arrives within |v|/16 or s/2¹⁰ in e4m3, |v|/8 or s/2¹⁷ in e5m2, before it is rounded to
its dtype (`octavo.comm`). Sums add these bounds up; all_reduce adds that of the sum.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fuzz.build import DTYPES, Case
from benchmarks.fuzz.outcome import PASS, Outcome, fail
from benchmarks.fuzz.ranks import POOL, WORLD
from octavo import comm

_RELATIVE = {"e4m3": (2.0**-4, 2.0**-10, 448.0), "e5m2": (2.0**-3, 2.0**-17, 57344.0)}


def check(case: Case) -> Outcome:
    """Run one collective on both ranks."""
    return POOL.run(job, case)


def job(case: Case) -> Outcome:
    """Compare on this rank."""
    name, spec = case.get("collective", "all_gather"), case.get("spec", "e4m3/1x128")
    shape = list(case.get("shape", [2, 128]))
    if name == "all_to_all_single":
        return _all_to_all_single(case, shape, spec)
    if name == "all_to_all":
        return _all_to_all(case, shape, spec)
    x = _values(case, shape, dist.get_rank())
    options = {} if name == "all_gather" else {"op": case.get("reduce", "sum")}
    if name == "reduce_scatter" and shape[0] % WORLD:
        x = torch.cat((x, x))
    asynchronous = bool(case.get("asynchronous"))
    output = getattr(comm, name)(x, spec=spec, async_op=asynchronous, **options)
    output = output.wait() if asynchronous else output
    share = WORLD if case.get("reduce") == "avg" else 1
    wide, limit = _gathered(x.double()), _gathered(_bound(x, spec, name))
    if name == "all_gather":
        return _within(name, output, torch.cat(wide), torch.cat(limit), x.dtype)
    total, off = x.double(), sum(limit) / share
    dist.all_reduce(total)
    total /= share
    if name == "reduce_scatter":
        rank = dist.get_rank()
        return _within(name, output, total.chunk(WORLD)[rank], off.chunk(WORLD)[rank], x.dtype)
    off = off + _bound((total.abs() + off).float(), spec, name)
    bits = _gathered(output)
    if not torch.equal(bits[0].nan_to_num(), bits[1].nan_to_num()):
        return fail("ranks", f"{name}: the ranks got different bits")
    return _within(name, output, total, off, x.dtype)


def _all_to_all_single(case: Case, shape: list[int], spec: str) -> Outcome:
    rank, shape = dist.get_rank(), [*shape, 8] if len(shape) < 2 else shape
    table = case.get("splits")
    if table is None:
        sent = received = None
        rows = 2 * shape[0]
    else:
        sent, received, rows = table[rank], [row[rank] for row in table], sum(table[rank])
    x = _values(case, [rows, *shape[1:]], rank)
    output = comm.all_to_all_single(x, received, sent, spec=spec)
    wide, limit = (t.new_empty(output.shape, dtype=torch.float64) for t in (x, x))
    dist.all_to_all_single(wide, x.double().contiguous(), received, sent)
    dist.all_to_all_single(limit, _bound(x, spec, "all_to_all_single").contiguous(), received, sent)
    return _within("all_to_all_single", output, wide, limit, x.dtype)


def _all_to_all(case: Case, shape: list[int], spec: str) -> Outcome:
    inputs = [_values(case, shape, WORLD * dist.get_rank() + other) for other in range(WORLD)]
    expected = [_values(case, shape, WORLD * other + dist.get_rank()) for other in range(WORLD)]
    outputs = [torch.full_like(x, 7.0) for x in expected]
    comm.all_to_all(outputs, inputs, spec=spec)
    for output, x in zip(outputs, expected, strict=True):
        outcome = _within("all_to_all", output, x.double(), _bound(x, spec, "all_to_all"), x.dtype)
        if outcome.failed:
            return outcome
    return PASS


def _values(case: Case, shape: list[int], rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.get("seed", 0) + rank)
    x, form, half = torch.randn(shape, generator=generator), case.get("values", "normal"), case.get("dtype") == "fp16"
    if form == "tiny":
        x *= 1e-3 if half else 1e-25
    elif form == "large":
        x *= 1e3 if half else 1e25
    elif form == "zeros":
        x.zero_()
    elif form == "spread" and x.numel():
        x *= torch.logspace(-3, 2, x.shape[-1])
    x = x.to(DTYPES[case.get("dtype", "fp32")])
    return x.t().contiguous().t() if case.get("layout") == "transposed" and x.ndim == 2 else x


def _bound(x: Tensor, spec: str, name: str) -> Tensor:
    """Largest distance of what arrives from each element, float64 of x's shape."""
    form, group = spec.split("/")
    relative, smallest, largest = _RELATIVE[form]
    exact = x.double()
    if name == "all_reduce" or x.ndim < 2 or group == "tensor" or not x.numel():  # cut elsewhere: no group is wider
        amax = exact.abs().amax() if x.numel() else exact.new_zeros(())
    else:
        rows = exact.reshape(x.shape[0], -1)
        extent = rows.shape[1] if group == "row" else int(group.removeprefix("1x"))
        amax = torch.cat([p.abs().amax(1, keepdim=True).expand_as(p) for p in rows.split(extent, 1)], 1).view(x.shape)
    scale = (amax / largest).clamp_min(2.0**-126)
    return torch.maximum(exact.abs() * relative, (scale * smallest).expand_as(exact)) * (1 + 1e-6)


def _within(name: str, actual: Tensor, exact: Tensor, limit: Tensor, dtype: torch.dtype) -> Outcome:
    if actual.shape != exact.shape or actual.dtype != dtype:
        return fail("shape", f"{name}: {actual.dtype} {list(actual.shape)}, expected {dtype} {list(exact.shape)}")
    info = torch.finfo(dtype)
    fits = exact.abs() + limit < info.max
    over = (actual.double() - exact).abs() - limit
    over = over - (exact.abs() + limit) * (info.eps / 2 + 2.0**-22) - info.smallest_normal * info.eps
    over = torch.where(fits, over, -1.0)
    if actual.numel() and not (over <= 0).all():
        return fail("bound", f"{name}: {over.nan_to_num(nan=torch.inf).max():.3g} over the bound")
    return PASS


def _gathered(x: Any) -> list[Tensor]:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return parts
