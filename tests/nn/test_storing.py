"""Modules that store: MLPs around an activation, and operands and dtypes beside the usual ones."""

import copy

import pytest
import torch
from test_activations import flat, storing
from torch import nn

import octavo
from octavo.nn.storage import kept_for_backward
from octavo.numerics import sqnr


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
    assert {row.name: row.storage for row in octavo.report(model).activations} == {
        "0": "mlp", "1": "activation", "2": "mlp",
    }  # fmt: skip
    with kept_for_backward(model) as kept:
        model(x)
    assert kept.bytes == 2 * x.numel() * 33 // 32
    text = str(octavo.report(model))
    assert "linear beside an activation: input made again, or stored in FP8" in text and "precision level bf16" in text


def test_a_skipped_linear_beside_an_activation_is_left_alone():
    precision = octavo.Precision(matmul="bf16", activations="fp8", skip=["fc1"])
    model, x = storing(A(), precision), rand(64, 64).requires_grad_() * 1
    assert type(model.fc1) is nn.Linear and type(model) is A and type(model.fc2) is not nn.Linear
    seen = []
    model.fc1.register_full_backward_hook(lambda module, _, given: seen.append(given[0]))
    model(x).sum().backward()
    assert torch.equal(model.fc1.weight.grad, seen[0].t() @ x)


def test_heads_and_other_kinds_of_linears_beside_an_activation_are_left_alone():
    class Own(nn.Linear):
        pass

    model = nn.Module()
    model.embed, model.act, model.lm_head, model.own = nn.Embedding(64, 64), nn.GELU(), nn.Linear(64, 64), Own(64, 64)
    assert octavo.report(storing(model)).activations[0].name == "act" and len(octavo.report(model).activations) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_without_epsilon_adds_what_pytorch_adds(dtype):
    norm = nn.RMSNorm(64).to(dtype)
    x = (rand(64, 64) * 3e-4).to(dtype).requires_grad_()
    expected = norm(x)
    actual = storing(copy.deepcopy(norm))(x)
    assert sqnr(expected, actual) > (100 if dtype == torch.float32 else 50)


def test_a_norm_without_epsilon_leaves_float64_to_pytorch():
    norm = nn.RMSNorm(64).double()
    x = rand(8, 64).double() * 1e-7
    assert torch.equal(norm(x), storing(copy.deepcopy(norm))(x))


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_norms_under_autocast_store_16_bit_inputs(kind):
    norm = kind(64)
    model, x = storing(copy.deepcopy(norm)), rand(64, 64).bfloat16().requires_grad_() * 1
    with torch.autocast("cpu", torch.bfloat16), kept_for_backward(model) as kept:
        expected, actual = norm(x), model(x)
    assert expected.dtype == actual.dtype and sqnr(expected, actual) > 45
    assert kept.by_dtype[torch.float8_e4m3fn] == x.numel()
    actual.sum().backward()


class Glu(nn.Module):
    """Gate and up by themselves, or joined, up first."""

    def __init__(self, joint=False, up_dtype=None):
        super().__init__()
        self.joint, self.up_dtype = joint, up_dtype
        if joint:
            self.gate_up_proj = nn.Linear(64, 128)
        else:
            self.gate_proj, self.up_proj = nn.Linear(64, 64), nn.Linear(64, 64)
        self.down_proj = nn.Linear(64, 64)

    def forward(self, x):
        if self.joint:
            up, gate = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(nn.functional.silu(gate) * up)


@pytest.mark.parametrize("joint", [False, True])
def test_a_gated_mlp_of_another_dtype_computes_as_pytorch_does(joint):
    plain = Glu(joint)
    model = storing(copy.deepcopy(plain)).double()
    assert model.octavo_storage.kind == "glu"
    x = rand(64, 64).double()
    assert torch.equal(plain.double()(x), model(x))


def test_gate_and_up_of_unlike_dtypes_or_shapes_are_multiplied_as_pytorch_does():
    plain = Glu()
    model, x = storing(copy.deepcopy(plain)), rand(64, 64)
    for m in (plain, model):
        m.up_proj.register_forward_hook(lambda module, args, y: y.bfloat16())
    assert torch.equal(plain(x), model(x))
    plain = Glu()
    model = storing(copy.deepcopy(plain))
    for m in (plain, model):
        m.up_proj = nn.Linear(64, 1, bias=False)
        torch.nn.init.ones_(m.up_proj.weight)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("gate_first", [True, False])
def test_halves_of_a_joint_gradient_are_in_order(gate_first, monkeypatch):
    """Also where the op gives them one by one."""
    import octavo.nn.storing as module

    def apart(*args, joined=False):
        return module_backward(*args)

    module_backward = module.glu_backward
    both = rand(64, 64).requires_grad_()
    expected = torch.autograd.grad(module.stored_joint_glu(both * 1, "silu", gate_first).sum(), both)[0]
    monkeypatch.setattr(module, "glu_backward", apart)
    actual = torch.autograd.grad(module.stored_joint_glu(both * 1, "silu", gate_first).sum(), both)[0]
    assert torch.equal(expected, actual)
