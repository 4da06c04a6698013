"""Arithmetic of PTX on vectors of threads: numpy arrays of one element per thread.

Registers hold bits: unsigned integers of their width, or bool for predicates. Results are those of the PTX manual,
rounded correctly, and a NaN that an operation computes is the canonical one. The approximate instructions
(`rcp.approx`, `ex2.approx`, `lg2.approx`, `div.full`, …) are rounded correctly too: a GPU's may differ in the last
place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.ptx.program import Instruction

Bits = np.ndarray[Any, Any]

_FP8 = {"e4m3x2": (torch.float8_e4m3fn, 448.0), "e5m2x2": (torch.float8_e5m2, 57344.0)}
_CANONICAL = np.uint32(0x7FFFFFFF)


class Unknown(NotImplementedError):
    """An instruction, or a form of one, that is not implemented."""


def dtype_of(kind: str) -> Any:
    """Return the numpy type of a PTX type such as "s32"; of bf16 and of pairs their bits."""
    if kind == "pred":
        return np.dtype(bool)
    if kind in ("bf16", "bf16x2", "f16x2"):
        return np.dtype(np.uint16 if kind == "bf16" else np.uint32)
    letters = {"b": "u", "u": "u", "s": "i", "f": "f"}
    return np.dtype(f"{letters[kind[0]]}{int(kind[1:]) // 8}")


def typed(bits: Bits, kind: str) -> Bits:
    """View a register's bits as a PTX type; the lower bits of a wider register."""
    dtype = dtype_of(kind)
    if "b" in (bits.dtype.kind, dtype.kind):
        return bits.astype(dtype)
    if bits.dtype.itemsize != dtype.itemsize:
        bits = bits.astype(f"u{dtype.itemsize}")
    return bits.view(dtype)


def bits_of(values: Bits) -> Bits:
    """Return the bits of typed values, as a register holds them."""
    if values.dtype == bool:
        return values
    if values.dtype == np.float32:
        return np.where(np.isnan(values), _CANONICAL, values.view(np.uint32))
    return values.view(f"u{values.dtype.itemsize}")


def compute(i: Instruction, arguments: list[Bits]) -> Bits:
    """Return the bits that an arithmetic instruction writes.

    Raises:
        Unknown: If it is not implemented.
    """
    with np.errstate(all="ignore"):
        if i.name == "cvt":
            return _convert(i, arguments)
        if i.name in ("selp", "prmt", "bfe"):
            return _SPECIAL[i.name](i, arguments)
        if i.type in ("bf16", "bf16x2", "f16x2"):
            return _small(i, arguments)
        if i.type.startswith("f"):
            return _float(i, arguments)
        if i.type == "pred":
            return _LOGIC[i.name](*arguments) if i.name in _LOGIC else _unknown(i)
        return _integer(i, arguments)


def _unknown(i: Instruction) -> Any:
    raise Unknown(f"line {i.line}: {i.text!r} is not implemented; add it to benchmarks/ptx")


# Integers

_LOGIC: dict[str, Callable[..., Bits]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
}
_INTEGER: dict[str, Callable[..., Bits]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": np.minimum,
    "max": np.maximum,
    "neg": lambda a: -a,
    "abs": np.abs,
    "popc": np.bitwise_count,
    **_LOGIC,
}


def _integer(i: Instruction, arguments: list[Bits]) -> Bits:
    name, kind = i.name, i.type
    if kind in ("s16x2", "u16x2") and name in ("add", "max", "min") and i.parts == (kind,):
        pairs = [_unpacked(typed(a, "u32"), kind[:3]) for a in arguments]
        low, high = (_INTEGER[name](*pair).view(np.uint16).astype(np.uint32) for pair in zip(*pairs, strict=True))
        return low | high << np.uint32(16)
    if name in ("shl", "shr"):
        return bits_of(_shifted(name, typed(arguments[0], kind), typed(arguments[1], "u32")))
    values = [typed(a, kind) for a in arguments]
    if name in _INTEGER and i.parts == (kind,):
        return bits_of(np.asarray(_INTEGER[name](*values), dtype_of(kind)))
    if name == "max" and i.parts == ("relu", "s32"):
        return bits_of(np.maximum(np.maximum(*values), np.int32(0)))
    if name in ("mul", "mad") and i.parts[0] in ("lo", "wide"):
        wide = kind if i.parts[0] == "lo" else f"{kind[0]}{2 * int(kind[1:])}"
        product = values[0].astype(dtype_of(wide)) * values[1].astype(dtype_of(wide))
        return bits_of(product + typed(arguments[2], wide) if name == "mad" else product)
    if name in ("div", "rem"):
        return bits_of(_divided(name, *values))
    return _unknown(i)


def _unpacked(values: Bits, kind: str) -> tuple[Bits, Bits]:
    """Return the lower and the upper 16 bits."""
    return typed(values & np.uint32(0xFFFF), kind), typed(values >> np.uint32(16), kind)


def _shifted(name: str, values: Bits, by: Bits) -> Bits:
    size = 8 * values.dtype.itemsize
    count = np.minimum(by, size - 1).astype(values.dtype)
    if name == "shr":
        shifted = values >> count
        return shifted if values.dtype.kind == "i" else np.where(by >= size, 0, shifted).astype(values.dtype)
    return np.where(by >= size, 0, values << count).astype(values.dtype)


def _divided(name: str, values: Bits, by: Bits) -> Bits:
    """Divide, rounded toward zero."""
    assert by.all(), "a division by zero"
    rest = np.fmod(values, by)
    return rest if name == "rem" else (values - rest) // by


def _selected(i: Instruction, arguments: list[Bits]) -> Bits:
    kind = "b" + i.type[1:] if i.type.startswith("f") else i.type
    return np.where(arguments[2], typed(arguments[0], kind), typed(arguments[1], kind))


def _permuted(i: Instruction, arguments: list[Bits]) -> Bits:
    if i.parts != ("b32",):
        return _unknown(i)
    low, high, selector = (typed(a, "b32").astype(np.uint64) for a in arguments)
    pool, result = low | high << np.uint64(32), np.zeros((), np.uint64)
    for place in range(4):
        nibble = selector >> np.uint64(4 * place) & np.uint64(15)
        byte = pool >> (nibble & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        sign = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        result = result | np.where(nibble & np.uint64(8), sign, byte) << np.uint64(8 * place)
    return result.astype(np.uint32)


def _extracted(i: Instruction, arguments: list[Bits]) -> Bits:
    """Return a bit field, with its sign for signed types."""
    values = typed(arguments[0], i.type)
    position, length = (typed(a, "u32").astype(np.int64) for a in arguments[1:])
    size = 8 * values.dtype.itemsize
    assert ((length > 0) & (position + length <= size)).all(), "a bit field outside of its register"
    up = (size - length - position).astype(values.dtype)
    return bits_of((values << up) >> (size - length).astype(values.dtype))


_SPECIAL = {"selp": _selected, "prmt": _permuted, "bfe": _extracted}


# Floating point


def _float(i: Instruction, arguments: list[Bits]) -> Bits:
    kind, flush = i.type, "ftz" in i.parts
    if not set(i.parts) <= {kind, "rn", "ftz", "approx", "full", "NaN"}:
        return _unknown(i)
    values = [typed(a, kind) for a in arguments]
    if flush:
        values = [_flushed(v) for v in values]
    if i.name == "abs":
        return bits_of(np.abs(values[0]))
    if i.name == "neg":
        return bits_of(-values[0])
    if i.name in ("add", "sub", "mul"):
        result = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[i.name](*values)
    elif i.name in ("div", "rcp") and kind == "f64" and "rn" in i.parts:
        result = _APPROXIMATE[i.name](*values)
    elif i.name == "fma" and kind == "f32":
        result = fused(*values)
    elif i.name in ("min", "max") and kind == "f32":
        result = _extreme(i, *values)
    elif i.name in _APPROXIMATE and kind == "f32":
        result = _APPROXIMATE[i.name](*(v.astype(np.float64) for v in values)).astype(np.float32)
    else:
        return _unknown(i)
    return bits_of(_flushed(result) if flush else result)


_APPROXIMATE: dict[str, Callable[..., Bits]] = {
    "rcp": lambda x: 1 / x,
    "div": lambda x, y: x / y,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
"""In float64, whose rounding to float32 is that of the exact quotient and root of float32 operands."""


def _flushed(values: Bits) -> Bits:
    """Replace subnormal numbers by zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def _extreme(i: Instruction, a: Bits, b: Bits) -> Bits:
    """Return the smaller or larger number; -0 is below +0."""
    if i.name == "min":
        larger = np.where((a < b) | ((a == b) & np.signbit(a)), a, b)
    else:
        larger = np.where((a > b) | ((a == b) & np.signbit(b)), a, b)
    some_nan = np.isnan(a) | np.isnan(b)
    if "NaN" in i.parts:
        return np.where(some_nan, np.float32(np.nan), larger)
    return np.where(some_nan, np.where(np.isnan(a), b, a), larger)


def fused(a: Bits, b: Bits, c: Bits) -> Bits:
    """Return a · b + c of float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there, so that rounding it again to float32 is as
    rounding the exact sum.
    """
    product, addend = np.broadcast_arrays(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    return _to_odd(total, error).astype(np.float32)


def _to_odd(total: Bits, error: Bits) -> Bits:
    """Move a rounded sum to the neighbour with an odd last bit, on the side of the exact sum, which is `error` away."""
    bits = total.view(f"i{total.dtype.itemsize}")
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(away, 1, -1).astype(bits.dtype), bits).view(total.dtype)


def _small(i: Instruction, arguments: list[Bits]) -> Bits:
    """Compute with bf16, or with pairs of bf16 or float16."""
    if i.name == "abs":
        return typed(arguments[0], i.type) & (0x7FFF if i.type == "bf16" else 0x7FFF7FFF)
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    if i.name not in operations or i.parts not in ((i.type,), ("rn", i.type)):
        return _unknown(i)
    halves = [_halves(typed(a, i.type), i.type) for a in arguments]
    rounded = _f16_of if i.type == "f16x2" else _bf16_of
    low, high = (rounded(operations[i.name](*pair)) for pair in zip(*halves, strict=True))
    return low if i.type == "bf16" else low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def _f16_of(values: Bits) -> Bits:
    """Round to the bits of float16; NaN to the canonical one."""
    return np.where(np.isnan(values), 0x7FFF, values.astype(np.float16).view(np.uint16)).astype(np.uint16)


def _halves(bits: Bits, kind: str) -> tuple[Bits, Bits]:
    """Return the lower and upper half of bits, as float64, in which sums and products of two round as exact ones."""
    wide = bits.astype(np.uint32)
    if kind == "f16x2":
        parts = wide.astype(np.uint16), (wide >> np.uint32(16)).astype(np.uint16)
        return parts[0].view(np.float16).astype(np.float64), parts[1].view(np.float16).astype(np.float64)
    low, high = wide << np.uint32(16), wide & np.uint32(0xFFFF0000)
    return low.view(np.float32).astype(np.float64), high.view(np.float32).astype(np.float64)


def _bf16_of(values: Bits) -> Bits:
    """Round float64 to the bits of bf16, once."""
    near = values.astype(np.float32)
    return to_bf16(_to_odd(near, values - near.astype(np.float64)))


def to_bf16(values: Bits) -> Bits:
    """Round float32 to the bits of bf16, to nearest even; NaN to the canonical one."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


# Conversions


def _convert(i: Instruction, arguments: list[Bits]) -> Bits:
    to, kind = i.parts[-2], i.type
    if to in _FP8 and kind == "f32" and i.parts[:-2] == ("rn", "satfinite"):
        high, low = (_fp8_code(typed(a, "f32"), to) for a in arguments)
        return high << np.uint16(8) | low
    if kind in _FP8 and to == "f16x2":
        low, high = (_from_fp8(typed(arguments[0], "b16") >> np.uint16(8 * n) & np.uint16(255), kind) for n in (0, 1))
        return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)
    if {"sat", "relu", "satfinite"} & set(i.parts):
        return _unknown(i)
    if to in ("bf16x2", "f16x2") and kind == "f32":
        rounded = to_bf16 if to == "bf16x2" else _f16_of
        high, low = (rounded(typed(a, "f32")).astype(np.uint32) for a in arguments)
        return high << np.uint32(16) | low
    if to == "bf16" and kind == "f32":
        return to_bf16(typed(arguments[0], "f32"))
    if to == "f32" and kind == "bf16":
        return typed(arguments[0], "b16").astype(np.uint32) << np.uint32(16)
    if to == "f64" and kind == "bf16":
        return bits_of((typed(arguments[0], "b16").astype(np.uint32) << np.uint32(16)).view("f4").astype("f8"))
    if "x" in to + kind or "bf16" in (to, kind):
        return _unknown(i)
    values = typed(arguments[0], kind)
    if kind[0] == "f" and to[0] == "f" and {"rz", "rm", "rp"}.isdisjoint(i.parts):
        if to == kind:
            rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
            return bits_of(rounding[i.parts[0]](values)) if i.parts[0] in rounding else _unknown(i)
        return bits_of(values.astype(dtype_of(to)))
    if kind[0] == "f":
        return bits_of(_to_integer(i, values, dtype_of(to)))
    if to[0] == "f":
        return bits_of(values.astype(dtype_of(to)))
    return bits_of(values.astype(dtype_of(to)))


def _to_integer(i: Instruction, values: Bits, dtype: Any) -> Bits:
    """Round to an integer that saturates; NaN gives 0."""
    rounding = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
    if i.parts[0] not in rounding:
        return _unknown(i)
    limits = np.iinfo(dtype)
    whole = rounding[i.parts[0]](values.astype(np.float64))
    result = np.where(np.isnan(whole), 0, np.clip(whole, limits.min, limits.max)).astype(np.int64)
    return result.astype(dtype)


def _fp8_code(values: Bits, kind: str) -> Bits:
    """Return FP8 codes, rounded to nearest even and saturated at the largest finite value; NaN is 0x7F."""
    dtype, largest = _FP8[kind]
    codes = torch.from_numpy(np.ascontiguousarray(values)).clamp(-largest, largest).to(dtype).view(torch.uint8)
    return np.where(np.isnan(values), 0x7F, codes.numpy()).astype(np.uint16)


def _from_fp8(codes: Bits, kind: str) -> Bits:
    """Return the float16 bits of FP8 codes."""
    data = torch.from_numpy(codes.astype(np.uint8)).view(_FP8[kind][0]).to(torch.float16)
    return np.where(np.isnan(data.numpy()), 0x7FFF, data.view(torch.int16).numpy().view(np.uint16)).astype(np.uint16)


# Comparisons


def compare(i: Instruction, arguments: list[Bits]) -> list[Bits]:
    """Return the predicates that `setp` writes: one, or two for a pair of bf16."""
    if i.type in ("bf16x2", "f16x2"):
        halves = [_halves(typed(a, "b32"), i.type) for a in arguments]
        return [_compared(i, *pair) for pair in zip(*halves, strict=True)]
    if i.type == "bf16":
        return [_compared(i, *(_halves(typed(a, "b16"), "bf16")[0] for a in arguments))]
    return [_compared(i, *(typed(a, i.type) for a in arguments))]


def _compared(i: Instruction, a: Bits, b: Bits) -> Bits:
    name = i.parts[0]
    if len(i.parts) != 2 or name not in _COMPARISONS:
        return _unknown(i)
    return _COMPARISONS[name](a, b)


_COMPARISONS: dict[str, Callable[[Bits, Bits], Bits]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "neu": lambda a, b: a != b,
    "equ": lambda a, b: ~((a != b) & (a == a) & (b == b)),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
}
