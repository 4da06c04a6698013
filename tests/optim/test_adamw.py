import copy
import math
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from torch import nn

from octavo.kernels.adamw import reference
from octavo.optim import AdamW, Muon, adamw
from support.refusals import refused
from tensors import randn, same, saved_and_loaded


def parameters(dtype=torch.float32):
    shapes = [(40, 200), (7, 128), (96,), (3, 5, 30), (1,), (0, 64), ()]
    return [nn.Parameter(randn(*shape, seed=i, dtype=dtype)) for i, shape in enumerate(shapes)]


def set_gradients(params, step, dtype=None):
    for i, param in enumerate(params):
        param.grad = randn(*param.shape, seed=1000 * step + i).to(dtype or param.dtype)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(params, step)
        optimizer.step()


SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("maximize", [False, True])
def test_with_fp32_states_it_is_torch_adamw(maximize):
    ours, theirs = parameters(), parameters()
    train(AdamW(ours, **SETTINGS, states="fp32", maximize=maximize), ours, 5)
    train(torch.optim.AdamW(theirs, **SETTINGS, foreach=False, maximize=maximize), theirs, 5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_a_remainder_is_an_exact_fp32_master(states):
    """bf16 parameters with remainders walk exactly the path of float32 masters; parameters are the masters, rounded."""
    start = [p.detach().bfloat16() for p in parameters()]
    remainder, master = ([nn.Parameter(p.clone()) for p in start] for _ in range(2))
    one = AdamW(remainder, **SETTINGS, states=states, master="remainder")
    other = AdamW(master, **SETTINGS, states=states, master="fp32")
    train(one, remainder, 8)
    train(other, master, 8)
    for a, b in zip(remainder, master, strict=True):
        if a.numel():
            bits = (a.detach().view(torch.int16).int() << 16) + one.state[a]["remainder"].int()
            assert torch.equal(bits.view(torch.float32), other.state[b]["master"])
            # Ties are rounded up here and to even there.
            assert (a.detach().view(torch.int16).int() - b.detach().view(torch.int16).int()).abs().max() <= 1


def bytes_per_parameter(optimizer, names):
    total = sum(t.nbytes for s in optimizer.state.values() for n, t in s.items() if n.startswith(names))
    return total / sum(p.numel() for g in optimizer.param_groups for p in g["params"])


@pytest.mark.parametrize("shape", [(64, 4096), (128, 128), (50, 1000), (300, 64), (32, 3, 14, 14)])
def test_bytes_per_parameter(shape):
    param = nn.Parameter(randn(*shape, dtype=torch.bfloat16))
    optimizer = AdamW([param])
    train(optimizer, [param], 1)
    assert bytes_per_parameter(optimizer, ("exp_avg",)) <= 2.2
    assert bytes_per_parameter(optimizer, ("remainder", "master")) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("steps", "dtype", "stochastic"), [(1, torch.float32, True), (20, torch.bfloat16, True), (1, torch.bfloat16, False)]
)
def test_resuming_is_bitwise_the_uninterrupted_run(steps, dtype, stochastic):
    settings = {**SETTINGS, "stochastic_rounding": stochastic}
    whole = parameters(dtype)
    optimizer = AdamW(whole, **settings)
    train(optimizer, whole, steps)
    saved = saved_and_loaded({"model": [p.detach() for p in whole], "optimizer": optimizer.state_dict()})
    train(optimizer, whole, 3, start=steps)
    resumed = [nn.Parameter(p) for p in saved["model"]]
    second = AdamW(resumed, **settings)
    second.load_state_dict(saved["optimizer"])
    train(second, resumed, 3, start=steps)
    assert same(whole, resumed) and same(optimizer.state.values(), second.state.values())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_is_not_finite_changes_nothing(bad, nonfinite):
    params = parameters()
    optimizer = AdamW(params, **SETTINGS, nonfinite=nonfinite)
    train(optimizer, params, 2)
    values, states = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict()["state"])
    set_gradients(params, 5)
    params[1].grad[3, 7] = bad
    message = r"of 1 parameters contain NaN or Inf, the first of shape \[7, 128\]"
    with pytest.raises(FloatingPointError, match=message) if nonfinite == "raise" else nullcontext():
        optimizer.step()
    assert optimizer.skipped == (nonfinite == "skip")
    assert same(values, params) and same(states, optimizer.state_dict()["state"])


def test_parameters_without_a_gradient_are_left_alone():
    params = parameters()
    optimizer = AdamW(params, **SETTINGS)
    set_gradients(params, 0)
    params[0].grad = None
    before = params[0].detach().clone()
    optimizer.step()
    assert torch.equal(params[0], before) and params[0] not in optimizer.state


def test_groups_lr_as_a_tensor_closure_and_added_groups():
    params = parameters()
    lr = torch.tensor(1e-2)
    ours = AdamW([{"params": params[:1], "weight_decay": 0.0}, {"params": params[1:3]}], lr=lr, states="fp32")
    ours.add_param_group({"params": params[3:], "lr": 1e-3})
    twins = parameters()
    theirs = torch.optim.AdamW(
        [{"params": twins[:1], "weight_decay": 0.0}, {"params": twins[1:3]}, {"params": twins[3:], "lr": 1e-3}],
        lr=1e-2, foreach=False,
    )  # fmt: skip
    for step in range(3):
        set_gradients(params, step)
        set_gradients(twins, step)
        assert ours.step(lambda: 3.5) == 3.5
        theirs.step()
        lr.fill_(1e-2 / (step + 2))
        for group in theirs.param_groups[:2]:
            group["lr"] = 1e-2 / (step + 2)
    for a, b in zip(params, twins, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)


def test_stochastic_rounding_keeps_small_updates_of_bf16_parameters():
    """Updates of a tenth of a unit in the last place vanish when rounded to nearest, and arrive at random."""
    still, moving = (nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16)) for _ in range(2))
    for param, stochastic in ((still, False), (moving, True)):
        optimizer = AdamW([param], lr=2**-8 / 10, weight_decay=0, master=None, stochastic_rounding=stochastic)
        for _ in range(20):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert torch.equal(still, torch.ones_like(still))
    assert moving.float().mean().item() == pytest.approx(1 - 20 * 2**-8 / 10, abs=2e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"states": "fp4"}, "states is 'fp8' or 'fp32'; got 'fp4'.*did you mean 'fp8'"),
        ({"master": "remaindr"}, "did you mean 'remainder'"),
        ({"nonfinite": "stop"}, "nonfinite is 'raise', 'skip' or 'ignore'"),
        ({"amsgrad": True}, "use torch.optim.AdamW"),
        ({"lr": -1.0}, "lr must be a number, at least 0 and finite; got -1.0"),
        ({"lr": torch.ones(2)}, "lr must be a number"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] must be a number, at least 0 and below 1; got 1.0"),
        *(({"betas": betas}, "betas must be two numbers") for betas in (0.9, (0.9,), {0.9, 0.99}, torch.ones(2) / 2)),
        ({"betas": ("a", 0.9)}, r"betas\[0\] must be a number"),
        ({"eps": -1e-8}, "eps must be a number, at least 0"),
        ({"weight_decay": math.inf}, "weight_decay must be .* finite; got inf"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        AdamW(parameters(), **settings)


def test_parameters_that_do_not_fit_are_named():
    refused("use master='fp32' for them", AdamW, parameters(torch.float16))
    AdamW(parameters(torch.float16), master="fp32")
    refused("got torch.float64", AdamW, [nn.Parameter(torch.zeros(3, dtype=torch.float64))])


@pytest.mark.parametrize("states", ["fp8", "fp32"])
@pytest.mark.parametrize("master", ["remainder", "fp32", None])
def test_small_parameters_stepped_together_are_those_stepped_alone(states, master, monkeypatch):
    shapes = [(256, 256), (7, 128), (512,), (3, 2, 384), (40, 200), (512, 128), (1, 128)]
    together, alone = (
        [nn.Parameter(randn(*shape, seed=i, dtype=torch.bfloat16)) for i, shape in enumerate(shapes)] for _ in range(2)
    )
    settings = SETTINGS | {"states": states, "master": master}
    first, second = AdamW(together, **settings), AdamW(alone, **settings)
    with mock.patch.object(reference, "_step_together", wraps=reference._step_together) as step:
        train(first, together, 3)
    assert max(len(call.args[0]) for call in step.call_args_list) > 1
    monkeypatch.setattr(reference, "_step_together", lambda of, *rest: [reference.step(s, *rest) for s in of])
    train(second, alone, 3)
    assert same(together, alone) and same(first.state.values(), second.state.values())


def test_a_cuda_graph_cannot_capture_a_step(monkeypatch):
    params = parameters()
    before = [param.detach().clone() for param in params]
    optimizer = AdamW(params, nonfinite="ignore")
    set_gradients(params, 0)
    monkeypatch.setattr(adamw, "is_capturing", lambda device: True)
    refused("step cannot be captured.*call it after each replay", optimizer.step, kind=RuntimeError)
    assert same(before, params) and not optimizer.state


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_a_compiled_step_is_the_eager_one(kind):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ours, theirs = ([nn.Parameter(randn(40, 200, dtype=torch.bfloat16))] for _ in range(2))
    eager, compiled = kind(ours, lr=1e-2), kind(theirs, lr=1e-2)
    step, scaled = (torch.compile(f, backend="eager") for f in (compiled.step, compiled.step_scaled))
    for i in range(2):
        set_gradients(ours, i)
        set_gradients(theirs, i)
        eager.step(), step()
        eager.step_scaled(0.5), scaled(0.5)
    assert torch.equal(*ours, *theirs) and not torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()  # forgets that the frame is not worth a graph
    with pytest.raises(torch._dynamo.exc.Unsupported, match="octavo: a step has kernels of its own"):
        torch.compile(compiled.step, backend="eager", fullgraph=True)()


# --- training with FP8 moments ends where training with float32 moments does ---


def noisy_quadratic(make):
    """Mean loss of the last 100 steps on ½(x−t)ᵀA(x−t), curvatures over three decades, gradients with noise."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-2, 1, 4096).view(16, 256)
    target = torch.randn(16, 256, generator=generator)
    x = nn.Parameter(torch.zeros(16, 256))
    optimizer, losses = make([x]), []
    for _ in range(1000):
        error = x.detach() - target
        losses.append((curvature * error**2).sum().item() / 2)
        x.grad = curvature * error + 0.1 * curvature.sqrt() * torch.randn(16, 256, generator=generator)
        optimizer.step()
    return sum(losses[-100:]) / 100


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
@pytest.mark.slow
def test_loss_is_within_1_percent_of_fp32_moments(lr):
    exact = noisy_quadratic(lambda params: torch.optim.AdamW(params, lr=lr))
    assert noisy_quadratic(lambda params: AdamW(params, lr=lr)) == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_rounding_to_nearest_stalls_averages():
    """Why moments are rounded at random by default."""
    exact = noisy_quadratic(lambda params: torch.optim.AdamW(params, lr=1e-2))
    assert noisy_quadratic(lambda params: AdamW(params, lr=1e-2, stochastic_rounding=False)) > 1.05 * exact
