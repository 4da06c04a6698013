"""Cases at random: the same (seed, index, kind) gives the same case everywhere."""

import random
from typing import Any

from benchmarks.fuzz import experts, modules
from benchmarks.fuzz.build import VIEWS, Case
from benchmarks.fuzz.modules import Part
from benchmarks.fuzz.wrappers import EARLIER

KINDS = ("activations", "linear", "optimizer", "comm", "wrappers", "experts")
RECIPES = ("rowwise", "tensorwise", "rowwise_hp_wgrad", "blockwise", "mxfp8")
LAYER_RECIPES = (*RECIPES, "rowwise_equalized")
"""A model's layers have channel scales that its emulation does not know."""
WRAPPERS = ("checkpoint", "checkpoint_reentrant", "keep_weights", "fully_shard", "parallelize", "compile")
SPECS = ("e4m3/1x128", "fp8/1x128", "e4m3/row", "e4m3/tensor", "e4m3/1x32", "e5m2/1x128", "e5m2/row")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all_single", "all_to_all", "isend")
_WEIGHTS = (("activations", 6), ("linear", 3), ("optimizer", 2), ("comm", 1), ("wrappers", 2), ("experts", 1))


def draw(seed: int, index: int, only: str | None = None) -> Case:
    """Draw case number `index` of a seed, of one kind where `only` is given."""
    dice = Dice(f"{seed}/{index}/{only}")
    kind = only or dice.of(*[kind for kind, weight in _WEIGHTS for _ in range(weight)])
    case = {"activations": _activations, "linear": _linear, "optimizer": _optimizer, "comm": _comm,
            "wrappers": _wrapped, "experts": _experts}  # fmt: skip
    return {"kind": kind, "seed": dice.number(0, 9999), **case[kind](dice)}


class Dice(random.Random):
    """Random choices, of which the default needs no key in a case."""

    def of(self, *choices: Any) -> Any:
        return self.choice(choices)

    def number(self, low: int, high: int) -> int:
        return self.randint(low, high)

    def maybe(self, chance: float, **options: Any) -> dict[str, Any]:
        return options if self.random() < chance else {}


def _model(dice: Dice, *, benign: bool = False) -> Case:
    """A model and its input; `benign` leaves out what is badly conditioned, random, or keeps side effects."""
    width = dice.of(16, 32, 32, 64, 48, 20) if not benign else dice.of(32, 64, 48)
    parts = [_part(dice, 2, benign) for _ in range(dice.of(1, 1, 2, 2, 3))]
    case: Case = {
        "dtype": dice.of("fp32", "fp32", "bf16", "bf16", "fp16"), "width": width, "batch": dice.of(1, 2, 3),
        "length": dice.of(16, 17, 33, 64, 48) if benign else dice.of(0, 1, 2, 7, 16, 17, 33, 64, 100), "parts": parts,
    }  # fmt: skip
    if benign:
        return case
    return case | {
        **dice.maybe(0.15, scale=dice.of(1e-3, 30.0, 300.0, 1e-6)), **dice.maybe(0.1, outliers=True),
        **dice.maybe(0.15, mean=dice.of(1.0, 30.0, 300.0)), **dice.maybe(0.1, weight_gain=dice.of(0.1, 3.0)),
        **dice.maybe(0.1, shared=True), **dice.maybe(0.1, train=False), **dice.maybe(0.05, input_frozen=True),
        **dice.maybe(0.1, loss_scale=dice.of(1e-4, 1e4)),
    }  # fmt: skip


def _part(dice: Dice, depth: int, benign: bool) -> Part:
    ops = ("norm", "gate", "gate", "attention", "attention", "mlp", "view", "linear")
    ops = ops if benign else (*ops, "activation", "module", "conv", "dropout")
    wraps = ("residual", "residual", "sequence", "sequence") + (() if benign else ("repeat", "hooked"))
    op = dice.of(*ops, *(wraps * 2 if depth else ()))
    if op in ("residual", "repeat", "hooked"):
        of = _part(dice, depth - 1, benign)
        while op == "repeat" and of["op"] in ("norm", "repeat"):  # a norm of its own output has no gradient to speak of
            of = _part(dice, depth - 1, benign)
        forms = {
            "residual": ("plain", "plain", "scaled") if benign else
            ("plain", "plain", "scaled", "rezero", "sigmoid", "detached", "drop"),
            "hooked": ("forward", "pre", "backward", "backward_pre"), "repeat": (None,),
        }  # fmt: skip
        form = dice.of(*forms[op])
        options = {"hooked": {"inside": True}, "repeat": {"times": 3}, "residual": {"records": True}}[op]
        more = dice.maybe(0.0 if benign else 0.4, **options)
        return {"op": op, **({"form": form} if form else {}), **more, "of": of}
    if op == "sequence":
        norm, reader = _leaf(dice, "norm", benign), _leaf(dice, dice.of("gate", "attention", "mlp", "linear"), benign)
        return {"op": "sequence", "parts": [norm, reader]}
    if op == "view" and depth and dice.random() < 0.6:
        return {"op": "view", "form": dice.of(*VIEWS), "of": _leaf(dice, dice.of("norm", "module", "gate"), benign)}
    return _leaf(dice, op, benign)


def _leaf(dice: Dice, op: str, benign: bool) -> Part:
    if op == "norm":
        forms = (*modules.KNOWN_NORMS * 2, *(modules.OWN_NORMS[:2] if benign else modules.OWN_NORMS))
        return {"op": op, "form": dice.of(*forms), **dice.maybe(0.1, eps=dice.of(1e-5, 1e-2))}
    if op == "gate":
        forms = (*modules.KNOWN_GATES, *(modules.OWN_GATES[:3] if benign else modules.OWN_GATES))
        part = {"op": op, "form": dice.of(*forms), **dice.maybe(0.2, hidden=dice.of(16, 40, 96))}
        act = dice.maybe(0.3, act=dice.of("silu", "gelu", "gelu_tanh"))
        return part | act | ({} if benign else dice.maybe(0.2, bias=dice.of(1.0, 4.0, 8.0)))
    if op == "attention":
        return _attention(dice, benign)
    if op == "mlp":
        part = {"op": op, "act": dice.of("gelu", "silu", "relu") if benign else dice.of(*modules.ACTIVATIONS)}
        return part | ({} if benign else dice.maybe(0.2, dropout=0.2))
    if op == "view":
        return {"op": op, "form": dice.of(*VIEWS)}
    if op == "linear":
        forms = (None, "frozen") if benign else (None, "weight_norm", "spectral_norm", "frozen", "transposed_weight")
        form = dice.of(*forms)
        return {"op": op, **({"form": form} if form else {}), **dice.maybe(0.3, bias=False)}
    if op == "activation":
        forms = tuple(modules.FUNCTIONS)
        return {"op": op, "form": dice.of(*forms), **dice.maybe(0.3, factor=dice.of(0.1, 3.0, 8.0))}
    if op == "module":
        return {"op": op, "form": dice.of(*modules.ACTIVATIONS)}
    if op == "conv":
        return {"op": op, "form": dice.of("patch", "depthwise", "full")}
    return {"op": op}


def _attention(dice: Dice, benign: bool) -> Part:
    cores = ("sdpa", "sdpa", "eager", "mha") if benign else ("sdpa", "sdpa", "eager", *modules.CORES)
    part = {"op": "attention", "core": dice.of(*cores), "mask": dice.of(*modules.MASKS)}
    part |= dice.maybe(0.3, rotary=dice.of("table", "learned")) | dice.maybe(0.3, heads=4)
    part |= dice.maybe(0.2, grouped=True) | dice.maybe(0.2, bias=True)
    if not benign:
        part |= dice.maybe(0.3, scale=dice.of(4.0, 30.0, 200.0)) | dice.maybe(0.2, key_bias=dice.of(3.0, 100.0))
        part |= dice.maybe(0.2, qk_norm=True) | dice.maybe(0.15, shift=True) | dice.maybe(0.1, dropout=0.2)
    return part


def _activations(dice: Dice) -> Case:
    case = _model(dice)
    after = [_change(dice) for _ in range(dice.of(0, 0, 0, 1, 1, 2))]
    if {"instance", "class"} <= {change["op"] for change in after}:  # which of the two is called is not promised
        after = after[:1]
    autocast = dice.maybe(0.3, autocast=True) if case["dtype"] == "fp32" else {}
    return case | autocast | ({"after": after} if after else {})


def _change(dice: Dice) -> Part:
    op = dice.of("act_fn", "dropout", "instance", "class", "freeze", "eval")
    return {"op": op, **({"index": dice.number(0, 9)} if op in ("instance", "class", "freeze") else {})}


def _linear(dice: Dice) -> Case:
    if dice.random() < 0.4:
        return {"form": "model", "recipe": dice.of(*RECIPES), **_model(dice, benign=True)}
    sizes = (1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 96, 100, 127, 128, 129, 200, 256, 300)
    return {
        "form": "layer", "recipe": dice.of(*LAYER_RECIPES), "dtype": dice.of("fp32", "bf16", "bf16", "fp16"),
        "rows": dice.of(0, 1, 2, 3, *sizes), "inputs": dice.of(*sizes), "outputs": dice.of(*sizes),
        "x": dice.of("normal", "normal", "tiny", "large", "outliers", "zero_rows", "spread"),
        "g": dice.of("normal", "normal", "tiny", "spread", "zero_rows"),
        **dice.maybe(0.3, bias=False), **dice.maybe(0.2, layout="transposed"),
        **dice.maybe(0.2, x_layout="transposed"), **dice.maybe(0.2, siblings=2),
        **dice.maybe(0.15, frozen=dice.of("weight", "input")), **dice.maybe(0.1, keep_weights=True),
        **dice.maybe(0.1, bad=dice.of("nan", "inf")),
    }  # fmt: skip


def _optimizer(dice: Dice) -> Case:
    shapes = ([64, 256], [7, 128], [3, 5, 30], [96], [1], [0, 64], [], [33, 65], [5, 64], [2, 3, 8, 8], [40, 200])
    params = [
        {"shape": dice.of(*shapes), "dtype": dice.of("fp32", "bf16", "bf16"),
         **dice.maybe(0.4, layout=dice.of("transposed", "strided", "reversed")),
         **dice.maybe(0.3, grad_layout=dice.of("transposed", "expanded")),
         **dice.maybe(0.4, grad=dice.of("tiny", "large", "spread", "zeros", "none", "sparse_rows", "constant"))}
        for _ in range(dice.number(1, 4))
    ]  # fmt: skip
    return {
        "params": params, "steps": dice.number(1, 6), "states": dice.of("fp8", "fp32"),
        "master": dice.of("remainder", "remainder", "fp32", "none"), "lr": dice.of(1e-4, 1e-2, 1e-3),
        "betas": dice.of([0.9, 0.999], [0.9, 0.95], [0.0, 0.99]), "weight_decay": dice.of(0.0, 0.1),
        **dice.maybe(0.3, stochastic_rounding=False), **dice.maybe(0.2, maximize=True),
        **dice.maybe(0.25, bad=dice.of("nan", "nan_all_ones", "inf"), nonfinite=dice.of("raise", "skip", "ignore")),
        **dice.maybe(0.3, resume=True),
    }  # fmt: skip


def _comm(dice: Dice) -> Case:
    shapes = ([4, 96], [2, 128], [6, 130], [2, 1], [8, 3, 7], [0, 64], [10], [1, 1], [2, 257], [3, 5])
    return {
        "collective": dice.of(*COLLECTIVES), "shape": dice.of(*shapes), "dtype": dice.of("fp32", "bf16", "fp16"),
        "spec": dice.of(*SPECS[:2], *SPECS),
        "values": dice.of(*["normal"] * 3, "tiny", "subnormal", "spread", "outliers", "zeros", "large", "nan", "inf"),
        **dice.maybe(0.3, reduce="avg"), **dice.maybe(0.3, layout=dice.of("transposed", "strided")),
        **dice.maybe(0.3, asynchronous=True),
        **dice.maybe(0.3, splits=[[dice.number(0, 3) for _ in range(2)] for _ in range(2)]),
        **dice.maybe(0.15, collective="feedback"),
    }  # fmt: skip


def _wrapped(dice: Dice) -> Case:
    wrapper = dice.of(*WRAPPERS[:2] * 4, *WRAPPERS[2:5] * 2, WRAPPERS[5])
    precision = dice.of({"activations": "fp8"}, {"matmul": "fp8"}, {"matmul": "fp8", "activations": "fp8"})
    if wrapper in ("keep_weights", "compile"):
        precision = {"matmul": "fp8"}
    if "matmul" in precision:
        precision["recipe"] = dice.of(*RECIPES)
    case = {"wrapper": wrapper, "precision": precision, **_model(dice, benign=True)}
    if wrapper == "keep_weights":
        case |= {"steps": dice.number(2, 4), **dice.maybe(0.3, optimizer="torch")}
    if wrapper in ("fully_shard", "parallelize"):
        case["dtype"] = dice.of("fp32", "bf16")
    if wrapper == "parallelize" and precision.get("recipe", "rowwise") not in ("blockwise", "mxfp8"):
        case |= dice.maybe(0.6, fp8_comm=dice.of("on", "gather"))
    if wrapper == "parallelize":
        case |= dice.maybe(0.5, earlier=dice.of(*EARLIER))
    if wrapper.startswith("checkpoint"):
        case |= {**dice.maybe(0.3, each=True), **dice.maybe(0.3, autocast=True)}
    return case


def _experts(dice: Dice) -> Case:
    count = dice.of(2, 4, 8, 8, 16)
    return {
        "family": dice.of(*experts.FAMILIES), "experts": count, "k": dice.number(1, min(3, count)),
        "hidden": dice.of(32, 64, 100, 128, 192), "inner": dice.of(32, 48, 96, 130),
        "tokens": [dice.of(0, 1, 7, 16, 33, 64) for _ in range(2)], "dtype": dice.of("fp32", "bf16", "bf16"),
        "recipe": dice.of("rowwise", "rowwise", *RECIPES), "routing": dice.of("random", *experts.ROUTINGS),
        "values": dice.of("normal", "normal", "normal", "tiny", "spread", "nan", "inf"),
    }  # fmt: skip
