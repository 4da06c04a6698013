"""A new optimizer is one file and one row: Lion (arXiv 2302.06675) with an FP8 momentum, trained, resumed, planned."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from octavo.kernels.adamw.reference import step_all
from octavo.numerics import Precision, sqnr
from octavo.optim import OPTIMIZERS, AdamW
from octavo.optim.states import OptimizerSpec
from octavo.planner.devices import DEVICES
from octavo.train.config.run_config import ConfigError, load_config
from octavo.train.config.sections import Optim, PrecisionConfig
from octavo.train.optimizer import make_optimizer, state_bytes_per_parameter
from octavo.train.run_plan import plan_memory, plan_step
from tensors import randn

DEMO = Path(__file__).parents[2] / "configs" / "demo.toml"


def lion(p, grad, moments, hyper):
    (m,) = moments
    p.mul_(1 - hyper.lr * hyper.weight_decay).sub_(m.lerp(grad, 1 - hyper.beta1).sign_(), alpha=hyper.lr)
    m.lerp_(grad, 1 - hyper.beta2)


class Lion(AdamW):
    def spec(self, group):
        return LION


LION = OptimizerSpec(name="lion", make=Lion, moments={"exp_avg": True}, step=partial(step_all, rule=lion))


@pytest.fixture(autouse=True)
def row(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", LION)


@pytest.mark.parametrize(("states", "decibels"), [("fp32", 100), ("fp8", 15)])
def test_steps_are_those_of_plain_lion(states, decibels):
    params = [nn.Parameter(randn(*shape)) for shape in ((40, 200), (7, 128), (96,))]
    plain, momentum = [param.detach().clone() for param in params], [torch.zeros_like(param) for param in params]
    optimizer = Lion(params, lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1, states=states)
    for number in range(20):
        for i, (param, value, m) in enumerate(zip(params, plain, momentum, strict=True)):
            param.grad = randn(*param.shape, seed=100 * number + i) + randn(*param.shape, seed=i)
            grad = 0.5 * param.grad
            value.copy_(value * (1 - 1e-2 * 0.1) - 1e-2 * torch.sign(m + (1 - 0.9) * (grad - m)))
            m.copy_(m + (1 - 0.99) * (grad - m))
        optimizer.step_scaled(0.5)
    for param, value in zip(params, plain, strict=True):
        start = randn(*param.shape)
        assert sqnr(value - start, param.detach() - start) > decibels
    assert ("exp_avg_hi" in optimizer.state[params[0]]) == (states == "fp8")


def test_the_trainer_builds_and_resumes_it():
    optim, precision = Optim(name="lion", lr=3e-3), PrecisionConfig(level="fp8+activations+optimizer")
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128)).bfloat16()
        runs.append((model, make_optimizer(model, optim, precision, {}, None)))

    def train(model, optimizer, numbers):
        for number in numbers:
            x = randn(32, 128, seed=number).bfloat16()
            loss = (model(x) - x).float().square().mean()
            loss.backward()
            optimizer.accumulate()
            optimizer.step(3e-3, optimizer.gradient_norm(1.0), number)
            optimizer.zero_grad()
        return loss.item()

    (model, optimizer), (twin, second) = runs
    first, last = train(model, optimizer, [0]), train(model, optimizer, range(1, 20))
    assert isinstance(optimizer.inner, Lion) and last < 0.8 * first
    assert state_bytes_per_parameter(optimizer, model) == pytest.approx(3.07, abs=0.02)  # FP8, scales, remainders
    twin.load_state_dict(deepcopy(model.state_dict()))
    second.load_state_dict(deepcopy(optimizer.state_dict()))
    assert train(model, optimizer, range(20, 23)) == train(twin, second, range(20, 23))
    assert all(map(torch.equal, model.parameters(), twin.parameters()))
    others = {torch.optim.AdamW: "lion computes another step", AdamW: "exp_avg_sq_fp8 is .*, expected none"}
    for other, message in others.items():
        saved = other(model.parameters())
        model(randn(1, 128).bfloat16()).sum().backward()
        saved.step()
        with pytest.raises(ValueError, match=message):
            Lion(model.parameters()).load_state_dict(saved.state_dict())


@pytest.mark.thorough
def test_memory_and_time_are_planned():
    config = load_config(DEMO, ["precision.level=fp8+activations+optimizer", "optim.name=lion"])
    memory, plan = plan_memory(config).largest, plan_step(config, gpu="h100")
    assert memory["optimizer states"] / memory["parameters"] == pytest.approx((2 + 1 + 5 / 128) / 2, rel=0.01)
    moved = plan.parameters * (2 * (2 + 2 + 1 + 5 / 128) + 2 * 2)
    assert plan.planned.optimizer == pytest.approx(moved / DEVICES["h100"].bandwidth, rel=1e-3)
    for name, message in {"lyon": "did you mean 'lion'", "lion": 'momentum is for optim.name = "muon"'}.items():
        with pytest.raises(ConfigError, match=message):
            load_config(DEMO, [f"optim.name={name}", "optim.momentum=0.9"])


@pytest.mark.parametrize(("states", "master"), [("fp32", "fp32"), ("fp8", "remainder"), ("fp8", "none")])
def test_bytes_of_a_step_are_those_of_its_tensors(states, master):
    precision = Precision(states=states, master=master)
    for spec in OPTIMIZERS.values():
        param = nn.Parameter(randn(16, 256, dtype=torch.bfloat16))
        param.grad = torch.ones_like(param)
        optimizer = spec.make([param], states=states, master=None if master == "none" else master)
        optimizer.step()
        written = [param, *(value for name, value in optimizer.state[param].items() if name != "step")]
        size = 2 * sum(value.nbytes for value in written) + 2 * param.grad.nbytes  # the norm reads the gradient, too
        assert spec.step_bytes(precision) == pytest.approx(size / param.numel() + spec.traffic, rel=1e-6)
    assert OPTIMIZERS["adamw"].step_bytes(Precision()) == 32
