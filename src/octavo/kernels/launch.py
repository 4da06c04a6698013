"""Triton kernels with their compile-time arguments: launched, or compiled without a GPU (docs/host_time.md).

Triton's own launch takes 14 µs. `PreparedLaunch` records once what its launcher passes to its C function, and calls
that with the stream and the addresses (1 µs). It holds no tensor. Only Triton backends and their tools import this.
"""

import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from operator import or_
from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import torch
import triton

from octavo.kernels.direct import Plans

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's CPU interpreter (TRITON_INTERPRET=1 at the import of Triton)."""

MAX_GRID_YZ = 65535  # Largest second and third dimension of a grid in CUDA


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel with its compile-time constants."""

    kernel: Any  # The `@triton.jit` function
    constants: dict[str, Any]  # Its `tl.constexpr` arguments
    num_warps: int  # Warps per program
    num_stages: int = 3  # Depth of software pipelining of its loops
    _prepared: Plans["PreparedLaunch"] = field(default_factory=Plans, init=False, repr=False, compare=False)

    def run(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        """Launch on `grid` programs with those of `arguments` that the kernel takes."""
        # Switches to the tensors' device, as Triton launches on the current one. FP fusion is off, as in the reference.
        launch = self.prepared(grid, arguments)
        launch([_tensor_of(arguments[name]) for name in launch.names])

    def prepared(self, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> "PreparedLaunch":
        """Return a launch of these arguments, or of earlier ones that differ in the addresses of tensors alone."""
        kinds: list[Any] = [grid]
        for name in self.kernel.arg_names:  # a loop without calls: most of what a launch takes
            if name in arguments:
                value = arguments[name]
                kind = value.__class__
                if kind is int or kind is float:
                    kinds += (kind, value)
                else:
                    kinds += (value.dtype, value.device) if kind is torch.Tensor else _kind(value)
        key = tuple(kinds)
        launch = self._prepared.get(key)
        if launch is None:
            launch = self._prepared.add(key, PreparedLaunch(self, grid, arguments))
        return launch


def shared_launch(kernel: object, constants: Mapping[str, Any], num_warps: int) -> Launch:
    """Return a launch of a kernel, the same for equal constants, so that what it has prepared is found again."""
    key = id(kernel), num_warps, *constants.items()  # to hash a kernel takes long; a launch keeps it alive
    launch = _SHARED.get(key)
    if launch is None:
        launch = _SHARED[key] = Launch(kernel=kernel, constants=dict(constants), num_warps=num_warps)
    return launch


_SHARED: dict[Any, Launch] = {}


def _kind(value: Any) -> tuple[Any, ...]:
    """Return what a prepared launch fixes of an argument: dtype and device, or type and value (True is not 1)."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device
    if isinstance(value, int | float):
        return type(value), value
    sizes = (tuple(size) for size in (value.shape, value.strides, value.block_shape))
    return type(value), value.base.dtype, value.base.device, *sizes


def _tensor_of(value: object) -> Any:
    """Return the tensor that an argument is, or that a TMA descriptor describes; a scalar as it is."""
    return getattr(value, "base", value)


class PreparedLaunch:
    """A launch with fixed grid, scalars, dtypes, device and TMA descriptors. Call it with tensors, as `names`."""

    def __init__(self, launch: Launch, grid: tuple[int, ...], arguments: Mapping[str, Any]) -> None:
        if any(programs > MAX_GRID_YZ for programs in grid[1:]):
            raise ValueError(
                f"{launch.kernel.fn.__name__} cannot be launched on a grid of {grid}: CUDA allows {MAX_GRID_YZ} in the "
                "second and third dimension. Reshape the input to more rows and fewer columns"
            )
        passed = {name: arguments[name] for name in launch.kernel.arg_names if name in arguments}
        bases = {name: _tensor_of(value) for name, value in passed.items()}
        dtypes = {name: base.dtype for name, base in bases.items() if isinstance(base, torch.Tensor)}
        # `names` are the arguments that are tensors, or TMA descriptors of tensors, `scalars` the others.
        self.launch, self.grid, self.names, self._dtypes = launch, grid, tuple(dtypes), tuple(dtypes.values())
        self.scalars = {name: value for name, value in passed.items() if name not in dtypes}
        self._index = bases[self.names[0]].device.index
        self._descriptors = {name: _without_base(passed[name]) for name in dtypes if passed[name] is not bases[name]}
        self._compiled: dict[Any, tuple[Any, Callable[..., None]]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Launch with tensors on the device of those at preparation, of dtypes of the same sizes."""
        if self._index is not None and self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                return self(tensors)
        addresses = [*map(_ADDRESS, tensors)]
        aligned = True if not reduce(or_, addresses) & 15 else tuple(address % 16 == 0 for address in addresses)
        compiled = self._compiled.get(aligned)
        if compiled is None or HOOKS.launch_enter_hook.calls or HOOKS.launch_exit_hook.calls:
            return self._through_triton(aligned, tensors)
        compiled[1](current_stream(self._index), *addresses)

    def source(self, constants: dict[str, Any]) -> str | None:
        """Return source that launches the kernel compiled for aligned addresses, on `stream`; None without one."""
        # It runs on the current device, with addresses named as the kernel's arguments.
        # The objects in it are added to `constants`. No profiler's hooks (`HOOKS`) may be installed when it runs.
        compiled = self._compiled.get(True)
        return None if compiled is None else self._call_source(compiled[0], constants)

    def _call_source(self, kernel: Any, constants: dict[str, Any]) -> str | None:
        """Return Python source that calls the C function below Triton's launcher."""
        # A copy of the launcher, with names instead of the stream and of addresses, passes the arguments of the C
        # function to a list. A launcher that allocates scratch memory at each launch, or of an unknown kind, is called;
        # None if it would have to unpack descriptors.
        call: Any = kernel.run
        values = {name: _named(name, self._descriptors.get(name)) for name in self.names}
        values |= {**self.scalars, **self.launch.constants}
        passed = (
            *(*self.grid, 1, 1)[:3], Name("stream"), kernel.function, kernel.packed_metadata, None, None, None,
            *(values[name] for name in self.launch.kernel.arg_names),
        )  # fmt: skip
        sizes = [getattr(call, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
        if hasattr(call, "launch") and sizes == [0, 0] and not getattr(call, "gsan_enabled", False):
            recorded: list[tuple[Any, ...]] = []
            launcher, function = copy(call), call.launch
            launcher.launch = lambda *arguments: recorded.append(arguments)
            if not self._descriptors:
                launcher(*passed)
            else:
                function = _record_unpacked(launcher, function, passed, constants)
            call, (passed,) = function, recorded or [()]
        elif self._descriptors:
            call = None
        return None if call is None else render(call, constants) + render(passed, constants)

    def arguments(self, tensors: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the kernel's arguments but constants by name, with tensors viewed as the dtypes at preparation."""
        viewed = (x if x.dtype == dtype else x.view(dtype) for x, dtype in zip(tensors, self._dtypes, strict=True))
        arguments = dict(zip(self.names, viewed, strict=True)) | self.scalars
        return arguments | {name: described(base=arguments[name]) for name, described in self._descriptors.items()}

    def _through_triton(self, aligned: object, tensors: Sequence[torch.Tensor]) -> None:
        """Launch as Triton does, which compiles the kernel if needed, and remember the compiled kernel."""
        launch = self.launch
        THROUGH_TRITON[launch.kernel.fn.__name__] += 1
        kernel = _with_writable_cache(
            launch.kernel[self.grid], **self.arguments(tensors), **launch.constants, num_warps=launch.num_warps,
            num_stages=launch.num_stages, enable_fp_fusion=False,
        )  # fmt: skip
        constants: dict[str, Any] = {}
        if not INTERPRETED and (source := self._call_source(kernel, constants)) is not None:
            launched = eval(f"lambda stream, {', '.join(self.names)}: {source}", constants)
            self._compiled[aligned] = kernel, launched


def _without_base(descriptor: Any) -> "partial[Any]":
    """Return a TMA descriptor as a function of the tensor that it describes."""
    others = {f.name: getattr(descriptor, f.name) for f in fields(descriptor) if f.name != "base"}
    make: Callable[..., Any] = type(descriptor)
    return partial(make, **others)


# Functions generated from source, for what the host does in every step: calls and branches of Python cost it most. The
# objects that source names lie in a dictionary of constants, the globals of the function.


class Name(str):
    """A name in generated source, in the place of a value."""


def render(value: object, constants: dict[str, Any]) -> str:
    """Return Python source of a value that may hold names; other objects in it are added to `constants`."""
    if isinstance(value, Name):
        return value
    if isinstance(value, tuple):
        return f"({''.join(render(item, constants) + ', ' for item in value)})"
    if value is None or type(value) in (bool, int):
        return repr(value)
    name = f"constant{len(constants)}"
    constants[name] = value
    return name


def compile_function(parameters: str, lines: Iterable[str], constants: dict[str, Any]) -> Callable[..., Any]:
    """Return the function of these parameters and lines."""
    exec("\n ".join([f"def run({parameters}):", *lines]), constants)
    run: Callable[..., Any] = constants["run"]
    return run


class _Address(Name):
    """The name of an address in generated source, in the place of a tensor."""

    def data_ptr(self) -> Name:
        return self


def _named(name: str, descriptor: "partial[Any] | None") -> Any:
    """Return what stands for an argument when Triton's launcher is recorded: a name, or a descriptor of one."""
    return Name(name) if descriptor is None else SimpleNamespace(**descriptor.keywords, base=_Address(name))


def _record_unpacked(launcher: Any, launch: object, passed: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Record what a launcher passes to the C function, with source in the place of tensor maps; return the function."""
    # None in a release of Triton that does this otherwise.
    utils, record = triton.runtime.driver.active.utils, launcher.launch
    name = next((name for name in _ENCODES if hasattr(utils, name)), None)
    if name is None or not isinstance(launch, FunctionType) or "launcher" not in launch.__code__.co_freevars:
        return None
    cells = dict(zip(launch.__code__.co_freevars, launch.__closure__ or (), strict=True))

    def encode(address: object, *rest: object) -> Any:
        if not isinstance(address, Name):
            return encoder(address, *rest)  # a launch of another thread
        return Name(f"{render(encoder, constants)}{render((address, *rest), constants)}")

    def record_unpacked(*arguments: object) -> None:
        *others, last = arguments  # in Triton 3.9 a list of the kernel's arguments
        record(*others, tuple(last) if isinstance(last, list) else last)

    below = cells["launcher"].cell_contents
    cells["launcher"] = CellType(record_unpacked)
    launcher.launch = FunctionType(launch.__code__, launch.__globals__, closure=tuple(cells.values()))
    with _RECORDING:
        encoder = getattr(utils, name)
        setattr(utils, name, encode)
        try:
            launcher(*passed)
        finally:
            setattr(utils, name, encoder)
    return below


_ENCODES = ("fill_tma_descriptor_tiled", "fill_tma_descriptor")  # Encode a tensor map, in Triton 3.9 and 3.6
_RECORDING = threading.Lock()

THROUGH_TRITON: Counter[str] = Counter()  # Launches that were not direct, by kernel
_ADDRESS = torch.Tensor.data_ptr
HOOKS = triton.knobs.runtime  # Where profilers install what Triton calls around each launch


def preparation(index: int | None, constants: dict[str, Any], otherwise: str) -> list[str]:
    """Return lines that go before the source of launches on the device of an index: they assign `stream`."""
    # `otherwise` is the statement for another current device and under a profiler's hooks.
    stream_of = render(triton.runtime.driver.active.get_current_stream, constants)
    hooks = render(HOOKS, constants)
    lines = []
    if index is not None:
        lines += [f"if {render(torch.cuda.current_device, constants)}() != {index}: {otherwise}"]
    return [
        *lines,
        f"if {hooks}.launch_enter_hook.calls or {hooks}.launch_exit_hook.calls: {otherwise}",
        f"stream = {stream_of}({index})",
    ]


def current_stream(index: int | None) -> int:
    """Return the current stream of a device, as Triton's driver does."""
    stream: int = triton.runtime.driver.active.get_current_stream(index)
    return stream


def _with_writable_cache(launch: Callable[..., Any], **arguments: object) -> Any:
    """Launch; if Triton's cache of compiled kernels cannot be written, warn and use a temporary one from now on."""
    try:
        return launch(**arguments)
    except OSError as error:
        if triton.knobs.cache.dir in _TEMPORARY:
            raise
        _TEMPORARY.append(tempfile.mkdtemp(prefix="octavo-triton-"))
        warnings.warn(
            f"octavo: Triton cannot write compiled kernels to {triton.knobs.cache.dir} ({error}); they are compiled "
            f"again in each process, in {_TEMPORARY[-1]}. Set TRITON_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        triton.knobs.cache.dir = _TEMPORARY[-1]
        return launch(**arguments)


_TEMPORARY: list[str] = []  # The cache folder made by `_with_writable_cache`, if any
