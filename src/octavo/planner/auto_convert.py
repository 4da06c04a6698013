"""convert, the one line: decide for each linear layer, by rule or by cost on a GPU, then convert in place."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import nn

from octavo.nn.convert import apply_plan, check_unconverted, nothing_converted, rule_plan
from octavo.nn.filters import Filter, ModuleFilter
from octavo.nn.frozen import check_frozen, check_weight_only_request, with_weight_only
from octavo.nn.report import PLAN_ATTRIBUTE, check_module, report
from octavo.numerics.plan import Plan
from octavo.numerics.precision import AUTO, Precision
from octavo.numerics.recipe import Recipe

if TYPE_CHECKING:
    from octavo.planner.devices import Gpu

M = TypeVar("M", bound=nn.Module)

ASSUMED_TOKENS = 8192  # Assumed tokens per call of a linear layer
_HINTS = {
    "plan": ": read one with octavo.Plan.from_json(text)",
    "precision": ": make one with octavo.Precision.level('fp8')",
}


def convert(
    model: M,
    recipe: str | Recipe | Mapping[Filter | ModuleFilter, str | Recipe] | None = None,
    *,
    precision: Precision | None = None,
    plan: Plan | None = None,
    skip: Sequence[str] = (),
    filter: Filter | ModuleFilter | None = None,
    keep_weights: bool = False,
    activations: Literal["bf16", "fused", "fp8"] = "bf16",
    frozen: Literal["bf16", "fp8"] = "bf16",
    weight_only: Literal["auto"] | Sequence[str] = AUTO,
    device: "str | Path | Mapping[str, Any] | Gpu | None" = None,
    tokens: int = ASSUMED_TOKENS,
    verbose: bool = True,
) -> M:
    """Convert the linear layers of a model to FP8, in place: on a GPU those that gain there, else all.

    Without a recipe and a plan, and for a GPU that `octavo.planner.devices` knows, each layer gets the recipe that is
    predicted fastest for `tokens`, or stays in bf16; if none gains, the model is left as it is, with a warning.
    Otherwise every `nn.Linear` and Transformers `Conv1D` is converted, by default to `rowwise`, except vocabulary heads
    (`octavo.convert(model.lm_head, "rowwise")` converts one) and layers too narrow to gain (LoRA adapters, routers,
    classifiers). `octavo.report(model)` lists each layer with its recipe and reason.

    Args:
        model: Any module, on any device including meta; a linear layer itself is fine.
        recipe: A name in `octavo.RECIPES` or a `Recipe`, for every layer regardless of its gain; `"auto"` is None. Or
            recipes by filter, as `{filters.last(2): "rowwise_hp_wgrad"}`: that of the first match, else the default.
        precision: The whole request in one object, instead of `recipe`, `skip`, `keep_weights` and `activations`.
        plan: Decisions of `octavo.plan` or `octavo.Plan.from_json`, instead of all other arguments.
        skip: Name patterns of layers to leave alone, as `["*.o_proj", "model.layers.0"]`.
        filter: A filter of `octavo.nn.filters`, such as `filters.name("*.mlp.*") & ~filters.last(2)`, or a callable
            `filter(module, fqn) -> bool`, True to convert, for layers that no other rule excludes.
        keep_weights: Quantize each weight once per forward and backward, not twice (1 byte per parameter), and once for
            all micro-batches inside `octavo.nn.accumulating(model)`; not of sharded weights. See `octavo.nn.weights`.
        activations: `"fp8"`: norms, gated MLPs and activation functions with recognized code save tensors for backward
            in FP8; other modules do so where it is safe (docs/memory.md). Not under torch.compile. `"fused"`: norms and
            gated MLPs with recognized code run as one kernel in eager mode (docs/performance.md). For either alone:
            `precision=Precision(matmul="bf16", activations="fused")`.
        frozen: `"fp8"`: weights of frozen linears, as under LoRA, exist in FP8 only: 1 byte per parameter. If none is
            frozen, all are frozen. By rule, whatever the gain in time; for recipes with one FP8 form of W.
        weight_only: Name patterns of layers whose resident weights are dequantized for products in the input's dtype;
            `()` for none. `"auto"`: projections of attention whose recipe no filter chose.
        device: The GPU to decide for, as of `octavo.plan`: a name such as `"h100"`, a file or a table. None: this
            machine's GPU, if it has one. `"cpu"`: decide without costs, also on a machine with a GPU.
        tokens: Tokens per call of a layer on one GPU; used only for the decision.
        verbose: Print a one-line summary on stderr.

    Returns:
        The same model.

    Raises:
        ValueError: For an unknown recipe or GPU, a model converted already, contradicting arguments, a filter that
            raises or counts blocks in a model without blocks, tokens below 1, or if no layer can be converted.
        TypeError: If `model` is not a module, a filter is not one, `skip` is a string, `device` has another type, or
            weights have no FP8 format. After any error the model is unchanged.

    Examples:
        >>> model = octavo.convert(torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)))
        >>> model(torch.randn(8, 64)).sum().backward()
    """
    _check_request(model, recipe, precision, plan, skip, filter, keep_weights, activations, device, tokens, frozen)
    check_weight_only_request(weight_only, frozen, plan)
    if plan is not None:
        return apply_plan(model, plan, keep_weights=keep_weights, frozen=frozen, verbose=verbose)
    keep_weights |= precision is not None and precision.keep_weights
    no_gpu = local_gpu_name() is None if device is None else device == "cpu"
    if no_gpu or frozen == "fp8" or not _is_auto(recipe, precision):
        recipe = None if recipe == AUTO else recipe
        by_rule = rule_plan(model, recipe, precision=precision, skip=skip, filter=filter, activations=activations)
        by_rule = with_weight_only(by_rule, weight_only, model) if frozen == "fp8" else by_rule
        return apply_plan(model, by_rule, keep_weights=keep_weights, frozen=frozen, verbose=verbose)
    precision = precision or Precision(recipe=AUTO, skip=tuple(skip), activations=activations)
    by_cost, where = _plan_on(device, model, precision, filter, tokens)
    if by_cost.converted or by_cost.activation_modules:
        return apply_plan(model, by_cost, keep_weights=keep_weights, verbose=verbose)
    return _left_alone(model, by_cost, where, tokens, verbose)


def _left_alone(model: M, plan: Plan, where: str, tokens: int, verbose: bool) -> M:
    warnings.warn(
        f"octavo: no layer of this model is predicted to gain from FP8 on {where} with {tokens} tokens, so the model "
        "is unchanged; octavo.report(model) has the figures. octavo.convert(model, 'rowwise') converts it anyway",
        UserWarning, stacklevel=3,
    )  # fmt: skip
    vars(model)[PLAN_ATTRIBUTE] = plan  # after the warning, which may be an error
    if verbose:
        print(f"octavo: {report(model).summary}", file=sys.stderr)
    return model


def _check_request(
    model: nn.Module, recipe: object, precision: Precision | None, plan: Plan | None, skip: Sequence[str],
    filter: object, keep_weights: bool, activations: str, device: object, tokens: int, frozen: str,
) -> None:  # fmt: skip
    check_frozen(frozen)
    check_module("convert", model)
    check_unconverted(model)
    for name, argument, expected in (("plan", plan, Plan), ("precision", precision, Precision)):
        if argument is not None and not isinstance(argument, expected):
            raise TypeError(f"{name} is an octavo.{expected.__name__}; got {argument!r}{_HINTS[name]}")
    if isinstance(skip, str):
        raise TypeError(f"skip is a list of name patterns; got the string {skip!r}: write skip=[{skip!r}]")
    selects = bool(skip) or activations != "bf16"
    kind = str(device).partition(":")[0].lower() if isinstance(device, str | torch.device) else ""
    for is_refused, message in (
        (frozen == "fp8" and device not in (None, "cpu"),
         "frozen='fp8' chooses layers by rule, for their memory: leave out device"),
        (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1,
         f"tokens is an integer of 1 or more; got {tokens!r}"),
        (plan is not None and (selects or any(each is not None for each in (recipe, precision, filter, device))),
         "plan replaces recipe, precision, skip, filter, activations and device: pass plan alone, or those without "
         "plan"),
        (precision is not None and (recipe is not None or selects or keep_weights),
         "precision holds recipe, skip, keep_weights and activations: set them there, or pass them without precision"),
        (kind in ("cpu", "cuda", "gpu") and device != "cpu",
         f"device={device!r} names no GPU: leave it out for this machine's, or give a name such as 'h100'; 'cpu' "
         "decides without costs"),
        (device not in (None, "cpu") and not _is_auto(recipe, precision),
         "device decides which layers gain on a GPU, but this request names the recipe or has no FP8 products: leave "
         "out device, or use recipe='auto'"),
    ):  # fmt: skip
        if is_refused:
            raise ValueError(message)
    if plan is not None and not (plan.converted or plan.activation_modules):
        raise nothing_converted(plan)


def _is_auto(recipe: object, precision: Precision | None) -> bool:
    if precision is None:
        return recipe is None or recipe == AUTO
    return precision.recipe == AUTO and precision.matmul == "fp8"


def local_gpu_name() -> str | None:
    """Return the name of this machine's GPU, as its driver reports it; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _plan_on(
    device: "str | Path | Mapping[str, Any] | Gpu | None", model: nn.Module, precision: Precision,
    filter: Filter | ModuleFilter | None, tokens: int,
) -> tuple[Plan, str]:  # fmt: skip
    """Plan a model for a GPU, None for this machine's; return the plan and the name of the GPU."""
    from octavo.planner.decide import decide_by_rule
    from octavo.planner.devices import find_gpu, gpu_by_driver_name, with_measurements

    name = local_gpu_name() or ""
    properties = gpu_by_driver_name(name) if device is None else find_gpu(device)
    if properties is None:
        rule = decide_by_rule(model, precision, filter).plan
        if not rule.converted:
            raise nothing_converted(rule)
        note = f"by rule: {name} is not in the table of GPUs, so no cost is known"
        decisions = {f: replace(d, reason=f"{d.reason}; {note}") if d.recipe else d for f, d in rule.decisions.items()}
        return Plan(decisions, rule.activations), name
    plan = plan_on_gpu(model, with_measurements(properties, None), precision, filter, tokens)
    return plan, name if device is None else properties.name


def plan_on_gpu(
    model: nn.Module, gpu: "Gpu", precision: Precision, filter: Filter | ModuleFilter | None, tokens: int
) -> Plan:  # fmt: skip
    """Plan a model by cost on a GPU, which need not be present; for an assumed number of tokens per call."""
    from octavo.nn.filters import sizes
    from octavo.planner.decide import decide_by_rule
    from octavo.planner.roofline import LinearCall

    rule = decide_by_rule(model, precision, filter)
    if not rule.plan.converted:
        raise nothing_converted(rule.plan)
    calls = {}
    for fqn in rule.linears:
        module = model.get_submodule(fqn)
        inner, outer = sizes(module)
        trained = all(p.requires_grad for p in module.parameters(recurse=False) if p.ndim == 2)
        calls[fqn] = (LinearCall(m=tokens, k=inner, n=outer, wgrad=trained),)
    by_cost, _ = rule.by_cost(gpu, calls, eager=True)
    note = f"{tokens} tokens assumed on {gpu.name}"
    decisions = {
        fqn: replace(d, reason=f"{d.reason}; {note}") if d.gain is not None else d
        for fqn, d in by_cost.decisions.items()
    }
    return Plan(decisions, by_cost.activations)
