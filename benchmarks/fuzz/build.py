"""Models, inputs and runs from cases: a case gives the same bits in every process. Its `"parts"` are modules one after
the other, each a dictionary with an `"op"`; a part that holds another has it as `"of"`. Keys have defaults.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.fuzz import modules
from benchmarks.fuzz.modules import Part
from octavo.activations.detect import ORIGINAL

Case = dict[str, Any]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def values(shape: Sequence[int], form: str | None, dtype: torch.dtype, generator: Any = None) -> Tensor:
    """Random numbers of a form; None: normal ones."""
    half, x = dtype == torch.float16, torch.randn(list(shape), generator=generator)
    tiny, subnormal, large = (1e-3, 1e-6, 30.0) if half else (1e-20, 1e-40, 1e10)
    x *= {"tiny": tiny, "subnormal": subnormal, "large": large, "zeros": 0.0}.get(form or "", 1.0)
    if x.ndim and x.numel():
        if form == "spread":
            x *= torch.logspace(-2 if half else -4, 1 if half else 2, x.shape[-1])
        elif form == "spread_rows":
            x *= torch.logspace(-2 if half else -8, 1 if half else 4, x.shape[0]).view(-1, *[1] * (x.ndim - 1))
        elif form == "outliers":
            x[..., 3::50] *= 100.0
        elif form == "zero_rows":
            x[::2] = 0.0
        elif form in ("nan", "inf"):
            x.view(-1)[3::101] = float(form)
    return x.fill_(0.37).to(dtype) if form == "constant" else x.to(dtype)


def strided(x: Tensor, layout: str | None) -> Tensor:
    if layout == "strided" and x.ndim:
        return x.repeat_interleave(2, -1)[..., ::2]
    order = list(range(x.ndim))
    if layout == "transposed" and x.ndim > 1:
        order[:2] = 1, 0
    elif layout == "reversed":
        order.reverse()
    return x.permute(order).contiguous().permute(order)


class Residual(nn.Module):
    """x + f(x) in several ways; `drop` leaves f out at random, by torch.rand. Keeps a loss where it `records`."""

    aux: Tensor | None

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form, self.inner = part.get("form", "plain"), module(width, part["of"])
        start = {"rezero": 0.1, "scaled": 0.5, "sigmoid": 3.0}.get(self.form)
        self.scale = None if start is None else nn.Parameter(torch.full((1,), start))
        self.records, self.calls, self.aux = part.get("records", False), 0, None

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "drop" and self.training and torch.rand(()) < 0.4:
            return x
        y = self.inner(x)
        if self.records:
            self.calls += 1
            self.aux = y.float().pow(2).sum()
        if self.form == "sigmoid":
            assert self.scale is not None
            return x + torch.sigmoid(self.scale) * y
        if self.form == "detached":
            return x.detach() + y
        return x + y if self.scale is None else x + self.scale * y


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


VIEWS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "permute": lambda fc, x: fc(x.permute(1, 0, 2)).permute(1, 0, 2),
    "chunk": lambda fc, x: fc(torch.cat(x.chunk(2, -1)[::-1], -1)),
    "reshape": lambda fc, x: fc(x.reshape(x.shape[0], -1, x.shape[2] // 2)).reshape(x.shape),
    "transposed_weight": lambda fc, x: x @ fc.weight,
    "transposed": lambda fc, x: (fc.weight @ x.transpose(1, 2)).transpose(1, 2),
    "expand": lambda fc, x: fc(x[:, :1].expand(x.shape)) + x,
    "flatten": lambda fc, x: fc(x.flatten(0, 1)).view(x.shape),
    "strided": lambda fc, x: fc(x[..., ::2].repeat_interleave(2, -1)[..., : x.shape[2]]),
}
"""Views between what makes x and a linear."""


class View(nn.Module):
    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.form = part.get("form", "permute")
        self.inner = module(width, part["of"]) if "of" in part else nn.Identity()
        features = width // 2 if self.form == "reshape" else width
        self.fc = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return VIEWS[self.form](self.fc, self.inner(x))


class Convolution(nn.Module):
    """Over tokens, or as a patch embedding of them as an image."""

    def __init__(self, width: int, part: Part) -> None:
        super().__init__()
        self.patch, groups = part.get("form", "patch") == "patch", width if part.get("form") == "depthwise" else 1
        conv1d = partial(nn.Conv1d, width, width, 3, padding=1, groups=groups)
        self.conv = nn.Conv2d(1, width, (1, width)) if self.patch else conv1d()

    def forward(self, x: Tensor) -> Tensor:
        if not x.shape[1]:
            return x
        y = self.conv(x[:, None]).squeeze(3) if self.patch else self.conv(x.transpose(1, 2))
        return y.transpose(1, 2)


def _linear(width: int, part: Part) -> nn.Module:
    fc = nn.Linear(width, width, bias=part.get("bias", True))
    form = part.get("form")
    if form == "weight_norm":
        return nn.utils.parametrizations.weight_norm(fc)
    if form == "spectral_norm":
        return nn.utils.parametrizations.spectral_norm(fc)
    if form == "frozen":
        fc.requires_grad_(False)
    if form == "transposed_weight":
        fc.weight = nn.Parameter(fc.weight.detach().t().contiguous().t())
    return fc


def _hooked(width: int, part: Part) -> nn.Module:
    inner, form = module(width, part["of"]), part.get("form", "forward")
    target = next((m for m in inner.modules() if type(m) is nn.Linear), inner) if part.get("inside") else inner
    halved: Any = lambda grads: tuple(g if g is None else g * 0.5 for g in grads)  # noqa: E731
    {
        "forward": lambda: target.register_forward_hook(lambda m, args, y: y * 0.5),
        "pre": lambda: target.register_forward_pre_hook(lambda m, args: (args[0] + 0.25,)),
        "backward": lambda: target.register_full_backward_hook(lambda m, grads, _: halved(grads)),
        "backward_pre": lambda: target.register_full_backward_pre_hook(lambda m, grads: halved(grads)),
    }[form]()
    return inner


_BUILDERS: dict[str, Callable[[int, Part], nn.Module]] = {
    "norm": modules.norm, "gate": modules.gate, "mlp": modules.mlp, "attention": modules.attention, "linear": _linear,
    "activation": lambda w, p: Function(lambda x: modules.FUNCTIONS[p.get("form", "silu")](x * p.get("factor", 1.0))),
    "module": lambda w, p: modules.ACTIVATIONS[p.get("form", "silu")](), "residual": Residual, "hooked": _hooked,
    "repeat": lambda w, p: nn.Sequential(*[module(w, p["of"])] * p.get("times", 2)), "view": View,
    "conv": Convolution, "dropout": lambda w, p: nn.Dropout(p.get("p", 0.2)),
    "sequence": lambda w, p: nn.Sequential(*(module(w, each) for each in p["parts"])),
}  # fmt: skip


def module(width: int, part: Part) -> nn.Module:
    return _BUILDERS[part["op"]](width, part)


def build(case: Case) -> nn.Module:
    torch.manual_seed(case.get("seed", 0))
    width = case.get("width", 32)
    model = nn.Sequential(*(module(width, part) for part in case["parts"]))
    if case.get("shared") and len(model) > 1:  # the first module once more, at the end
        model.append(model[0])
    for m in model.modules():
        if isinstance(m, nn.Linear) and "weight_gain" in case:
            m.weight.detach().mul_(case["weight_gain"])
    return model.to(DTYPES[case.get("dtype", "fp32")]).train(case.get("train", True))


def inputs(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(case.get("seed", 0) + 1)
    shape = case.get("batch", 2), case.get("length", 4), case.get("width", 32)
    x = torch.randn(shape, generator=generator) * case.get("scale", 1.0)
    if case.get("outliers") and x.shape[2] > 3:
        x[..., 3] *= 100.0
    if case.get("mean"):
        x = x + case["mean"]
    return x.to(DTYPES[case.get("dtype", "fp32")])


@contextmanager
def mutated(model: nn.Module, case: Case) -> Iterator[None]:
    """Inside, the model is changed as a user might change it after `convert`: `"after"` of the case."""
    candidates = [m for m in model.modules() if not isinstance(m, nn.Sequential | nn.ModuleList)]
    with ExitStack() as stack:
        for change in case.get("after", ()):
            op, m = change["op"], candidates[change.get("index", 0) % len(candidates)]
            if op in ("instance", "class"):
                mine = (c for c in type(m).__mro__ if ORIGINAL not in vars(c) and not c.__module__.startswith("octavo"))
                classes = (c for c in mine if "forward" in vars(c))
                owner: Any = m if op == "instance" else next(classes)
                stack.enter_context(mock.patch.object(owner, "forward", _halved(owner.forward)))
            elif op == "freeze":
                m.requires_grad_(False)
            elif op == "eval":
                model.eval()
            for each in model.modules():
                if op == "act_fn" and hasattr(each, "act_fn"):
                    each.act_fn = nn.ReLU()
                if op == "dropout" and isinstance(each, nn.Dropout):
                    each.p = 0.6
        yield


def _halved(forward: Callable[..., Any]) -> Callable[..., Any]:
    def halved(*args: Any, **kwargs: Any) -> Any:
        y = forward(*args, **kwargs)
        return y * 0.5 if isinstance(y, Tensor) else y

    return halved


@dataclass
class Run:
    y: Tensor
    grads: dict[str, Tensor | None]
    random: Tensor
    effects: dict[str, Any]


def run(model: nn.Module, case: Case, x: Tensor, *, autocast: bool = False, call: Any = None) -> Run:
    """One forward and backward: outputs, gradients of parameters and of x, random state, side effects."""
    x = x.clone().requires_grad_(not case.get("input_frozen"))
    torch.manual_seed(case.get("seed", 0) + 2)
    model.zero_grad()
    for m in model.modules():
        if isinstance(m, modules.Gate):
            m.collected.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), mutated(model, case):
        y = model(x) if call is None else call(model, x)
        random = torch.random.get_rng_state()
        generator = torch.Generator().manual_seed(case.get("seed", 0) + 3)
        wide = torch.promote_types(y.dtype, torch.float32)
        loss = (y.to(wide) * torch.randn(y.shape, generator=generator)).sum() * case.get("loss_scale", 1.0)
        for aux in _auxiliary(model):
            loss = loss + aux.to(wide)
        if loss.requires_grad:
            loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()} | {"input": x.grad}
    effects: dict[str, Any] = {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
    effects |= {f"calls of {name}": m.calls for name, m in model.named_modules() if hasattr(m, "calls")}
    losses = [loss.detach() for loss in _auxiliary(model)]
    return Run(y.detach(), grads, random, effects | {"losses": torch.stack(losses) if losses else torch.zeros(0)})


def _auxiliary(model: nn.Module) -> list[Tensor]:
    losses = [getattr(m, "aux", None) for m in model.modules()]
    return [loss for loss in losses if loss is not None] + [
        t for m in model.modules() for t in getattr(m, "collected", ())
    ]


def reference(model: nn.Module, case: Case) -> nn.Module:
    """Turn a copy of a plain model into float64, where what depends on the dtype does as before."""
    for m in model.modules():
        if hasattr(m, "as_dtype"):
            m.as_dtype = DTYPES[case.get("dtype", "fp32")]  # type: ignore[assignment]
    return model.double()


def knows(case: Any) -> bool:
    """Whether a case holds a module that Octavo knows by its code, whose forward may differ by one rounding."""
    if isinstance(case, dict):
        forms = {"norm": (None, *modules.KNOWN_NORMS), "gate": modules.KNOWN_GATES}.get(case.get("op", ""), ())
        return case.get("form") in forms or any(map(knows, case.values()))
    return isinstance(case, list) and any(map(knows, case))
