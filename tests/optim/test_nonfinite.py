"""NaN stays NaN and infinity stays infinity, whatever their bits, where float32 is rounded by integer arithmetic."""

import pytest
import torch

from octavo.kernels.adamw import ADAMW, HyperParams, ParamState, compress, expand, split
from tensors import ADAMW_BACKENDS

# NumPy, on which Triton's interpreter runs, warns of operations on what is not finite.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
STILL = HyperParams(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=3)


def patterns():
    """Float32 values: NaN of both signs with small and large payloads, infinities, the largest finite numbers."""
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    high = [0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF]
    bits = [sign | (a << 16) | b for sign in (0, 1 << 31) for a in high for b in low]
    bits += [sign | 0x7F7FFFFF for sign in (0, 1 << 31)]
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def joined(upper, remainder):
    return ((upper.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def test_split_keeps_every_nan_and_infinity():
    values = patterns()
    assert values.isnan().sum() == 82 and values.isinf().sum() == 2
    upper, remainder = split(values)
    assert torch.equal(upper.isnan(), values.isnan())
    assert torch.equal(joined(upper, remainder).nan_to_num(7.0), values.nan_to_num(7.0)) and values.isinf().any()
    assert torch.equal(joined(upper, remainder).isnan(), values.isnan())
    assert torch.equal(joined(upper, remainder).isinf(), values.isinf())


def stepped(backend, param, **fields):
    """A step of learning rate 0 on one row, 16 times for as many random bits."""
    row = param.repeat(1, 16)
    rest = {name: value.repeat(1, 16) if value.ndim else value.item() for name, value in fields.items()}
    zeros = torch.zeros_like(row, dtype=torch.float32)
    state = ParamState(param=row, grad=zeros.clone(), moments=((zeros.clone(),), (zeros.clone(),)), **rest)
    ADAMW.backends[backend].run([(state, STILL)])
    return state


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
def test_a_step_keeps_them_in_the_remainder(backend):
    values = patterns().view(1, -1)
    upper, low = split(values)
    state = stepped(backend, upper, remainder=low)
    after = joined(state.param, state.remainder)
    # What rounds to infinity in bf16 is infinite: a master beside an infinite parameter may be stale.
    expected = torch.where(upper.isinf(), upper.float(), values).repeat(1, 16)
    assert torch.equal(after.isnan(), expected.isnan()) and torch.equal(after.isinf(), expected.isinf())
    assert torch.equal(state.param.isnan(), expected.isnan())


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
@pytest.mark.parametrize("stochastic", [True, False])
def test_a_step_keeps_them_in_a_bf16_parameter(backend, stochastic):
    values = (patterns().view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16).view(1, -1)
    state = stepped(backend, values, **({"seed": torch.tensor(5)} if stochastic else {}))
    expected = values.repeat(1, 16)
    assert expected.isnan().any() and expected.isinf().any()
    assert torch.equal(state.param.isnan(), expected.isnan()) and torch.equal(state.param.isinf(), expected.isinf())
    assert torch.equal(state.param.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
@pytest.mark.parametrize("stochastic", [True, False])
def test_a_step_keeps_them_in_the_master_and_its_bf16_parameter(backend, stochastic):
    values = patterns().view(1, -1)
    state = stepped(backend, values.bfloat16(), master=values, **({"seed": torch.tensor(5)} if stochastic else {}))
    for stored in (state.param, state.master):
        assert torch.equal(stored.isnan(), values.isnan().repeat(1, 16))
    assert torch.equal(state.master.isinf(), values.isinf().repeat(1, 16))


@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
@pytest.mark.parametrize("mode", ["remainder", "at random", "to nearest"])
def test_gradients_that_are_not_finite_make_the_parameter_nan(backend, mode):
    values = patterns().view(1, -1).repeat(1, 16)
    zeros = torch.zeros_like(values)
    state = ParamState(
        param=torch.ones_like(values).bfloat16(), grad=values, moments=((zeros.clone(),), (zeros.clone(),)),
        remainder=zeros.to(torch.int16) if mode == "remainder" else None, seed=5 if mode == "at random" else None,
    )  # fmt: skip
    ADAMW.backends[backend].run(
        [(state, HyperParams(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3))]
    )
    assert torch.equal(state.param.isnan(), ~values.isfinite())
    if state.remainder is not None:
        assert torch.equal(joined(state.param, state.remainder).isnan(), ~values.isfinite())


@pytest.mark.thorough
@pytest.mark.parametrize("backend", ADAMW_BACKENDS)
@pytest.mark.parametrize("stochastic", [True, False])
def test_fp8_moments_show_what_was_not_finite(backend, stochastic):
    """The group of 128 that holds it is NaN or infinite from then on, as are its parameters; the others are not."""
    for value in patterns()[~patterns().isfinite()][::5]:
        moments = torch.full((2, 256), 1e-3)
        state = ParamState(
            param=torch.ones(2, 256), grad=torch.full((2, 256), 1e-3), seed=1 if stochastic else None,
            moments=(compress(moments, True), compress(moments, False)),
        )  # fmt: skip
        state.grad[1, 130] = value
        ADAMW.backends[backend].run([(state, STILL)])
        state.grad[1, 130] = 0.0
        ADAMW.backends[backend].run([(state, STILL)])
        bad = torch.zeros(2, 256, dtype=torch.bool)
        bad[1, 128:] = True
        for moment, signed in zip(state.moments, (True, False), strict=True):
            assert torch.equal(~expand(*moment, signed).isfinite(), bad)
        assert state.param[1, 130].isnan() and state.param[~bad].isfinite().all()
