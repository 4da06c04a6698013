"""convert, as users call it: on a machine with a GPU, decide for each linear layer by its cost there.

    octavo.convert(model)                       every layer that gains on this GPU, in the recipe that gains most
    octavo.convert(model, "rowwise")            every layer, in this recipe
    octavo.convert(model, plan=octavo.plan(…))  as planned, for any GPU

Without a GPU, with a recipe, or with a plan this is `octavo.nn.convert`. Otherwise the same rules select the
candidates, and cost decides among them. The number of tokens is unknown before the first batch, so one is assumed;
every reason states it, and `tokens` sets it. Each layer is assumed to be called once in eager mode with an input of its
own: siblings that share an input gain a little more than predicted. `octavo.plan` uses a real batch.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import nn

from octavo.nn import convert as convert_linears
from octavo.nn.filters import Filter, ModuleFilter
from octavo.nn.report import PLAN_ATTRIBUTE, is_converted, report
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import Recipe

if TYPE_CHECKING:
    from octavo.planner.devices import Gpu

M = TypeVar("M", bound=nn.Module)

ASSUMED_TOKENS = 8192
"""Assumed tokens per call of a linear layer."""


def convert(
    model: M,
    recipe: str | Recipe | Mapping[Filter | ModuleFilter, str | Recipe] | None = None,
    *,
    precision: Precision | None = None,
    plan: Plan | None = None,
    skip: Sequence[str] = (),
    filter: Filter | ModuleFilter | None = None,
    keep_weights: bool = False,
    activations: Literal["bf16", "fp8"] = "bf16",
    tokens: int = ASSUMED_TOKENS,
    verbose: bool = True,
) -> M:
    """Convert the linear layers of a model to FP8, in place; on a machine with a GPU, those that gain there.

    Without a recipe and a plan, and with a GPU that `octavo.planner.devices` knows, each layer gets the recipe
    predicted to be fastest for `tokens`, or stays in bf16 if none gains; if no layer does, the model is unchanged, with
    a warning. Otherwise every `nn.Linear` and Transformers `Conv1D` is converted, by default to `rowwise`. Vocabulary
    heads stay in high precision: `octavo.convert(model.lm_head, "rowwise")` converts one.

    Args:
        model: Any module, on any device including meta; a linear layer itself is fine.
        recipe: A name in `octavo.RECIPES` or a `Recipe`, for every layer regardless of its gain; or `"auto"`, same as
            None. Or recipes by filter, such as `{filters.last(2): "rowwise_hp_wgrad"}`: a layer gets the recipe of the
            first filter that matches it, else the default.
        precision: The whole request in one object, instead of `recipe`, `skip`, `keep_weights` and `activations`.
        plan: Decisions of `octavo.plan` or `octavo.Plan.from_json`, instead of all other arguments.
        skip: Name patterns of layers to leave alone, as in `fnmatch`, such as `["*.o_proj", "model.layers.0"]`.
        filter: A filter of `octavo.nn.filters`, such as `filters.name("*.mlp.*") & ~filters.last(2)`, or a callable
            `filter(module, fqn) -> bool`, True to convert, for layers that no other rule excludes.
        keep_weights: Quantize each weight once per forward and backward instead of twice (1 byte per parameter), and
            once for all micro-batches inside `octavo.nn.accumulating(model)` (2 on a GPU). Same losses. No effect on
            weights that FSDP shards, nor under torch.compile: see `octavo.nn.weights`.
        activations: `"fp8"`: norms, gated MLPs, activations and attention save tensors for backward in FP8. Not under
            torch.compile. For this alone: `precision=Precision(matmul="bf16", activations="fp8")`.
        tokens: Tokens per call of a layer on one GPU; used only for the decision.
        verbose: Print a one-line summary on stderr.

    Returns:
        The same model.

    Raises:
        ValueError: For an unknown recipe, a model converted already, contradicting arguments, an unusable filter,
            tokens below 1, or if a recipe was named and no layer would be converted.
        TypeError: If `model` is not a module, a filter is not one, or weights have a dtype without an FP8 format.
            After any error the model is unchanged.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)))
        >>> model(torch.randn(8, 64)).sum().backward()
    """
    if tokens < 1:
        raise ValueError(f"tokens is an integer of 1 or more; got {tokens!r}")
    by_name = None if recipe == AUTO else recipe
    auto = by_name is None and plan is None and isinstance(model, nn.Module)
    name = local_gpu_name() if auto and (precision is None or _is_auto(precision)) else None
    if name is None:
        return convert_linears(
            model, by_name, precision=precision, plan=plan, skip=skip, filter=filter, keep_weights=keep_weights,
            activations=activations, verbose=verbose,
        )  # fmt: skip
    if precision is None:
        precision = Precision(recipe=AUTO, skip=tuple(skip), keep_weights=keep_weights, activations=activations)
    elif skip or keep_weights or activations != "bf16":
        raise ValueError(
            "precision includes recipe, skip, keep_weights and activations: set them there, or pass them without "
            "precision"
        )
    decided = plan_for_driver_name(model, name, precision, filter, tokens)
    if decided.converted or decided.storing:
        return convert_linears(model, plan=decided, keep_weights=precision.keep_weights, verbose=verbose)
    vars(model)[PLAN_ATTRIBUTE] = decided
    warnings.warn(
        f"octavo: no layer of this model is predicted to gain from FP8 on {name} with {tokens} tokens, so the model is "
        "unchanged; octavo.report(model) has the figures. octavo.convert(model, 'rowwise') converts it anyway",
        UserWarning, stacklevel=2,
    )  # fmt: skip
    if verbose:
        print(f"octavo: {report(model).summary}", file=sys.stderr)
    return model


def local_gpu_name() -> str | None:
    """Return the name of this machine's GPU, as its driver reports it; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def plan_for_driver_name(
    model: nn.Module, name: str, precision: Precision, filter: Filter | ModuleFilter | None, tokens: int
) -> Plan:
    """Plan a model for a GPU by its driver name: by cost if the GPU is known, else by the default rules.

    Args:
        model: Not converted yet.
        name: Driver name of the GPU.
        precision: The request, including its recipe.
        filter: Selects the layers.
        tokens: Tokens per call of a layer.
    """
    from octavo.inspect.planning import default_decisions, plan_request, with_measurements
    from octavo.planner.devices import gpu_by_driver_name

    if any(is_converted(module) for module in model.modules()):
        convert_linears(model)  # raises the error for converted models
    gpu = gpu_by_driver_name(name)
    if gpu is None:
        rule, _ = default_decisions(model, plan_request(precision, filter))
        note = f"by rule: {name} is not in the table of GPUs, so no cost is known"
        return Plan(
            {fqn: replace(d, reason=f"{d.reason}; {note}") if d.recipe else d for fqn, d in rule.decisions.items()},
            rule.activations,
        )
    return plan_on_gpu(model, with_measurements(gpu, None), precision, filter, tokens)


def plan_on_gpu(
    model: nn.Module, gpu: "Gpu", precision: Precision, filter: Filter | ModuleFilter | None, tokens: int
) -> Plan:  # fmt: skip
    """Plan a model by cost on a GPU, which need not be present; otherwise like `plan_for_driver_name`."""
    from octavo.inspect.planning import default_decisions, plan_from_costs, plan_request, planned_linears
    from octavo.nn.filters import sizes
    from octavo.planner.forecast import decide_by_cost
    from octavo.planner.roofline import LinearCall
    from octavo.planner.trace import Trace

    request = plan_request(precision, filter)
    rule, forced_bf16 = default_decisions(model, request)
    calls = {}
    for fqn in planned_linears(model, rule):
        module = model.get_submodule(fqn)
        inner, outer = sizes(module)
        trained = all(p.requires_grad for p in module.parameters(recurse=False) if p.ndim == 2)
        calls[fqn] = (LinearCall(m=tokens, k=inner, n=outer, wgrad=trained),)
    assumed = Trace(calls=calls, attention=0, products=(), rest=(), regions=(), parameters=0, trained=0)
    cost = decide_by_cost(gpu, assumed, list(calls), forced_bf16, request.recipes, eager=True)
    decided = plan_from_costs(rule, cost)
    note = f"{tokens} tokens assumed on {gpu.name}"
    decisions = {
        fqn: replace(d, reason=f"{d.reason}; {note}") if d.gain is not None else d
        for fqn, d in decided.decisions.items()
    }
    return Plan(decisions, decided.activations)


def _is_auto(precision: Precision) -> bool:
    """Return whether a precision leaves the recipe of its FP8 products to cost."""
    return isinstance(precision, Precision) and precision.recipe == AUTO and precision.matmul == "fp8"
