"""octavo.AdamW and Muon beside PyTorch's on float64 copies of the same parameters and gradients, up to FP8 moments and
roundings of the parameter. `"writes"` are made between steps: the next one starts from what was written.
"""

import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.fuzz import outcome
from benchmarks.fuzz.build import DTYPES, Case, strided, values
from benchmarks.fuzz.modules import Part
from benchmarks.fuzz.outcome import PASS, Outcome, fail, same
from octavo.kernels.conformance.mismatches import difference
from octavo.numerics import sqnr

FP8_DB = 14.0
"""Of what FP8 states move a parameter by, beside exact ones, where all elements have gradients of one size."""
_FEWEST = 512
_MUON = 3.0  # Bound of the difference of two orthogonal updates, per element


def _replace(p: nn.Parameter, start: Tensor) -> None:
    p.data = start.clone()


WRITES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "zero_rows": lambda p, start: p[::2].zero_() if p.ndim else p.zero_(), "clamp": lambda p, start: p.clamp_(min=0),
    "mask": lambda p, start: p.mul_(start > 0), "data": _replace,
    "load_state_dict": lambda p, start: nn.ParameterList([p]).load_state_dict({"0": start}),
    "average": lambda p, start: p.data.copy_(0.9 * p.detach() + 0.1 * start),
    "add": lambda p, start: p.add_(start), "bits": lambda p, start: p.data.view(p.shape).copy_(start),
}  # fmt: skip
"""Ways to write to a parameter, which started at other values."""


def check(case: Case) -> Outcome:
    torch.manual_seed(case.get("seed", 0))
    parts = case["params"]
    params = []
    for part in parts:
        x = values(part.get("shape", [4, 64]), None, DTYPES[part.get("dtype", "fp32")])
        params.append(nn.Parameter(strided(x, part.get("layout"))))
    firsts, strides = [p.detach().clone() for p in params], [p.stride() for p in params]
    twins = [nn.Parameter(p.detach().double().contiguous()) for p in params]
    optimizer, exact = _optimizer(case, params), _exact(case, twins)
    bad, behaviour, steps = case.get("bad"), case.get("nonfinite", "raise"), case.get("steps", 1)
    sign = -1.0 if case.get("maximize") else 1.0  # torch.optim.Muon cannot maximize
    with outcome.around_octavo(nn.ParameterList(params)):
        for step in range(steps):
            grads = [_gradient(part, p) for part, p in zip(parts, params, strict=True)]
            poisoned = bool(bad) and step == steps - 1 and _poison(grads, str(bad))
            for p, twin, grad in zip(params, twins, grads, strict=True):
                p.grad = grad
                twin.grad = None if grad is None else sign * grad.double().contiguous()
            before, raised = [p.detach().clone() for p in params], ""
            try:
                optimizer.step()
            except FloatingPointError as error:
                raised = str(error)
            if bool(raised) != (poisoned and behaviour == "raise"):
                return fail("nonfinite", f"step {step} raised {raised or 'nothing'}")
            if not poisoned or behaviour == "ignore":
                for other in exact:
                    other.step()
            elif mismatch := difference(before, [p.detach() for p in params], list(map(str, range(len(params))))):
                return fail("nonfinite", f"a step that was left out changed a parameter: {mismatch}")
            if case.get("resume") and step == 0 and steps > 1:
                optimizer = _resumed(case, params, optimizer)
            if step < steps - 1 and (write := case.get("writes", {}).get(str(step))):
                _write(write, params, firsts, twins)
    skipped = int(poisoned and behaviour == "skip")
    if optimizer.skipped != skipped:
        return fail("nonfinite", f"skipped is {optimizer.skipped}, expected {skipped}")
    for i, (part, p, twin, start, stride) in enumerate(zip(parts, params, twins, firsts, strides, strict=True)):
        if p.stride() != stride and "data" not in case.get("writes", {}).values():
            return fail("strides", f"parameter {i} had strides {stride}, has {p.stride()}")
        state = optimizer.state[p]
        if poisoned and behaviour != "ignore":  # the last step did not read what was written
            state = {name: value for name, value in state.items() if name != "master"}
        mismatch = _off(case, part, p.detach(), twin.detach(), start.double(), state)
        if mismatch is not None:
            return fail("parameter", f"parameter {i} {part}: {mismatch}")
    return PASS


@torch.no_grad()
def _write(write: str, params: list[nn.Parameter], starts: list[Tensor], twins: list[nn.Parameter]) -> None:
    for p, start, twin in zip(params, starts, twins, strict=True):
        before = p.clone()
        WRITES[write](p, start)
        twin.copy_(torch.where((p == before) | before.isnan(), twin, p.double()))


def _is_matrix(case: Case, p: Tensor) -> bool:
    return bool(case.get("muon")) and p.ndim == 2 and p.numel() > 0


def _optimizer(case: Case, params: list[nn.Parameter]) -> Any:
    names = ("lr", "maximize", "states", "stochastic_rounding", "nonfinite")
    settings = {name: case[name] for name in names if name in case}
    settings["master"] = None if case.get("master") == "none" else case.get("master", "fp32")
    settings |= {"betas": tuple(case.get("betas", (0.9, 0.999))), "weight_decay": case.get("weight_decay", 0.01)}
    if not case.get("muon"):
        return octavo.AdamW(params, **settings)
    return octavo.optim.Muon([{"params": [p], "muon": _is_matrix(case, p)} for p in params], **settings)


def _exact(case: Case, twins: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
    hyper: Any = {"weight_decay": 0.01, **{name: case[name] for name in ("lr", "weight_decay") if name in case}}
    others, matrices = ([p for p in twins if _is_matrix(case, p) == muon] for muon in (False, True))
    betas = tuple(case.get("betas", (0.9, 0.999)))
    exact: list[Any] = [torch.optim.AdamW(others, betas=betas, foreach=False, **hyper)] if others else []
    return exact + ([torch.optim.Muon(matrices, **hyper)] if matrices else [])


def _resumed(case: Case, params: list[nn.Parameter], optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = _optimizer(case, params)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


def _gradient(part: Part, p: Tensor) -> Tensor | None:
    if part.get("grad") == "none":
        return None
    grad = values(list(p.shape), part.get("grad"), p.dtype)
    if part.get("grad_layout") == "expanded" and grad.ndim > 1 and grad.numel():
        return grad[:, :1].expand(grad.shape)
    return strided(grad, part.get("grad_layout"))


def _poison(grads: list[Tensor | None], bad: str) -> bool:
    for i, grad in enumerate(grads):
        if grad is not None and grad.numel():
            grad = grads[i] = grad.contiguous()
            if bad == "nan_all_ones":  # rounding its mantissa up would overflow into the sign
                bits = {4: torch.int32, 2: torch.int16}[grad.element_size()]
                grad.view(bits).view(-1)[-1] = torch.iinfo(bits).max
            else:
                grad.view(-1)[-1] = float(bad)
            return True
    return False


def _off(case: Case, part: Part, p: Tensor, exact: Tensor, start: Tensor, state: Mapping[str, Tensor]) -> str | None:
    """Describe how a parameter is further from its float64 twin than the form allows, if it is."""
    muon = _is_matrix(case, p)
    if muon and not exact.isfinite().all():  # one number is enough for the whole update
        return "finite" if p.isfinite().all() else None
    if (differ := p.isnan().ne(exact.isnan())).any():
        index = tuple(differ.nonzero()[0].tolist())
        return f"at {index} {p[index].item()}, expected {exact[index].item()}"
    if not state:
        return None if case.get("writes") else same("without a gradient", start, p.double())
    steps, lr, writes = case.get("steps", 1), case.get("lr", 1e-3), len(case.get("writes", {}))
    precise, eps = not {"master", "remainder"} & state.keys(), torch.finfo(p.dtype).eps
    master = state["master"].double() if "master" in state else p.double()
    relative = 0.0 if "master" in state else eps * (steps if precise and p.dtype != torch.float32 else 1)
    relative += steps * 2.0**-22 + eps * writes * ("remainder" in state)
    fp8 = any(name.endswith("_hi") for name in state) and steps > 1
    update = lr * steps * (_MUON * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 if muon else 3.0 if fp8 else 2e-4)
    finite = exact.isfinite()
    over = (master - exact).abs() - relative * (exact.abs() + lr * steps) - update
    over = torch.where(finite, over, -math.inf)
    if finite.any() and over.max() > 0:
        index = tuple(over.eq(over.max()).nonzero()[0].tolist())
        return f"at {index} {master[index].item():.9g}, expected {exact[index].item():.9g}; {over.max():.2g} over"
    if "master" in state and (rounded := same("beside its master", state["master"].to(p.dtype), p)) is not None:
        return rounded
    even = part.get("grad") is None and part.get("grad_layout") != "expanded" and p.numel() >= _FEWEST
    own = p.dtype == torch.float32 or "master" in state
    if fp8 and own and even and finite.all() and not (writes or muon):
        moved = exact - start
        if (db := sqnr(moved, master - start)) < FP8_DB:
            return f"what the steps changed: {db:.1f} dB, at least {FP8_DB:g} dB expected"
    return None
