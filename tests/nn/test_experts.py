"""Experts of a mixture in FP8: found by structure and code, as accurate as FP8 linears, undone exactly."""

import copy
import importlib
import inspect
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import octavo
from octavo.nn import filters, weights
from octavo.nn.experts import _decorated_code, experts_shape, looks_like_experts
from octavo.nn.select import obstacle
from octavo.numerics import sqnr
from support.moe_models import FAMILIES, Checkpointed, experts_of, mixture, results, routed
from tensors import same

NAME = "model.layers.1.mlp.experts"


def converted(experts, recipe="rowwise", **options):
    return octavo.convert(copy.deepcopy(experts), recipe, verbose=False, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_its_own_forward_in_output_and_every_gradient(family):
    experts = experts_of(family)
    batch = routed(65)
    expected, actual = results(experts, *batch), results(converted(experts), *batch)
    assert expected.keys() == actual.keys()
    assert min(sqnr(expected[name], actual[name]) for name in expected) > 21
    with octavo.disabled():
        off = results(converted(experts), *batch)
    assert same(expected, off)


@pytest.mark.parametrize(("family", "tokens"), [("mixtral", 0), ("gpt_oss", 0), ("gpt_oss", 1), ("mixtral", 7)])
def test_few_tokens_leave_experts_without_rows_and_their_gradients_zero(family, tokens):
    experts = experts_of(family).bfloat16()
    batch = routed(tokens, dtype=torch.bfloat16)
    actual = results(converted(experts), *batch)
    if tokens:
        expected = results(experts, *batch)
        assert min(sqnr(expected[name], actual[name]) for name in expected) > 18
    unused = [expert for expert in range(8) if not (batch[1] == expert).any()]
    assert unused and not actual["down_proj"][unused].any() and not actual["gate_up_proj"][unused].any()
    assert actual["y"].shape == batch[0].shape and actual["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("absent", [8, 11, -1, -7])
def test_slots_of_other_ranks_change_nothing(absent):
    experts = converted(experts_of("gpt_oss"))
    x, index, weights, grad = routed(33)
    dropped = torch.rand(33, 2, generator=torch.Generator().manual_seed(1)) < 0.4
    kept = torch.where(dropped, 0.0, weights)
    expected = results(experts, x, index, kept, grad)  # computed with weight 0
    x_nan = torch.where(dropped.all(1, keepdim=True), torch.inf, x)
    actual = results(experts, x_nan, torch.where(dropped, absent, index), weights, grad)
    for name in ("y", "x", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
        assert sqnr(expected[name], actual[name]) > 100, name
    assert not actual["weights"][dropped].any() and torch.equal(
        actual["weights"][~dropped], expected["weights"][~dropped]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_convert_puts_nearly_all_matrix_weights_in_fp8_and_revert_undoes_it(family):
    model = mixture(family, num_hidden_layers=3, vocab_size=16, tie_word_embeddings=False)
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = torch.arange(24).view(2, 12) % 16
    expected = model(input_ids=tokens).logits
    octavo.convert(model, verbose=False)
    report = octavo.report(model)
    rows = [row for row in report if row.experts]
    assert sum(row.weights for row in report if row.converted) / sum(row.weights for row in report) >= 0.95
    assert all(r.reason.startswith("experts: 8 x (64 → ") and "in FP8 (rowwise)" in r.reason for r in rows)
    assert f"{len(rows)} of {len(rows)} modules of experts to rowwise" in report.summary
    assert not any(row.converted for row in report if "router" in row.name or row.name.endswith("mlp.gate"))
    assert list(model.state_dict()) == list(state) and octavo.Plan.from_json(model.octavo_plan.to_json())
    assert sqnr(expected, model(input_ids=tokens).logits) > 12  # some tokens go to other experts
    assert same(state, model.state_dict())
    octavo.revert(model)
    assert before == {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_skip_filters_and_recipes_choose_experts_by_name_block_and_size():
    def rows(**options):
        model = octavo.convert(mixture("mixtral"), verbose=False, **options)
        return {row.name: row for row in octavo.report(model) if row.experts}

    other = NAME.replace("1", "0")
    chosen = rows(recipe={filters.name("*.1.mlp.experts"): "blockwise"})
    assert [chosen[other].recipe, chosen[NAME].recipe] == ["rowwise", "blockwise"]
    assert "in FP8 (blockwise, one product per expert)" in chosen[NAME].reason
    assert rows(skip=["*.0.mlp.experts"])[other].reason == "skipped by pattern '*.0.mlp.experts'"
    assert rows(filter=~filters.last(1))[NAME].reason == "excluded by filter: in the last of 2 blocks"
    assert rows(filter=~filters.shape(min_out=96))[NAME].reason == "excluded by filter: out_features 96 ≥ 96"
    row = rows(recipe="rowwise_equalized")[NAME]
    assert row.recipe == "rowwise" and "without channel equalization" in row.reason
    precision = octavo.Precision(matmul="bf16", activations="fp8")
    assert rows(precision=precision)[NAME].reason == "precision level bf16"


def test_activations_in_fp8_save_less_and_give_close_gradients():
    experts = experts_of("mixtral", hidden_size=128, intermediate_size=256)
    batch = routed(64, hidden=128)
    sizes = {}

    def saved(module, name):
        seen = {}
        pack = lambda t: seen.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t  # noqa: E731
        parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            actual = results(module, *batch)
        sizes[name] = sum(size for pointer, size in seen.items() if pointer not in parameters)
        return actual

    parent = nn.ModuleDict({"experts": experts})
    plain = saved(experts, "plain")
    products = saved(octavo.convert(copy.deepcopy(parent), verbose=False)["experts"], "products")
    model = octavo.convert(copy.deepcopy(parent), activations="fp8", verbose=False)
    stored = saved(model["experts"], "stored")
    assert torch.equal(products["y"], stored["y"])
    assert min(sqnr(plain[name], stored[name]) for name in plain) > 20
    assert sizes["stored"] < 0.6 * sizes["products"] < 0.6 * sizes["plain"]
    assert [row.activation_storage for row in octavo.report(model).activations if row.name == "experts"] == [
        "saved_tensors"
    ]


@pytest.mark.parametrize(
    ("family", "recipe"), [("mixtral", "rowwise"), ("gpt_oss", "rowwise"), ("gpt_oss", "blockwise")]
)
def test_kept_weights_change_no_bit_and_are_quantized_once(family, recipe, monkeypatch):
    experts, batch = experts_of(family), routed(33)
    expected = results(converted(experts, recipe), *batch)
    keeping = converted(experts, recipe, keep_weights=True)
    casts = mock.Mock(wraps=weights._cast)
    monkeypatch.setattr(weights, "_cast", casts)
    products = 2 if recipe == "rowwise" else 16
    assert same(expected, results(keeping, *batch)) and casts.call_count == products
    casts.reset_mock()
    with octavo.nn.accumulating(keeping):
        assert same(expected, results(keeping, *batch)) and same(expected, results(keeping, *batch))
        # Grouped products cast a copy of [E,K,N], of which nothing proves that it is not stale.
        shared = recipe != "rowwise" or not keeping.is_transposed
        assert casts.call_count == products * (1 if shared else 2)
    if shared:
        with pytest.raises(RuntimeError, match=r"first: '\.down_proj'"), octavo.nn.accumulating(keeping):
            keeping(*batch[:3])
            keeping.down_proj.data.mul_(2)
    octavo.revert(keeping)
    assert "keep_weights" not in vars(keeping)


@pytest.mark.thorough
def test_copied_checkpointed_and_compiled_experts_compute_the_same_bits():
    experts, batch = converted(experts_of("gpt_oss")), routed(33)
    expected = results(experts, *batch)
    for other in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts)), Checkpointed(experts, False)):
        assert same(expected, {name.removeprefix("inner."): t for name, t in results(other, *batch).items()})
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert same(expected, {name.removeprefix("_orig_mod."): t for name, t in results(compiled, *batch).items()})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = results(experts, *batch)
    assert all(cast[name].dtype == torch.float32 and sqnr(expected[name], cast[name]) > 25 for name in expected)


class Unknown(nn.Module):
    """Experts by structure, of no library that the package knows."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 32, 16)), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        return x


def test_experts_of_unknown_code_stay_as_they_are_with_the_reason():
    def changed(**attributes):
        experts = experts_of("mixtral")
        for name, value in attributes.items():
            setattr(experts, name, value)
        return experts

    scaled = changed()
    scaled.__class__ = type(
        "Scaled", (type(scaled),), {"forward": lambda self, *a: 2 * super(type(self), self).forward(*a)}
    )
    foreign = changed()
    foreign.config = copy.deepcopy(foreign.config)
    foreign.config._experts_implementation_internal = "mine"
    for experts, reason in (
        (Unknown(), "is not that of Transformers' use_experts_implementation"),
        (scaled, "is not that of Transformers' use_experts_implementation"),
        (changed(has_bias=True), "it has no bias parameters"),
        (changed(is_transposed=True), "do not fit its flags"),
        (changed(has_gate=False), "it has no parameter up_proj"),
        (changed(forward=lambda *a: a[0]), "replaced on the instance"),
        (changed(recipe="mine"), "an attribute 'recipe' of its own"),
        (foreign, "chooses the experts implementation 'mine'"),
    ):
        assert looks_like_experts(experts) and reason in obstacle(experts), reason
        model = octavo.convert(nn.ModuleDict({"experts": experts, "linear": nn.Linear(64, 64)}), verbose=False)
        assert reason in octavo.report(model)[0].reason and not octavo.report(model)[0].converted


class AnyConfig:
    """A config of every family: experts of small sizes, whatever its attributes are called."""

    _experts_implementation = "eager"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        values = {
            "latent": None, "expert": 4, "eps": 1e-6, "limit": 7.0, "alpha": 1.7, "act": "silu", "intermediate": 32,
        }  # fmt: skip
        return next((value for part, value in values.items() if part in name), 64)


@pytest.mark.slow
def test_every_experts_class_of_transformers_agrees_with_its_own_loop():
    import transformers

    checked = []
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if "use_experts_implementation" not in path.read_text():
            continue
        library = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for name, owner in vars(library).items():
            forward = getattr(owner, "forward", None) if inspect.isclass(owner) else None
            if getattr(forward, "__code__", None) is not _decorated_code() or owner.__module__ != library.__name__:
                continue
            torch.manual_seed(0)
            arguments = (0,) if "layer_idx" in inspect.signature(owner.__init__).parameters else ()
            experts = owner(AnyConfig(), *arguments)
            for parameter in experts.parameters():
                nn.init.normal_(parameter, std=0.2)
            count, hidden, *_ = experts_shape(experts)
            x, index, weights, _ = routed(20, count, hidden=hidden)
            expected = experts(x, index, weights)
            assert sqnr(expected, converted(experts)(x, index, weights)) > 20, name
            checked.append(name)
    assert len(checked) >= 60
