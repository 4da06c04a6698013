"""The roofline: by hand, the table of what quantizing moves, and what may never happen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.numerics import RECIPES, equalized
from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import (
    RATIOS,
    SCALES_LAUNCHES,
    LinearCall,
    bf16_linear,
    fp8_linear,
    fp8_rate,
    memory_time,
    product,
    quantize_calls,
)

PLAIN = Gpu(
    name="plain", bf16_tflops=100, fp8_tflops=200, memory_tbs=1, memory_gib=10, link_gbs=10, multiprocessors=64,
    bf16_efficiency=0.5, fp8_efficiency=0.5, row_efficiency=1.0, block_efficiency=0.25,
    memory_efficiency=1.0, launch_us=2, host_us=10,
)  # fmt: skip
SIZES = st.integers(1, 20000)


def test_a_large_product_by_hand():
    # 64 × 64 tiles: 32 idle ones of 4096; 2·8192³ operations at 50 TFLOP/s.
    assert product(PLAIN, 8192, 8192, 8192) == pytest.approx(2 * 8192**3 / 50e12 * (1 + 32 / 4096))
    assert product(PLAIN, 8192, 8192, 8192, operand=1, rate=100e12) == pytest.approx(
        2 * 8192**3 / 100e12 * (1 + 32 / 4096)
    )


def test_a_small_output_is_split_along_its_contraction():
    one_tile = 2 * 128 * 128 * 512 / 50e12
    assert product(replace(PLAIN, launch_us=0, memory_tbs=100), 128, 128, 512) == pytest.approx(one_tile * 33)
    assert product(replace(PLAIN, launch_us=0, memory_tbs=100), 128, 128, 1024) == pytest.approx(2 * one_tile * 17)


def test_a_thin_product_takes_its_bytes_and_a_tiny_one_its_launch():
    assert product(PLAIN, 1, 8192, 8192) == pytest.approx(2 * (8192**2 + 2 * 8192) / 1e12)
    assert product(PLAIN, 16, 16, 16) == 2e-6
    assert product(PLAIN, 0, 16, 16) == 0
    assert memory_time(PLAIN, 5e6) == pytest.approx(5e-6)
    assert memory_time(PLAIN, 1.0) == 2e-6
    assert memory_time(PLAIN, 0.0) == 0


def test_channel_scales_cost_their_share_of_a_refresh():
    call = LinearCall(m=8192, k=4096, n=2048)
    rowwise, often, rarely = (fp8_linear(PLAIN, call, r) for r in (RECIPES["rowwise"], *map(every, (1, 50))))
    moved = 2 * (8192 + 2048) * 4096 / 1e12
    assert often.total - rowwise.total == pytest.approx(moved + SCALES_LAUNCHES * 2e-6)
    assert rarely.total - rowwise.total == pytest.approx((often.total - rowwise.total) / 50)
    assert rarely.host == pytest.approx(rowwise.host * RATIOS["rowwise_equalized"] / RATIOS["rowwise"])
    second = replace(call, first=False)  # of the layers that read one X
    moved = 2 * 2048 * 4096 / 1e12
    assert fp8_linear(PLAIN, second, every(1)).total - fp8_linear(PLAIN, second, RECIPES["rowwise"]).total == (
        pytest.approx(moved)
    )
    frozen = replace(call, dgrad=False, wgrad=False)  # evaluation measures nothing
    assert fp8_linear(PLAIN, frozen, every(1)).total == fp8_linear(PLAIN, frozen, RECIPES["rowwise"]).total


def every(passes):
    return equalized("rowwise", every=passes)


@pytest.mark.parametrize(
    ("recipe", "x", "w", "w_again", "g"),
    [
        ("tensorwise", [2, 4], [2, 3], [3], [2, 4]),
        ("rowwise", [4], [3], [3], [2, 4]),
        ("rowwise_equalized", [4], [3], [3], [2, 4]),
        ("rowwise_hp_wgrad", [3], [3], [3], [3]),
        ("blockwise", [4], [3], [3], [4]),
        ("mxfp8", [4], [3], [3], [4]),
    ],
)
def test_what_quantizing_moves_is_the_table(recipe, x, w, w_again, g):
    """Beside scales: at most 4 bytes in 32 elements of each form."""
    call = LinearCall(m=4096, k=2048, n=1024)
    sizes = {"x": 4096 * 2048, "w": 2048 * 1024, "g": 4096 * 1024}
    moved = [
        [size for q in phase for size in (q.column_maxima, *q.bytes) if size]
        for phase in quantize_calls(call, RECIPES[recipe])
    ]
    forward = [b * sizes["x"] for b in x] + [b * sizes["w"] for b in w]
    backward = [b * sizes["w"] for b in w_again] + [b * sizes["g"] for b in g]
    assert moved == [pytest.approx(forward, rel=0.03), pytest.approx(backward, rel=0.03)]


def test_a_linear_by_hand():
    call = LinearCall(m=8192, k=8192, n=8192)
    cube = 2 * 8192**3 / 50e12 * (1 + 32 / 4096)
    bf16 = bf16_linear(PLAIN, call)
    assert (bf16.forward, bf16.backward, bf16.host) == tuple(map(pytest.approx, (cube, 2 * cube, 30e-6)))
    fp8 = fp8_linear(PLAIN, call, RECIPES["rowwise"])
    element = 8192**2 / 1e12
    assert fp8.total == pytest.approx(1.5 * cube + (4 + 3 + 3 + 2 + 4) * element, rel=1e-3)
    assert fp8.host == pytest.approx(30e-6 * RATIOS["rowwise"])
    exact_wgrad = fp8_linear(PLAIN, call, RECIPES["rowwise_hp_wgrad"])
    assert exact_wgrad.total == pytest.approx(2 * cube + (3 + 3 + 3 + 3) * element, rel=1e-3)


def test_rates_of_recipes():
    assert fp8_rate(PLAIN, RECIPES["rowwise"]) == fp8_rate(PLAIN, RECIPES["tensorwise"]) == 100e12
    by_row = replace(PLAIN, row_efficiency=0.8)
    rates = {name: fp8_rate(by_row, recipe) for name, recipe in RECIPES.items() if name != "mxfp8"}
    slower = {name for name, rate in rates.items() if rate == pytest.approx(80e12)}
    assert slower == {name for name in rates if name.startswith("rowwise")}
    assert fp8_rate(PLAIN, RECIPES["blockwise"]) == 50e12
    assert fp8_rate(PLAIN, RECIPES["mxfp8"]) is None
    assert fp8_rate(DEVICES["b200"], RECIPES["mxfp8"]) == pytest.approx(4500e12 * 0.70)
    assert fp8_rate(DEVICES["a100"], RECIPES["rowwise"]) is None


def test_backward_products_accumulate_exactly_at_a_share_of_the_rate():
    exact = replace(PLAIN, exact_efficiency=0.9, row_exact_efficiency=0.8)
    each = product(PLAIN, 8192, 8192, 8192, operand=1, rate=100e12)
    for name, share in (("tensorwise", 0.9), ("rowwise", 0.8), ("rowwise_equalized", 0.8), ("blockwise", 1.0)):
        call = LinearCall(m=8192, k=8192, n=8192)
        before, after = (fp8_linear(gpu, call, RECIPES[name]) for gpu in (PLAIN, exact))
        assert after.forward == before.forward
        assert after.backward - before.backward == pytest.approx(2 * each * (1 / share - 1), abs=1e-9), name
    before, after = (
        fp8_linear(gpu, LinearCall(m=8192, k=8192, n=8192, experts=2), RECIPES["rowwise"]) for gpu in (PLAIN, exact)
    )
    assert after.forward == before.forward and after.backward > before.backward * 1.1


def test_maxima_of_columns_are_slower_than_copies():
    call, slow = LinearCall(m=16384, k=8192, n=4096), replace(PLAIN, maxima_efficiency=0.5)
    for name, moved in (("rowwise", 2 * 16384 * 4096), ("tensorwise", 0), ("rowwise_hp_wgrad", 0), ("blockwise", 0)):
        before, after = (fp8_linear(gpu, call, RECIPES[name]) for gpu in (PLAIN, slow))
        assert after.total - before.total == pytest.approx(moved / 1e12, abs=1e-12), name


@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(RECIPES)), st.sampled_from(sorted(DEVICES)), st.integers(0, 2))
def test_more_work_never_takes_less_time(m, k, n, recipe, device, which):
    gpu = replace(DEVICES[device], measured=None)
    small = (m, k, n)
    large = tuple(size + (1000 if i == which else 0) for i, size in enumerate(small))
    calls = [LinearCall(m=m, k=k, n=n) for m, k, n in (small, large)]
    for cost in (lambda c: bf16_linear(gpu, c), lambda c: fp8_linear(gpu, c, RECIPES[recipe])):
        less, more = (cost(call) for call in calls)
        assert more.forward >= less.forward * (1 - 1e-9)
        assert more.backward >= less.backward * (1 - 1e-9)
