"""Modules that store: MLPs around an activation, and operands and dtypes beside the usual ones."""

import copy
import gc
from functools import partial

import pytest
import torch
from models import MLP
from test_modules import flat, storing
from torch import nn
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.activations import saved_tensors
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr
from support.gated import JointlyGatedMLP


class A(nn.Module):
    """An MLP with an activation between its linears."""

    def __init__(self, width=64):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Classifier(A):
    """And computes its loss by itself, some classes masked."""

    def forward(self, x):
        y = super().forward(x)
        y = y.masked_fill(torch.arange(y.shape[-1]) % 32 == 5, float("-inf"))
        return -y.log_softmax(-1)[..., 0].mean()


def rand(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_what_an_mlp_computes_besides_its_linears_is_not_rounded():
    plain = nn.Sequential(Classifier())
    model, x = storing(copy.deepcopy(plain)), rand(64, 64)
    grads = []
    for module in (plain, model):
        module(x).backward()
        grads.append({name: p.grad for name, p in module.named_parameters()})
    assert all(g.isfinite().all() for g in grads[1].values())
    assert sqnr(flat(grads[0]), flat(grads[1])) > 24
    assert torch.equal(grads[0]["0.fc2.bias"], grads[1]["0.fc2.bias"])


def test_linears_beside_an_activation_keep_their_inputs_in_fp8():
    model, x = (
        storing(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))),
        rand(64, 64).requires_grad_() * 1,
    )
    stored = {row.name: row.activation_storage for row in octavo.report(model).activations}
    assert stored == {"": "saved_tensors", "1": "activation"}
    with saved_for_backward(model) as kept:
        model(x)
    assert kept.bytes == 2 * x.numel() * 33 // 32
    text = str(octavo.report(model))
    assert "own forward: inputs of products" in text and "precision level bf16" in text


def test_a_skipped_linear_beside_an_activation_is_left_alone():
    precision = octavo.Precision(matmul="bf16", activations="fp8", skip=["fc1"])
    model, x = storing(A(), precision), rand(64, 64).requires_grad_()
    assert type(model.fc1) is nn.Linear and model.octavo_storage.unrounded == ("fc1",)
    plain, seen = A(), []
    plain.load_state_dict(model.state_dict())
    for m in (plain, model):
        m.fc1.register_full_backward_hook(lambda module, _, gradients: seen.append(gradients[0]))
        m(x).sum().backward()
    assert torch.equal(model.fc1.weight.grad, seen[1].t() @ x) and not torch.equal(*seen)
    assert 25 < sqnr(plain.fc2.weight.grad, model.fc2.weight.grad) < 60


def test_heads_and_other_kinds_of_linears_keep_their_inputs_as_they_are():
    class Own(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Module()
    model.embed, model.act, model.lm_head, model.own = nn.Embedding(64, 64), nn.GELU(), nn.Linear(64, 64), Own(64, 64)
    assert storing(model).octavo_storage.unrounded == ("lm_head", "own")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_epsilon_adds_what_pytorch_adds(dtype):
    norm = nn.RMSNorm(64).to(dtype)
    x = (rand(64, 64) * 3e-4).to(dtype).requires_grad_()
    expected = norm(x)
    actual = storing(copy.deepcopy(norm))(x)
    assert sqnr(expected, actual) > (100 if dtype == torch.float32 else 50)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_under_autocast_store_16_bit_inputs(kind):
    norm = kind(64)
    model, x = storing(copy.deepcopy(norm)), rand(64, 64).bfloat16().requires_grad_() * 1
    with torch.autocast("cpu", torch.bfloat16), saved_for_backward(model) as kept:
        expected, actual = norm(x), model(x)
    assert expected.dtype == actual.dtype and sqnr(expected, actual) > 45
    assert kept.by_dtype[torch.float8_e4m3fn] == x.numel()
    actual.sum().backward()


@pytest.mark.parametrize("kind", [MLP, JointlyGatedMLP])
def test_a_gated_mlp_of_another_dtype_computes_as_pytorch_does(kind):
    plain = kind()
    model = storing(copy.deepcopy(plain)).double()
    assert model.octavo_storage.kind == "glu"
    x = rand(64, 64).double()
    grads = []
    for m in (plain.double(), model):
        y = m(x)
        y.sum().backward()
        grads.append([y, *(p.grad for p in m.parameters())])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("kind", [MLP, JointlyGatedMLP])
def test_a_gated_mlp_without_tokens(kind):
    model, x = storing(kind()), torch.zeros(2, 0, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == x.shape and all(not p.grad.count_nonzero() for p in model.parameters())


def test_gate_and_up_of_unlike_dtypes_or_shapes_are_multiplied_as_pytorch_does():
    plain = MLP()
    model, x = storing(copy.deepcopy(plain)), rand(64, 64)
    for m in (plain, model):
        m.up_proj.register_forward_hook(lambda module, args, y: y.bfloat16())
    assert torch.equal(plain(x), model(x))
    plain = MLP()
    model = storing(copy.deepcopy(plain))
    for m in (plain, model):
        m.up_proj = nn.Linear(64, 1, bias=False)
        torch.nn.init.ones_(m.up_proj.weight)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_a_joint_gradient_are_in_order(gate_first, monkeypatch):
    """Also where the op gives them one by one."""
    import octavo.activations.functional as module

    def apart(*args, joined=False):
        return module_backward(*args)

    def gradient():
        gate, up = both.detach().chunk(2, -1) if gate_first else both.detach().chunk(2, -1)[::-1]
        h = module.glu_saving_fp8(gate, up, nn.functional.silu(gate) * up, "silu", None, both * 1, gate_first)
        return torch.autograd.grad(h.sum(), both)[0]

    module_backward = module.glu_backward
    both = rand(64, 64).requires_grad_()
    expected = gradient()
    gate, up = both.chunk(2, -1) if gate_first else both.chunk(2, -1)[::-1]
    exact = torch.autograd.grad((nn.functional.silu(gate) * up).sum(), both)[0]
    assert sqnr(exact, expected) > 20
    monkeypatch.setattr(module, "glu_backward", apart)
    assert torch.equal(expected, gradient())


@pytest.mark.thorough
@pytest.mark.parametrize("recomputed", [False, True])
def test_nothing_is_left_to_the_garbage_collector(recomputed):
    """Tensors in a reference cycle would live until Python looks for one."""
    model, x = storing(nn.Sequential(nn.RMSNorm(64), A(), MLP())), rand(64, 64).requires_grad_()
    call = partial(checkpoint, model, use_reentrant=False) if recomputed else model
    call(x).sum().backward()
    kinds = (saved_tensors.CompressionHooks, saved_tensors.PackedTensor)

    def left():
        return sum(issubclass(type(o), kinds) for o in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = left()
        call(x).sum().backward()
        assert left() == before
    finally:
        gc.enable()
