"""A pretended H100: CPU tensors take the GPU path, and a CUDA driver that launches nothing (`libcuda.c`) ends it.
Triton compiles for sm_90 and runs its real launcher; FP8 products are bf16 products of the same sizes; outputs are
uninitialized memory. `install` changes the process for good, before anything imports Triton.
"""

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.compilers import CannotPretend, build, compiler, folder_of
from octavo.runtime.torch_compat import empty_strided_on

SOURCE = Path(__file__).with_name("libcuda.c")
find_compiler = partial(compiler, "CC", "cc", "gcc", "clang")
MOST_PARAMETERS = 64


class Record(ctypes.Structure):
    """One launch, as a GPU would have received it; the same fields as in `libcuda.c`."""

    _fields_ = (
        ("kernel", ctypes.c_ulonglong), ("stream", ctypes.c_ulonglong), ("grid", ctypes.c_uint * 3),
        ("threads", ctypes.c_uint), ("shared", ctypes.c_uint), ("count", ctypes.c_int),
        ("value", ctypes.c_ulonglong * MOST_PARAMETERS),
    )  # fmt: skip

    def key(self) -> tuple[Any, ...]:
        values = tuple(self.value[: self.count])
        return self.kernel, tuple(self.grid), self.threads, self.shared, self.stream, values


class Stub:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._launches = ctypes.c_long.in_dll(library, "stub_launches")
        self._recording = ctypes.c_int.in_dll(library, "stub_recording")
        self._count = ctypes.c_int.in_dll(library, "stub_records")
        self._records = (Record * 1024).in_dll(library, "stub_record")

    @property
    def launches(self) -> int:
        return self._launches.value

    @contextmanager
    def recorded(self) -> Iterator[list[Record]]:
        """Record the launches inside the block (at most 1024); the list is filled at its end."""
        records: list[Record] = []
        self._count.value, self._recording.value = 0, 1
        try:
            yield records
        finally:
            self._recording.value = 0
            records += [Record.from_buffer_copy(self._records[i]) for i in range(self._count.value)]


def missing() -> str | None:
    if find_compiler() is None:
        return "the stub driver needs a C compiler: install gcc or clang, or set CC to one"
    if find_spec("triton") is None:
        return "the stub driver needs Triton, whose launches it receives: pip install triton"
    return None


def install() -> Stub:
    """Build and load the stub driver, and send CPU tensors down the GPU path; raises CannotPretend."""
    if (reason := missing()) is not None:
        raise CannotPretend(reason)
    assert "triton" not in sys.modules, "the stub driver must be installed before Triton is imported"
    os.environ.pop("TRITON_INTERPRET", None)
    library = Path(tempfile.mkdtemp(prefix="octavo-stub-")) / "libcuda.so.1"
    atexit.register(shutil.rmtree, library.parent, ignore_errors=True)
    headers = folder_of("triton") / "backends" / "nvidia" / "include"
    build(find_compiler(), SOURCE, library, "-Wl,-soname,libcuda.so.1", f"-I{headers}")
    library.with_name("libcuda.so").symlink_to(library.name)
    os.environ["TRITON_LIBCUDA_PATH"] = str(library.parent)
    # Whatever asks for libcuda.so.1 from now on gets this one.
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _activate()
    from octavo.kernels import registry

    registry.GPU_TYPES.add("cpu")
    choose_as_an_h100(torch.device("cpu"))
    torch._scaled_mm = F.scaled_mm = torch._scaled_mm_v2 = _product
    torch._scaled_grouped_mm = _grouped_product
    return Stub(loaded)


def _activate() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils

    class StubDriver(CudaDriver):
        def __init__(self) -> None:
            self.utils = CudaUtils()
            self.launcher_cls = CudaLauncher
            self.get_device_capability = lambda device=0: (9, 0)
            self.get_current_stream = lambda device: 0
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(StubDriver())


def choose_as_an_h100(*devices: torch.device) -> None:
    """Choose the backends that an H100 gets, without probing them."""
    from octavo.kernels import registry
    from octavo.kernels.gemm import torch_scaled

    for op in registry.OPS.values():
        for case in op.cases.values():
            no_grouped = op.name == "grouped_mm" and case[2:] not in (("nt", ""), ("nn", ""))
            name = "torch_scaled" if "torch_scaled" in op.backends and not no_grouped else "triton"
            op._chosen.update({(device, case): op.backends[name] for device in devices})
    torch_scaled._SUPPORTED = SimpleNamespace(get=lambda key: True)  # results of probes, all of them good


def _product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> Tensor:
    """A bf16 product of the same sizes, in place of an FP8 one; of large ones a corner, and the result as allocated."""
    operands = _OPERANDS.get((a.shape, b.shape))
    if operands is None:
        shapes = ([min(size, LARGEST) for size in x.shape] for x in (a, b))
        operands = _OPERANDS[a.shape, b.shape] = [torch.ones(shape, dtype=torch.bfloat16) for shape in shapes]
    product, shape = torch.mm(*operands), (a.shape[0], b.shape[1])
    return product if product.shape == shape else empty_strided_on(a.device)(shape, (shape[1], 1), product.dtype)


def _grouped_product(a: Tensor, b: Tensor, *_: Any, offs: Tensor, **__: Any) -> Tensor:
    """What `_grouped_mm` of bf16 costs the host, in place of the product of experts in FP8."""
    shapes = (a.shape, b.shape, b.stride())
    operands = _GROUPED.get(shapes)
    if operands is None:
        right = torch.empty_strided(b.shape, b.stride(), dtype=torch.bfloat16).zero_()
        operands = _GROUPED[shapes] = torch.zeros(a.shape, dtype=torch.bfloat16), right
    return torch._grouped_mm(*operands, offs=offs)


LARGEST = 16
_GROUPED: dict[Any, tuple[Tensor, Tensor]] = {}
_OPERANDS: dict[tuple[torch.Size, torch.Size], list[Tensor]] = {}
