"""What goes around a converted model: checkpointing, kept weights and FSDP2, which change no bit or as little as sums
in another order and FP8 messages do, and torch.compile, which moves single FP8 roundings.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.activations import convert, exact_run, plain_run, precision_of
from benchmarks.fuzz.build import Case, Run, build, inputs, reference, run
from benchmarks.fuzz.optimizer import WRITES
from benchmarks.fuzz.outcome import PASS, WHOLE_DB, Invalid, Outcome, compare_gradients, fail, same
from benchmarks.fuzz.ranks import WRAPPERS, on_ranks
from octavo.kernels.conformance.mismatches import difference
from octavo.numerics import sqnr

EARLIER: dict[str, Callable[[Tensor], Any]] = {
    "data": lambda weight: weight.data.mul_(2),
    "to_local": lambda weight: getattr(weight, "to_local", lambda: weight.data)().mul_(2),
    "in_place": lambda weight: weight.mul_(2), "copy": lambda weight: weight.data.copy_(2 * weight.data),
    "inference": lambda weight: weight,
}  # fmt: skip
"""What happens to each matrix after an earlier pass of a model; last, a forward in inference mode."""
ONE_PROCESS_DB, FP8_COMM_DB = 40.0, 25.0
"""Gradients on two ranks beside one process: bf16 sums in another order, and FP8 on the wire."""
NOISE_OF_LARGEST = 1e-6  # Gradients this much smaller than the largest are rounding noise, such as that of a key bias
FEW, E4M3_STEP = 8, 2.0**-4
"""Elements up to which no error averages out, and by how much a number is off at most that E4M3 rounds."""
WIRE_STEPS = 2.0**-15
"""E4M3 with a scale for 128 values has 25 dB down to this share of their largest, which another parameter may hold."""


def check(case: Case) -> Outcome:
    wrapper = case.get("wrapper", "checkpoint")
    if wrapper.startswith("checkpoint"):
        return _checkpoint(case)
    if wrapper in WRAPPERS:
        return on_ranks(job, case)
    return _keep_weights(case) if wrapper == "keep_weights" else _compile(case)


def _checkpoint(case: Case) -> Outcome:
    reentrant, autocast = case.get("wrapper") == "checkpoint_reentrant", bool(case.get("autocast"))

    def call(model: nn.Module, x: Tensor, recomputed: bool = True) -> Tensor:
        for part in model.children() if case.get("each") else [model]:
            x = checkpoint(part, x, use_reentrant=reentrant) if recomputed else part(x)
        return x

    model, x = build(case), inputs(case)
    expected = plain_run(model, case, x, autocast=autocast)
    again = run(model, case, x, autocast=autocast, call=call)
    if _different(expected, again) is not None:
        raise Invalid("plain PyTorch with checkpointing differs from PyTorch without")
    convert(model, precision_of(case))
    with outcome.around_octavo(model):
        expected = run(model, case, x, autocast=autocast, call=partial(call, recomputed=False))
        actual = run(model, case, x, autocast=autocast, call=call)
    if case.get("each") and precision_of(case).activations == "fp8" and same("output", expected.y, actual.y) is None:
        _, gradients = exact_run(reference(build(case), case), case, x)
        return compare_gradients(gradients, expected.grads, actual.grads, EXACT_ENOUGH_DB)
    mismatch = _different(expected, actual)
    return PASS if mismatch is None else fail("bits", mismatch)


def _different(expected: Run, actual: Run) -> str | None:
    runs = [{"output": r.y} | {n: g for n, g in r.grads.items() if g is not None} for r in (expected, actual)]
    if runs[0].keys() != runs[1].keys():
        return f"only one of them has {sorted(runs[0].keys() ^ runs[1].keys())}"
    return difference(list(runs[0].values()), list(runs[1].values()), list(runs[0]))


def _keep_weights(case: Case) -> Outcome:
    x, models = inputs(case), []
    plain_run(build(case), case, x)
    for keep in (False, True, False):
        model = build(case)
        if len(models) == 2:  # converted after all writes
            model.load_state_dict(models[0].state_dict())
        convert(model, precision_of(case, keep_weights=keep))
        with outcome.around_octavo(model):
            if len(models) < 2:
                _train(model, case, x)
        models.append(model)
    for (name, p), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if not p.isfinite().all():
            raise Invalid(f"the optimizer makes {name} non-finite, and so the next gradients")
        if (mismatch := same(name, p.detach(), other.detach())) is not None:
            return fail("bits", f"kept weights differ after {case.get('steps', 2)} steps: {mismatch}")
    with outcome.around_octavo(models[1]):
        runs = [run(model, case, x) for model in models]
    mismatch = _different(runs[2], runs[0]) or _different(runs[2], runs[1])
    return PASS if mismatch is None else fail("bits", f"a converted model of the same weights: {mismatch}")


def _train(model: nn.Module, case: Case, x: Tensor) -> None:
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise Invalid("there is nothing to train")
    starts = [p.detach().clone() for p in params]
    own = partial(octavo.AdamW, master="fp32", nonfinite="ignore")
    optimizer: Any = (torch.optim.AdamW if case.get("optimizer") == "torch" else own)(params, lr=1e-2)
    for step in range(case.get("steps", 2)):
        for micro in range(2):
            run(model, case | {"seed": case.get("seed", 0) + 10 * step + micro}, x)
        optimizer.step()
        if "writes" in case:
            with torch.no_grad():
                for p, start in zip(params, starts, strict=True):
                    WRITES[case["writes"]](p, start)


def _compile(case: Case) -> Outcome:
    model, x = build(case), inputs(case)
    plain = copy.deepcopy(model)
    exact, gradients = exact_run(reference(copy.deepcopy(model), case), case, x)
    try:
        expected = _compiled(plain, case, x)
    except Exception as error:
        raise Invalid(f"torch.compile cannot compile the plain model: {error}") from error
    convert(model, precision_of(case))
    with outcome.around_octavo(model):
        expected = run(model, case, x)
        actual = _compiled(model, case, x)
    if sqnr(exact.y, expected.y) >= WHOLE_DB and not (db := sqnr(expected.y, actual.y)) >= WHOLE_DB:
        return fail("output", f"compiled: {db:.1f} dB beside eager")
    return compare_gradients(gradients, expected.grads, actual.grads, EXACT_ENOUGH_DB)


EXACT_ENOUGH_DB = 20.0  # SQNR of FP8 gradients against float64 below which a compiled model is not compared with them


def _compiled(model: nn.Module, case: Case, x: Tensor) -> Run:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend="aot_eager")
        return run(model, case, x, call=lambda _, x: compiled(x))


def job(case: Case) -> Outcome:
    """On a rank: its half of the batch through a sharded model, beside one process that does both halves."""
    rank, model, x = dist.get_rank(), build(case), inputs(case | {"batch": 2})
    halves, comm = x.chunk(2), case.get("fp8_comm", "off")
    plain_run(_sharded(copy.deepcopy(model), plain=True), case, halves[rank])
    convert(model, precision_of(case))
    alone = copy.deepcopy(model)
    _write(alone, case)
    runs = [run(alone, case, half) for half in halves]
    sharded = octavo.parallelize(model, fp8_comm=comm) if case.get("wrapper") == "parallelize" else _sharded(model)
    with outcome.around_octavo(sharded), warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if "earlier" in case:
            run(sharded, case, halves[rank])
            _write(sharded, case)
            sharded.zero_grad()
            with torch.inference_mode(case["earlier"] == "inference"), torch.no_grad():
                sharded(halves[rank])
        actual = run(sharded, case, halves[rank])
    if any("gathered in FP8" in str(warning.message) for warning in raised):
        return PASS  # another operation reads the weight of a layer: it gets FP8 values, with a warning
    if not (db := sqnr(runs[rank].y, actual.y)) >= ONE_PROCESS_DB and actual.y.numel():
        return fail("output", f"rank {rank}: {db:.1f} dB beside one process")
    grads = [g.double() for each in runs for g in each.grads.values() if g is not None and g.numel()]
    floor = NOISE_OF_LARGEST * max((float(g.square().mean()) ** 0.5 for g in grads), default=0.0)
    if comm == "on":
        floor = max(floor, WIRE_STEPS * max((float(g.abs().max()) for g in grads), default=0.0))
    for name, grad in actual.grads.items():
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        if name != "input" and (problem := _off(whole, [each.grads[name] for each in runs], comm == "on", floor)):
            return fail(problem[0], f"rank {rank}: {name}: {problem[1]} beside one process")
    return PASS


def _off(whole: Tensor | None, parts: list[Tensor | None], fp8: bool, floor: float) -> tuple[str, str] | None:
    """Say how a gradient is off the mean of those of two halves, but for what is below `floor`."""
    halves = [part.double() for part in parts if part is not None]
    if whole is None or not halves:
        return None if whole is None and not halves else ("missing gradient", "one of them has none")
    mean = (halves[0] + halves[1]) / 2
    # Where the halves cancel, what rounding leaves is beside the summands, not beside their mean.
    cancelled = mean.norm() <= max(part.norm() for part in halves) / 8
    if not mean.numel() or cancelled or float(mean.square().mean()) ** 0.5 < floor:
        return None
    least = FP8_COMM_DB if fp8 else ONE_PROCESS_DB
    if fp8 and mean.numel() <= FEW:  # each rank's summand is rounded by itself
        rounded = E4M3_STEP * sum(part.abs() for part in halves).norm() / 2
        least = sqnr(mean, mean * (1 + rounded / mean.norm())) - 0.5
    db = sqnr(mean, whole)
    return None if db >= least else ("gradient", f"{db:.1f} dB, at least {least:.1f} dB,")


@torch.no_grad()
def _write(model: nn.Module, case: Case) -> None:
    if "earlier" in case:
        for weight in model.parameters():
            if weight.ndim == 2:
                EARLIER[case["earlier"]](weight)


def _sharded(model: nn.Module, plain: bool = False) -> nn.Module:
    shard: Callable[..., Any] = fully_shard
    try:
        for part in (*model.children(), model):
            shard(part, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    except (ValueError, RuntimeError) as error:
        raise (Invalid(f"fully_shard refuses the plain model: {error}") if plain else error) from None
    return model
