"""A pretended H100 for `torch.compile`: fake tensors on "cuda" are traced, partitioned, scheduled and turned into code.

`install` builds and loads `device.cpp` and answers what Dynamo, AOTAutograd, Inductor and Octavo ask a GPU about. It
changes the process for good, and must run before anything imports torch. The code that Inductor makes is kept and not
run: `Graphs` holds it, and what is called in its place returns fake tensors.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_name("device.cpp")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024, warp_size=32,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 << 20, clock_rate=1755000, memory_clock_rate=2619000, memory_bus_width=5120, is_integrated=0,
    gcnArchName="", pci_bus_id=0,
)  # fmt: skip


class CannotPretend(RuntimeError):
    """There is no C++ compiler or no Triton, or torch is built for CUDA."""


@dataclass(frozen=True)
class Graph:
    """One graph that Inductor compiled.

    Attributes:
        lowered: Its `GraphLowering`, whose module and scheduler tell what it computes.
        code: The Python code that it made.
        bytes: Its estimate of the bytes that all kernels of the graph read and write.
    """

    lowered: Any
    code: str
    bytes: int


@dataclass
class Graphs:
    """The graphs compiled so far, in order."""

    graphs: list[Graph] = field(default_factory=list)

    def take(self) -> list[Graph]:
        """Return them, and forget them."""
        taken, self.graphs = self.graphs, []
        return taken


def missing() -> str | None:
    """Return what `install` lacks here, or None."""
    if _compiler() is None:
        return "it needs a C++ compiler: install g++ or clang, or set CXX to one"
    if find_spec("triton") is None:
        return "it needs Triton, which Inductor writes code for: pip install triton"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "it pretends a GPU, for which it needs a torch that is built without CUDA"
    return None


def install() -> Graphs:
    """Pretend a GPU from now on.

    Raises:
        CannotPretend: If something is missing, or the stub does not compile.
    """
    if (reason := missing()) is not None:
        raise CannotPretend(reason)
    assert "torch" not in sys.modules, "the device must be there before torch is imported"
    _load()
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    _answer_for_torch()
    _answer_for_triton()
    _answer_for_octavo()
    return _keep_code()


def _compiler() -> str | None:
    names = (os.environ["CXX"],) if "CXX" in os.environ else ("c++", "g++", "clang++")
    return next((path for name in names if (path := shutil.which(name))), None)


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _load() -> None:
    folder, compiler = _torch(), _compiler()
    with tempfile.TemporaryDirectory(prefix="octavo-device-") as scratch:
        library = Path(scratch) / "device.so"
        command = [
            str(compiler), "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{folder / 'include'}", str(SOURCE),
            f"-L{folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{folder / 'lib'}", "-o", str(library),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotPretend(f"{compiler} cannot build {SOURCE.name}: {done.stderr.strip() or done.returncode}")
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: value


def _answer_for_torch() -> None:
    import torch
    import torch._dynamo.device_interface
    import torch._inductor.config
    import torch._inductor.fx_passes.fuse_attention
    import torch._inductor.fx_passes.pad_mm
    import torch._inductor.scheduler
    import torch.utils._triton

    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=1)
    answers = {
        "_lazy_init": None, "_exchange_device": 0, "_maybe_exchange_device": 0, "_get_device_properties": H100,
        "current_device": 0, "current_stream": stream, "device_count": 1, "get_device_capability": (9, 0),
        "get_device_name": H100.name, "get_device_properties": H100, "is_available": True, "is_bf16_supported": True,
        "is_current_stream_capturing": False, "set_rng_state": None, "synchronize": None,
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, _always(answer))
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.version.cuda = "12.9"
    interface = torch._dynamo.device_interface.CudaInterface
    for owner, name, answer in (
        (interface, "get_device_properties", H100),
        (interface.Worker, "get_device_properties", H100),
        (interface, "is_available", True),
        (interface, "get_compute_capability", 90),
    ):
        setattr(owner, name, staticmethod(_always(answer)))
    torch.utils._triton.has_triton = torch._inductor.scheduler.has_triton = _always(True)
    # These run small tensors on the device, to make patterns of attention and padding and to fold constants.
    torch._inductor.fx_passes.fuse_attention._sfdp_init = _always(None)
    torch._inductor.fx_passes.pad_mm._pad_mm_init = _always(None)
    torch._inductor.config.joint_graph_constant_folding = False
    torch._inductor.config.force_disable_caches = True


def _answer_for_triton() -> None:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    driver = SimpleNamespace(
        get_current_target=_always(GPUTarget("cuda", 90, 32)), get_current_device=_always(0),
        get_active_torch_device=_always(torch.device("cuda", 0)), get_device_interface=_always(torch.cuda),
    )  # fmt: skip
    triton.runtime.driver.set_active(driver)


def _answer_for_octavo() -> None:
    """Choose the backends that an H100 gets, without probing them."""
    import torch

    from benchmarks.host.stub import AllSupported
    from octavo.kernels import registry
    from octavo.kernels.gemm import torch_scaled

    for op in registry.OPS.values():
        name = "torch_scaled" if "torch_scaled" in op.backends else "triton"
        for device in (torch.device("cuda"), torch.device("cuda", 0)):
            op._chosen.update({(device, case): op.backends[name] for case in op.cases.values()})
    torch_scaled._SUPPORTED = AllSupported()


def _keep_code() -> Graphs:
    import torch
    from torch._inductor.graph import GraphLowering

    graphs = Graphs()

    def compile_to_module(lowered: Any) -> Any:
        code = lowered.codegen()[0].value
        graphs.graphs.append(Graph(lowered, code, lowered.count_bytes()[0]))
        outputs = [
            node.meta["val"] if node is not None else None for node in lowered.module.graph.output_node().args[0]
        ]

        def call(arguments: list[Any]) -> list[Any]:
            arguments.clear()
            return [_like(output) if isinstance(output, torch.Tensor) else output for output in outputs]

        return SimpleNamespace(call=call, __file__=__file__, key="", cache_key="", cache_linemap=None)

    def _like(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    GraphLowering.compile_to_module = compile_to_module
    return graphs
