"""Strategies of cases: tables of keys with their choices, the simplest first, to which Hypothesis shrinks."""

import random
from collections.abc import Callable
from functools import cache
from typing import Any

from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from benchmarks.fuzz import experts, identity, modules
from benchmarks.fuzz.build import VIEWS, Case
from benchmarks.fuzz.modules import Part
from benchmarks.fuzz.optimizer import WRITES
from benchmarks.fuzz.threads import CONTEXTS
from benchmarks.fuzz.wrappers import EARLIER
from octavo import numerics

RECIPES = tuple(name for name, recipe in numerics.RECIPES.items() if not recipe.equalization)
EQUALIZED = tuple(name for name in numerics.RECIPES if name not in RECIPES)  # An emulated model knows no channel scales
SPECS = ("e4m3/1x128", "fp8/1x128", "e4m3/row", "e4m3/tensor", "e4m3/1x32", "e5m2/1x128", "e5m2/row")
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all_single", "all_to_all", "isend")
SIZES = (16, 1, 2, 7, 15, 17, 31, 32, 33, 64, 96, 100, 127, 128, 129, 200, 256, 300)
DTYPE = (None, None, "bf16", "bf16", "fp16")


def first(
    kind: str, fails: Callable[[Case], bool], *, seed: Any = 0, draws: int = 100, shrink: bool = True
) -> Case | None:
    """Return the simplest case of a kind for which `fails` holds, None if none of `draws` is one."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    options = settings(
        max_examples=draws, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    try:
        case = find(cases(kind), fails, settings=options, random=random.Random(f"{seed}/{kind}"))
    except NoSuchExample:
        return None
    for part in reversed(case.get("parts", ()) if shrink else ()):  # Hypothesis may leave one before that which fails
        fewer = {**case, "parts": [other for other in case["parts"] if other is not part]}
        case = fewer if fewer["parts"] and fails(fewer) else case
    return case


@cache
def cases(kind: str) -> SearchStrategy[Case]:
    return KINDS[kind]().map(lambda case: {"kind": kind, **case})


def _keys(*others: SearchStrategy[Case], **keys: Any) -> SearchStrategy[Case]:
    """Dictionaries with a choice for each key, after those of other strategies; None leaves a key out."""
    table = {name: each if isinstance(each, SearchStrategy) else st.sampled_from(each) for name, each in keys.items()}
    parts = st.tuples(*others, st.fixed_dictionaries(table))
    return parts.map(lambda parts: {k: v for part in parts for k, v in part.items() if v is not None})


def _some(chance: float, *choices: Any) -> tuple[Any, ...]:
    """Choices for a key that most cases leave out."""
    return (None,) * round(len(choices) * (0.5 / chance - 0.5)) + choices  # Hypothesis draws the first more often


def _seeded(**keys: Any) -> SearchStrategy[Case]:
    return _keys(seed=st.integers(0, 9999).map(lambda seed: seed or None), **keys)


def _model(*, benign: bool = False, most: int = 3, **keys: Any) -> SearchStrategy[Case]:
    """A model and its input; `benign` leaves out what is badly conditioned, random, or keeps side effects."""
    lengths = (None, 16, 17, 33, 64, 48) if benign else (None, 0, 1, 2, 7, 16, 17, 33, 64, 100)
    rare: Any = {
        "scale": _some(0.15, 1e-3, 30.0, 300.0, 1e-6), "outliers": _some(0.1, True), "shared": _some(0.1, True),
        "mean": _some(0.15, 1.0, 30.0, 300.0), "weight_gain": _some(0.1, 0.1, 3.0), "train": _some(0.1, False),
        "input_frozen": _some(0.05, True), "loss_scale": _some(0.1, 1e-4, 1e4),
    }  # fmt: skip
    common = {
        "dtype": DTYPE, "width": (None, 64, 48) if benign else (None, None, 16, 64, 48, 20), "batch": (None, 1, 3),
        "length": lengths, "parts": st.lists(_part(benign), min_size=1, max_size=most),
    }  # fmt: skip
    return _seeded(**{**common, **({} if benign else rare), **keys})


@cache
def _part(benign: bool) -> SearchStrategy[Part]:
    ops = ("linear", "norm", "gate", "gate", "attention", "attention", "mlp", "view")
    leaf = st.sampled_from(ops if benign else (*ops, "activation", "module", "conv", "dropout")).flatmap(
        lambda op: _leaf(op, benign))  # fmt: skip
    part = st.deferred(lambda: st.one_of(*[leaf] * (len(wraps) + 1), *wraps))
    producers = st.sampled_from(("norm", "module", "gate")).flatmap(lambda op: _leaf(op, benign))
    forms = (None, None, "scaled", *(() if benign else ("rezero", "sigmoid", "detached", "drop")))
    wraps = [
        _keys(op=("residual",), form=forms, records=(None,) if benign else _some(0.4, True), of=part),
        _keys(op=("sequence",), parts=st.tuples(_leaf("norm", benign), part).map(list)),
        _keys(op=("view",), form=tuple(VIEWS), of=producers),
    ]
    if not benign:
        # A norm of its own output has no gradient to speak of.
        repeated = part.filter(lambda part: part["op"] not in ("norm", "repeat"))
        hooks = ("forward", "pre", "backward", "backward_pre")
        wraps += [
            _keys(op=("repeat",), times=_some(0.4, 3), of=repeated),
            _keys(op=("hooked",), form=hooks, inside=_some(0.4, True), of=part),
        ]
    return part


@cache
def _leaf(op: str, benign: bool) -> SearchStrategy[Part]:
    tables: dict[str, dict[str, Any]] = {
        "norm": {"form": (*modules.KNOWN_NORMS * 2, *tuple(modules.OWN_NORMS)[:2 if benign else None]),
                 "eps": _some(0.1, 1e-5, 1e-2)},
        "gate": {"form": (*modules.KNOWN_GATES, *tuple(modules.OWN_GATES)[:3 if benign else None]),
                 "act": _some(0.3, "silu", "gelu", "gelu_tanh"), "bias": _some(0.2, 1.0, 4.0, 8.0),
                 "hidden": _some(0.2, 16, 40, 96)},
        "attention": {
            "core": (None, None, "eager", "mha") if benign else (None, None, "eager", *modules.CORES),
            "mask": modules.MASKS, "rotary": _some(0.3, "table", "learned"), "heads": _some(0.3, 4),
            "grouped": _some(0.2, True), "bias": _some(0.2, True), "scale": _some(0.3, 4.0, 30.0, 200.0),
            "key_bias": _some(0.2, 3.0, 100.0), "qk_norm": _some(0.2, True), "shift": _some(0.15, True),
            "dropout": _some(0.1, 0.2),
        },
        "mlp": {"act": tuple(modules.ACTIVATIONS)[:4 if benign else None], "dropout": _some(0.2, 0.2)},
        "view": {"form": tuple(VIEWS)},
        "linear": {"form": (None, "frozen", *(() if benign else ("weight_norm", "spectral_norm", "transposed_weight"))),
                   "bias": _some(0.3, False)},
        "activation": {"form": tuple(modules.FUNCTIONS), "factor": _some(0.3, 0.1, 3.0, 8.0)},
        "module": {"form": tuple(modules.ACTIVATIONS)}, "conv": {"form": ("patch", "depthwise", "full")}, "dropout": {},
    }  # fmt: skip
    harsh = ("scale", "key_bias", "qk_norm", "shift", "dropout", *(("bias",) if op == "gate" else ()))
    return _keys(op=(op,), **{k: v for k, v in tables[op].items() if not (benign and k in harsh)})


def _activations() -> SearchStrategy[Case]:
    changes = _keys(op=("act_fn", "dropout", "instance", "class", "freeze", "eval"), index=st.integers(0, 9))
    after = st.lists(
        changes, max_size=2, unique_by=lambda change: change["op"] in ("instance", "class") or change["op"]
    )
    after = st.one_of(st.none(), st.none(), after.map(lambda changes: changes or None))
    return _model(autocast=_some(0.2, True), activations=_some(0.3, "fused"), after=after)


def _linear() -> SearchStrategy[Case]:
    layer = _seeded(
        form=("layer",), recipe=(*RECIPES, *EQUALIZED), dtype=DTYPE, rows=(*SIZES, 0, 3), inputs=SIZES, outputs=SIZES,
        x=(None, None, "tiny", "large", "outliers", "zero_rows", "spread_rows"), siblings=_some(0.2, 2),
        g=(None, None, "tiny", "spread_rows", "zero_rows"), bias=_some(0.3, False), layout=_some(0.2, "transposed"),
        x_layout=_some(0.2, "transposed"), frozen=_some(0.15, "weight", "input"), keep_weights=_some(0.1, True),
        bad=_some(0.1, "nan", "inf"),
    )  # fmt: skip
    return st.one_of(layer, layer, _model(benign=True, form=("model",), recipe=RECIPES))


def _optimizer() -> SearchStrategy[Case]:
    shapes = ([64, 256], [7, 128], [3, 5, 30], [96], [1], [0, 64], [], [33, 65], [5, 64], [2, 3, 8, 8], [40, 200])
    parameter = _keys(
        shape=shapes, dtype=(None, "bf16", "bf16"), layout=_some(0.4, "transposed", "strided", "reversed"),
        grad_layout=_some(0.3, "transposed", "expanded"),
        grad=_some(0.4, "tiny", "large", "spread", "zeros", "none", "zero_rows", "constant"),
    )  # fmt: skip
    return _seeded(
        params=st.lists(parameter, min_size=1, max_size=4), steps=st.integers(1, 6), states=("fp8", "fp32"),
        master=("remainder", "remainder", "fp32", "none"), lr=(1e-3, 1e-2, 1e-4), weight_decay=(0.0, 0.1),
        betas=([0.9, 0.999], [0.9, 0.95], [0.0, 0.99]), stochastic_rounding=_some(0.3, False),
        maximize=_some(0.2, True), bad=_some(0.25, "nan", "nan_all_ones", "inf"), resume=_some(0.3, True),
        nonfinite=("raise", "skip", "ignore"), writes=st.none() | st.dictionaries(
            st.sampled_from("01234"), st.sampled_from(tuple(WRITES)), min_size=1, max_size=3),
        muon=_some(0.2, True),
    )  # fmt: skip


def _comm() -> SearchStrategy[Case]:
    shapes = ([2, 128], [4, 96], [6, 130], [2, 1], [8, 3, 7], [0, 64], [10], [1, 1], [2, 257], [3, 5])
    values = (None, None, None, "tiny", "subnormal", "spread", "outliers", "zeros", "large", "nan", "inf")
    return _seeded(
        collective=(*COLLECTIVES, "feedback"), shape=shapes, dtype=DTYPE, spec=(*SPECS, *SPECS[:2]), values=values,
        reduce=_some(0.3, "avg"), layout=_some(0.3, "transposed", "strided"), asynchronous=_some(0.3, True),
        splits=st.none() | st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2), min_size=2, max_size=2),
    )  # fmt: skip


def _wrapped() -> SearchStrategy[Case]:
    matmul = _keys(matmul=("fp8",), recipe=RECIPES, activations=(None, "fp8"))
    precision = matmul | st.just({"activations": "fp8"})
    gathers = matmul.filter(lambda p: p["recipe"] not in ("blockwise", "mxfp8"))

    def wrapper(*names: str, **keys: Any) -> SearchStrategy[Case]:
        return _model(benign=True, **{"wrapper": names, "precision": precision, **keys})

    halves = {"dtype": (None, "bf16"), "earlier": _some(0.5, *EARLIER)}
    return st.one_of(
        wrapper("checkpoint", "checkpoint_reentrant", each=_some(0.3, True), autocast=_some(0.3, True)),
        wrapper("keep_weights", steps=(2, 3, 4), optimizer=_some(0.3, "torch"), writes=_some(0.5, *WRITES)),
        wrapper("fully_shard", dtype=halves["dtype"]), wrapper("parallelize", **halves), wrapper("compile"),
        wrapper("parallelize", precision=gathers, fp8_comm=("on", "gather"), **halves),
    )  # fmt: skip


def _experts() -> SearchStrategy[Case]:
    counts = (0, 1, 7, 16, 33, 64)
    return _seeded(
        family=experts.FAMILIES, experts=(8, 4, 16), k=(2, 1, 3), hidden=(64, 32, 100, 128, 192),
        inner=(96, 32, 48, 130), tokens=st.tuples(st.sampled_from(counts), st.sampled_from(counts)).map(list),
        dtype=DTYPE[:4], recipe=("rowwise", *RECIPES), routing=("random", *experts.ROUTINGS),
        values=(None, None, None, "tiny", "spread", "nan", "inf"),
    )  # fmt: skip


def _converted(**keys: Any) -> SearchStrategy[Case]:
    return _model(benign=True, most=2, precision=({"matmul": "fp8"}, {"activations": "fp8"}, {
        "matmul": "fp8", "activations": "fp8"}), **keys)  # fmt: skip


def _threads() -> SearchStrategy[Case]:
    spans = st.tuples(st.sampled_from(tuple(CONTEXTS)), st.integers(0, 3), st.integers(1, 3)).map(list)
    return _converted(spans=st.none() | st.lists(spans, min_size=1, max_size=4), forwards=(None, 3))


def _derivatives() -> SearchStrategy[Case]:
    return _converted(penalty=(None, "norm", "hessian"), head=_some(0.3, True), by=_some(0.3, "parameter"),
                      disabled=_some(0.3, True), checkpoint=_some(0.2, True))  # fmt: skip


def _identity() -> SearchStrategy[Case]:
    others = st.tuples(*(st.sampled_from((None, *choices)) for choices in identity.OTHERS)).map(
        lambda chosen: list(filter(None, chosen)) or None)  # fmt: skip
    own = _keys(base=tuple(identity.BASES), first=identity.FIRST, others=others)
    return _converted(own=st.none() | own | own)


KINDS: dict[str, Callable[[], SearchStrategy[Case]]] = {
    "activations": _activations, "linear": _linear, "optimizer": _optimizer, "comm": _comm, "wrappers": _wrapped,
    "experts": _experts, "derivatives": _derivatives, "identity": _identity, "threads": _threads,
}  # fmt: skip
