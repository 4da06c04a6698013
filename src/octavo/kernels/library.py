"""The `octavo` namespace of torch ops: functional, with fake implementations, without autograd formulas.

An op may have a *decomposition* into PyTorch operations with the same bits, which AOTAutograd traces in its place, and
a FLOP formula, registered when somebody imports `torch.utils.flop_counter`, which imports Triton.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from octavo.numerics.formats import SUPPORTED_DTYPES
from octavo.runtime.torch_compat import FakeTensor, FunctionalTensor, FunctionalTensorMode

F = TypeVar("F", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("octavo", "DEF")

DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}
"""What torch.compile traces in place of an op, by the op's name. Returns NotImplemented to keep the op."""


_FLOPS: dict[str, Callable[..., int]] = {}
"""Floating point operations of ops by name, from the shapes of their arguments and `out_shape`."""


def define(
    name: str, run: F, fake: Callable[..., Any], decompose: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None, mutates: tuple[str, ...] = (),
) -> F:  # fmt: skip
    """Define `octavo::<name>` with the arguments of `run`, of which it writes into `mutates`. Return the op."""
    schema = torch.library.infer_schema(run, mutates_args=mutates)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{name}", fake, lib=_LIBRARY)
    if decompose is not None:
        DECOMPOSITIONS[name] = decompose
        torch.library.register_torch_dispatch(f"octavo::{name}", FunctionalTensorMode, _traced, lib=_LIBRARY)
    if flops is not None:
        _FLOPS[name] = flops
        if (counter := sys.modules.get(_COUNTER)) is not None:
            _register_flops(counter, name)
    return cast(F, getattr(torch.ops.octavo, name).default)


_COUNTER = "torch.utils.flop_counter"


def _register_flops(counter: ModuleType, *names: str) -> None:
    for name in names:
        counter.register_flop_formula(getattr(torch.ops.octavo, name))(_FLOPS[name])


class _AfterImport:
    """A finder on `sys.meta_path` that registers the formulas as soon as `_COUNTER` is imported."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(cls)
        spec: Any = find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register_flops(module, *_FLOPS)

        spec.loader.exec_module = execute_and_register
        return spec  # type: ignore[no-any-return]


if _COUNTER not in sys.modules:
    sys.meta_path.insert(0, _AfterImport)


def _traced(
    mode: FunctionalTensorMode, op: "torch._ops.OpOverload[..., Any]", types: tuple[type, ...],
    args: tuple[Any, ...], kwargs: dict[str, Any],
) -> Any:  # fmt: skip
    """Call an op while AOTAutograd or `torch.export` makes a graph functional."""
    if not all(t in _PLAIN or issubclass(t, FakeTensor) for t in types):
        return NotImplemented  # a tensor subclass calls the op again with what it wraps
    decompose = DECOMPOSITIONS.get(op.name().removeprefix("octavo::"))
    if decompose is not None and not torch.compiler.is_exporting():
        with mode:
            results = decompose(*args, **kwargs)
        if results is not NotImplemented:
            return results
    return mode.__torch_dispatch__(op, types, args, kwargs)


_PLAIN = (torch.Tensor, torch.nn.Parameter, FunctionalTensor)


def check_matrix(op: str, name: str, x: Tensor) -> None:
    """Raise ValueError unless x is a matrix [R,C] of a supported dtype."""
    if x.ndim != 2 or x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f"{op}: {name} must be a float32, bfloat16 or float16 matrix [R,C]; got {x.dtype} of shape {tuple(x.shape)}"
        )


def check_like(
    op: str, name: str, value: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], x: Tensor
) -> None:
    """Raise ValueError unless an operand is None or has this shape, one of these dtypes, and x's device."""
    if value is not None and (value.shape != shape or value.dtype not in dtypes or value.device != x.device):
        expected_dtypes = " or ".join(str(dtype) for dtype in dict.fromkeys(dtypes))
        raise ValueError(
            f"{op}: {name} must be {expected_dtypes} {list(shape)} on {x.device}; "
            f"got {value.dtype} {list(value.shape)} on {value.device}"
        )


def sample(device: torch.device, count: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random matrices [48,272] for probes: their sizes are no multiple of a tile."""
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(count, 48, 272, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype))
