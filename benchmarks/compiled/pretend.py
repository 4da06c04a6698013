"""A pretended H100 for `torch.compile`: fake tensors on "cuda" become graphs and Inductor's code, which is kept, not
run. It replaces the functions of C that a build with CUDA has, so Dynamo refuses what it refuses on a GPU. Off are
Inductor's patterns of attention and folding of constants, which would run on the device; there are no CUDA graphs or
streams.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.compilers import CannotPretend, build, compiler, folder_of

SOURCE = Path(__file__).with_name("device.cpp")
find_compiler = partial(compiler, "CXX", "c++", "g++", "clang++")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, clock_rate=1755000, memory_clock_rate=2619000, memory_bus_width=5120, is_integrated=0,
    gcnArchName="", pci_bus_id=0,
)  # fmt: skip


@dataclass(frozen=True)
class Graph:
    """One graph that Inductor compiled: its `GraphLowering`, its code, and the bytes that all kernels move."""

    lowered: Any
    code: str
    bytes: int


def missing() -> str | None:
    if find_compiler() is None:
        return "it needs a C++ compiler: install g++ or clang, or set CXX to one"
    if find_spec("triton") is None:
        return "it needs Triton, which Inductor writes code for: pip install triton"
    if (folder_of("torch") / "lib" / "libtorch_cuda.so").exists():
        return "it pretends a GPU, for which it needs a torch that is built without CUDA"
    return None


def install() -> list[Graph]:
    """Pretend a GPU, to whose list compiled graphs are added; raises CannotPretend without a compiler."""
    if (reason := missing()) is not None:
        raise CannotPretend(reason)
    assert "torch" not in sys.modules, "the device must be there before torch is imported"
    folder = folder_of("torch")
    with tempfile.TemporaryDirectory(prefix="octavo-device-") as scratch:
        library, own = Path(scratch) / "device.so", folder / "lib"
        build(find_compiler(), SOURCE, library, "-std=c++20", f"-I{folder / 'include'}", f"-L{own}", "-lc10",
              "-ltorch_cpu", f"-Wl,-rpath,{own}")  # fmt: skip
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _answer_for_torch()
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from benchmarks.host.stub import choose_as_an_h100

    driver = SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", 90, 32)), get_current_device=_always(0),
        get_active_torch_device=_always(torch.device("cuda", 0)), get_device_interface=_always(torch.cuda),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)
    choose_as_an_h100(torch.device("cuda"), torch.device("cuda", 0))
    return _keep_code()


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that Dynamo can as little look into as into those of C."""

    def answer(*arguments: Any, **keywords: Any) -> Any:
        return value

    answer._torchdynamo_disable = True  # type: ignore[attr-defined]
    return answer


def _answer_for_torch() -> None:
    """Answer for the functions of C that a build with CUDA has, below PyTorch's own Python, which Dynamo knows."""
    import torch
    import torch._inductor.config
    import torch._inductor.cudagraph_trees  # would import the memory pools of C from a build with CUDA
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.pad_mm

    for name, answer in {
        "_cuda_exchangeDevice": 0, "_cuda_getCurrentRawStream": 0, "_cuda_getCurrentStream": (0, 0, 1),
        "_cuda_getDevice": 0, "_cuda_getDeviceCount": 1, "_cuda_maybeExchangeDevice": 0, "_cuda_setDevice": None,
        "_cuda_synchronize": None,
    }.items():  # fmt: skip
        setattr(torch._C, name, _always(answer))
    torch._C._has_cuda = True
    base: Any = torch._C._CudaStreamBase
    base.__new__ = lambda cls, **keywords: object.__new__(cls)
    base.__init__ = lambda self, **keywords: vars(self).update(keywords, cuda_stream=0)
    # `torch.cuda` took these from C when it was imported.
    torch.cuda._exchange_device = torch._C._cuda_exchangeDevice
    torch.cuda._maybe_exchange_device = torch._C._cuda_maybeExchangeDevice
    torch.cuda._get_device_properties = _always(H100)
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = _always(False)
    torch.cuda._initialized = True
    torch.cuda.default_generators = (torch.default_generator,)
    torch.version.cuda = "12.9"

    # These run small tensors on the device, to make patterns of attention and padding and to fold constants.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = _always(None)
    torch._inductor.fx_passes.pad_mm._pad_mm_init = _always(None)
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.force_disable_caches = True


def _keep_code() -> list[Graph]:
    import torch
    from torch._inductor.graph import GraphLowering

    graphs: list[Graph] = []

    def compile_to_module(lowered: Any) -> Any:
        code = lowered.codegen()[0].value
        graphs.append(Graph(lowered, code, lowered.count_bytes()[0]))
        outputs = [node and node.meta["val"] for node in lowered.module.graph.output_node().args[0]]

        def call(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [
                torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
                if isinstance(x, torch.Tensor) else x for x in outputs
            ]  # fmt: skip

        return SimpleNamespace(call=call, __file__=__file__, key="", cache_key="", cache_linemap=None)

    GraphLowering.compile_to_module = compile_to_module
    return graphs
