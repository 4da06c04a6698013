"""octavo.optim.Muon: torch.optim.Muon in high precision, FP8 momentum, experts, AdamW beside it, and FSDP2."""

import copy

import pytest
import torch
from test_sharded import Weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from octavo.numerics.error import sqnr
from octavo.optim import AdamW, Muon, muon
from octavo.tensor import local_tensor
from processes import on_ranks
from support.refusals import refused
from tensors import randn, same

SHAPES = [(96, 128), (128, 96), (64, 64), (7, 130)]


def parameters(dtype=torch.float32):
    return list(Weights(dtype, SHAPES).parameters())


def take_steps(optimizer, params, numbers):
    for number in numbers:
        for i, param in enumerate(params):
            grad = randn(*param.shape, seed=100 * number + i) + 0.5 * randn(*param.shape, seed=i)
            param.grad = grad.to(param.dtype)
        optimizer.step()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_each_step_is_that_of_torch_in_float64(nesterov, scale, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda tensor: tensor.double().clone())  # torch's own products
    monkeypatch.setattr(muon, "PRODUCTS", torch.float64)
    own = parameters()
    reference = [nn.Parameter(param.detach().double()) for param in own]
    options = {"lr": 2e-2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov, "adjust_lr_fn": scale}
    theirs, ours = torch.optim.Muon(reference, **options), Muon(own, states="fp32", **options)
    for number in range(5):
        for i, param in enumerate(own):
            param.grad = randn(*param.shape, seed=100 * number + i)
            reference[i].grad = param.grad.double()
        theirs.step()
        ours.step()
        for param, expected in zip(own, reference, strict=True):
            assert sqnr(expected.detach(), param.detach().double()) > 115, (number, param.shape)


@pytest.mark.parametrize("shape", [(40, 64), (64, 40), (3, 64, 32), (1, 50), (50, 1)], ids=str)
def test_orthogonalized_matrices(shape):
    result = muon.orthogonalize(randn(*shape, seed=0).bfloat16())
    assert result.shape == shape and result.dtype == torch.bfloat16
    values = torch.linalg.svdvals(result.float())
    assert 0.6 < values.min() and values.max() < 1.25
    assert not muon.orthogonalize(torch.zeros(shape, dtype=torch.bfloat16)).any()


def test_each_expert_is_a_matrix_of_its_own():
    stack = nn.Parameter(randn(3, 32, 64))
    experts = [nn.Parameter(expert.clone()) for expert in stack.detach()]
    stack.grad = randn(*stack.shape, seed=1) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    for expert, grad in zip(experts, stack.grad, strict=True):
        expert.grad = grad.clone()
    for params in ([stack], experts):
        Muon(params, lr=0.1, states="fp32").step()
    for expert, own in zip(experts, stack, strict=True):
        torch.testing.assert_close(own, expert, rtol=0, atol=2e-3)


def test_momentum_in_fp8_follows_that_in_fp32():
    moved = {}
    for states in ("fp8", "fp32"):
        params = parameters()
        before = [param.detach().clone() for param in params]
        optimizer = Muon(params, lr=1e-2, weight_decay=0.0, states=states)
        take_steps(optimizer, params, range(20))
        moved[states] = [param.detach() - old for param, old in zip(params, before, strict=True)]
        if states == "fp8":
            assert set(optimizer.state[params[0]]) == {"step", "exp_avg_fp8", "exp_avg_hi", "exp_avg_k"}
            assert optimizer.state[params[0]]["exp_avg_fp8"].dtype == torch.float8_e4m3fn
    for expected, other in zip(moved["fp32"], moved["fp8"], strict=True):
        assert sqnr(expected, other) > 20


def test_adamw_beside_it_is_octavos():
    first, second = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    beside = Muon([{"params": first[:1]}, {"params": first[1:], "muon": False, "lr": 3e-3}], betas=(0.9, 0.99))
    alone = AdamW(second, lr=3e-3, betas=(0.9, 0.99), weight_decay=0.1)
    take_steps(beside, first, range(3))
    take_steps(alone, second, range(3))
    assert same(first[1:], second[1:])
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_a_scaled_step_is_one_with_multiplied_gradients(states):
    """Of matrices and of what AdamW steps beside them, with a factor of its own for each step; never NaN."""
    first, second = parameters(), parameters()
    scaled, plain = (
        Muon([{"params": own[:2]}, {"params": own[2:], "muon": False}], states=states) for own in (first, second)
    )
    for number, factor in enumerate((1.0, 0.3, 0.02)):
        for i, (one, two) in enumerate(zip(first, second, strict=True)):
            one.grad = randn(*one.shape, seed=100 * number + i)
            two.grad = one.grad * factor
        scaled.step_scaled(factor)
        plain.step()
    assert all(map(torch.equal, first, second))
    refused("finite factor; got nan", scaled.step_scaled, float("nan"))
    assert all(map(torch.equal, first, second))
    scaled.step()  # multiplies no more
    for one, two in zip(first, second, strict=True):
        two.grad = one.grad
    plain.step()
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("master", ["remainder", "fp32", None])
def test_a_loaded_state_continues_bitwise(master):
    def muon_of(params, both=True):
        groups = [{"params": params[:3], "muon": both}, {"params": params[3:], "muon": False}]
        return Muon(groups, lr=1e-2, master=master)

    params = parameters(dtype=torch.bfloat16)
    optimizer = muon_of(params)
    take_steps(optimizer, params, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    restored = muon_of(twins)
    restored.load_state_dict(state)
    take_steps(optimizer, params, range(3, 6))
    take_steps(restored, twins, range(3, 6))
    assert same(params, twins)
    state["param_groups"][0]["muon"] = False
    refused(r"does not fit: exp_avg_sq_fp8 is none, expected", muon_of(twins, False).load_state_dict, state)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8,), {}, r"got a parameter of shape \[8\]: put it into a group with muon=False"),
        ((8, 8), {"adjust_lr_fn": "orignal"}, r"adjust_lr_fn is .* \(did you mean 'original'\?\)"),
        ((8, 8), {"momentum": 1.0}, "momentum must be .* below 1; got 1.0"),
        ((8, 8), {"momentum": "x"}, "momentum must be a number, .*; got 'x'"),
        ((8, 8), {"ns_steps": 0}, "ns_steps must be an integer, at least 1; got 0"),
        ((8, 8), {"ns_steps": 2.5}, "ns_steps must be an integer, at least 1; got 2.5"),
        ((8, 8), {"nesterov": "x"}, "nesterov is True or False; got 'x'"),
        ((8, 8), {"maximize": "x"}, "maximize is True or False; got 'x'"),
        ((8, 8), {"states": "fp9"}, "states is 'fp8' or"),
    ],
    ids=str,
)
def test_mistakes(shape, options, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.zeros(shape))], **options)


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "states"), [(torch.bfloat16, "fp8"), (torch.float32, "fp32")], ids=str)
@on_ranks(3)
def test_shards_have_the_numbers_of_one_process(dtype, states):
    """Rows of sharded matrices, bit for bit; other shards raise."""
    mesh = init_device_mesh("cpu", (3,))
    whole, part = (Weights(dtype, [*SHAPES, (2, 40), (6, 24, 64), (9,)]) for _ in range(2))
    models = whole, fully_shard(part, mesh=mesh)
    optimizers = []
    for model in models:
        params = list(model.parameters())
        rest = {"params": params[-1:], "muon": False}
        optimizers.append(Muon([{"params": params[:-1]}, rest], lr=1e-2, states=states))
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for i, param in enumerate(model.parameters()):
                grad = randn(*param.shape, seed=100 * number + i).to(dtype)
                param.grad = distribute_tensor(grad, mesh, [Shard(0)]) if isinstance(param, DTensor) else grad
            optimizer.step()
    for whole, part in zip(models[0].parameters(), models[1].parameters(), strict=True):
        rows = distribute_tensor(whole.detach(), mesh, [Shard(0)]).to_local()
        assert torch.equal(rows, local_tensor(part).detach())
    columns = nn.Parameter(distribute_tensor(torch.zeros(8, 6), mesh, [Shard(1)]))
    refused("Muon needs whole matrices", Muon, [columns], states="fp32")
