"""A resident weight behaves as a tensor of its dtype, keeps its bytes, and raises for what would lose values."""

import copy
import pickle

import pytest
import torch
from torch import nn

from octavo.kernels import quantize
from octavo.nn import ResidentWeight
from octavo.numerics.spec import QuantSpec
from tensors import saved_and_loaded

ROW = QuantSpec.parse("e4m3/row")
READS = pytest.warns(UserWarning, match="reads a weight that is resident in FP8")


@pytest.fixture
def plain():
    return torch.randn(48, 96, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture
def weight(plain):
    return nn.Parameter(ResidentWeight.quantized(plain, ROW), requires_grad=False)


def same_bytes(one, other):
    pairs = ((one.data_.view(torch.uint8), other.data_.view(torch.uint8)), (one.scale, other.scale))
    return all(torch.equal(a, b) for a, b in pairs) and one.spec == other.spec


def test_it_holds_the_bytes_of_quantize_and_nothing_else(weight, plain):
    assert isinstance(weight, nn.Parameter) and not weight.requires_grad
    assert (weight.dtype, weight.shape, weight.stride()) == (torch.bfloat16, (48, 96), (96, 1))
    expected = quantize(plain, ROW)
    assert torch.equal(weight.data_.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(weight.scale, expected.scale)
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
    assert isinstance(copied, ResidentWeight) and same_bytes(copied, weight)
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
        assert same_bytes(weight, ResidentWeight.quantized(rounded.expand(48, 96), ROW))
    other = ResidentWeight.quantized(plain.flip(0), ROW)
    weight.copy_(other)
    assert same_bytes(weight, other)
    weight.copy_(ResidentWeight.quantized(plain, QuantSpec.parse("e4m3/tensor")))
    assert weight.spec == ROW and not same_bytes(weight, other)


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
    with pytest.raises(ValueError, match="resident in FP8"):
        CHANGES[name](weight)
    assert same_bytes(before, weight) and not weight.requires_grad


def test_an_optimizer_does_not_step_it(weight):
    before = weight.clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    optimizer.step()
    assert same_bytes(before, weight)
    weight.grad = torch.ones(48, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="would change a weight that is resident"):
        optimizer.step()
    assert same_bytes(before, weight)


def test_sharing_memory_shares_the_bytes(weight):
    assert not weight.is_shared()
    assert weight.share_memory_().is_shared() and weight.data_.is_shared() and weight.scale.is_shared()


def test_torch_save_of_tensors_loads_without_code(weight):
    loaded = saved_and_loaded({"w": weight})["w"]
    assert isinstance(loaded, nn.Parameter) and not loaded.requires_grad and same_bytes(loaded, weight)


def test_non_finite_values_stay_visible(plain):
    plain[3, 5], plain[4, 6] = float("nan"), float("inf")
    values = ResidentWeight.quantized(plain, ROW).dequantized(torch.float32)
    assert values.isnan().any(1).nonzero().flatten().tolist() == [3, 4]
