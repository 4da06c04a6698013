"""Run by test_quantize_decomposed.py in a process of its own, on a pretended H100. Prints how many bytes of what
Inductor's kernels write differ from the reference, by output.

The kernels are compiled for sm_90 as Inductor does, with contraction to FMA, and run in the interpreter of PTX.
"""

import importlib.util
import json
import re
import sys
import tempfile
from pathlib import Path

from benchmarks.compiled import pretend

GRAPHS = pretend.install()

import torch  # noqa: E402  after the device is there
import triton  # noqa: E402
from benchmarks.ptx.launches import _type  # noqa: E402
from benchmarks.ptx.machine import run  # noqa: E402
from benchmarks.ptx.memory import DeviceMemory  # noqa: E402
from benchmarks.ptx.program import parse  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from octavo.kernels import quantize  # noqa: E402
from octavo.kernels.quantize import reference  # noqa: E402
from octavo.numerics.spec import COLUMN, ROW, QuantSpec  # noqa: E402
from octavo.runtime.torch_compat import FakeTensorMode  # noqa: E402

BY_ROW, BY_COLUMN = QuantSpec(granularity=ROW), QuantSpec(granularity=COLUMN)
HEAD = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def casts(x, w, fold, fold_t, gate, up):
    y = (x.float() * 0.37).to(torch.bfloat16) * w  # fused, and therefore not rounded by Inductor
    a, b = quantize(y, BY_ROW, fold), quantize(y, BY_COLUMN, fold_t)
    c = quantize(x, BY_ROW, order="both")
    d = quantize(x, BY_ROW, scale=c.scale, order="columns")
    e, f = (quantize(weight, BY_ROW, beside=c.scale) for weight in (gate, up))  # one kernel
    return y, a.data, a.scale, b.data, b.scale, c.data, c.other_order, c.scale, d.data, e.data, e.scale, f.data, f.scale


def expected(y, x, fold, fold_t, gate, up):
    row, scale = reference.quantize(y, BY_ROW, fold)
    column, scale_t = reference.quantize(y, BY_COLUMN, fold_t)
    both = reference.quantize(x, BY_ROW, None, order="both")
    given = reference.quantize(x, BY_ROW, None, scale=both[-1], order="columns")
    weights = [tensor for weight in (gate, up) for tensor in reference.quantize(weight, BY_ROW, None)]
    return [y, row, scale, column, scale_t, both[0], both[1].t(), both[2], given[0].t(), *weights]


def inputs():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 272, generator=generator) * torch.randn(48, 1, generator=generator).mul(6).exp2()
    x[3], x[5, 7], x[6, 9], x[9, 1] = 0, float("nan"), float("inf"), -0.0
    w = torch.rand(272, generator=generator) + 0.5
    folds = torch.rand(1, 272, generator=generator), torch.rand(48, 1, generator=generator)
    gate, up = torch.randn(2, 64, 272, generator=generator).bfloat16()
    gate[3], gate[5, 7], up[6, 9] = 0, float("nan"), float("inf")
    return x.bfloat16(), w.bfloat16(), *folds, gate, up


def kernels(code, folder):
    """The Triton kernels in Inductor's code, by name. Hints for caches are left out."""
    found = {}
    for name, source in re.findall(r"(triton_\w+) = async_compile\.triton\('\w+', '''(.*?)''', device", code, re.S):
        path = folder / f"kernel_{len(found)}.py"
        path.write_text(HEAD + re.sub(r", eviction_policy='\w+'", "", source[source.index("@triton.jit") :]))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found[name] = getattr(module, name)
    return found


def launch(kernel, arguments, blocks):
    names = kernel.arg_names
    constants = {name: blocks[name] for name in names if name in blocks}
    values = dict(zip((name for name in names if name not in constants), arguments, strict=True))
    numbers = {name: v.data_ptr() if isinstance(v, torch.Tensor) else v for name, v in values.items()}
    signature = {name: "constexpr" if name in constants else _type(values[name]) for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in numbers and numbers[n] % 16 == 0}
    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": True},
    )
    memory = DeviceMemory([v for v in values.values() if isinstance(v, torch.Tensor)])
    grid = (-(-values["xnumel"] // blocks["XBLOCK"]), 1, 1)
    run(parse(compiled.asm["ptx"]), list(numbers.values()), grid, memory, compiled.metadata.shared)


def execute(code, arguments, blocks):
    """Do what the `call` of Inductor's code does, on the CPU: allocate, launch, return."""
    names = {f"arg{index}_1": argument for index, argument in enumerate(arguments)}
    names |= {"torch": torch, "reinterpret_tensor": torch.as_strided}
    with tempfile.TemporaryDirectory() as folder:
        found = kernels(code, Path(folder))
        for line in code[code.index("def call(") :].splitlines():
            if made := re.match(r"\s*(buf\d+) = empty_strided_cuda\((.*)\)", line):
                names[made[1]] = eval(
                    f"torch.empty_strided({made[2].rpartition(',')[0]}, dtype={made[2].split()[-1]})", names
                )
            elif launched := re.match(r"\s*(triton_\w+)\.run\((.*), stream=", line):
                launch(found[launched[1]], eval(f"[{launched[2]}]", names), blocks)
            elif returned := re.match(r"\s*return (\(buf.*)", line):
                return eval(returned[1].replace(", 0)", ")"), names)
    raise AssertionError("the code returns nothing")


def different_bytes(want, got):
    a, b = (t.contiguous().view(torch.uint8) for t in (want, got))
    nan = ((a & 0x7F) == 0x7F) & ((b & 0x7F) == 0x7F) if want.dtype == torch.float8_e4m3fn else False  # of any sign
    return int(((a != b) & ~torch.as_tensor(nan)).sum())


arguments = inputs()
with FakeTensorMode():
    fakes = [torch.empty(a.shape, dtype=a.dtype, device="cuda") for a in arguments]
    torch.compile(casts, fullgraph=True, dynamic=False)(*fakes)
(graph,) = GRAPHS.take()
results = execute(graph.code, arguments, {"XBLOCK": 8, "R0_BLOCK": 64})
wanted = expected(results[0], arguments[0], *arguments[2:])
result = {
    "kernels": len(re.findall(r"triton_\w+\.run\(", graph.code)),
    "differ": [different_bytes(want, got) for want, got in zip(wanted, results, strict=True)],
    "unrounded": int((results[0] != casts(*arguments)[0]).sum()),
}
json.dump(result, sys.stdout)
