"""Linears of other libraries: each is converted, or left with a reason that says what to do."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import octavo
from octavo.numerics import sqnr


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
