"""Collectives of `octavo.comm` on two ranks beside torch.distributed's, in float64, within the bounds that
`octavo.comm.encoding` documents. `feedback` is DDP's hook, of which a step that is not taken must change no bit.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.fuzz.build import DTYPES, Case, strided, values
from benchmarks.fuzz.outcome import PASS, Outcome, fail
from benchmarks.fuzz.ranks import WORLD, on_ranks
from octavo import comm
from octavo.parallel import Fp8AllReduce

_RELATIVE = {"e4m3": (2.0**-4, 2.0**-10, 448.0), "e5m2": (2.0**-3, 2.0**-17, 57344.0)}
_ADAPTIVE = ((2.0**-4, 491_520, 0.0), (2.0**-5, 3968, 2.0**-9), (2.0**-6, 504, 2.0**-6))
"""Of e4m3, e3m4 and e2m5: relative error, the largest value over the smallest error, the part below which few are."""


def check(case: Case) -> Outcome:
    return on_ranks(job, case)


def job(case: Case) -> Outcome:
    name, spec = case.get("collective", "all_gather"), case.get("spec", "e4m3/1x128")
    exchange = {"all_to_all_single": _all_to_all_single, "all_to_all": _all_to_all, "isend": _send,
                "all_gather": _all_gather, "feedback": _feedback}.get(name, _reduce)  # fmt: skip
    return exchange(case, list(case.get("shape", [2, 128])), spec)


def _all_gather(case: Case, shape: list[int], spec: str) -> Outcome:
    x = _values(case, shape, dist.get_rank())
    output = comm.all_gather(x, spec=spec, async_op=(later := bool(case.get("asynchronous"))))
    wide, limit = (torch.cat(_gathered(t)) for t in (x.double(), _bound(x, spec)))
    return _within("all_gather", output.wait() if later else output, wide, limit, x.dtype)  # type: ignore[union-attr]


def _reduce(case: Case, shape: list[int], spec: str) -> Outcome:
    name, rank = case["collective"], dist.get_rank()
    x, share = _values(case, shape, rank), WORLD if case.get("reduce") == "avg" else 1
    if name == "reduce_scatter" and shape[0] % WORLD:
        x = torch.cat((x, x))
    asynchronous = bool(case.get("asynchronous"))
    output = getattr(comm, name)(x, spec=spec, async_op=asynchronous, op=case.get("reduce", "sum"))
    output = output.wait() if asynchronous else output
    whole = name == "all_reduce"
    total, off = sum(_gathered(x.double())) / share, sum(_gathered(_bound(x, spec, whole))) / share
    if not whole:
        return _within(name, output, total.chunk(WORLD)[rank], off.chunk(WORLD)[rank], x.dtype)
    if not torch.equal(*(bits.nan_to_num() for bits in _gathered(output))):
        return fail("ranks", f"{name}: the ranks got different bits")
    return _within(name, output, total, off + _bound(total.abs() + off, spec, whole), x.dtype)


def _all_to_all_single(case: Case, shape: list[int], spec: str) -> Outcome:
    rank, shape = dist.get_rank(), [*shape, 8] if len(shape) < 2 else shape
    sent = received = None
    if (table := case.get("splits")) is not None:
        sent, received = table[rank], [row[rank] for row in table]
    x = _values(case, [2 * shape[0] if sent is None else sum(sent), *shape[1:]], rank)
    output = comm.all_to_all_single(x, received, sent, spec=spec)
    wide, limit = (x.new_empty(output.shape, dtype=torch.float64) for _ in range(2))
    dist.all_to_all_single(wide, x.double().contiguous(), received, sent)
    dist.all_to_all_single(limit, _bound(x, spec).contiguous(), received, sent)
    return _within("all_to_all_single", output, wide, limit, x.dtype)


def _all_to_all(case: Case, shape: list[int], spec: str) -> Outcome:
    inputs = [_values(case, shape, WORLD * dist.get_rank() + other) for other in range(WORLD)]
    expected = [_values(case, shape, WORLD * other + dist.get_rank()) for other in range(WORLD)]
    outputs = [torch.full_like(x, 7.0) for x in expected]
    comm.all_to_all(outputs, inputs, spec=spec)
    limit = torch.stack([_bound(x, spec) for x in expected])
    return _within("all_to_all", torch.stack(outputs), torch.stack(expected).double(), limit, inputs[0].dtype)


def _send(case: Case, shape: list[int], spec: str) -> Outcome:
    mine, x = (_values(case, shape, of) for of in (dist.get_rank(), 1 - dist.get_rank()))
    sending = comm.isend(mine, 1 - dist.get_rank(), spec=spec)
    output = comm.recv(x.shape, 1 - dist.get_rank(), dtype=x.dtype, spec=spec)
    sending.wait()
    return _within("isend", output, x.double(), _bound(x, spec), x.dtype)


def _feedback(case: Case, shape: list[int], spec: str) -> Outcome:
    averages, weight = [], torch.zeros(1)
    for skipped in (False, True):
        hook = Fp8AllReduce(spec=spec, error_feedback=True)
        for step in [case, {}] if skipped else [{}]:
            gradient = _values({**step, "seed": case.get("seed", 0)}, shape, dist.get_rank()).float().flatten()
            averages.append(hook.reduce_with_feedback(0, gradient, [weight]))
    equal = torch.equal(averages[0], averages[-1])
    return PASS if equal else fail("bits", "feedback: the errors of a step that was not taken changed the next one")


def _values(case: Case, shape: list[int], rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case.get("seed", 0) + rank)
    x = values(shape, case.get("values"), DTYPES[case.get("dtype", "fp32")], generator)
    return strided(-x if rank else x, case.get("layout"))


def _bound(x: Tensor, spec: str, cut_elsewhere: bool = False) -> Tensor:
    """Largest distance of what arrives from each element, float64 of x's shape; not finite in groups that are not."""
    form, group = spec.split("/")
    exact = x.double()
    if not x.numel():
        return exact.abs()
    if cut_elsewhere := cut_elsewhere or x.ndim < 2 or group == "tensor":  # no group is wider than all
        rows, extent = exact.reshape(1, -1), x.numel()
    else:
        rows = exact.reshape(x.shape[0], -1)
        extent = rows.shape[1] if group == "row" else int(group.removeprefix("1x"))
    bounds = [_of_group(part, form, cut_elsewhere) for part in rows.abs().split(extent, 1)]
    return torch.cat(bounds, 1).view(x.shape) * (1 + 1e-6)


def _of_group(size: Tensor, form: str, any_format: bool) -> Tensor:
    """The same for magnitudes [R,C], each row a group; `any_format` if what decides about its format is unknown."""
    amax = size.amax(1, keepdim=True)
    if form == "fp8":
        bound = torch.maximum(size * _ADAPTIVE[0][0], amax / _ADAPTIVE[0][1])
        for relative, smallest, fine in _ADAPTIVE[1:]:
            of_format = torch.maximum(size * relative, amax / smallest)
            coarse = (size.float() < amax.float() * fine) & (size > 0)
            fits = 8 * coarse.sum(1, keepdim=True) <= (size > 0).sum(1, keepdim=True)
            bound = torch.maximum(bound, of_format) if any_format else torch.where(fits, of_format, bound)
        return bound.clamp_min(2.0**-130) + amax.where(amax.isfinite(), torch.nan) * 0
    relative, smallest, largest = _RELATIVE[form]
    return torch.maximum(size * relative, (amax / largest).clamp_min(2.0**-126) * smallest)


def _within(name: str, actual: Tensor, exact: Tensor, limit: Tensor, dtype: torch.dtype) -> Outcome:
    if actual.shape != exact.shape or actual.dtype != dtype:
        return fail("shape", f"{name}: {actual.dtype} {list(actual.shape)}, expected {dtype} {list(exact.shape)}")
    info = torch.finfo(dtype)
    if (lost := actual.isfinite() & ~exact.isfinite()).any():
        return fail("not finite", f"{name}: {lost.sum()} values that are not finite arrived as finite ones")
    fits = exact.abs() + limit < info.max
    over = (actual.double() - exact).abs() - limit
    over = over - (exact.abs() + limit) * (info.eps / 2 + 2.0**-22) - info.smallest_normal * info.eps
    over = torch.where(fits, over, -1.0)
    if actual.numel() and not (over <= 0).all():
        return fail("bound", f"{name}: {over.nan_to_num(nan=torch.inf).max():.3g} over the bound")
    return PASS


def _gathered(x: Any) -> Any:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(WORLD)]
    dist.all_gather(parts, x.contiguous())
    return parts
