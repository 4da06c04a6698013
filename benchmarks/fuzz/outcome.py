"""The outcome of a case, and how gradients are compared: by SQNR. Gradients that are rounding noise or sums that cancel
are left out: the same model in float64, with noise and without it, tells which those are, without Octavo.
"""

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from octavo.kernels.conformance.mismatches import difference
from octavo.numerics import sqnr

WHOLE_DB, EACH_DB = 20.0, 15.0  # What gradients reach at least: all of a model together, and each
NOISE_DB = {torch.float32: 60.0, torch.float16: 44.0, torch.bfloat16: 34.0}
"""SQNR against float64 below which a gradient in plain PyTorch is rounding noise."""
NOISE, CANCELLED_DB = 2.0**-6, 22.0
"""Error put into gradients, 36 dB, where FP8's is 31; and what must be left of it for `EACH_DB` to be possible."""
FEW, CANCELLED_FEW_DB, DRAWS = 32, CANCELLED_DB + 10.0, 8
"""The same for a gradient of a few numbers: 10 dB are a factor of three; draws of the noise where there is such one."""
Grads = Mapping[str, Tensor | None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Exact:
    """Gradients in float64, without `NOISE` and of each draw of it."""

    grads: Grads
    noised: list[Grads]


@dataclass(frozen=True)
class Outcome:
    """`status`: `"pass"`; `"fail"`; `"invalid"`, where plain PyTorch cannot run the case; or `"cut"`, over time.

    `label` is the kind of failure, which stays the same while a case is shrunk.
    """

    status: str
    label: str = ""
    message: str = ""

    @property
    def failed(self) -> bool:
        return self.status == "fail"


PASS = Outcome("pass")


def fail(label: str, message: str) -> Outcome:
    return Outcome("fail", label, message)


class Invalid(Exception):
    """Plain PyTorch cannot run the case, or gives what is not finite."""


class Passed(Exception):
    """There is nothing to convert."""


def outcome_of(check: Callable[[], Outcome]) -> Outcome:
    """Return what a check returns, or what its exception means."""
    try:
        return check()
    except Passed:
        return PASS
    except Invalid as error:
        return Outcome("invalid", "", str(error))
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{where.filename.rpartition('/')[2]}:{where.lineno}"
        return fail(f"error {type(error).__name__} in {where.name}", f"{type(error).__name__}: {error} ({at})")


def around_octavo(model: nn.Module) -> AbstractContextManager[None]:
    """Surround each run of a converted model; tests put defects in its place."""
    return nullcontext()


def same(name: str, expected: Tensor, actual: Tensor) -> str | None:
    """Describe the first bit that differs, where NaN is equal to any NaN."""
    return difference([expected], [actual], [name])


def with_noise(model: nn.Module, run: Callable[[], Result]) -> list[Result]:
    """Run with `NOISE` in gradients and in inputs of silu and gelu; several times where a gradient has few numbers."""
    generator = torch.Generator()

    def disturbed(grad: Any) -> Any:  # a second derivative is no tensor where it is zero
        if grad is None:
            return None
        return grad * (1 + NOISE * torch.randn(grad.shape, generator=generator)).to(grad.dtype)

    def hook(module: nn.Module, args: Any, y: Any) -> None:
        if isinstance(y, Tensor) and y.requires_grad:
            y.register_hook(disturbed)

    handles: list[Any] = [m.register_forward_hook(hook) for m in model.modules()]
    acts = [m for m in model.modules() if isinstance(m, nn.SiLU | nn.GELU)]
    handles += [m.register_forward_pre_hook(lambda m, args: (disturbed(args[0]), *args[1:])) for m in acts]
    few = any(parameter.numel() <= FEW for parameter in model.parameters())
    results = []
    for seed in range(DRAWS if few else 1):
        generator.manual_seed(seed)
        results.append(run())
    for handle in handles:
        handle.remove()
    return results


def _measurable(exact: Exact, plain: Grads, names: list[str], noise_db: float) -> bool:
    reference, rounded = _flat(exact.grads, names), _flat(plain, names)
    if not reference.count_nonzero():
        return False
    errors = torch.stack([_flat(draw, names) - reference for draw in exact.noised]).norm(dim=1)
    error = errors.square().mean().sqrt()
    noised_db = 20 * torch.log10(reference.norm() / error).item() if error else float("inf")
    least = CANCELLED_FEW_DB if reference.numel() <= FEW else CANCELLED_DB
    return sqnr(reference, rounded) >= noise_db and noised_db >= least


def compare_gradients(
    exact: Exact, plain: Grads, actual: Grads, noise_db: float, least_db: tuple[float, float] = (WHOLE_DB, EACH_DB)
) -> Outcome:
    for name, g in plain.items():
        other = actual[name]
        if (g is None) != (other is None):
            return fail("missing gradient", f"{name}: {'plain PyTorch' if g is None else 'Octavo'} has none")
        if g is not None and other is not None:
            what, got = (f"{x.dtype} {list(x.shape)}" for x in (g, other))
            if what != got:
                return fail("shape", f"{name}: plain {what}, Octavo {got}")
            if g.isfinite().all() and not other.isfinite().all():
                return fail("not finite", f"{name}: plain is finite, Octavo is not")
    there = [name for name, g in plain.items() if g is not None and exact.grads[name] is not None]
    there = [name for name in there if _measurable(exact, plain, [name], noise_db)]
    whole = [("gradients", "all together", there, least_db[0])] if there else []
    for label, title, names, least in [*(("gradient", name, [name], least_db[1]) for name in there), *whole]:
        db = sqnr(_flat(plain, names), _flat(actual, names))
        if not db >= least and (len(names) == 1 or _measurable(exact, plain, names, noise_db)):
            return fail(label, f"{title}: {db:.1f} dB, promised {least:g} dB; norm {_flat(plain, names).norm():.3g}")
    return PASS


def _flat(grads: Grads, names: list[str]) -> Tensor:
    return torch.cat([grad.double().flatten() for name in names if (grad := grads[name]) is not None])
