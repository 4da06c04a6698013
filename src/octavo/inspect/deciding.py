"""convert, as users call it: where a GPU is present, linears are decided by what they cost there.

    octavo.convert(model)                       every linear that gains on this GPU, in the recipe that gains most
    octavo.convert(model, "rowwise")            every linear, in this recipe
    octavo.convert(model, plan=octavo.plan(…))  as planned, for whatever GPU

Without a GPU, with a recipe, or with a plan this is `octavo.nn.convert`. Else the same rules say which linears could be
converted, and cost says which are. How many tokens a linear will see is not known before the first batch, so a number
is assumed, said in each reason, and can be given. Every linear is taken to be called once, with an input of its own, by
eager code: siblings that share an input gain a little more than is predicted here. `octavo.plan` looks at a real batch.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from octavo.nn import convert as convert_as_told
from octavo.nn.filters import Filter, Plain
from octavo.nn.report import PLAN_ATTRIBUTE, is_converted, report
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import Recipe

if TYPE_CHECKING:
    from octavo.planner.devices import Gpu

M = TypeVar("M", bound=nn.Module)

TOKENS = 8192
"""Tokens that linears are assumed to be called with."""


def convert(
    model: M,
    recipe: str | Recipe | Mapping[Filter | Plain, str | Recipe] | None = None,
    *,
    precision: Precision | None = None,
    plan: Plan | None = None,
    skip: Sequence[str] = (),
    filter: Filter | Plain | None = None,
    keep_weights: bool = False,
    activations: Literal["bf16", "fp8"] = "bf16",
    tokens: int = TOKENS,
    verbose: bool = True,
) -> M:
    """Make the linear layers of a model compute in FP8, in place: on a machine with a GPU those that gain there.

    With neither a recipe nor a plan, and a GPU that `octavo.planner.devices` knows, each linear gets the recipe that is
    predicted to be fastest for so many `tokens`, or stays in bf16 where none gains. Where none does at all, the model
    is left as it is, with a warning. Otherwise every `nn.Linear` and Transformers `Conv1D` is converted, by default to
    the `rowwise` recipe. Vocabulary heads are left out in any case (call `octavo.convert(model.lm_head, "rowwise")`
    afterwards to convert one all the same). `octavo.report(model)` lists each layer with its recipe and reason.

    Args:
        model: Any module, on any device including meta; a linear itself is fine.
        recipe: `"rowwise"`, `"tensorwise"`, `"rowwise_hp_wgrad"`, `"blockwise"`, `"mxfp8"`, `"delayed"`, or a `Recipe`,
            for every linear whatever it gains; or `"auto"`, as without one. Or recipes by filter, as
            `{filters.last(2): "rowwise_hp_wgrad"}`: a layer gets that of the first filter that matches it, else the
            default.
        precision: The whole request at once, instead of `recipe`, `skip`, `keep_weights` and `activations`.
        plan: Decisions made before, as by `octavo.plan`, instead of all others.
        skip: Name patterns of layers to leave alone, as in `fnmatch`, such as `["*.o_proj", "model.layers.0"]`.
        filter: A rule of `octavo.nn.filters`, as `filters.name("*.mlp.*") & ~filters.last(2)`, or any callable
            `filter(module, fqn) -> bool`, True to convert; asked of each layer that nothing else excludes.
        keep_weights: Quantize each weight once per forward and backward instead of twice (1 byte per parameter in
            between), and once for all micro-batches inside `octavo.nn.accumulating(model)` (2 on a GPU). Same losses.
            No effect on weights that FSDP shards, nor under torch.compile: see `octavo.nn.weights`.
        activations: `"fp8"`: norms, gated MLPs, activations and attention, found by structure, store what backward
            needs in FP8. Not under torch.compile. For this alone: `precision=Precision(matmul="bf16",
            activations="fp8")`.
        tokens: That linears will be called with, on one GPU at a time; for deciding only.
        verbose: Print one line on stderr that says what was done.

    Returns:
        The same model.

    Raises:
        ValueError: For an unknown recipe, a model converted already, contradicting arguments, a filter that cannot be
            used, tokens below 1, or if no layer would be converted although FP8 was asked for by name.
        TypeError: If `model` is not a module, a filter is none, or a layer's weights have a dtype without an FP8 form.

    In every case of an error the model is left as it was.
    """
    if tokens < 1:
        raise ValueError(f"tokens is a number of 1 or more; got {tokens!r}")
    by_name = None if recipe == AUTO else recipe
    auto = by_name is None and plan is None and isinstance(model, nn.Module)
    name = present_gpu() if auto and (precision is None or _is_open(precision)) else None
    if name is None:
        return convert_as_told(
            model, by_name, precision=precision, plan=plan, skip=skip, filter=filter, keep_weights=keep_weights,
            activations=activations, verbose=verbose,
        )  # fmt: skip
    if precision is None:
        precision = Precision(recipe=AUTO, skip=tuple(skip), keep_weights=keep_weights, activations=activations)
    elif skip or keep_weights or activations != "bf16":
        raise ValueError(
            "precision holds the recipe, what to skip, whether weights are kept and how activations are stored: "
            "set them there, or give them alone"
        )
    decided = decide_for(model, name, precision, filter, tokens)
    if decided.converted or decided.storing:
        return convert_as_told(model, plan=decided, keep_weights=precision.keep_weights, verbose=verbose)
    vars(model)[PLAN_ATTRIBUTE] = decided
    warnings.warn(
        f"octavo: no layer of this model is predicted to gain from FP8 on {name} with {tokens} tokens, so it was left "
        "as it is; octavo.report(model) has the figures. octavo.convert(model, 'rowwise') converts it all the same",
        UserWarning, stacklevel=2,
    )  # fmt: skip
    if verbose:
        print(f"octavo: {report(model).summary}", file=sys.stderr)
    return model


def present_gpu() -> str | None:
    """The name of this machine's GPU, as its driver gives it; None where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def decide_for(model: nn.Module, name: str, precision: Precision, filter: Filter | Plain | None, tokens: int) -> Plan:
    """The plan of a model for a GPU by its driver's name: by cost where that is known, else by the rule.

    Args:
        model: Not converted yet.
        name: The GPU's.
        precision: What is asked for, its recipe included.
        filter: Which linears it is about.
        tokens: That linears will be called with.
    """
    from octavo.inspect.forecast import asked_of, undecided, with_measurements
    from octavo.planner.devices import by_driver

    if any(is_converted(module) for module in model.modules()):
        convert_as_told(model)  # says so
    gpu = by_driver(name)
    if gpu is None:
        rule, _ = undecided(model, asked_of(precision, filter))
        note = f"by rule: {name} is not in the table of GPUs, so no cost is known"
        return Plan(
            {fqn: replace(d, reason=f"{d.reason}; {note}") if d.recipe else d for fqn, d in rule.decisions.items()},
            rule.activations,
        )
    return decide_on(model, with_measurements(gpu, None), precision, filter, tokens)


def decide_on(
    model: nn.Module, gpu: "Gpu", precision: Precision, filter: Filter | Plain | None, tokens: int
) -> Plan:  # fmt: skip
    """The plan of a model by cost on a GPU, which need not be here; else as `decide_for`."""
    from octavo.inspect.forecast import asked_of, decided_plan, linears_of, undecided
    from octavo.nn.filters import sizes
    from octavo.planner.forecast import by_cost
    from octavo.planner.roofline import Linear
    from octavo.planner.trace import Trace

    asked = asked_of(precision, filter)
    rule, kept = undecided(model, asked)
    calls = {}
    for fqn in linears_of(model, rule):
        module = model.get_submodule(fqn)
        inner, outer = sizes(module)
        trained = all(p.requires_grad for p in module.parameters(recurse=False) if p.ndim == 2)
        calls[fqn] = (Linear(m=tokens, k=inner, n=outer, wgrad=trained),)
    assumed = Trace(calls=calls, attention=0, products=(), rest=(), regions=(), parameters=0, trained=0)
    cost = by_cost(gpu, assumed, list(calls), kept, asked.recipes, eager=True)
    found = decided_plan(rule, cost)
    note = f"{tokens} tokens assumed on {gpu.name}"
    told = {
        fqn: replace(d, reason=f"{d.reason}; {note}") if d.gain is not None else d for fqn, d in found.decisions.items()
    }
    return Plan(told, found.activations)


def _is_open(precision: Precision) -> bool:
    """Whether a precision leaves open which recipe its FP8 products take."""
    return isinstance(precision, Precision) and precision.recipe == AUTO and precision.matmul == "fp8"
