"""Faults that the fuzzer has to find, one at a time: mistakes that were made in this project or in others.

`INJECTED_FAULTS` is the table: add a row with a context that injects the fault. Contexts avoid the internals of
stored activations: they change torch functions, the forward of modules, or public ops, while a converted model runs.
"""

import importlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from benchmarks.fuzz import outcome
from benchmarks.fuzz.modules import Gate
from torch import nn

import octavo
from octavo import comm
from octavo.activations import modules
from octavo.kernels.adamw import reference as adamw
from octavo.nn import linear_subclasses, operands, weights
from octavo.parallel.fsdp import Fp8ReduceScatter
from octavo.runtime import derivatives
from octavo.runtime.switch import SWITCH


def rounded(x):
    """x in e4m3 with one scale."""
    if not x.numel():
        return x
    scale = x.abs().amax().clamp_min(1e-12) / 448
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


class FromRounded(torch.autograd.Function):
    """A function of x whose backward sees x rounded."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(rounded(x), *parameters)
        return function(x, *parameters)

    @staticmethod
    def backward(ctx, grad):
        tensors = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            return None, *torch.autograd.grad(ctx.function(*tensors), tensors, grad)


class RoundedSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.special.expit(x)
        ctx.save_for_backward(rounded(y))
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y * (1 - y)


# --- around the run of a converted model ---


def around(change):
    return mock.patch.object(outcome, "around_octavo", change)


def function(target, name, replacement):
    return around(lambda model: mock.patch.object(target, name, replacement))


@contextmanager
def _forwards(chosen, replacement, model):
    for module in model.modules():
        if chosen(module):
            module.forward = partial(replacement, module, module.forward)
    yield


def forward(chosen, replacement):
    """Replaces the forward of the modules that are chosen by replacement(module, original, x)."""
    return around(partial(_forwards, chosen, replacement))


_SDPA = F.scaled_dot_product_attention
_LINEAR = F.linear


def _rounded_q(q, k, v, **options):
    def pack(t):
        return rounded(t) if t.data_ptr() == q.data_ptr() and t.shape == q.shape else t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        return _SDPA(q, k, v, **options)


def _rounded_norm(module, original, x):
    parameters = [p for p in (module.weight, module.bias) if p is not None]
    return FromRounded.apply(
        lambda x, w=None, b=None: F.layer_norm(x, module.normalized_shape, w, b, module.eps), x, *parameters
    )


def _as_gated_mlp(module, original, x):
    return module.down_proj(module.act_fn(module.gate_proj(x)) * module.up_proj(x))


def _without_effects(module, original, x):
    y = original(x)
    module.aux, module.calls = None, 0
    if isinstance(module, Gate):
        module.collected.clear()
    return y


def _one_more_number(module, original, x):
    torch.rand(1)
    return original(x)


@contextmanager
def _no_hooks(model):
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
        module._backward_hooks.clear()
    yield


# --- in the library ---


def stale_weights():
    """Casts of the first step, for ever."""
    linear = importlib.import_module("octavo.nn.linear")
    first, cast = {}, linear.cast_weight

    def stale(w_NK, recipe, needs_dgrad, factor=None):
        key = id(w_NK if w_NK._base is None else w_NK._base)
        return first.setdefault(key, cast(w_NK, recipe, needs_dgrad, factor))

    return mock.patch.object(linear, "cast_weight", stale)


@contextmanager
def quantize_as(change):
    original = operands.quantize

    def quantize(x, spec, fold=None, **options):
        return original(*change(x, spec, fold), **options)

    with mock.patch.object(operands, "quantize", quantize), mock.patch.object(weights, "quantize", quantize):
        yield


def wrong_fold():
    return quantize_as(lambda x, spec, fold: (x, spec, fold if fold is None else fold.flip(0)))


def scale_that_drifts():
    calls = []

    def drifting(x, spec, fold):
        calls.append(0)
        return x * (1 + 2.0**-7 * len(calls)), spec, fold

    return quantize_as(drifting)


def wrapped(target, name, call):
    """Replaces a function or a method by call(original, *its arguments)."""
    original = getattr(target, name)
    return mock.patch.object(target, name, lambda *args, **options: call(original, *args, **options))


def optimizer_step(before=lambda group, p: None, after=lambda optimizer, p: None):
    def step(original, self, closure=None):
        params = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for group, p in params:
            before(group, p)
        original(self, closure)
        for _, p in params:
            after(self, p)

    return wrapped(octavo.AdamW, "step", step)


def _memory_order(group, p):
    if p.ndim == 2 and not p.is_contiguous():
        p.grad = p.grad.t().reshape(p.shape)


def _zero_for_nan(optimizer, p):
    if "remainder" in optimizer.state[p]:
        p.data[p.isnan()] = -0.0


def _one_beta(group, p):
    group["betas"] = group["betas"][0], group["betas"][0]


def last_element_lost():
    def all_gather(original, *args, **options):
        y = original(*args, **options)
        if isinstance(y, torch.Tensor) and y.numel():
            y.view(-1)[-1] = 0
        return y

    return wrapped(comm, "all_gather", all_gather)


def format_too_fine():
    """Adaptive messages have e2m5 for groups whose small values it rounds to zero."""
    return mock.patch.object(importlib.import_module("octavo.kernels.adaptive.reference"), "FEW", 1)


def expert_scale_skipped():
    """W of the first expert is read as if its scales were 1."""

    def quantized(original, g, offsets, dgrad, wgrad, w_scale, *rest):
        if w_scale is not None:
            w_scale = w_scale.clone()
            w_scale[0] = 1.0
        return original(g, offsets, dgrad, wgrad, w_scale, *rest)

    return wrapped(importlib.import_module("octavo.nn.experts"), "quantize_grouped", quantized)


def summed_not_averaged():
    def reduce(original, self, output_tensor, *args, **options):
        original(self, output_tensor, *args, **options)
        output_tensor *= 2

    return wrapped(Fp8ReduceScatter, "__call__", reduce)


def remainder_of_what_was_written():
    """The remainder of the old value is added to a written zero: NaN."""

    def exact(param, remainder, master):
        values = param.float()
        if remainder is None:
            return values if master is None else torch.where(master.to(param.dtype) == param, master, values)
        return (values.contiguous().view(torch.int32) + remainder).view(torch.float32)

    return mock.patch.object(adamw, "exact_values", exact)


def writes_undone():
    """A float32 master wins over what was written to its parameter."""
    original = adamw.exact_values
    return mock.patch.object(adamw, "exact_values", lambda p, r, master: original(p, r, master) if r is None is master
                             else master if master is not None else original(p, r, None))  # fmt: skip


def penalty_lost():
    """Backward reads FP8 copies, without an error that they have no derivative."""
    lenient = SimpleNamespace(compiler=torch.compiler, is_grad_enabled=lambda: False)
    return mock.patch.object(derivatives, "torch", lenient)


@contextmanager
def signatures_lost():
    """Forward of a class that convert makes has the signature of the mixin."""
    caches = [value for module in (modules, linear_subclasses) for value in vars(module).values()
              if hasattr(value, "cache_clear")]  # fmt: skip
    for cached in caches:
        cached.cache_clear()
    with mock.patch.object(modules, "update_wrapper", lambda function, *args, **options: function):
        yield
    for cached in caches:
        cached.cache_clear()


@contextmanager
def restored_not_counted():
    """A block of `disabled` restores what it found when it began."""

    @contextmanager
    def disabled():
        before = list(SWITCH.off)
        SWITCH.off.append(None)
        yield
        SWITCH.off[:] = before

    with mock.patch.object(octavo, "disabled", disabled):
        yield
    SWITCH.off.clear()


@dataclass(frozen=True)
class InjectedFault:
    """A defect: its kind of case, a pattern that cases need for it to matter, the label that its failure has, and how
    many draws may pass it by.
    """

    kind: str
    defect: Callable[[], AbstractContextManager]
    pattern: str = ""
    label: str = ""
    draws: int = 400
    on_ranks: bool = False
    slow: bool = False

    def concerns(self, text):
        return re.search(self.pattern, text) is not None


LOOK_ALIKES = ("beta", "detached", "reversal", "straight_through", "clamp", "bypass", "gain")


INJECTED_FAULTS = {
    "q saved in FP8 beside sdpa's statistics": InjectedFault(
        "activations", lambda: function(F, "scaled_dot_product_attention", _rounded_q), '"attention"', "gradient"),
    "results of sigmoid saved in FP8": InjectedFault(
        "activations", lambda: function(torch, "sigmoid", RoundedSigmoid.apply),
        '"sigmoid"|"beta"|sigmoid_product', "gradient", draws=2000, slow=True),
    "LayerNorm saves x, not x - mean": InjectedFault(
        "activations",
        lambda: forward(lambda m: isinstance(m, nn.LayerNorm) and m.weight is not None, _rounded_norm),
        '"mean".*"layer|"layer.*"mean"', "gradient", draws=6000, slow=True),
    "a look-alike taken for a gated MLP": InjectedFault(
        "activations", lambda: forward(lambda m: isinstance(m, Gate) and m.form in LOOK_ALIKES, _as_gated_mlp),
        "|".join(f'"{form}"' for form in LOOK_ALIKES)),
    "side effects lost": InjectedFault(
        "activations", lambda: forward(lambda m: hasattr(m, "calls"), _without_effects), '"records"|"aux'),
    "a parameter without its gradient": InjectedFault(
        "activations",
        lambda: function(F, "linear", lambda x, w, b=None: _LINEAR(x, w, None if b is None else b.detach()))),
    "one random number more": InjectedFault(
        "activations", lambda: forward(lambda m: isinstance(m, nn.Linear), _one_more_number)),
    "a mask forgotten": InjectedFault(
        "activations",
        lambda: function(F, "scaled_dot_product_attention", lambda q, k, v, scale, **_: _SDPA(q, k, v, scale=scale)),
        '"causal"|"padded"|"additive"'),
    "hooks not called": InjectedFault("activations", lambda: around(_no_hooks), '"hooked"'),
    "a fold in the wrong order": InjectedFault("linear", wrong_fold),
    "NaN made finite": InjectedFault(
        "linear", lambda: quantize_as(lambda x, spec, fold: (x.nan_to_num(), spec, fold)), '"bad"'),
    "weights kept too long": InjectedFault("wrappers", stale_weights, '"keep_weights"'),
    "a scale that depends on how often forward ran": InjectedFault("wrappers", scale_that_drifts, '"checkpoint'),
    "strides ignored by the optimizer": InjectedFault(
        "optimizer", lambda: optimizer_step(before=_memory_order), '"layout"'),
    "NaN made -0.0 by the remainder": InjectedFault("optimizer", lambda: optimizer_step(after=_zero_for_nan), '"nan'),
    "the second moment decays as the first": InjectedFault("optimizer", lambda: optimizer_step(before=_one_beta)),
    "the remainder of a value that was overwritten": InjectedFault(
        "optimizer", remainder_of_what_was_written, '"writes"', "parameter"),
    "writes between steps undone": InjectedFault(
        "optimizer", writes_undone, '"master": "fp32".*"writes"|"writes".*"master": "fp32"', "parameter", draws=1000),
    "a gradient penalty lost": InjectedFault("derivatives", penalty_lost, label="gradient"),
    "signatures lost": InjectedFault("identity", signatures_lost, label="of a converted module"),
    "overlapping blocks of disabled() restore": InjectedFault("threads", restored_not_counted, "disabled", "threads"),
    "a collective that loses the last element": InjectedFault(
        "comm", last_element_lost, '"all_gather"', on_ranks=True, slow=True),
    "a format too fine for its group": InjectedFault(
        "comm", format_too_fine, '"fp8/1x128"', "bound", on_ranks=True, slow=True),
    "the scale of one expert's weight skipped": InjectedFault(
        "experts", expert_scale_skipped, '"rowwise"', "gradient", on_ranks=True, slow=True),
    "gradients added up, not averaged": InjectedFault(
        "wrappers", summed_not_averaged, '"fp8_comm": "on"', on_ranks=True, slow=True),
}  # fmt: skip
