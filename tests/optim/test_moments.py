from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels import quantize
from octavo.kernels.adamw import reference
from octavo.kernels.adamw.reference import GROUP, compress, expand, group_seeds, hashed
from octavo.numerics import E4M3, QuantSpec, sqnr
from octavo.runtime.torch_compat import FakeTensorMode


def lognormal(*shape, sigma=1.0, seed=0):
    return torch.exp(sigma * torch.randn(*shape, generator=torch.Generator().manual_seed(seed)))


def round_trip(values, signed):
    return expand(*compress(values, signed), signed)


def random_bits(rows, columns, first, seed):
    return hashed(group_seeds(rows, columns, first, seed, torch.device("cpu"))).view(rows, -1, GROUP)


def without_expansion(values):
    """E4M3 with one scale per group of 128."""
    return quantize(values.reshape(-1, 128), QuantSpec.parse("e4m3/row")).dequantize().reshape(values.shape)


def test_expansion_gains_6_db_on_first_moments_and_12_on_second():
    signs = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1)).sign()
    first, second = lognormal(256, 1024) * signs, lognormal(256, 1024)
    assert sqnr(first, round_trip(first, True)) >= sqnr(first, without_expansion(first)) + 6
    assert sqnr(second, round_trip(second, False)) >= sqnr(second, without_expansion(second)) + 12


EDGES = {
    "zeros": [0.0] * 130,
    "constant": [3.0] * 130,
    "one element": [7.0],
    "one among zeros": [0.0, 5.0, 0.0],
    "tiny": [1e-38] * 5,
    "huge": [1e38] * 5,
    "both ends": [1e-37, 1e38, 0.0, 1.0],
    "nearly constant": [1.0, 1.0 + 2**-23],
    "subnormal": [1e-40, 2e-40],
}


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("values", EDGES.values(), ids=EDGES)
def test_edges_stay_finite_and_accurate(values, signed):
    values = torch.tensor([values])
    back = round_trip(values, signed)
    assert back.isfinite().all()
    assert torch.equal(back == 0, values == 0)
    wide = values.max() / values.masked_fill(values == 0, torch.inf).min() > 1e30
    torch.testing.assert_close(back, values, rtol=2.0 if wide else 2**-4, atol=0)


@given(st.integers(0, 5), st.integers(0, 300), st.booleans(), st.integers(0, 100))
def test_any_size(rows, columns, signed, seed):
    values = lognormal(rows, columns, seed=seed)
    if signed:
        values *= torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).sign()
    codes, hi, k = compress(values, signed)
    assert codes.shape == values.shape and hi.shape == k.shape == (rows, -(-columns // 128))
    back = expand(codes, hi, k, signed)
    assert back.shape == values.shape and ((back - values).abs() <= 0.2 * values.abs()).all()
    largest = values.abs().amax().item() if values.numel() else 0
    assert back.abs().amax().item() == pytest.approx(largest, rel=1e-5) if values.numel() else True


def test_a_group_of_its_own_does_not_see_the_others():
    values = lognormal(2, 384)
    alone = round_trip(values[:, 128:256], False)
    assert torch.equal(round_trip(values, False)[:, 128:256], alone)


@pytest.mark.parametrize("signed", [True, False])
def test_rounding_at_random_keeps_the_mean(signed):
    values = lognormal(8, 128) * (torch.randn(8, 128).sign() if signed else 1)
    noise = [random_bits(8, 128, 0, seed) for seed in range(300)]
    mean = sum(expand(*compress(values, signed, bits), signed) for bits in noise) / 300
    at_random, to_nearest = ((t / values - 1).abs().mean() for t in (mean, round_trip(values, signed)))
    assert at_random < to_nearest / 5


def test_random_bits_do_not_depend_on_pieces_and_look_random():
    whole = random_bits(6, 300, 0, 7)
    assert torch.equal(whole[2:], random_bits(4, 300, 2, 7))
    bits = random_bits(100, 1280, 0, 1)
    for bit in range(32):
        ones = ((bits >> bit) & 1).double()
        assert abs(ones.mean() - 0.5) < 0.01
        assert abs((ones.flatten()[1:] * ones.flatten()[:-1]).mean() - 0.25) < 0.01
    assert not torch.equal(bits, random_bits(100, 1280, 0, 2))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("hi", [1.0, 1e-30, 3e38])
def test_every_code_and_power_expands_as_in_float64(signed, hi):
    codes = torch.arange(256, dtype=torch.uint8).repeat(255, 1)
    k = torch.arange(1, 256, dtype=torch.uint8).unsqueeze(-1).repeat(1, 2)
    q = codes.view(E4M3.dtype).double() if signed else reference._unsigned_values(codes).double()
    expected = hi * (q.abs() / (448 if signed else 2.0**15 * 31 / 16)) ** (16.0 / k.double().repeat_interleave(128, 1))
    expected = expected.copysign(q)
    actual = expand(codes.view(E4M3.dtype) if signed else codes, torch.full(k.shape, hi), k, signed)
    normal = (expected.abs() >= 1.2e-38) | (q == 0) | q.isnan()
    torch.testing.assert_close(actual[normal].double(), expected[normal], rtol=1e-4, atol=0, equal_nan=True)
    assert (actual[~normal].abs() <= 1.2e-38).all()
    assert torch.equal(actual.signbit(), q.signbit() & ~q.isnan() | actual.isnan() & actual.signbit())


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


STATES = {
    "float64 by default": lambda: default_dtype(torch.float64),
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "meta by default": lambda: torch.device("meta"),
    "fake mode": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("state", STATES)
def test_moments_do_not_depend_on_the_state_of_the_first_step(state):
    """The table of roots is shared by the process, so the first expansion must not leave its state there."""
    values = lognormal(4, 256)
    for signed in (True, False):
        compressed = compress(values, signed)
        expected = expand(*compressed, signed)
        reference._shared_half_roots.cache_clear()
        with STATES[state]():
            first = expand(*compressed, signed)
        if state != "fake mode":
            assert first.dtype == torch.float32 and torch.equal(first, expected)
        assert torch.equal(expand(*compressed, signed), expected)
        table = reference._shared_half_roots(signed, values.device)
        assert type(table) is torch.Tensor and table.dtype == torch.float32 and not table.is_inference()
