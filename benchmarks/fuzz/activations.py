"""Stored and fused activations beside the plain model: bitwise the same forward, side effects and random numbers; only
norms and gated MLPs known by their code may differ by one rounding. Gradients reach `WHOLE_DB` and `EACH_DB`.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.build import Case, Run, build, inputs, knows, reference, run
from benchmarks.fuzz.outcome import NOISE_DB, PASS, Exact, Invalid, Outcome, compare_gradients, fail, same, with_noise

PRECISIONS = {kind: octavo.Precision(matmul="bf16", activations=kind) for kind in ("fp8", "fused")}
_ROUNDINGS = 8.0  # Times the rounding error of the plain model by which a known module's rounding may move the output


def check(case: Case) -> Outcome:
    plain, x = build(case), inputs(case)
    stored, exact_model = copy.deepcopy(plain), reference(copy.deepcopy(plain), case)
    autocast = bool(case.get("autocast"))
    expected = plain_run(plain, case, x, autocast=autocast)
    exact, gradients = exact_run(exact_model, case, x)
    convert(stored, PRECISIONS[case.get("activations", "fp8")])
    with outcome.around_octavo(stored):
        actual = run(stored, case, x, autocast=autocast)
    comparison = compare_forward(case, exact, expected, actual)
    if comparison.failed:
        return comparison
    noise_db = NOISE_DB[torch.bfloat16 if autocast else x.dtype]
    return compare_gradients(gradients, expected.grads, actual.grads, noise_db)


def exact_run(model: nn.Module, case: Case, x: Tensor, once: Callable[..., Run] = run) -> tuple[Run, Exact]:
    exact = plain_run(model, case, x.double(), once)
    noised = with_noise(model, lambda: plain_run(model, case, x.double(), once))
    return exact, Exact(exact.grads, [one.grads for one in noised])


def precision_of(case: Case, **more: Any) -> octavo.Precision:
    return octavo.Precision(**{"matmul": "bf16", **case.get("precision", {"matmul": "fp8"}), **more})


def convert(model: nn.Module, precision: octavo.Precision) -> None:
    try:
        octavo.convert(model, precision=precision, verbose=False)
    except ValueError as error:
        if "no layer would be converted" in str(error):
            raise outcome.Passed from error
        raise


def plain_run(model: nn.Module, case: Case, x: Tensor, once: Callable[..., Run] = run, **options: Any) -> Run:
    """Run a model that is not Octavo's; raises Invalid where it cannot run, or gives what is not finite."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = once(model, case, x, **options)
    except (RuntimeError, ValueError, IndexError, ImportError, TypeError, AssertionError) as error:
        raise Invalid(str(error)) from error
    if not result.y.isfinite().all() or any(g is not None and not g.isfinite().all() for g in result.grads.values()):
        raise Invalid("plain PyTorch gives what is not finite")
    return result


def compare_forward(case: Case, exact: Run, expected: Run, actual: Run) -> Outcome:
    if not torch.equal(expected.random, actual.random):
        return fail("random", "the random generator is in another state after the forward")
    known = knows(case["parts"])
    if known:
        difference = _within_rounding(exact.y, expected.y, actual.y)
    else:
        difference = same("output", expected.y, actual.y)
    if difference is not None:
        return fail("forward", difference)
    for name, value in expected.effects.items():
        other = actual.effects.get(name)
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            mismatch = _within_rounding(exact.effects[name], value, other) if known else same(name, value, other)
        else:
            mismatch = None if value == other else f"{name}: plain {value!r}, Octavo {other!r}"
        if mismatch is not None:
            return fail("side effect", f"{name}: {mismatch}")
    return PASS


def _within_rounding(exact: Tensor, expected: Tensor, actual: Tensor) -> str | None:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return f"plain {expected.dtype} {list(expected.shape)}, Octavo {actual.dtype} {list(actual.shape)}"
    if not expected.is_floating_point():
        return None if torch.equal(expected, actual) else "differs"
    wide = expected.double()
    eps = torch.finfo(expected.dtype).eps
    allowed = _ROUNDINGS * (torch.linalg.vector_norm(wide - exact.double()) + eps * torch.linalg.vector_norm(wide))
    off = torch.linalg.vector_norm(wide - actual.double())
    return None if off <= allowed else f"off by {off:.3g} in norm, where rounding allows {allowed:.3g}"
