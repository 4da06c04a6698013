"""Parameters that somebody else writes between two steps, and gradients whose squares overflow."""

import pytest
import torch
from torch import nn

import octavo
from octavo.kernels.adamw import ADAMW, HyperParams, ParamState, exact_values, split
from octavo.optim.states import master_values
from tensors import ADAMW_BACKENDS

STILL = HyperParams(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=3)
MASK = torch.arange(256).remainder(3) > 0
WRITES = {
    "pruning mask": lambda p: p.mul_(MASK.to(p.dtype)),
    "clamp": lambda p: p.clamp_(min=0),
    "row of zeros": lambda p: p[0].zero_(),
    "negative zero": lambda p: p.fill_(-0.0),
    "other weights": lambda p: p.copy_(torch.linspace(-3, 3, p.numel()).view_as(p)),
    "data": lambda p: setattr(p, "data", torch.full_like(p, 0.75)),
    "inf": lambda p: p[1].fill_(torch.inf),
    "nan": lambda p: p[1, :7].fill_(torch.nan),
}


def make(cls, parameters, **options):
    return cls(parameters, lr=1e-3, weight_decay=0.1, **options)


@pytest.mark.parametrize(
    ("cls", "master", "write"),
    [
        *((octavo.AdamW, master, write) for master in ("remainder", "fp32") for write in WRITES.values()),
        *((octavo.optim.Muon, "remainder", WRITES[name]) for name in ("pruning mask", "negative zero", "data")),
    ],
)
def test_a_step_starts_from_what_was_written(cls, master, write):
    """The step after a write is that of an optimizer with the same moments whose master is what was written there."""
    start = torch.randn(64, 256).mul(0.1).bfloat16()
    written, expected = (nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [make(cls, [p], master=master, nonfinite="ignore") for p in (written, expected)]
    generator = torch.Generator().manual_seed(1)
    for step in range(2):
        grad = torch.randn(64, 256, generator=generator).bfloat16()
        for param, optimizer in zip((written, expected), optimizers, strict=True):
            if step:
                before = param.detach().clone()
                with torch.no_grad():
                    write(param)
                new = param.detach().clone()
                if param is expected:
                    name, value = ("remainder", 0 * before) if master == "remainder" else ("master", new)
                    own = optimizer.state[param][name]
                    own.copy_(torch.where(before == new, own, value.to(own.dtype)))
            param.grad = grad.clone()
            optimizer.step()
    # A remainder beside a finite value other than 0 is a number below half a step of bf16, 2⁻⁸ of the value.
    masters = [master_values(p, o.state[p]) for p, o in zip((written, expected), optimizers, strict=True)]
    finite = expected.detach().isfinite()
    bound = new.detach().float().abs() * (2.0**-8 if master == "remainder" else 0.0)
    assert ((masters[0] - masters[1]).abs()[finite] <= bound[finite] + 1e-7).all()
    assert torch.equal(written.isnan(), expected.isnan()) and torch.equal(written.isinf(), expected.isinf())
    assert finite.sum() > 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
def test_backends_take_a_stale_master_for_what_was_written(backend, dtype):
    values = torch.randn(4, 256)
    half = values.to(dtype)
    stale = torch.zeros(4, 256, dtype=torch.bool)
    stale[::2, ::3] = True
    half[stale] = torch.tensor([0.0, -0.0, 7.0, torch.inf, torch.nan] * 35, dtype=dtype)[: int(stale.sum())]
    zeros = torch.zeros_like(values)
    state = ParamState(
        param=half.clone(), grad=zeros.clone(), moments=((zeros.clone(),), (zeros.clone(),)), master=values.clone(),
    )  # fmt: skip
    ADAMW.backends[backend].run([(state, STILL)])
    expected = torch.where(stale, half.float(), values)
    torch.testing.assert_close(state.master, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(state.param, half, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
def test_a_remainder_beside_a_written_zero_is_ignored(backend):
    _, remainder = split(torch.randn(4, 256))
    assert (remainder < 0).any()
    zeros = torch.zeros(4, 256)
    for value in (0.0, -0.0, torch.inf, -torch.inf):
        state = ParamState(
            param=torch.full((4, 256), value, dtype=torch.bfloat16), grad=zeros.clone(),
            moments=((zeros.clone(),), (zeros.clone(),)), remainder=remainder.clone(),
        )  # fmt: skip
        ADAMW.backends[backend].run([(state, STILL)])
        assert not state.param.isnan().any()
        exact = exact_values(state.param, state.remainder, None)
        assert exact.abs().amax() < 1e-40 if value == 0 else torch.equal(exact, torch.full_like(exact, value))


def test_every_master_is_its_own():
    """What `split` and a rounded copy leave is never taken for a write: exact to the bit."""
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), dtype=torch.int64).int()
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x7F7FFFFF, 0x7F7F8000, 0x7F800000], dtype=torch.int32)
    values = torch.cat((bits, edges, edges | -(2**31))).view(torch.float32)
    values = values[~values.isnan()]
    upper, remainder = split(values)
    infinite = upper.isinf()  # also of values that only round to infinity
    assert torch.equal(exact_values(upper, remainder, None)[infinite], upper.float()[infinite])
    assert torch.equal(exact_values(upper, remainder, None)[~infinite], values[~infinite])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(exact_values(values.to(dtype), None, values).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("states", "dtype"), [("fp8", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
def test_large_finite_gradients_saturate(backend, states, dtype):
    start = torch.randn(8, 256).to(dtype)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    ours, theirs = octavo.AdamW([params[0]], states=states), torch.optim.AdamW([params[1]], lr=1e-3)
    before = params[0].detach().clone()
    with ADAMW.force(backend):
        for step in range(4):
            for param in params:
                param.grad = torch.randn(8, 256, generator=torch.Generator().manual_seed(step)).to(dtype)
                if step in (1, 2):
                    param.grad[0, :4] = torch.tensor([1e22, -3e38, 3e38 * (-1) ** step, 1e19])
            ours.step()
            theirs.step()
    state = ours.state[params[0]]
    for name in ("exp_avg", "exp_avg_sq"):
        assert state.get(f"{name}_hi", state.get(name)).isfinite().all()
    # Elements without large gradients, and the group of those with them: no larger steps than Adam takes.
    moved = (params[0].detach() - before).float().abs()
    assert moved.isfinite().all() and moved.amax() < (0.05 if dtype == torch.bfloat16 else 0.02)
    torch.testing.assert_close(params[0][1:].float(), params[1][1:].float(), rtol=2e-2, atol=2e-3)


def test_infinite_moments_and_rates_are_seen():
    for states, name in (("fp8", "exp_avg_hi"), ("fp32", "exp_avg_sq")):
        param = nn.Parameter(torch.randn(4, 256))
        optimizer = octavo.AdamW([param], states=states)
        param.grad = torch.randn(4, 256)
        optimizer.step()
        before = param.detach().clone()
        optimizer.state[param][name][1, 0] = torch.inf
        with pytest.raises(FloatingPointError, match=r"moments of 1 parameters contain NaN or Inf.*\[4, 256\]"):
            optimizer.step()
        assert torch.equal(param, before)
    optimizer.param_groups[0]["lr"] = torch.nan
    with pytest.raises(ValueError, match="lr must be finite; got nan"):
        optimizer.step()
    assert torch.equal(param, before)


@pytest.mark.parametrize("cls", [octavo.AdamW, octavo.optim.Muon])
def test_steps_under_another_default_device(cls):
    param = nn.Parameter(torch.randn(64, 128).bfloat16())
    optimizer = make(cls, [param])
    param.grad = torch.randn_like(param)
    with torch.device("meta"):
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
    assert param.device.type == "cpu" and int(optimizer.state[param]["step"]) == 2
