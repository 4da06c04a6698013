"""docs/host_time.md, from the rows of `python -m benchmarks host`."""

from typing import Any

HEAD = """<!-- Written by `python -m benchmarks host --write`; edit benchmarks/host/document.py instead. -->
# Host time

Eager PyTorch hands each operation to the GPU from Python. Where the GPU finishes sooner than the host can hand over
the next operation, the host sets the pace: small layers, few tokens, many launches. `torch.compile` and CUDA graphs
remove most of it.

`python -m benchmarks host` measures the host alone, without a GPU. CPU tensors take the GPU path, Triton compiles
for sm_90, and its real launcher calls a CUDA driver that launches nothing
([`benchmarks/host/libcuda.c`](https://github.com/octavo-fp8/octavo/blob/main/benchmarks/host/libcuda.c), built with
the system's C compiler). Matrices are 16×16, so that a product takes the host only its dispatch. FP8 products are
replaced by bf16 products of the same sizes, so they take the same time in both arms. Microseconds are those of the
machine below, best of many samples, without the cost of an empty autograd graph; only their ratios carry over to other
machines, and those roughly. Launches, dispatches and calls are exact and are tested
(`tests/kernels/test_stub_driver.py`). No figure here was measured on a GPU. Not included: what a GPU's allocator
and its libraries cost the host beyond a CPU's.

## Forward and backward of a linear, and of a block

One linear without bias if not stated, in training. A block is the seven linears of a Llama block, where q, k and v
share the FP8 form of their input, as gate and up do. Ratios are to bf16's row of the same kind.

"""
TITLES = ["| | forward µs | total µs | × bf16 | launches | kernels | dispatches | calls |", "|---|" + 7 * "---:|"]
COLUMNS = """- *launches*: kernels that Triton launches; *kernels*: all kernels that a GPU would run: these, products,
  memory sets, sums and casts of PyTorch.
- *dispatches*: operations that go through PyTorch's dispatcher, allocations and views included.
- *calls*: calls of Python functions, those of PyTorch and Triton included.
"""
LATER = """*Before* is the code without plans of products by Triton, on the same machine. Other work ran on it
meanwhile: compare ratios. A product by Triton is a launch, with nothing in its place."""
TAIL = """
## What makes it so

- **Launches go to the compiled kernel** (`octavo.kernels.launch`): Triton's own launch binds and classifies all
  arguments each time. Grid, scalars and dtypes are fixed once; each launch checks the alignment of addresses,
  since Triton compiles other code for addresses that are no multiples of 16. The first launch of a combination goes
  through Triton and is counted in `octavo.kernels.launch.THROUGH_TRITON`; so does each launch while a profiler's hooks
  are installed. The first launch also records what Triton's launcher passes to its C function; later ones call it.
- **TMA descriptors are encoded by the driver's function alone** (`octavo.kernels.launch`): what Triton unpacks a
  descriptor into is recorded at the first launch, and only its address differs later. A product by Triton is then one
  generated function (`octavo.kernels.gemm.triton_plan`). Triton's launch with two descriptors took most of 0.15-0.19 ms
  of a product's wall time on an H100, before. Products of experts (`grouped_mm`) launch directly, too, but go through
  the dispatcher, and build their descriptors as Triton's.
- **A cast is one generated function** (`octavo.kernels.quantize.quantize_plan`): allocations, addresses and launches
  of one shape and order, without the branches that the first call decided.
- **Ops run from plans, below the dispatcher** (`octavo.kernels.direct`): the first call with a combination of dtypes,
  shapes, strides, devices and options runs all checks and caches a plan. Later calls allocate and launch. cuBLAS's
  products with block scales bypass the dispatcher for the product, but not for the operations that rearrange their
  scales; Triton's read the scales as they are, and pad only operands whose contraction is no multiple of 16. Under
  `torch.compile`, dispatch modes (fake tensors, selective checkpointing), function modes, functorch transforms,
  tracing, CUDA graph capture, and for tensor subclasses the dispatcher is used as before. Results are
  bitwise the same.
- **A linear runs from one plan** (`octavo.nn.linear_plan`), which holds the plans of its ops. Forward checks X, W and
  the bias once, and backward checks G once, instead of once per op. The check is the C++ guard with which
  `torch.compile` recognizes inputs (`octavo.runtime.torch_compat.guard_of`). Recipes with an amax history, weights
  that FSDP gathers in FP8 and inputs that backward recomputes take the ordinary path.
- **Then each direction is one generated function** (`octavo.nn.linear_source`): once its casts and products are
  prepared, a plan joins their source, without calls between them. Linears launch the same kernels on the same tensors
  as before (`tests/kernels/stub_launches.py`).
- **A layer whose quantized inputs nobody reads keeps few of them** (`octavo.nn.input_casts.Readers`): for q, k and v
  the first keeps what it made of their input; a layer without such siblings stops after a few passes.
- **Outputs are allocated below the dispatcher**, as Inductor's generated code does.
- **The registry selects the backend**, as without plans: by `octavo calibrate`, probes and `force`. If its selection
  changes, cached plans are discarded.

## Inputs that norms and gated MLPs emit

`emit` (`octavo.nn.emitting`) makes the last multiplication of a norm or gated MLP and the quantization of its result
one kernel. In a Llama block three passes over X and three multiplications become three kernels: 114 kernels in
forward and backward instead of 117, as many of Triton's (32). The host takes longer, because an autograd function in
Python replaces PyTorch's own multiplication, with checks of the module's code before it: the last rows of Llama blocks
above differ by 109 µs for three modules. 36 µs per module are 1.8 bf16 linears, 44 µs where the planner assumes 24 µs
for one. The kernel saves a read of y, 2 bytes per element: at 3.0 TB/s (an H100's data sheet, 90 %) 45 µs for 2²⁶
elements, at 4.3 TB/s (H200) 31 µs. Where the host sets the pace, emitting therefore loses; where the GPU does, it
gains. `emit="auto"` emits results of 2²⁶ elements or more (8192 tokens × 8192 columns), whose products take the GPU
longer than the host needs for the layer, and smaller ones take the module's own code. Not measured on a GPU.

A kernel cache that cannot be written (`TRITON_CACHE_DIR`) is reported once; kernels are then compiled again in each
process.

The goal is 2.2 × bf16's time. Twenty runs of a few rows on this machine gave 1.94 to 2.35 for a rowwise linear, median
2.2, and 1.87 to 1.98 for the block. The stand-in for FP8 products takes 0.8 µs of Python each, 2.5 of rowwise's 44 µs,
in place of what `torch._scaled_mm` needs for its eight arguments, which is not measured. Channel scales (`_equalized`)
add seven Python calls and no dispatch in most passes: 4 µs, 8 to 10 % of rowwise's on this CPU, where the goal is 5 %
and another CPU needed 4 %; the passes that measure are not included. `delayed` has no plans. The dispatches of
`blockwise` and `mxfp8` pad operands and arrange scales; at sizes of models, which are multiples of blocks, operands
need no padding.

Rejected: passing tensors instead of addresses to Triton's launcher, for which it asks the driver about each pointer;
CUDA graphs of a linear, which fix addresses.
"""


def text(content: dict[str, Any]) -> str:
    """Return the page."""
    before = {row["name"]: row for row in content.get("before", ())}
    measured = (
        f"\n{_measured(content)} *Before* is the code without direct launches and plans, on another machine: compare "
        "its ratios, which are to its own bf16, and its counts.\n\n"
    )
    if later := content.get("later"):
        names = {row["name"] for row in content["rows"]}
        new = {name: row for name, row in before.items() if name not in names}
        table = "\n".join(_table(later["rows"], new))
        measured += f"Rows measured later, in a run of their own:\n\n{table}\n\n{_measured(later)}\n{LATER}\n\n"
    return HEAD + "\n".join(_table(content["rows"], before)) + "\n" + measured + COLUMNS + TAIL


def _table(rows: list[dict[str, Any]], before: dict[str, Any]) -> list[str]:
    lines = list(TITLES)
    for row in rows:
        old = before.get(row["name"])
        changed = old is not None and old["python_calls"] != row["python_calls"]
        if changed and old is not None:
            lines.append(_line(f"{row['name']}, before", old))
        lines.append(_line(f"**{row['name']}**" if changed else row["name"], row))
    return lines


def _measured(content: dict[str, Any]) -> str:
    machine = content["environment"]
    return (
        f"Measured with `python -m benchmarks host` on one thread of {machine['device']}; torch {machine['torch']}, "
        f"Triton {machine['triton']}, torchao {machine['torchao'] or 'absent'}, Python {machine['python']}, "
        f"{machine['date']}."
    )


def _line(name: str, row: dict[str, Any]) -> str:
    cells = [f"{row['forward_us']:.0f}", f"{row['total_us']:.0f}", f"{row['ratio']:.1f}"]
    cells += [str(row[key]) for key in ("launches", "kernels", "dispatches", "python_calls")]
    return f"| {name} | " + " | ".join(cells) + " |"
