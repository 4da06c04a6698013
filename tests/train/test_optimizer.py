import copy
import io
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.cohere.modeling_cohere import CohereLayerNorm

from octavo.train.config.sections import Optim
from octavo.train.optimizer import Fp8StateOptimizer, MasterWeightOptimizer, decayed_parameters

OPTIM = Optim(lr=1e-3, weight_decay=0.1, clip=0.0)


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to(dtype)


def backward(model: nn.Module, seed: int, factor: float = 1.0) -> None:
    dtype = next(model.parameters()).dtype
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
    (model(x).float().square().mean() * factor).backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_follow_fp32_adamw_and_parameters_are_rounded_from_them(dtype: torch.dtype) -> None:
    model, shadow = make_model(dtype), make_model(dtype).float()
    optimizer = MasterWeightOptimizer(model, OPTIM, master=True)
    decayed = [param for param in shadow.parameters() if param.dim() >= 2]
    plain = [param for param in shadow.parameters() if param.dim() < 2]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    for step in range(20):
        backward(model, step)
        for param, twin in zip(model.parameters(), shadow.parameters(), strict=True):
            twin.grad = param.grad.float()
        optimizer.accumulate()
        assert all(param.grad is None for param in model.parameters())
        optimizer.step(1e-3, optimizer.gradient_norm(1.0))
        optimizer.zero_grad()
        for group in reference.param_groups:
            group["lr"] = 1e-3
        reference.step()
        masters = optimizer.state_dict()["masters"]
        for (name, param), twin in zip(model.named_parameters(), shadow.parameters(), strict=True):
            torch.testing.assert_close(masters[name], twin.detach(), rtol=1e-6, atol=1e-7)
            assert torch.equal(param, masters[name].to(dtype))
            with torch.no_grad():
                twin.copy_(masters[name])


def test_masters_keep_updates_that_16_bits_lose() -> None:
    weights = []
    for master in (True, False):
        model = nn.Linear(4, 4, bias=False).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizer = MasterWeightOptimizer(model, Optim(lr=1e-3, weight_decay=0.0, clip=0.0), master=master)
        for _ in range(10):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.accumulate()
            optimizer.step(1e-3, optimizer.gradient_norm(1.0))
            optimizer.zero_grad()
        weights.append(model.weight.detach().float().mean().item())
    assert weights[0] == pytest.approx(0.99, abs=0.003)
    assert weights[1] == 1.0  # half a unit in the last place of 1.0 is 0.002 downward: each update rounds away


def test_norms_and_biases_do_not_decay() -> None:
    model = make_model(torch.float32)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = MasterWeightOptimizer(model, Optim(lr=0.1, weight_decay=0.5, clip=0.0), master=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(0.1, optimizer.gradient_norm(1.0))
    for name, param in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if param.dim() >= 2 else before[name]
        torch.testing.assert_close(param.detach(), expected)


class Odd(nn.Module):
    """Parameters whose number of dimensions does not tell what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(4, 2))
        self.gate_up_proj = nn.Parameter(torch.ones(2, 4, 4))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(2, 4))
        self.time_mix = nn.Parameter(torch.ones(1, 1, 4))
        self.marked = nn.Parameter(torch.ones(4, 4))
        self.marked._no_weight_decay = True  # type: ignore[attr-defined]
        self.norm = CohereLayerNorm((2, 4), bias=True)
        self.embedding = nn.Embedding(4, 4)
        self.out = nn.Linear(4, 1)


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_weight_decay_goes_by_what_a_parameter_is(states: str) -> None:
    model = Odd()
    assert decayed_parameters(model) == {"gate_up_proj", "embedding.weight", "out.weight"}
    optim = Optim(lr=0.1, weight_decay=0.5, clip=0.0)
    optimizer = (
        MasterWeightOptimizer(model, optim, master=True) if states == "fp32"
        else Fp8StateOptimizer(model, optim, states="fp8", master=None)
    )  # fmt: skip
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step(0.1, optimizer.gradient_norm(1.0))
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == decayed_parameters(model)


def test_gradients_of_micro_batches_are_added_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterWeightOptimizer(model, OPTIM, master=True)
    for part in (1.0, 2.0**-9, 2.0**-9):  # each 2⁻⁹ would be lost beside 1 in bf16
        model.weight.grad = torch.full_like(model.weight, part)
        optimizer.accumulate()
    assert optimizer.gradient_norm(1.0).item() == 1 + 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_clipping_is_by_global_norm(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    optimizer = MasterWeightOptimizer(model, Optim(lr=1e-3, clip=0.25), master=True)
    backward(model, 0, factor=50.0)
    optimizer.accumulate()
    norm = optimizer.gradient_norm(1.0)
    assert norm > 1
    optimizer.step(1e-3, norm)
    assert optimizer.gradient_norm(1.0).item() == pytest.approx(0.25, rel=1e-4)


def test_gradients_within_the_clip_are_not_multiplied() -> None:
    parameters = []
    for known in (False, True):
        model = make_model(torch.bfloat16)
        optimizer = MasterWeightOptimizer(model, Optim(lr=1e-3, clip=4.0), master=True)
        backward(model, 0, factor=1.0)
        optimizer.accumulate()
        norm = optimizer.gradient_norm(1.0)
        with patch.object(torch, "_foreach_mul_", wraps=torch._foreach_mul_) as multiply:
            optimizer.step(1e-3, norm, **({"norm_value": norm.item()} if known else {}))
        assert norm < 4.0 and not multiply.called
        parameters.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *parameters))


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_one_micro_batch_keeps_its_bf16_gradients(clip: float) -> None:
    """The kernel reads, clips and steps what is added up, multiplied, stepped and rounded otherwise."""
    optim, arms = Optim(lr=1e-2, weight_decay=0.1, clip=clip), {}
    for adds_up in (True, False):
        model = make_model(torch.bfloat16)
        model[2].bias.requires_grad_(False)
        optimizer = MasterWeightOptimizer(model, optim, master=True, adds_up=adds_up)
        for step in range(20):
            backward(model, step)
            optimizer.accumulate()
            before = [p.grad.clone() for p in model.parameters() if not adds_up and p.requires_grad]
            norm = optimizer.gradient_norm(1.0)
            with Operations() as called:
                optimizer.step(1e-2, norm, norm_value=norm.item())
            if not adds_up:
                assert all(map(torch.equal, before, (p.grad for p in model.parameters() if p.requires_grad)))
                assert not {"_foreach_mul_", "_foreach_copy_", "_fused_adamw_"} & called.names
            optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        for name, master in optimizer.state_dict()["masters"].items():
            assert torch.equal(model.get_parameter(name), master.bfloat16())
        arms[adds_up] = optimizer.state_dict()
    assert arms[True]["masters"].keys() == arms[False]["masters"].keys()
    for name, master in arms[True]["masters"].items():  # gradients differ where a parameter rounds to the other side
        torch.testing.assert_close(arms[False]["masters"][name], master, rtol=0, atol=2e-3)


@pytest.mark.parametrize("adds_up", [True, False])
def test_gradients_may_lie_otherwise_in_memory(adds_up: bool) -> None:
    """As of parts of a DTensor: PyTorch's fused step ignores strides, without an error."""
    values, results = torch.arange(60.0).view(12, 5).sin(), []
    for gradient in (values, values.t().contiguous().t()):
        model = nn.Linear(5, 12, bias=False, dtype=torch.bfloat16)
        nn.init.ones_(model.weight)
        optimizer = MasterWeightOptimizer(model, OPTIM, master=True, adds_up=adds_up)
        model.weight.grad = gradient.bfloat16()
        optimizer.accumulate()
        optimizer.step(1e-2, optimizer.gradient_norm(1.0))
        results.append(optimizer.state_dict()["adamw"]["state"][0]["exp_avg"])
    assert torch.equal(*results)


class Operations(TorchDispatchMode):
    """The names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("adds_up", [(True, False), (False, True), (False, False)])
def test_states_fit_any_number_of_micro_batches(adds_up: tuple[bool, bool]) -> None:
    """And a state that is read into the tensors in place, as from shards, goes on from its count of steps."""

    def steps(model: nn.Module, optimizer: MasterWeightOptimizer, seeds: range) -> None:
        for seed in seeds:
            backward(model, seed)
            optimizer.accumulate()
            optimizer.step(1e-3, optimizer.gradient_norm(1.0))
            optimizer.zero_grad()

    model = make_model(torch.bfloat16)
    first = MasterWeightOptimizer(model, OPTIM, master=True, adds_up=adds_up[0])
    steps(model, first, range(5))
    saved, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(model.state_dict())
    tensors = {name: value.clone() for name, value in first.tensors().items()}
    steps(model, first, range(5, 8))
    for in_place in (False, True):
        twin = make_model(torch.bfloat16)
        twin.load_state_dict(weights)
        second = MasterWeightOptimizer(twin, OPTIM, master=True, adds_up=adds_up[1])
        if in_place:
            steps(twin, second, range(2))
            twin.load_state_dict(weights)
            for name, value in second.tensors().items():
                value.copy_(tensors[name])
        else:
            second.load_state_dict(saved)
        steps(twin, second, range(5, 8))
        for own, other in zip(model.parameters(), twin.parameters(), strict=True):
            if adds_up == (False, False):
                assert torch.equal(own, other)
            torch.testing.assert_close(own, other, rtol=0.01, atol=1e-3)
        assert {int(s["step"]) for s in second.state_dict()["adamw"]["state"].values()} == {8}


def test_the_norm_is_of_unscaled_gradients_and_shows_overflow() -> None:
    norms = []
    for scale in (1.0, 1024.0):
        model = make_model(torch.bfloat16)
        optimizer = MasterWeightOptimizer(model, OPTIM, master=True)
        backward(model, 0, factor=scale)
        optimizer.accumulate()
        norms.append(optimizer.gradient_norm(scale).item())
    assert norms[0] == norms[1]
    bias = next(param for param in model.parameters() if param.dim() == 1)
    bias.grad = torch.full_like(bias, torch.inf)
    optimizer.accumulate()
    assert not torch.isfinite(optimizer.gradient_norm(1.0))


def test_frozen_parameters_are_left_out() -> None:
    model = make_model(torch.bfloat16)
    model[0].requires_grad_(False)
    optimizer = MasterWeightOptimizer(model, OPTIM, master=True)
    before = model[0].weight.clone()
    backward(model, 0)
    optimizer.accumulate()
    optimizer.step(1.0, optimizer.gradient_norm(1.0))
    assert torch.equal(model[0].weight, before)
    assert "0.weight" not in optimizer.state_dict()["masters"]


@pytest.mark.parametrize(("dtype", "master"), [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float32, True)])
def test_state_round_trip_continues_bitwise(dtype: torch.dtype, master: bool) -> None:
    def steps(model: nn.Module, optimizer: MasterWeightOptimizer, seeds: range) -> None:
        for seed in seeds:
            backward(model, seed)
            optimizer.accumulate()
            optimizer.step(1e-2, optimizer.gradient_norm(1.0))
            optimizer.zero_grad()

    model = make_model(dtype)
    optimizer = MasterWeightOptimizer(model, OPTIM, master=master)
    steps(model, optimizer, range(3))
    twin = make_model(dtype)
    twin.load_state_dict(model.state_dict())
    restored = MasterWeightOptimizer(twin, OPTIM, master=master)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    restored.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    steps(model, optimizer, range(3, 6))
    steps(twin, restored, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
