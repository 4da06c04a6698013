"""`convert(frozen="fp8")`: which weights become resident, the products with them, checkpoints, and the way back."""

import copy
import gc
import pickle

import pytest
import torch
from models import llama
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.kernels import quantize
from octavo.nn import ResidentWeight, change_recipe
from octavo.numerics.error import sqnr
from octavo.numerics.spec import QuantSpec
from support.moe_models import experts_of, resident, routed
from support.refusals import refused
from tensors import same, saved_and_loaded


def mlp(dtype=torch.bfloat16, width=128):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 256, dtype=dtype), nn.GELU(), nn.Linear(256, width, bias=False, dtype=dtype))


def weights_of(model):
    return [model[i].weight for i in (0, 2)]


def run(model, x):
    x = x.detach().clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_hp_wgrad", "tensorwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_are_those_of_a_frozen_weight_bit_for_bit(recipe, dtype):
    x = torch.randn(5, 3, 128, dtype=dtype, generator=torch.Generator().manual_seed(1))
    usual = octavo.convert(mlp(dtype), recipe, verbose=False).requires_grad_(False)
    model = resident(mlp(dtype), recipe)
    assert all(isinstance(weight, ResidentWeight) for weight in weights_of(model))
    assert same(run(usual, x), run(model, x))


def test_all_is_frozen_if_nothing_was_and_only_that_otherwise():
    model = resident(mlp())
    assert not any(p.requires_grad for p in model.parameters())
    model = mlp()
    model[0].weight.requires_grad_(False)
    resident(model)
    assert isinstance(model[0].weight, ResidentWeight) and model[0].bias.requires_grad
    assert type(model[2].weight) is nn.Parameter
    model(torch.randn(4, 128).bfloat16()).sum().backward()
    assert model[2].weight.grad is not None and model[0].weight.grad is None


def test_the_report_states_bytes_and_reasons():
    report = octavo.report(resident(llama(hidden_size=256, intermediate_size=512)))
    assert "linear; resident in FP8: 1.016 bytes per parameter" in {row.reason for row in report}
    rows = [row for row in report if row.resident_bytes]
    size = sum(row.resident_bytes for row in rows) / sum(row.weights for row in rows)
    assert f"14 of them frozen and resident in FP8 ({size:.3f} bytes per parameter)" in report.summary and size < 1.02
    assert [row.name for row in report if not row.resident_bytes] == ["lm_head"]


def test_no_copy_in_high_precision_is_left():
    model = resident(mlp())
    state = model.state_dict()
    assert sum(t.numel() * t.element_size() for t in state.values()) == 2 * 32768 + 4 * (256 + 128) + 2 * 256
    assert {k: v.dtype for k, v in state.items()} == {
        "0.weight": torch.float8_e4m3fn, "0.weight_scale": torch.float32, "0.bias": torch.bfloat16,
        "2.weight": torch.float8_e4m3fn, "2.weight_scale": torch.float32,
    }  # fmt: skip
    model = resident(mlp(width=136))
    model(torch.randn(4, 136).bfloat16()).sum()
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter, ResidentWeight)]
    assert {t.element_size() for t in tensors if t.numel() == 136 * 256 and type(t) is not ResidentWeight} == {1}


RESIDENT = {
    "linears": lambda: (resident(mlp()), torch.randn(4, 128).bfloat16()),
    "experts": lambda: (resident(experts_of("mixtral")), *routed(9)[:3]),
    "transposed experts": lambda: (resident(experts_of("gpt_oss")), *routed(9)[:3]),
}


@pytest.mark.parametrize("kind", RESIDENT)
def test_backward_reads_the_bytes_of_the_parameters(kind):
    model, x, *others = RESIDENT[kind]()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(x.requires_grad_(), *others)
    weights = [p for p in model.parameters() if isinstance(p, ResidentWeight)]
    large = {t.data_ptr() for t in saved if t.numel() >= min(weight.numel() for weight in weights)}
    assert large == {weight.data_.data_ptr() for weight in weights}


def test_state_round_trips_bit_for_bit(tmp_path):
    from safetensors.torch import load_file, save_file

    model, x = resident(mlp()), torch.randn(4, 128).bfloat16()
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    for state in (saved_and_loaded(model.state_dict()), load_file(tmp_path / "base.safetensors")):
        for assign in (False, True):
            other = mlp()
            other[0].weight.data.zero_()
            resident(other).load_state_dict(state, assign=assign)
            assert same([other.state_dict(), other(x)], [model.state_dict(), model(x)])


def test_loading_values_quantizes_them():
    plain, expected = mlp(), resident(mlp())
    for assign in (False, True):
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            model = mlp()
            model[0].weight.data.zero_()
            resident(model).load_state_dict(copy.deepcopy(plain).to(dtype).state_dict(), assign=assign)
            assert same(weights_of(expected), weights_of(model))
            assert model[0].weight.dtype == torch.bfloat16 and isinstance(model[0].weight, nn.Parameter)


def test_states_that_do_not_fit_raise():
    model, state = resident(mlp()), resident(mlp()).state_dict()
    before = copy.deepcopy(weights_of(model))
    with pytest.raises(RuntimeError, match=r"0.weight is torch.float8_e4m3fn without 0.weight_scale"):
        model.load_state_dict({k: v for k, v in state.items() if k != "0.weight_scale"})
    with pytest.raises(RuntimeError, match=r"resident as e4m3/row, .*convert in the recipe, and with the weight_only"):
        model.load_state_dict(resident(mlp(), "tensorwise").state_dict())
    refused("size mismatch", model.load_state_dict, resident(mlp(width=64)).state_dict(), kind=RuntimeError)
    plain = octavo.convert(mlp(), "rowwise", verbose=False)
    weight = plain[0].weight.clone()
    for other, dtype in ((state, "float8_e4m3fn"), (resident(mlp(), weight_only=["*"]).state_dict(), "uint8")):
        for assign in (False, True):
            with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*0\.weight_scale"):
                mlp().load_state_dict(other, assign=assign)
        with pytest.raises(RuntimeError, match=f"0.weight is torch.{dtype}, but the layer's is not resident"):
            plain.load_state_dict(other, strict=False)
    assert torch.equal(plain[0].weight, weight)
    assert same(before, weights_of(model))


def test_disabled_computes_with_the_fp8_values():
    model, x = resident(mlp()), torch.randn(4, 128).bfloat16()
    with octavo.disabled():
        actual = run(model, x)
    assert same(run(octavo.revert(model), x), actual)


def test_revert_leaves_the_fp8_values_in_the_original_dtype():
    plain, model = mlp(), resident(mlp())
    values = model[0].weight.dequantized(torch.bfloat16)
    octavo.revert(model)
    assert type(model[0]) is nn.Linear and type(model[0].weight) is nn.Parameter and not model[0].weight.requires_grad
    assert torch.equal(model[0].weight, values) and sqnr(plain[0].weight, values) > 30
    model.load_state_dict(plain.state_dict())
    assert not octavo.report(model)[0].resident_bytes


def test_shared_weights():
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(3)), nn.Embedding(128, 128))
    model[1].weight = model[0].weight
    model[2].weight = model[3].weight
    model.add_module("again", model[0])
    resident(model, filter=lambda module, name: True)
    assert model[0].weight is model[1].weight and isinstance(model[0].weight, ResidentWeight)
    assert type(model[3].weight) is nn.Parameter and model[2].weight is model[3].weight
    copied = copy.deepcopy(model)
    assert copied[0].weight is copied[1].weight and isinstance(copied[0].weight, nn.Parameter)
    octavo.revert(copied)
    assert copied[0].weight is copied[1].weight


def test_a_weight_that_another_module_reads_keeps_its_dtype():
    class Reader(nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.table = weight

    linear = nn.Linear(128, 128)
    with pytest.raises(ValueError, match="no weight would be resident in FP8: linear; not resident: its weight is"):
        resident(nn.ModuleDict({"linear": linear, "reader": Reader(linear.weight)}))
    model = resident(nn.ModuleDict({"linear": linear, "reader": Reader(linear.weight), "more": nn.Linear(128, 128)}))
    assert type(linear.weight) is nn.Parameter and linear.weight is model["reader"].table
    assert "not resident: its weight is also 'reader.table'" in octavo.report(model)[0].reason


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"recipe": "mxfp8"}, "recipe 'mxfp8' of '0' needs one for forward and another"),
        ({"device": "h100", "recipe": None}, "leave out device"),
        ({"frozen": "fp9"}, "frozen is 'bf16' or 'fp8'; got 'fp9'"),
    ],
)
def test_bad_requests_leave_the_model(options, error):
    model = mlp()
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=error):
        resident(model, **options) if "frozen" not in options else octavo.convert(model, **options)
    after = dict(model.named_parameters())
    assert all(after[k] is before[k] and after[k].requires_grad for k in before) and type(model[0]) is nn.Linear


def test_equalization_is_left_out():
    model = resident(mlp(), "rowwise_equalized")
    row = octavo.report(model)[0]
    assert row.recipe == "rowwise" and "without channel equalization" in row.reason
    x = torch.randn(4, 128).bfloat16()
    assert same(run(model, x), run(resident(mlp()), x))


def test_changes_of_the_recipe():
    model, x = resident(mlp()), torch.randn(4, 128).bfloat16()
    y = model(x)
    for recipe in ("blockwise", "rowwise_equalized", "mxfp8"):
        with pytest.raises(ValueError, match=f"{recipe!r} cannot read: use one of rowwise, rowwise_hp_wgrad"):
            change_recipe(model, "0", recipe, reason="a test")
    change_recipe(model, "0", "rowwise_hp_wgrad", reason="a test")
    assert torch.equal(model(x), y)
    change_recipe(model, "0", None, reason="a test")
    assert type(model[0].weight) is nn.Parameter and not model[0].weight.requires_grad
    change_recipe(model, "0", "rowwise", reason="a test")
    assert sqnr(y, model(x)) > 40


def test_conv1d_keeps_its_transposed_weight():
    torch.manual_seed(0)
    plain, x = Conv1D(96, 64), torch.randn(2, 5, 64)
    usual = octavo.convert(copy.deepcopy(plain), "rowwise", verbose=False).requires_grad_(False)
    model = resident(copy.deepcopy(plain))
    assert tuple(model.weight.shape) == (64, 96) and model.weight.spec.text == "e4m3/column"
    for expected, actual in zip(run(usual, x), run(model, x), strict=True):
        assert sqnr(expected, actual) > 120  # the weights lie differently, so a CPU may add in another order
    assert sqnr(plain.weight, octavo.revert(model).weight) > 30


def test_zero_tokens_autocast_no_grad_and_checkpointing():
    model, x = resident(mlp()), torch.randn(4, 128)
    assert run(model, x.bfloat16()[:0])[1].shape == (0, 128)
    expected = run(model, x.bfloat16())
    with torch.no_grad():
        assert torch.equal(model(x.bfloat16()), expected[0])
    with torch.inference_mode():
        assert torch.equal(model(x.bfloat16()), expected[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    recomputed = run(lambda x: checkpoint(model, x, use_reentrant=False), x.bfloat16())
    assert same(expected, recomputed)


def test_conversion_in_inference_mode_leaves_a_model_that_trains():
    expected, model, x = resident(mlp()), mlp(), torch.randn(4, 128).bfloat16()
    with torch.inference_mode():
        resident(model)
    assert same(run(expected, x), run(model, x))
    with torch.inference_mode():
        octavo.revert(model)
    run(model, x)


def test_a_change_between_forward_and_backward_raises():
    model, x = resident(mlp()), torch.randn(4, 128).bfloat16().requires_grad_()
    y = model(x)
    model[2].weight.copy_(model[2].weight.clone())
    refused("modified by an inplace operation", y.sum().backward, kind=RuntimeError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's imports warn of torch's own deprecated parts
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("weight_only", [(), ["0"]], ids=str)
@pytest.mark.parametrize("make", [mlp, lambda: nn.Sequential(Conv1D(256, 128), nn.GELU(), Conv1D(128, 256)).bfloat16()])
def test_compiled(backend, make, weight_only):
    model, x = resident(make(), weight_only=weight_only), torch.randn(4, 128).bfloat16()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for expected, actual in zip(run(model, x), run(compiled, x), strict=True):
        assert sqnr(expected, actual) > 40


def test_another_spec_is_found_in_a_graph_too():
    layer = resident(Conv1D(256, 128))
    layer.recipe = octavo.numerics.RECIPES["blockwise"]
    with pytest.raises(Exception, match="exists as e4m3/row only, but its layer's recipe needs e4m3/128x128"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(4, 128))


def test_save_pretrained_raises_and_writes_nothing(tmp_path):
    """from_pretrained would read the FP8 values without their scales."""
    model = resident(llama())
    sharing = nn.ModuleDict({"base": model})
    for one in (model, model.model, copy.deepcopy(model), saved_and_loaded(model, weights_only=False), sharing.base):
        with pytest.raises(ValueError, match=r"octavo\.export\(model, path, to='fp8-row'\).*octavo\.revert\(model\)"):
            one.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    copied = copy.deepcopy(model)
    assert copied.save_pretrained.args[0] is copied
    octavo.revert(model)
    model.save_pretrained(tmp_path / "plain")
    tokens = torch.arange(12).view(1, 12)
    again = type(model).from_pretrained(tmp_path / "plain")
    assert torch.equal(again(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert "save_pretrained" not in vars(model) | vars(model.model)


def test_a_failed_conversion_leaves_save_pretrained(monkeypatch):
    model = llama()
    monkeypatch.setattr("octavo.nn.convert.report", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        octavo.convert(model, frozen="fp8")
    assert "save_pretrained" not in vars(model)


# --- a resident weight behaves as a tensor of its dtype, keeps its bytes, and raises for what would lose values ---

ROW = QuantSpec.parse("e4m3/row")
READS = pytest.warns(UserWarning, match="reads a weight that is resident in FP8")


@pytest.fixture
def plain():
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def weight(plain):
    return nn.Parameter(ResidentWeight.quantized(plain, ROW), requires_grad=False)


def test_it_holds_the_bytes_of_quantize_and_nothing_else(weight, plain):
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert (weight.dtype, weight.shape, weight.stride()) == (torch.bfloat16, (48, 96), (96, 1))
    expected = quantize(plain, ROW)
    assert same([weight.data_, weight.scale], [expected.data, expected.scale])
    assert weight.data_.nbytes + weight.scale.nbytes <= 1.05 * weight.numel()
    assert [v for v in vars(weight).values() if isinstance(v, torch.Tensor)] == [weight.data_, weight.scale]


COPIES = {
    "clone": torch.clone,
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "view": lambda w: w.view(48, 96),
    "half": lambda w: w.half(),
    "float": lambda w: w.to(torch.float32),
    "to": lambda w: w.to("cpu", copy=True),
    "twice transposed": lambda w: w.t().t(),
    "mT": lambda w: w.mT.mT,
    "T": lambda w: w.T.T,
    "transpose": lambda w: w.transpose(-1, 0).transpose(0, 1),
    "not permuted": lambda w: w.permute(0, 1),
    "contiguous": lambda w: w.contiguous(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_keep_the_bytes(name, weight):
    copied = COPIES[name](weight)
    assert isinstance(copied, ResidentWeight) and same(copied, weight)
    assert copied.dtype == {"half": torch.float16, "float": torch.float32}.get(name, torch.bfloat16)
    if name in ("clone", "deepcopy", "pickle", "half", "to"):
        assert copied.data_.data_ptr() != weight.data_.data_ptr()
    assert isinstance(copied, nn.Parameter) == (name in ("deepcopy", "pickle", "contiguous"))


@pytest.mark.parametrize("transpose", [lambda w: w.t(), lambda w: w.T, lambda w: w.mT, lambda w: w.transpose(0, 1)])
def test_transposed(transpose, weight):
    other = transpose(weight)
    assert isinstance(other, ResidentWeight) and other.spec == ROW.transposed
    assert torch.equal(other.dequantized(torch.float32), weight.dequantized(torch.float32).t())


READERS = {
    "matmul": lambda w: torch.ones(3, 96, dtype=w.dtype) @ w.t(),
    "linear": lambda w: torch.nn.functional.linear(torch.ones(3, 96, dtype=w.dtype), w),
    "norm": lambda w: torch.linalg.norm(w, dim=1),
    "index": lambda w: w[3, 4:9],
    "flatten": lambda w: w.view(-1),
    "as_strided": lambda w: w.as_strided((48, 96), (1, 48)),
    "double": lambda w: w.to(torch.float64),
    "add": lambda w: 1 + w,
    "out": lambda w: torch.zeros(48, 96, dtype=w.dtype).copy_(w),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_get_the_fp8_values_with_a_warning(name, weight):
    with READS:
        actual = READERS[name](weight)
    assert type(actual) is torch.Tensor and torch.equal(actual, READERS[name](weight.dequantized(weight.dtype)))


def test_copy_quantizes_values_and_copies_bytes(weight, plain):
    for value in (2 * plain, (2 * plain).float(), plain[:1], (3 * plain).double()):
        weight.copy_(value)
        rounded = value.float() if value.dtype == torch.float64 else value
        assert same(weight, ResidentWeight.quantized(rounded.expand(48, 96), ROW))
    other = ResidentWeight.quantized(plain.flip(0), ROW)
    weight.copy_(other)
    assert same(weight, other)
    weight.copy_(ResidentWeight.quantized(plain, QuantSpec.parse("e4m3/tensor")))
    assert weight.spec == ROW and not same(weight, other)


def test_fills_quantize(weight):
    address = weight.data_.data_ptr()
    weight.zero_()
    assert not weight.dequantized(torch.float32).any() and weight.data_.data_ptr() == address
    nn.init.normal_(weight, std=0.5)
    assert weight.dequantized(torch.float32).std().item() == pytest.approx(0.5, rel=0.1)


CHANGES = {
    "add": lambda w: w.add_(1),
    "data +=": lambda w: w.data.__iadd__(1),
    "clone +=": lambda w: w.clone().mul_(2),
    "part": lambda w: w.t().sub_(1),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "lerp": lambda w: w.lerp_(torch.zeros(48, 96, dtype=w.dtype), 0.5),
    "data =": lambda w: setattr(w, "data", torch.zeros(48, 96)),
    "data = bf16": lambda w: setattr(w, "data", torch.zeros(48, 96, dtype=w.dtype)),
    "data = fp32": lambda w: setattr(w, "data", w.float()),
    "address": lambda w: w.data_ptr(),
    "storage": lambda w: w.storage(),
    "requires_grad_": lambda w: w.requires_grad_(),
    "requires_grad": lambda w: setattr(w, "requires_grad", True),
    "parameter": lambda w: nn.Parameter(w),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_would_change_it_raises_and_leaves_it(name, weight):
    before = weight.clone()
    refused("resident in FP8", CHANGES[name], weight)
    assert same(before, weight) and not weight.requires_grad


def test_an_optimizer_does_not_step_it(weight):
    before = weight.clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    assert same(before, weight)
    weight.grad = torch.ones(48, 96, dtype=torch.bfloat16)
    refused("would change a weight that is resident", optimizer.step)
    assert same(before, weight)


def test_sharing_memory_shares_the_bytes(weight):
    assert not weight.is_shared()
    assert weight.share_memory_().is_shared() and weight.data_.is_shared() and weight.scale.is_shared()


def test_torch_save_of_tensors_loads_without_code(weight):
    loaded = saved_and_loaded({"w": weight})["w"]
    assert isinstance(loaded, nn.Parameter) and not loaded.requires_grad and same(loaded, weight)


def test_non_finite_values_stay_visible(plain):
    plain[3, 5], plain[4, 6] = float("nan"), float("inf")
    values = ResidentWeight.quantized(plain, ROW).dequantized(torch.float32)
    assert values.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
