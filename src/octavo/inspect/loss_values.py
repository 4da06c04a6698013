"""Convert losses of any library to floats, check them, and find the unit to which they are rounded.

Rounded losses tie: two gaps that are equal only after rounding have no deviation, and any test would call them certain.
"""

import math
import operator
import reprlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Set
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np

FEWEST_BITS = 8  # Significant bits of the coarsest format: bf16
FLOAT_BITS = 53


def losses_of(owner: str, values: object) -> list[float]:
    """Return the values as floats above zero, with NaN for each that is not finite (the run diverged)."""
    losses = []
    for index, value in _items(owner, values):
        try:
            losses.append(_loss(value))
        except ValueError as error:
            raise ValueError(f"{owner} holds {shown(value)} at index {index}: {error}") from None
    return losses


def seed_names(values: object, count: int) -> tuple[int, ...]:
    """Return the seeds as a tuple of `count` integers."""
    names = []
    for index, value in _items("seeds", values):
        try:
            if isinstance(value, bool):
                raise TypeError
            names.append(operator.index(value))
        except TypeError:
            raise ValueError(f"seeds holds {shown(value)} at index {index}: a seed is a whole number") from None
    if len(names) != count:
        raise ValueError(f"there are {len(names)} seeds and {count} losses of the baseline: name one seed per loss")
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"seed {duplicates[0]} is named twice: the losses of one seed are one pair; name each once")
    return tuple(names)


def resolution(losses: list[float]) -> float:
    """Return the unit to which losses were rounded, in decimal or in binary digits, whichever is larger."""
    # Digits are counted from the first of the largest loss: 0.01 for 3.0 and 3.02, 2⁻⁶ for numbers of bf16 from 2 to 4.
    # Decimals are the shortest of the smallest float format: 3.02 of fp32 has two places.
    largest, values = max(losses), np.array(losses)
    with np.errstate(over="ignore", under="ignore"):
        kinds = (np.float16, np.float32, np.float64)
        values = next(few for kind in kinds if ((few := values.astype(kind)) == values).all())
    numbers = {loss: Decimal(str(value).removesuffix(".0")) for loss, value in zip(losses, values, strict=True)}
    digits = max(number.adjusted() - int(number.as_tuple().exponent) for number in numbers.values())
    decimal = 10.0 ** (numbers[largest].adjusted() - digits)
    exact, printed = (_spacing(losses, digit) for digit in (0.0, decimal))
    if printed < 2 * decimal:  # any decimal is close to such a number
        printed = decimal
    return max(decimal, exact, printed)


def _spacing(losses: list[float], digit: float) -> float:
    """Return the spacing, at the largest loss, of the coarsest binary format that holds all losses to half a digit."""

    def has(bits: int, loss: float) -> bool:  # at most so many bits, up to half a decimal digit and fp32 rounding
        mantissa, exponent = math.frexp(loss)
        scaled = math.ldexp(mantissa, bits)
        return bits == FLOAT_BITS or abs(scaled - round(scaled)) <= math.ldexp(digit / 2, bits - exponent) * 1.01

    bits = next(bits for bits in range(FEWEST_BITS, FLOAT_BITS + 1) if all(has(bits, loss) for loss in losses))
    return math.ldexp(1.0, math.frexp(max(losses))[1] - bits)


def _items(owner: str, values: object) -> Iterator[tuple[int, Any]]:
    try:
        items = _python(values)
    except ValueError as error:
        raise ValueError(f"{owner} is {shown(values)}: {error}") from None
    if isinstance(items, str | bytes | bytearray | Set | Mapping) or not isinstance(items, Iterable):
        raise ValueError(f"{owner} is a list with one number per seed, in order; got {shown(values)}")
    return enumerate(items)


def _python(value: object) -> object:
    """Convert an array or a tensor to Python numbers."""
    try:
        return value.tolist() if hasattr(value, "tolist") else value
    except (RuntimeError, TypeError) as error:  # a tensor without data; a class
        raise ValueError(f"there are no numbers in it to compare: {error}") from None


def _loss(value: object) -> float:
    number = _python(value)
    if isinstance(number, bool) or not isinstance(number, Real | Decimal):
        raise ValueError("a loss is a number, or nan for a run that diverged")
    try:
        loss = float(number)
    except OverflowError:
        loss = math.inf
    except ValueError:  # a signaling NaN of Decimal
        return math.nan
    if loss < sys.float_info.min:
        raise ValueError(f"a loss is above zero ({sys.float_info.min:.2g} or more), as gaps are in percent of it")
    if loss == math.inf and number != math.inf:
        raise ValueError("that is beyond the range of floats; a loss is finite, or nan")
    return loss if math.isfinite(loss) else math.nan


def shown(value: object) -> str:
    """Return a shortened repr of any value, for messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number of more digits than Python prints
        return "a huge number"
