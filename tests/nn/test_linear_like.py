"""Linears of other kinds: what a new kind needs, how parameters are found, and linears of other libraries."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import octavo
from octavo.inspect import Watch
from octavo.nn.filters import sizes
from octavo.nn.linear import linear
from octavo.nn.linear_like import LinearLike
from octavo.nn.linear_subclasses import is_transposed
from octavo.nn.memory_audit import audit
from octavo.nn.select import is_linear
from octavo.numerics import sqnr
from octavo.runtime import linear_kinds
from octavo.runtime.linear_kinds import LinearKind
from octavo.runtime.torch_compat import eager_signature
from support.refusals import refused

FP8_ACTIVATIONS = octavo.Precision(matmul="bf16", activations="fp8")


class Columns(nn.Module):
    """A linear with a [in, out] weight, of no library that the package knows."""

    def __init__(self, rows=64, columns=48):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(rows, columns)), None
        self.rows, self.columns = rows, columns

    def forward(self, x):
        return x @ self.weight


class Fp8Columns(LinearLike, Columns):
    octavo_original = Columns
    weight_is_transposed = True
    in_features = property(lambda self: self.rows)
    out_features = property(lambda self: self.columns)

    def forward(self, x):
        return linear(x, self.weight.t(), self.bias, self.recipe, self.octavo_keep_weights(), self.octavo_quantizer())


class Mixer(nn.Module):
    """A module with a forward of its own, as an attention is."""

    def __init__(self):
        super().__init__()
        self.up, self.down = Columns(64, 128), Columns(128, 64)

    def forward(self, x):
        return self.down(self.up(x))


def path(cls):
    return f"{cls.__module__}.{cls.__name__}"


@pytest.fixture
def entry(monkeypatch):
    """The entry of the table, as docs/extending.md describes it."""
    kind = LinearKind(plain=path(Columns), fp8=path(Fp8Columns), sizes=("rows", "columns"))
    monkeypatch.setattr(linear_kinds, "KINDS", [*linear_kinds.KINDS, kind])
    return kind


def test_a_new_kind_of_layer_is_converted_reported_watched_changed_and_reverted(entry):
    model = nn.Sequential(Columns(), nn.Linear(48, 48))
    assert is_linear(model[0]) and is_transposed(model[0]) and sizes(model[0]) == (64, 48)
    octavo.convert(model, filter=octavo.nn.filters.shape(min_in=64), verbose=False)
    assert isinstance(model[0], Fp8Columns) and is_transposed(model[0]) and sizes(model[0]) == (64, 48)
    (row, other) = octavo.report(model)
    assert (row.linear, row.converted, row.recipe, other.converted) == (True, True, "rowwise", False)
    refused("1 layers of this model are converted already", octavo.convert, model)
    octavo.nn.change_recipe(model, "0", "blockwise", reason="a test")
    watch, x = Watch(model, every=1), torch.randn(8, 64)
    with watch.step(measure={"0": ["blockwise"]}):
        y = model[0](x)
        y.sum().backward()
    assert torch.equal(y, linear(x, model[0].weight.t(), None, octavo.RECIPES["blockwise"]))
    assert {row.recipe for row in watch.rows} == {"blockwise"} and watch.errors["0"]["blockwise"] < 0.1
    octavo.nn.change_recipe(model, "0", "rowwise_equalized", reason="a test")
    model(torch.ones(8, 64)).sum().backward()
    assert list(octavo.nn.equalized.state_dict(model)) == ["0"]
    octavo.revert(model)
    assert type(model[0]) is Columns and torch.equal(model[0](x), x @ model[0].weight)


def test_fp8_activations_of_a_module_with_a_new_kind_of_layer(entry):
    """The module around the layers stores the inputs of both in FP8: 1 byte per element, and scales."""
    model, x = nn.Sequential(Mixer()), torch.randn(64, 64, requires_grad=True)
    octavo.convert(model, precision=FP8_ACTIVATIONS, verbose=False)
    assert {row.dtype for row in audit(model, x).rows} == {torch.float8_e4m3fn, torch.float8_e8m0fnu}


def test_what_only_looks_like_one_is_none():
    """A recipe, an octavo module path or the name of a class make no converted layer."""
    fake = type("Conv1D", (Columns,), {"__module__": "octavo.nn.conv1d"})()
    assert not octavo.report(fake)[0].converted and not is_linear(fake)
    refused("has no converted layer", octavo.revert, fake)
    mine = type("Linear", (octavo.nn.Linear,), {"__module__": "octavo.nn.linear"})(8, 8)
    refused("became a Linear after it was converted", octavo.revert, mine)


def test_a_layer_without_parameters_is_reported():
    """As under FSDP1, which puts plain tensors in their place."""
    layer = octavo.convert(nn.Linear(8, 8, bias=False), verbose=False)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight
    assert octavo.report(layer)[0].converted


def nested(sizes, layout):
    torch.manual_seed(1)
    return torch.nested.nested_tensor([torch.randn(*size) for size in sizes], layout=layout, requires_grad=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize(
    ("layout", "sizes", "recipe"),
    [
        (torch.jagged, [(5, 128), (9, 128)], "rowwise_equalized"),
        (torch.jagged, [(5, 3, 128), (9, 3, 128)], "rowwise"),
        (torch.strided, [(5, 128), (9, 128)], "tensorwise"), (torch.strided, [(5, 3, 128), (9, 3, 128)], "rowwise"),
    ],
)  # fmt: skip
def test_nested_input(layout, sizes, recipe):
    """The results of the rows as one matrix, nested as before."""
    results = []
    for nest in (True, False):
        torch.manual_seed(0)
        layer, x = octavo.convert(nn.Linear(128, 128), recipe, verbose=False), nested(sizes, layout)
        y = layer(x) + x if nest else layer(torch.cat(x.unbind())) + torch.cat(x.unbind())
        rows = torch.cat(y.unbind()) if nest else y
        rows.square().sum().backward()
        results.append([rows, layer.weight.grad, layer.bias.grad, *x.grad.unbind()])
        if len(sizes[0]) == 2:  # PyTorch has no linear of four strided dimensions
            with octavo.disabled():
                layer(x)
    assert all(map(torch.equal, *results))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
def test_inputs_that_are_no_rows():
    layer = octavo.convert(nn.Linear(128, 64), verbose=False)
    ragged = torch.nested.nested_tensor([torch.randn(4, 5), torch.randn(4, 9)], layout=torch.strided)
    for x in (torch.randn(64, 128).relu().to_sparse(), ragged):
        refused(r"a converted linear layer takes dense.*in_features = 128; got Tensor of", layer, x, kind=TypeError)
        assert eager_signature(x) is None


# --- weight and bias of a `Linear` are where `nn.Linear` finds them, whoever put them there ---


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w


def with_property(layer, name):
    """Make a property of a new class, which reads the parameter, as torchtitan's simple FSDP does."""
    double = property(lambda self: 2 * self._parameters[name])
    layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {name: double})


def with_subclass(layer, name):
    def lookup(self, attribute):
        value = nn.Module.__getattr__(self, attribute)
        return 2 * value if attribute == name else value

    layer.__class__ = type(f"Own{type(layer).__name__}", (type(layer),), {"__getattr__": lookup})


def as_plain_tensor(layer, name):
    value = getattr(layer, name).detach() * 2
    delattr(layer, name)
    setattr(layer, name, value)


def as_buffer(layer, name):
    value = getattr(layer, name).detach() * 2
    delattr(layer, name)
    layer.register_buffer(name, value)


CHANGES = {
    "parametrized": lambda layer, name: parametrize.register_parametrization(layer, name, Doubled()),
    "pruned": lambda layer, name: prune.random_unstructured(layer, name, 0.5),
    "property": with_property,
    "lookup": with_subclass,
    "plain tensor": as_plain_tensor,
    "buffer": as_buffer,
    "hidden": lambda layer, name: vars(layer).update({name: getattr(layer, name).detach() * 2}),
    "another": lambda layer, name: setattr(layer, name, nn.Parameter(getattr(layer, name).detach() * 2)),
}


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_are_those_that_attributes_name(change, name):
    """After a first forward, too."""
    torch.manual_seed(0)
    layer, x = octavo.convert(nn.Linear(32, 48), "rowwise", verbose=False), torch.randn(16, 32)
    before = layer(x)
    CHANGES[change](layer, name)
    expected = octavo.nn.linear(x, layer.weight, layer.bias, layer.recipe)
    assert torch.equal(layer(x), expected) and not torch.equal(expected, before)


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_without_a_parameter_the_error_is_that_of_torch(name):
    layer, x = octavo.convert(nn.Linear(32, 48), "rowwise", verbose=False), torch.randn(16, 32)
    delattr(layer, name)
    refused(f"has no attribute '{name}'", layer, x, kind=AttributeError)
    setattr(layer, name, None)
    if name == "bias":
        assert layer(x).shape == (16, 48)


# --- linears of other libraries ---


def reason_beside_a_linear(module):
    """The reason why a module stays as it is in a model whose other layers are converted."""
    model = nn.Sequential(nn.Linear(128, 128), module, nn.Linear(128, 128))
    before = type(module), dict(vars(module))
    rows = {row.name: row for row in octavo.report(octavo.convert(model, "rowwise", verbose=False))}
    assert rows["0"].converted and rows["2"].converted and type(module) is before[0]
    reasons = [row.reason for name, row in rows.items() if name.split(".")[0] == "1" and not row.converted]
    return "; ".join(reasons)


def test_layers_of_torch_ao():
    with warnings.catch_warnings(action="ignore"):
        from torch.ao.quantization import get_default_qat_qconfig

        aware = torch.ao.nn.qat.Linear(128, 128, qconfig=get_default_qat_qconfig())
    assert "quantizes its weight (torch.ao)" in reason_beside_a_linear(aware)
    assert "convert the model before" in reason_beside_a_linear(aware)


def test_packed_weights():
    class Packed(nn.Linear):
        def forward(self, x):
            return x @ self.weight.float().T

    packed = Packed(128, 128, bias=False)
    packed.weight = nn.Parameter(torch.zeros(128, 128, dtype=torch.int8), requires_grad=False)
    reason = reason_beside_a_linear(packed)
    assert "its weight is quantized (Packed)" in reason and "frozen='fp8'" in reason


@pytest.mark.parametrize("kind", ["Linear4bit", "Linear8bitLt"])
@pytest.mark.filterwarnings("ignore")
def test_layers_of_bitsandbytes(kind):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    layer = getattr(bitsandbytes.nn, kind)(128, 128)
    reason = reason_beside_a_linear(layer)
    assert "its weight is quantized" in reason and "load the model without quantization" in reason


def test_attention_of_torch_reads_the_weight_of_its_linear():
    assert "nn.MultiheadAttention reads its weight" in reason_beside_a_linear(nn.MultiheadAttention(128, 2))


class CastsToDtype(nn.Linear):
    """As nanochat writes it."""

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype))


class CastsLike(nn.Linear):
    """As modded-nanogpt writes it."""

    def forward(self, x):
        return F.linear(x, self.weight.type_as(x))


class CastsBoth(nn.Linear):
    """As Whisper writes it."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


@pytest.mark.parametrize(
    ("kind", "recipe"), [(CastsToDtype, "rowwise"), (CastsLike, "tensorwise"), (CastsBoth, "rowwise_equalized")]
)
def test_linears_that_cast_their_weight_compute_in_fp8(kind, recipe):
    torch.manual_seed(0)
    plain = nn.Sequential(kind(64, 128, bias=kind is CastsBoth))
    model = octavo.convert(copy.deepcopy(plain), recipe, verbose=False)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(32, 64).to(dtype)
        for either in (plain, model):
            either.zero_grad()
            either(x).square().sum().backward()
        assert model(x).dtype == dtype and not torch.equal(model(x), plain(x))
        assert sqnr(plain(x).float(), model(x).float()) > 24
        assert all(sqnr(p.grad, q.grad) > 20 for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    with octavo.disabled():
        assert torch.equal(model(x), plain(x))


def test_a_linear_that_casts_and_ignores_its_bias_is_left_alone():
    with pytest.raises(ValueError, match="CastsToDtype is a subclass of nn.Linear with behaviour of its own"):
        octavo.convert(nn.Sequential(CastsToDtype(64, 64, bias=True)), verbose=False)


def test_float64_layers_stay():
    model = octavo.convert(nn.Sequential(nn.Linear(64, 64).double(), nn.Linear(64, 64)), verbose=False)
    assert type(model[0]) is nn.Linear and "float64 kept" in octavo.report(model)[0].reason


class ReadsWeight(nn.Module):
    """As BEiT's attention uses its qkv."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 192, bias=False), nn.Linear(192, 64)

    def forward(self, x):
        return self.proj(F.linear(x, self.qkv.weight))


def test_a_report_with_a_batch_names_layers_that_are_not_called():
    model = octavo.convert(ReadsWeight(), verbose=False)
    alone, run = ({row.name: row.reason for row in octavo.report(model, *b)} for b in ((), (torch.randn(2, 64),)))
    assert alone["qkv"] == alone["proj"] == run["proj"] == "linear"
    assert run["qkv"] == "linear; not called in this forward, so not in FP8: other code may read its weight"


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_equalized"])
@pytest.mark.parametrize("register", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrizations_of_converted_layers(register, recipe):
    """`weight_norm` has two originals."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64))
    model = octavo.convert(copy.deepcopy(plain), recipe, verbose=False)
    for either in (plain, model):
        torch.manual_seed(1)
        register(either[0])
        either.eval()
    x = torch.randn(32, 64)
    for either in (plain, model):
        either(x).square().sum().backward()
    assert all(sqnr(p.grad, q.grad) > 20 for p, q in zip(plain.parameters(), model.parameters(), strict=True))
    assert not torch.equal(plain(x), model(x))
    assert "convert the model before the parametrization is registered" in reason_beside_a_linear(plain[0])


class Halved(torch.Tensor):
    """A weight in another format, that of half its values, as torchao's `quantize_` puts into layers."""

    @staticmethod
    def __new__(cls, half):
        return torch.Tensor._make_wrapper_subclass(cls, half.shape, dtype=half.dtype)

    def __init__(self, half):
        self.half = half

    def __tensor_flatten__(self):
        return ["half"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["half"])

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x, 2 * weight.half, *bias)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return cls(args[0].half)
        raise NotImplementedError(function)


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_equalized"])
def test_a_weight_that_another_library_quantizes_after_conversion_multiplies_itself(recipe):
    plain, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)
    model = octavo.convert(copy.deepcopy(plain), recipe, verbose=False)
    model(x).sum().backward()  # leaves a plan
    model[0].weight = nn.Parameter(Halved(plain[0].weight.detach() / 2), requires_grad=False)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode(), pytest.warns(UserWarning, match=r"is a Halved, which multiplies itself.*octavo\.revert"):
            assert torch.equal(model(x), plain(x))
    (row,) = octavo.report(model)
    assert not row.converted and row.reason == "its weight was replaced by a Halved, which multiplies itself"
    assert torch.equal(octavo.revert(model)(x), plain(x))


def test_the_fast_path_of_torch_multiplies_in_high_precision():
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    plain, x = nn.TransformerEncoder(layer, 1).eval(), torch.randn(2, 8, 64)
    model = octavo.convert(copy.deepcopy(plain), "rowwise", verbose=False)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert 25 < sqnr(plain(x), model(x)) < 60  # with gradients: in FP8
    reasons = {row.name: row.reason for row in octavo.report(model)}
    assert all("fast path multiplies its weight" in reasons[f"layers.0.linear{i}"] for i in (1, 2))
    frozen = octavo.convert(copy.deepcopy(plain), "rowwise", frozen="fp8", verbose=False)
    with torch.no_grad(), pytest.warns(UserWarning, match="reads a weight"):
        assert sqnr(plain(x), frozen(x)) > 25
