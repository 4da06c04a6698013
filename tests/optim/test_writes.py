"""NaN and infinity of any bits, parameters that somebody else writes between two steps, large squares, layouts."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

import octavo
from octavo.kernels.adamw import ADAMW
from octavo.kernels.adamw.reference import HyperParams, ParamState, compress, exact_values, expand, split
from octavo.optim.states import master_values
from tensors import ADAMW_BACKENDS, randn, same, saved_and_loaded

# NumPy, on which Triton's interpreter runs, warns of operations on what is not finite.
not_finite = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
by_backend = pytest.mark.parametrize("backend", ADAMW_BACKENDS)
by_rounding = pytest.mark.parametrize("seed", [None, 5], ids=["to nearest", "at random"])
STILL = HyperParams(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=3)
MOVING = HyperParams(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)


def patterns():
    """Float32 values: NaN of both signs with small and large payloads, infinities, the largest finite numbers.

    A row [1,C] with each of them 16 times, for as many random bits.
    """
    low = [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    high = [0x7F80, 0x7F81, 0x7FBF, 0x7FC0, 0x7FC1, 0x7FFE, 0x7FFF]
    bits = torch.tensor([(a << 16) | b for a in high for b in low] + [0x7F7FFFFF], dtype=torch.int32)
    return torch.cat((bits, bits | -(2**31))).view(torch.float32).repeat(1, 16)


def stepped(backend, param, grad=None, hyper=STILL, **fields):
    """What a step makes of a copy of this state."""
    zeros = torch.zeros_like(param, dtype=torch.float32)
    state = ParamState(
        param=param.clone(), grad=zeros.clone() if grad is None else grad,
        moments=((zeros.clone(),), (zeros.clone(),)), **copy.deepcopy(fields),
    )  # fmt: skip
    ADAMW.backends[backend].run([(state, hyper)])
    return state


def joined(upper, remainder):
    return ((upper.view(torch.int16).int() << 16) + remainder).view(torch.float32)


def alike(one, other):
    """NaN and infinity at the same places."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.isinf(), other.isinf())


def test_split_and_rounded_copies_keep_any_value():
    """Of lower halves that are rounded down, up, or tie: exact to the bit, and never taken for a write."""
    high = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).view(-1, 1) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    values = (high | low).flatten().view(torch.float32)
    upper, remainder = split(values)
    assert alike(joined(upper, remainder), values) and torch.equal(upper.isnan(), values.isnan())
    steps = upper.view(torch.int16).int() - values.bfloat16().view(torch.int16).int()
    assert (values.isnan() | (steps.abs() <= 1)).all()  # ties are rounded up here and to even there
    values = values[~values.isnan()]  # which may be split in another way where there is none
    upper, remainder = split(values)
    infinite = upper.isinf()  # also of values that only round to infinity
    assert (values[infinite].abs() > 3.38e38).all()
    for actual in (joined(upper, remainder), torch.where(infinite, values, exact_values(upper, remainder, None))):
        assert torch.equal(actual.view(torch.int32), values.view(torch.int32))
    assert torch.equal(exact_values(upper, remainder, None)[infinite], upper.float()[infinite])
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(exact_values(values.to(dtype), None, values).view(torch.int32), values.view(torch.int32))


@not_finite
@by_backend
@by_rounding
def test_a_step_keeps_what_is_not_finite(backend, seed):
    """In the remainder of a bf16 parameter, in one by itself, and in one and its float32 master."""
    values = patterns()
    upper, low = split(values)
    state = stepped(backend, upper, remainder=low)
    # What rounds to infinity in bf16 is infinite: a master beside an infinite parameter may be stale.
    expected = torch.where(upper.isinf(), upper.float(), values)
    assert alike(joined(state.param, state.remainder), expected)
    assert torch.equal(state.param.isnan(), expected.isnan())
    halves = (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    state = stepped(backend, halves, seed=seed)
    assert halves.isnan().any() and halves.isinf().any() and alike(state.param, halves)
    assert torch.equal(state.param.nan_to_num(7.0), halves.nan_to_num(7.0))
    state = stepped(backend, values.bfloat16(), master=values, seed=seed)
    assert alike(state.master, values) and torch.equal(state.param.isnan(), values.isnan())


@not_finite
@by_backend
@pytest.mark.parametrize("mode", ["remainder", "at random", "to nearest"])
def test_gradients_that_are_not_finite_make_the_parameter_nan(backend, mode):
    values = patterns()
    fields = {"remainder": {"remainder": torch.zeros(values.shape, dtype=torch.int16)}, "at random": {"seed": 5}}
    state = stepped(backend, torch.ones_like(values).bfloat16(), values, MOVING, **fields.get(mode, {}))
    assert torch.equal(state.param.isnan(), ~values.isfinite())
    if state.remainder is not None:
        assert torch.equal(joined(state.param, state.remainder).isnan(), ~values.isfinite())


@not_finite
@pytest.mark.thorough
@by_backend
@by_rounding
def test_fp8_moments_show_what_was_not_finite(backend, seed):
    """The group of 128 that holds it is NaN or infinite from then on, as are its parameters; the others are not."""
    values = patterns()[0, :86]
    for value in values[~values.isfinite()][::5]:
        moments = torch.full((2, 256), 1e-3)
        state = ParamState(
            param=torch.ones(2, 256), grad=torch.full((2, 256), 1e-3), seed=seed,
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
@by_backend
def test_backends_take_a_stale_master_for_what_was_written(backend, dtype):
    values = torch.randn(4, 256)
    half = values.to(dtype)
    stale = torch.zeros(4, 256, dtype=torch.bool)
    stale[::2, ::3] = True
    half[stale] = torch.tensor([0.0, -0.0, 7.0, torch.inf, torch.nan] * 35, dtype=dtype)[: int(stale.sum())]
    state = stepped(backend, half, master=values)
    expected = torch.where(stale, half.float(), values)
    torch.testing.assert_close(state.master, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(state.param, half, rtol=0, atol=0, equal_nan=True)


@by_backend
def test_a_remainder_beside_a_written_zero_is_ignored(backend):
    _, remainder = split(torch.randn(4, 256))
    assert (remainder < 0).any()
    for value in (0.0, -0.0, torch.inf, -torch.inf):
        state = stepped(backend, torch.full((4, 256), value, dtype=torch.bfloat16), remainder=remainder)
        assert not state.param.isnan().any()
        exact = exact_values(state.param, state.remainder, None)
        assert exact.abs().amax() < 1e-40 if value == 0 else torch.equal(exact, torch.full_like(exact, value))


@pytest.mark.parametrize(("states", "dtype"), [("fp8", torch.bfloat16), ("fp32", torch.float32)])
@by_backend
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


# --- a parameter of any memory layout takes the steps of its contiguous copy, bit for bit ---


def sliced(values, *, step=2, offset=1):
    """The same values with gaps in memory, not at the beginning of their storage."""
    base = torch.full((*values.shape[:-1], values.shape[-1] * step + offset), 7.0, dtype=values.dtype)
    view = base[..., offset::step][..., : values.shape[-1]]
    view.copy_(values)
    return view


LAYOUTS = {
    "transposed": lambda dtype: randn(66, 7).to(dtype).t(),
    "permuted": lambda dtype: randn(5, 14, 4).to(dtype).permute(2, 0, 1),
    "channels_last": lambda dtype: randn(4, 8, 3, 3).to(dtype).to(memory_format=torch.channels_last),
    "columns sliced": lambda dtype: sliced(randn(3, 130).to(dtype)),
    "vector sliced": lambda dtype: sliced(randn(100).to(dtype)),
    "expanded, one taken": lambda dtype: randn(6, 1).to(dtype).expand(6, 9)[:, 2:3],
    "0-d": lambda dtype: randn(4).to(dtype)[2],
    "empty": lambda dtype: randn(4, 0, 70).to(dtype).permute(2, 0, 1),
}
MODES = [
    (dtype, states, master, stochastic)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for states in ("fp8", "fp32")
    for master in ("remainder", "fp32", None)
    for stochastic in (True, False)
    if dtype == torch.bfloat16 or (dtype == torch.float16 and master == "fp32" and stochastic) or master is None
]


def train(optimizer, param, steps, start=0):
    for step in range(start, start + steps):
        # Gradients have strides of their own.
        grad = randn(*param.shape, seed=100 + step).to(param.dtype)
        param.grad = sliced(grad) if grad.ndim and step % 2 else grad
        optimizer.step()


@not_finite
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "backend"),
    [*((layout, "reference") for layout in LAYOUTS), *product(("transposed", "0-d"), ADAMW_BACKENDS[1:])],
)  # both backends step a contiguous copy
def test_any_layout_steps_and_resumes_as_the_contiguous_copy(layout, backend):
    for dtype, states, master, stochastic in MODES:
        if backend == "triton" and not (stochastic and dtype == torch.bfloat16):
            continue  # the interpreter is slow
        settings = {"lr": 0.1, "states": states, "master": master, "stochastic_rounding": stochastic}
        param = nn.Parameter(LAYOUTS[layout](dtype))
        strides, start = param.stride(), param.detach().clone(memory_format=torch.contiguous_format)
        dense = nn.Parameter(start.clone())
        optimizer, other = octavo.AdamW([param], **settings), octavo.AdamW([dense], **settings)
        with ADAMW.force(backend):
            train(optimizer, param, 3)
            train(other, dense, 3)
            assert param.stride() == strides
            assert same((dense, other.state[dense]), (param, optimizer.state[param]))
            assert not param.numel() or not torch.equal(param, start)
            resumed = octavo.AdamW([param], **settings)
            resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
            train(resumed, param, 2, start=3)
            train(other, dense, 2, start=3)
            assert same((dense, other.state[dense]), (param, resumed.state[param]))


@not_finite
@by_backend
def test_parameters_in_one_storage_do_not_touch_each_other(backend):
    """Two that interlace, one between them that no optimizer has."""
    base = randn(64, 3, 80).bfloat16()
    before = base.clone()
    params = [nn.Parameter(base[:, 0]), nn.Parameter(base[:, 2].t())]
    twins = [nn.Parameter(p.detach().clone(memory_format=torch.contiguous_format)) for p in params]
    with ADAMW.force(backend):
        for some in (params, twins):
            optimizer = octavo.AdamW(some, lr=1e-2)
            for step in range(2):
                for i, param in enumerate(some):
                    param.grad = randn(*param.shape, seed=10 * step + i).bfloat16()
                optimizer.step()
    assert same(twins, params)
    assert torch.equal(base[:, 1], before[:, 1]) and not torch.equal(base[:, 0], before[:, 0])


def test_elements_that_share_memory_are_refused():
    with pytest.raises(ValueError, match=r"elements of a parameter \[4, 64\] share memory.*contiguous copy"):
        octavo.AdamW([nn.Parameter(torch.zeros(4, 1).expand(4, 64))])
