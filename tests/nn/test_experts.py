"""Experts of a mixture in FP8: found by structure and code, as accurate as FP8 linears, undone exactly."""

import copy
import importlib
import inspect
import pickle
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.kernels import grouped, registry
from octavo.kernels.grouped import GROUPED_MM, is_grouped, reference
from octavo.nn import ResidentWeight, change_recipe, filters, grouped_linear, linear, weights
from octavo.nn.experts import STACKED, _decorated_code, experts_shape, looks_like_experts
from octavo.nn.memory_audit import saved_for_backward
from octavo.nn.select import obstacle
from octavo.numerics import sqnr
from octavo.runtime.torch_compat import FakeTensorMode
from octavo.tensor import ScaledTensor
from support.moe_models import FAMILIES, Checkpointed, experts_of, mixture, resident, results, routed
from support.refusals import refused
from tensors import same, saved_and_loaded

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
    assert not actual["weights"][dropped].any()
    assert torch.equal(actual["weights"][~dropped], expected["weights"][~dropped])


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
    parent, batch, runs = nn.ModuleDict({"experts": experts}), routed(64, hidden=128), []
    for activations in (None, "bf16", "fp8"):
        model = copy.deepcopy(parent)
        if activations is not None:
            octavo.convert(model, activations=activations, verbose=False)
        with saved_for_backward(model) as saved:
            runs.append((saved, results(model["experts"], *batch)))
    (plain_size, plain), (products_size, products), (stored_size, stored) = ((s.bytes, actual) for s, actual in runs)
    assert torch.equal(products["y"], stored["y"])
    assert min(sqnr(plain[name], stored[name]) for name in plain) > 20
    assert stored_size < 0.6 * products_size < 0.6 * plain_size
    rows = octavo.report(model).activations
    assert [row.activation_storage for row in rows if row.name == "experts"] == ["saved_tensors"]


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


# --- one weight per expert: the results of a linear for each expert alone ---

COUNTS = [5, 0, 1, 33, 16]
TAIL = 3


def operands(dtype=torch.float32, biased=True, n=70, k=40, tail=TAIL):
    """Rows with outliers, weights whose experts differ in size, and a gradient; the tail is NaN."""
    torch.manual_seed(0)
    experts, m = len(COUNTS), sum(COUNTS) + tail
    x, g = torch.randn(m, k), torch.randn(m, n) * torch.rand(m, 1)
    x[sum(COUNTS) :] = g[sum(COUNTS) :] = torch.nan
    w = torch.randn(experts, n, k) * torch.tensor([1.0, 3, 0.01, 100, 1]).view(-1, 1, 1)
    bias = torch.randn(experts, n) if biased else None
    offsets = torch.tensor(COUNTS).cumsum(0).int()
    return *(None if t is None else t.to(dtype) for t in (x, w, bias, g)), offsets


def differentiated(x, w, bias, g, *arguments, function=grouped_linear):
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, w, bias)]
    y = function(*leaves, *arguments)
    y.backward(g)
    return y.detach(), *(None if t is None else t.grad for t in leaves)


def per_expert(x, w, bias, g, recipe):
    """The same from a linear for each expert."""
    y, dx = torch.zeros_like(g), torch.zeros_like(x)
    dw, dbias = torch.zeros_like(w), None if bias is None else torch.zeros_like(bias)
    start = 0
    for expert, count in enumerate(COUNTS):
        rows = slice(start, start + count)
        own = None if bias is None else bias[expert]
        y[rows], dx[rows], dw[expert], db = differentiated(x[rows], w[expert], own, g[rows], recipe, function=linear)
        if dbias is not None:
            dbias[expert] = db
        start += count
    return y, dx, dw, dbias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("name", [name for name, recipe in octavo.RECIPES.items() if not recipe.equalization])
def test_each_expert_gets_the_bits_of_its_own_linear_and_nothing_reads_the_tail(name, biased, dtype):
    x, w, bias, g, offsets = operands(dtype, biased)
    expected = per_expert(x, w, bias, g, octavo.RECIPES[name])
    assert same(expected, differentiated(x, w, bias, g, offsets, octavo.RECIPES[name]))
    stored = w.transpose(1, 2).contiguous()
    y, dx, dw, db = differentiated(x, stored, bias, g, offsets, octavo.RECIPES[name], True)
    assert dw.shape == stored.shape and same(expected, (y, dx, dw.transpose(1, 2), db))


def test_one_quantization_of_x_and_three_products_serve_all_experts(monkeypatch):
    calls = []
    for owner, op in ((torch.ops.octavo, "quantize"), (grouped, "_GROUPED_MM")):
        original = getattr(owner, op)
        counted = lambda *a, name=op, run=original: calls.append((name, a[0].shape)) or run(*a)  # noqa: E731
        monkeypatch.setattr(owner, op, counted)
    x, w, _, g, offsets = operands(biased=False)
    differentiated(x, w, None, g, offsets, octavo.RECIPES["rowwise"])
    assert sum(name == "_GROUPED_MM" for name, _ in calls) == 3
    assert sum(name == "quantize" and shape == x.shape for name, shape in calls) == 1


def test_operands_in_both_memory_orders_as_on_gpus_give_the_same_bits(monkeypatch):
    x, w, bias, g, offsets = operands(tail=0)
    expected = differentiated(x, w, bias, g, offsets, octavo.RECIPES["rowwise"])
    monkeypatch.setattr(registry, "GPU_TYPES", {"cuda", "cpu"})
    monkeypatch.setattr("octavo.kernels.gemm.GPU_TYPES", {"cuda", "cpu"})
    y, dx, dw, db = differentiated(x, w, bias, g, offsets, octavo.RECIPES["rowwise"])
    assert torch.equal(y, expected[0]) and torch.equal(db, expected[3])
    assert sqnr(expected[1], dx) > 120 and sqnr(expected[2], dw) > 120  # another order of summation


def accuracy():
    """The least SQNR of the three products of an expert against float64."""
    x, w, _, g, offsets = operands(biased=False, n=256, k=192, tail=0)
    y, dx, dw, _ = differentiated(x, w, None, g, offsets, octavo.RECIPES["rowwise"])
    least, start = [], 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start + 1:
            xe, we, ge = x[start:end].double(), w[expert].double(), g[start:end].double()
            least += [sqnr(xe @ we.T, y[start:end]), sqnr(ge @ we, dx[start:end]), sqnr(ge.T @ xe, dw[expert])]
        start = end
    return min(least)


def test_products_are_accurate_for_experts_of_any_size_and_a_skipped_scale_is_noticed(monkeypatch):
    assert accuracy() > 27
    run, last = reference.grouped_mm, len(COUNTS) - 1

    def skipping(a, b, offsets, layout, *arguments):
        scale = a.scale.clone()
        rows = slice(last, None) if layout == "tn" else slice(int(offsets[last - 1]), None)
        scale[rows] = 1.0
        return run(ScaledTensor(a.data, scale, a.spec), b, offsets, layout, *arguments)

    backend = GROUPED_MM.backends["reference"]
    monkeypatch.setitem(GROUPED_MM.backends, "reference", type(backend)(name="reference", run=skipping))
    with GROUPED_MM.force("reference"):
        assert accuracy() < 10


def test_nothing_is_read_on_the_host_and_frozen_operands_get_no_product():
    x, w, bias, g, offsets = operands()
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) for t in (x, w, bias, g, offsets)]
        for name in ("rowwise", "blockwise"):
            y, dx, dw, db = differentiated(*fake, octavo.RECIPES[name])
            assert (y.shape, dx.shape, dw.shape, db.shape) == (g.shape, x.shape, w.shape, bias.shape)
    x.requires_grad_()
    y = grouped_linear(x, w, None, offsets, octavo.RECIPES["rowwise"])
    saved = [t for t in y.grad_fn.saved_tensors if t is not None]
    assert not any(t.dtype == torch.float8_e4m3fn for t in saved) and any(t.data_ptr() == w.data_ptr() for t in saved)
    y[: sum(COUNTS)].sum().backward()
    assert x.grad.isfinite()[: sum(COUNTS)].all()


def test_what_does_not_fit_is_refused():
    x, w, bias, _, offsets = operands()
    for arguments, text in (
        ((x, w[0], bias, offsets), "takes input"),
        ((x, w, bias, offsets[1:]), "takes input"),
        ((x[:, 1:], w, bias, offsets), "in_features = 40"),
        ((x.bfloat16(), w, bias, offsets), "cast one of them"),
        ((x, w, bias, offsets.long()), "int32"),
        ((x, w, bias[:, 1:], offsets), r"bias is \[5,70\]"),
    ):
        refused(text, grouped_linear, *arguments, octavo.RECIPES["rowwise"])
    with pytest.raises(ValueError, match="'rowwise_equalized' needs channel scales, which experts do not keep"):
        grouped_linear(x, w, bias, offsets, octavo.RECIPES["rowwise_equalized"])
    assert [name for name, recipe in octavo.RECIPES.items() if is_grouped(recipe)] == ["rowwise"]


# --- experts whose weights are resident in FP8: products, states, the way back ---

TOKENS = torch.arange(24).view(2, 12) % 64


def run(module, x, index, weights, grad):
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    y = module(x, index, weights)
    y.backward(grad)
    return y.detach(), x.grad, weights.grad


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        *((family, "rowwise") for family in FAMILIES),
        *(("gpt_oss", name) for name in ("rowwise_hp_wgrad", "tensorwise", "blockwise")),
    ],
)
def test_products_are_those_of_frozen_experts_bit_for_bit(family, recipe):
    experts = experts_of(family)
    usual = octavo.convert(copy.deepcopy(experts), recipe, verbose=False).requires_grad_(False)
    module = resident(copy.deepcopy(experts), recipe)
    assert not any(parameter.requires_grad for parameter in module.parameters())
    for tokens in (65, 3, 0):
        batch = routed(tokens)
        expected, actual = run(usual, *batch), run(module, *batch)
        ordered = family != "gpt_oss" or recipe not in ("tensorwise", "blockwise", "rowwise_hp_wgrad")
        if ordered or (tokens == 65 and Version(torch.__version__) >= Version("2.13")):
            assert same(expected, actual)
        else:  # the same bytes in another memory order, for which the CPU's product of few rows sums in another order
            assert all(
                one.shape == other.shape and sqnr(one, other) > 100 for one, other in zip(expected, actual, strict=True)
            )
        assert same(run(module, *batch), run(lambda *a: checkpoint(module, *a, use_reentrant=False), *batch))
    with octavo.disabled():
        off = run(module, *routed(65))
    assert same(off, run(octavo.revert(module), *routed(65)))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_of_the_input_against_the_dequantized_base_in_float64(family):
    experts, batch = experts_of(family, hidden_size=128), routed(65, hidden=128)
    module = resident(experts)
    actual = run(module, *batch)
    exact = octavo.revert(copy.deepcopy(module)).double()
    exact.config._experts_implementation = "eager"
    expected = run(exact, batch[0].double(), batch[1], batch[2].double(), batch[3].double())
    # Two products and a gate, each of operands in FP8.
    assert all(sqnr(one, other) > 23 for one, other in zip(expected, actual, strict=True))


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_bytes_and_the_report(family):
    model = resident(mixture(family, hidden_size=128, intermediate_size=256))
    rows = [row for row in octavo.report(model) if row.experts]
    assert len(rows) == 2 and all("resident in FP8: 1.0" in row.reason for row in rows)
    weights = [p for n, p in model.named_parameters() if n.rpartition(".")[2] in STACKED]
    assert len(weights) == 4 and all(isinstance(weight, ResidentWeight) for weight in weights)
    assert sum(w.data_.nbytes + w.scale.nbytes for w in weights) <= 1.05 * sum(w.numel() for w in weights)


def test_only_frozen_experts_become_resident():
    model = mixture("mixtral")
    model.get_submodule(NAME).requires_grad_(False)
    resident(model)
    kinds = {n: type(p) for n, p in model.named_parameters() if p.ndim > 1 and "layers" in n and "gate.w" not in n}
    assert {n for n, kind in kinds.items() if kind is ResidentWeight} == {f"{NAME}.gate_up_proj", f"{NAME}.down_proj"}
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    refused("is frozen and cannot be trained", model.requires_grad_, True)


@pytest.mark.parametrize(
    ("family", "recipe"), [("mixtral", "rowwise"), ("gpt_oss", "rowwise_hp_wgrad"), ("gpt_oss", "blockwise")]
)
def test_state_round_trips_bit_for_bit(family, recipe, tmp_path):
    model = resident(mixture(family), recipe)
    expected = model(input_ids=TOKENS).logits
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    for state in (saved_and_loaded(model.state_dict()), load_file(tmp_path / "base.safetensors")):
        assert state[f"{NAME}.down_proj"].dtype == torch.float8_e4m3fn and f"{NAME}.down_proj_scale" in state
        for assign in (False, True):
            other = mixture(family)
            nn.init.zeros_(other.get_submodule(NAME).down_proj)
            resident(other, recipe).load_state_dict(state, assign=assign)
            assert same(model.state_dict(), other.state_dict())
            assert torch.equal(other(input_ids=TOKENS).logits, expected)
    values = mixture(family)
    loaded = resident(mixture(family, num_hidden_layers=2), recipe)
    nn.init.zeros_(loaded.get_submodule(NAME).down_proj)
    loaded.load_state_dict(values.state_dict())
    assert same(loaded.state_dict(), model.state_dict())
    bad = {k: v for k, v in model.state_dict().items() if k != f"{NAME}.down_proj_scale"}
    with pytest.raises(RuntimeError, match=r"down_proj is torch.float8_e4m3fn without .*down_proj_scale"):
        loaded.load_state_dict(bad)
    with pytest.raises(RuntimeError, match=r"but the layer's is not resident"):
        octavo.convert(mixture(family), recipe, verbose=False).load_state_dict(model.state_dict(), strict=False)


def test_copies_moves_and_changes_of_the_recipe():
    model = resident(mixture("gpt_oss"))
    expected = model(input_ids=TOKENS).logits
    assert torch.equal(copy.deepcopy(model)(input_ids=TOKENS).logits, expected)
    assert torch.equal(saved_and_loaded(model, weights_only=False)(input_ids=TOKENS).logits, expected)
    on_meta = copy.deepcopy(model).to("meta").get_submodule(NAME).down_proj
    assert isinstance(on_meta, ResidentWeight) and on_meta.device.type == on_meta.data_.device.type == "meta"
    before = {k: v.clone() for k, v in model.state_dict().items() if k.startswith(NAME) and "bias" not in k}
    model.bfloat16()
    assert model.get_submodule(NAME).down_proj.dtype == torch.bfloat16
    assert same(before, {k: v for k, v in model.state_dict().items() if k in before})
    expected = model.float()(input_ids=TOKENS).logits
    with pytest.raises(ValueError, match="'blockwise' cannot read: use one of rowwise, rowwise_hp_wgrad"):
        change_recipe(model, NAME, "blockwise", reason="a test")
    change_recipe(model, NAME, "rowwise_hp_wgrad", reason="a test")
    assert sqnr(expected, model(input_ids=TOKENS).logits) > 40
    change_recipe(model, NAME, None, reason="a test")
    down = model.get_submodule(NAME).down_proj
    assert type(down) is nn.Parameter and not down.requires_grad
    change_recipe(model, NAME, "rowwise", reason="a test")
    octavo.revert(model)
    assert not any(isinstance(p, ResidentWeight) for p in model.parameters())
    assert model.to("meta").get_submodule(NAME).down_proj.is_meta


def test_views_of_one_expert_keep_its_bytes():
    weight = resident(experts_of("gpt_oss")).gate_up_proj
    whole = weight.dequantized(torch.float32)
    for index, expert in enumerate(weight.unbind()):
        assert isinstance(expert, ResidentWeight) and torch.equal(expert.dequantized(torch.float32), whole[index])
        assert torch.equal(weight[index].dequantized(torch.float32), whole[index])
        assert weight[index].data_.data_ptr() == weight.data_[index].data_ptr()
    assert torch.equal(weight.transpose(1, 2).dequantized(torch.float32), whole.transpose(1, 2))
    with pytest.warns(UserWarning, match="reads a weight that is resident in FP8"):
        assert torch.equal(weight.transpose(0, 1), whole.transpose(0, 1))
    with pytest.warns(UserWarning, match="reads a weight that is resident in FP8"):
        assert torch.equal(weight[:, 3], whole[:, 3])
    refused("would change a weight that is resident", weight[2].add_, 1)
