"""silu, gelu_tanh and gelu with their derivatives in float32, from sums, products and one reciprocal (docs/kernels.md).

Each operation rounds once, and `device` has the same ones in the same order. e(NaN) may be any number: all callers
multiply it by the argument. silu(-∞) and gelu(-∞) are NaN, as in PyTorch.
"""

from functools import lru_cache

import torch
from torch import Tensor

from octavo.runtime.torch_compat import outside_autograd

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

LOG2_E = 1.44269502162933349609375
ROUNDER = 12582912.0  # 1.5·2²³: adding it leaves the nearest integer in the low bits; a left shift by 23 drops its bits
LN2_HIGH = 0.693145751953125  # Upper 16 bits of ln 2, so that its product with n is exact
LN2_LOW = 1.428606765330187045037746429443359375e-06
EXP = (0.008290305733680725, 0.0418979749083519, 0.1666763722896576, 0.4999915063381195, 0.9999997019767761, 1.0)
"""Coefficients of p(r), highest power first."""
EXP_LOWEST = -86.25  # Below it the result is 0, because the exponent arithmetic needs 2⁻¹²⁵ or more

TAIL_SLOPE = 0.300000011920928955078125
TAIL = (  # Coefficients of P(c), highest power first
    0.03603620454668999, -0.158713236451149, 0.20896399021148682, -0.056095369160175323,
    0.12984316051006317, 0.0995231345295906, 0.12081687897443771, 0.11962516605854034,
)  # fmt: skip
TANH_SCALE = 1.59576916694641113281250  # 2·√(2/π)
TANH_CUBIC = 0.044714998453855514526367187500
TANH_CUBIC_3 = 0.134144991636276245117187500
GELU_CAP = 16.0  # Beyond it both gelus are exactly g or 0; larger |g| could overflow when squared or cubed
INVERSE_SQRT_2PI = 0.398942291736602783203125


MOST_LOOKUP_THREADS = 4  # Threads up to which a lookup on one of them is faster than the operations on all


def factor(g: Tensor, activation: str) -> Tensor:
    """Return activation(g) / g, float32 of g's shape, for float32 g."""
    return _factor_and_slope(g, activation, False)[0]


def activation_value(g: Tensor, activation: str) -> Tensor:
    """Return activation(g), float32 of g's shape."""
    if _has_table(g):
        return _look_up(g, *_table(activation, g.dtype)[:1])[0]
    g = g.float()
    return factor(g, activation).mul_(g)


def value_and_slope(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return activation(g) and the derivative of the activation at g, float32 of g's shape."""
    if _has_table(g):
        value, slope = _look_up(g, *_table(activation, g.dtype))
        return value, slope
    return _computed(g.float(), activation)


def _has_table(g: Tensor) -> bool:
    few = torch.get_num_threads() <= MOST_LOOKUP_THREADS
    return few and g.dtype in (torch.bfloat16, torch.float16) and g.device.type == "cpu" and type(g) is Tensor


@lru_cache(maxsize=8)
@outside_autograd()
def _table(activation: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `value_and_slope` of each 16-bit number, by its bits, computed once for the process."""
    numbers = torch.arange(1 << 16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
    return _computed(numbers.float(), activation)


def _look_up(g: Tensor, *tables: Tensor) -> list[Tensor]:
    indices = g.view(torch.uint16).to(torch.int32, memory_format=torch.contiguous_format).view(-1)
    return [table.index_select(0, indices).view(g.shape) for table in tables]


def _computed(g: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    value, slope = _factor_and_slope(g, activation, True)
    return value.mul_(g), slope


def _factor_and_slope(g: Tensor, activation: str, with_slope: bool) -> tuple[Tensor, Tensor]:
    size = g.abs()
    if activation == "silu":
        argument, inner = size, None
    else:
        size = size.clamp_max(GELU_CAP)
        if activation == "gelu":
            return _gelu(g, size, with_slope)
        square = size * size
        argument = TANH_SCALE * (size + (size * square) * TANH_CUBIC)
        inner = TANH_SCALE * (1.0 + square * TANH_CUBIC_3)
    z = exp_of_negative(-argument)
    upper = (z + 1.0).reciprocal_()
    lower = z.mul_(upper)
    bend = (lower * upper).mul_(g) if with_slope else None
    value = _where_negative(g, lower, upper)
    if bend is None:
        return value, value
    return value, (bend if inner is None else bend.mul_(inner)).add_(value)


def _gelu(g: Tensor, size: Tensor, with_slope: bool) -> tuple[Tensor, Tensor]:
    z = exp_of_negative((size * size) * -0.5)
    c = 1.0 / (1.0 + size * TAIL_SLOPE)
    lower = z * (c * _polynomial(c, TAIL))
    value = _where_negative(g, lower, 1.0 - lower)
    return value, value + g * (z * INVERSE_SQRT_2PI) if with_slope else value


def exp_of_negative(x: Tensor) -> Tensor:
    """Return exp(x) for float32 x ≤ 0, within 2.4 ulp; 0 below 2⁻¹²⁵."""
    shifted = (x * LOG2_E).add_(ROUNDER)
    n = shifted - ROUNDER
    r = (x - n * LN2_HIGH).sub_(n.mul_(LN2_LOW))
    bits = _polynomial(r, EXP).view(torch.int32).add_(shifted.view(torch.int32).bitwise_left_shift_(23))
    return bits.bitwise_and_(_negative(x - EXP_LOWEST).bitwise_not_()).view(torch.float32)


def _negative(sign: Tensor) -> Tensor:
    """Return a mask: all ones for negative float32, all zeros otherwise, either for NaN. Overwrites its argument."""
    return sign.add_(0.0).view(torch.int32).bitwise_right_shift_(31)  # -0 + 0 is +0


def _where_negative(sign: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Compute `torch.where(sign < 0, a, b)` without its per-element branches on a CPU. Overwrites a."""
    # NaN selects either: callers multiply the result by NaN.
    others = b.view(torch.int32)
    chosen = a.view(torch.int32).bitwise_xor_(others).bitwise_and_(_negative(sign.clone())).bitwise_xor_(others)
    return chosen.view(torch.float32)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    total = (x * coefficients[0]).add_(coefficients[1])
    for coefficient in coefficients[2:]:
        total.mul_(x).add_(coefficient)
    return total
