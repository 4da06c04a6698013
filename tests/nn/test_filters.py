import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import MLP, llama
from torch import nn

import octavo
from octavo.nn import filters
from octavo.nn.filters import Layer
from octavo.numerics import Precision
from octavo.runtime.blocks import find_stacks

LINEAR = nn.Linear(64, 96)
LAYER = Layer(
    fqn="layers.3.mlp.up", module=LINEAR, names=frozenset({"layers", "layers.3", "layers.3.mlp", "layers.3.mlp.up"}),
    module_path=(MLP(), LINEAR), block=(3, 4), place=(6, 9),
)  # fmt: skip
SIMPLE = [
    filters.name("*.mlp.*"), filters.name("*.q", "*.k"), filters.kind("MLP"), filters.kind(nn.Conv2d),
    filters.shape(min_in=64, multiple_of=32), filters.shape(min_out=128), filters.first(2), filters.last(1),
    filters.last(3, of="linears"), filters.where(lambda module, fqn: module.bias is not None, reason="has a bias"),
    filters.where(lambda module, fqn: False),
]  # fmt: skip
TREES = st.recursive(
    st.sampled_from(SIMPLE),
    lambda inner: st.one_of(
        inner.map(lambda a: ~a),
        st.tuples(inner, inner).map(lambda ab: ab[0] & ab[1]),
        st.tuples(inner, inner).map(lambda ab: ab[0] | ab[1]),
    ),
    max_leaves=6,
)


def reasons(model):
    return {row.name: row.reason for row in octavo.report(model)}


@pytest.mark.parametrize(
    ("rule", "selected", "reason"),
    [
        (filters.name("*.mlp.*"), True, "name matches '*.mlp.*'"),
        (filters.name("*.q", "layers.3"), True, "name matches 'layers.3'"),
        (filters.name("*.q", "*.k"), False, "name does not match '*.q' or '*.k'"),
        (filters.kind("MLP"), True, "inside a MLP"),
        (filters.kind(nn.Conv2d, nn.Linear), True, "is a Linear"),
        (filters.kind(nn.Conv2d, "Attention"), False, "neither is nor is inside a Conv2d or Attention"),
        (filters.shape(min_in=65), False, "in_features 64 < 65"),
        (filters.shape(max_out=95), False, "out_features 96 > 95"),
        (filters.shape(multiple_of=64), False, "out_features 96 is no multiple of 64"),
        (filters.shape(min_in=64, max_in=64, multiple_of=16), True,
         "in_features 64 ≥ 64, in_features 64 ≤ 64, multiples of 16"),
        (filters.last(1), True, "in the last of 4 blocks"),
        (filters.first(3), False, "not in the first 3 of 4 blocks"),
        (filters.last(2, of="linears"), False, "not in the last 2 of 9 linears"),
        (filters.last(3, of="linears"), True, "in the last 3 of 9 linears"),
        (filters.where(lambda m, n: m.out_features > 90, reason="wide"), True, "wide"),
        (filters.where(lambda m, n: m.out_features > 99, reason="wide"), False, "not wide"),
        (filters.name("*.mlp.*") & ~filters.last(2) | filters.shape(min_in=512), False,
         "in the last 2 of 4 blocks, in_features 64 < 512"),
        (filters.name("*.mlp.*") & ~filters.first(2) | filters.shape(min_in=512), True,
         "name matches '*.mlp.*', not in the first 2 of 4 blocks"),
        (filters.first(1) | filters.last(1), True, "in the last of 4 blocks"),
        (filters.name("*.q") & (lambda m, n: 1 / 0), False, "name does not match '*.q'"),  # which decides: no call
        ((lambda m, n: m.out_features > 90) & filters.last(1), True, "in the last of 4 blocks"),
        ((lambda m, n: m.out_features > 99) | filters.first(1), False, "not in the first of 4 blocks"),
    ],
)  # fmt: skip
def test_a_rule_says_what_decides(rule, selected, reason):
    assert rule.match(LAYER) == (selected, reason)


@settings(max_examples=30)
@given(TREES, TREES)
def test_the_algebra_holds_for_verdicts_and_reasons(a, b):
    matches = (a & b).match(LAYER), (a | b).match(LAYER), (~a).match(LAYER)
    assert [match.selected for match in matches] == [
        a.match(LAYER).selected and b.match(LAYER).selected,
        a.match(LAYER).selected or b.match(LAYER).selected,
        not a.match(LAYER).selected,
    ]
    assert (~~a).match(LAYER) == a.match(LAYER)
    assert (~(a & b)).match(LAYER) == (~a | ~b).match(LAYER)
    assert (~(a | b)).match(LAYER) == (~a & ~b).match(LAYER)
    assert (a & a).match(LAYER).selected == (a | a).match(LAYER).selected == a.match(LAYER).selected


def test_the_report_tells_what_the_filter_found():
    model = llama(num_hidden_layers=4)
    octavo.convert(model, filter=filters.name("*.mlp.*") & ~filters.last(2) | filters.shape(min_in=96), verbose=False)
    reason_of = reasons(model)
    assert reason_of["model.layers.0.mlp.up_proj"] == "linear: name matches '*.mlp.*', not in the last 2 of 4 blocks"
    assert reason_of["model.layers.3.mlp.down_proj"] == "linear: in_features 96 ≥ 96"
    excluded = reason_of["model.layers.3.mlp.up_proj"]
    assert excluded == "excluded by filter: in the last 2 of 4 blocks, in_features 64 < 96"
    assert reason_of["lm_head"].startswith("vocabulary head")
    converted = [row.name for row in octavo.report(model) if row.converted]
    assert len(converted) == 2 * 3 + 2 and all(".mlp." in name for name in converted)
    stored = octavo.Plan.from_json(model.octavo_plan.to_json())
    assert stored["model.layers.3.mlp.up_proj"].reason == excluded


def test_recipes_by_filter():
    model = llama(num_hidden_layers=3)
    recipe = {filters.last(1): "mxfp8", filters.kind("LlamaMLP"): "blockwise"}
    octavo.convert(model, recipe, filter=lambda module, fqn: "v_proj" not in fqn, verbose=False)
    rows = {row.name: row for row in octavo.report(model)}
    assert rows["model.layers.2.mlp.up_proj"].recipe == "mxfp8"
    assert rows["model.layers.2.mlp.up_proj"].reason == "linear; mxfp8: in the last of 3 blocks"
    assert rows["model.layers.0.mlp.up_proj"].recipe == "blockwise"
    assert (rows["model.layers.0.self_attn.q_proj"].recipe, rows["lm_head"].recipe) == ("rowwise", None)
    assert rows["model.layers.2.self_attn.v_proj"].reason == "excluded by filter"
    with pytest.raises(ValueError, match=r"unknown recipe 'mxpf8' \(did you mean 'mxfp8'"):
        octavo.convert(llama(), {filters.last(1): "mxpf8"})


def test_linears_are_counted_without_heads_and_what_cannot_be_converted():
    model = llama(num_hidden_layers=2)
    octavo.convert(model, filter=filters.last(2, of="linears") | filters.first(1, of="linears"), verbose=False)
    assert [row.name for row in octavo.report(model) if row.converted] == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj",
    ]  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))


class Other(Block):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList([Block(), Other(), Block(), Other()])})
        self.towers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), Block()])  # each another: no stack
        self.mlp = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])  # no parts: no stack
        self.projector = nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def test_blocks_are_those_of_every_outermost_stack():
    model = Model()
    lists = [[*model.encoder], [*model.decoder["layers"]], [*model.towers[1].experts]]
    assert find_stacks(model) == lists
    octavo.convert(model, filter=filters.last(1), verbose=False)
    inside = {row.name for row in octavo.report(model) if row.converted}
    ends = ("encoder.1", "decoder.layers.3")
    experts = [f"{end}.experts.{i}" for end in ends for i in range(3)]
    assert {name.rpartition(".")[0] for name in inside} == {*ends, *experts, "towers.1.experts.2"}
    assert reasons(model)["projector.0"] == "excluded by filter: outside of all blocks"


def test_patterns_and_kinds_that_match_nothing_warn():
    rule = filters.name("*.mlp.*", "*dwn_proj") | filters.kind("LlamaMLQ")
    with pytest.warns(UserWarning) as warned:
        octavo.convert(llama(), filter=rule, verbose=False)
    assert [str(each.message) for each in warned] == [
        "filter pattern '*dwn_proj' matches no linear layer (did you mean 'down_proj'?)",
        "filter kind 'LlamaMLQ' matches no linear layer (did you mean 'LlamaMLP'?)",
    ]
    assert all(each.filename == __file__ for each in warned)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: filters.last(0), ValueError, "filters.last takes 1 or more; got 0"),
        (lambda: filters.first(-2), ValueError, "filters.first takes 1 or more; got -2"),
        (lambda: filters.last(1.5), TypeError, "filters.last takes an integer; got 1.5"),
        (lambda: filters.last(2, of="block"), ValueError, r"got 'block' \(did you mean 'blocks'"),
        (lambda: filters.name(), ValueError, "needs at least one argument"),
        (lambda: filters.name(["a", "b"]), TypeError, r"one by one.*got \['a', 'b'\]"),
        (lambda: filters.kind(int), TypeError, "classes of modules or their names.*got <class 'int'>"),
        (lambda: filters.shape(), ValueError, "needs at least one argument"),
        (lambda: filters.shape(min_in=0), ValueError, r"shape\(min_in=…\) takes 1 or more; got 0"),
        (lambda: filters.where("*.mlp"), TypeError, r"a rule of octavo.nn.filters.*got '\*.mlp'"),
        (lambda: filters.last(1) & 3, TypeError, "a rule of octavo.nn.filters.*got 3"),
        (lambda: "*.mlp" | filters.last(1), TypeError, "a rule of octavo.nn.filters"),
        (lambda: filters.last(1) | nn.Linear, TypeError, r"of a class, kind\(Linear\)"),
        (lambda: filters.last(1) and filters.first(1), TypeError, "combine filters with &, | and ~"),
    ],
)  # fmt: skip
def test_mistakes_are_named_where_they_are_made(make, error, message):
    with pytest.raises(error, match=message.replace("|", r"\|")):
        make()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"filter": "*.mlp.*"}, TypeError, "a rule of octavo.nn.filters"),
        ({"recipe": {"*.mlp.*": "mxfp8"}}, TypeError, "a rule of octavo.nn.filters"),
        ({"filter": filters.name("*_proj") & (lambda m, n: None)}, TypeError, "returned None for 'gate_proj'"),
        ({"filter": ~filters.last(1)}, ValueError, r"filters.last\(1\) counts blocks, and this model has none"),
        ({"precision": Precision(skip_last=1)}, ValueError, r"filters.last\(1\) counts blocks"),
    ],
)
def test_mistakes_found_by_convert_leave_the_model_as_it_was(arguments, error, message):
    model = MLP()
    with pytest.raises(error, match=message):
        octavo.convert(model, **arguments)
    assert {type(module) for module in model.modules()} == {MLP, nn.Linear}


def test_precision_says_which_layers_too():
    precision = Precision(only=("*.mlp.*", "*.q_proj"), skip_first=1, skip_last=1, min_features=64, skip=("*.up_proj",))
    model = llama(num_hidden_layers=4)
    octavo.convert(model, precision=precision, filter=lambda module, fqn: "layers.1" not in fqn, verbose=False)
    reason_of = reasons(model)
    assert [row.name for row in octavo.report(model) if row.converted] == [
        f"model.layers.2.{name}" for name in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert reason_of["model.layers.2.mlp.up_proj"] == "skipped by pattern '*.up_proj'"
    assert reason_of["model.layers.0.mlp.gate_proj"] == "excluded by filter: in the first of 4 blocks"
    unmatched = "excluded by filter: name does not match '*.mlp.*' or '*.q_proj'"
    assert reason_of["model.layers.2.self_attn.k_proj"] == unmatched
    for wrong, error in (({"only": "*.mlp.*"}, TypeError), ({"skip_last": -1}, ValueError)):
        with pytest.raises(error, match=next(iter(wrong))):
            Precision(**wrong)
