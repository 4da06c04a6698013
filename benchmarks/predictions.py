"""Compare the planner with published measurements, and with an H100's (`benchmarks.errors`), and generate
docs/planner.md. Needs no GPU.

Each row is a published speed-up of FP8 over bf16 whose shapes, or model, and GPU are known. The prediction uses the
bytes that *their* code moves (`TABLES`) and the device table of `octavo plan`. No row was used for fitting. Rows that
miss stay, with the reason.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import errors
from benchmarks.environment import write_text
from octavo.planner.decide import break_even, candidates
from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import Cost, LinearCall, Passes, bf16_linear, fp8_cost, memory_time
from octavo.planner.step import Recompute, StepConfig, step_time
from octavo.planner.trace import Trace, trace

DOCUMENT = Path(__file__).parent.parent / "docs" / "planner.md"
WITHIN = 0.10
"""Maximum difference between a close prediction and the published speed-up over bf16: 10 points."""

TABLES: Mapping[str, tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]] = {
    "by tensor": ((2, 4), (2, 4), (2, 4)),
    "amax given": ((4,), (4,), (4,)),
    "by row, two copies": ((3, 5), (3, 5), (3, 5)),
    "by block": ((4,), (4,), (4,)),
}
"""Bytes per element of X, W and G in each pass: bf16 read at 2, FP8 written at 1 per memory order. By tensor: the
maximum, then one cast into both orders. Two copies: by row, and by column, which looks for maxima by itself. Amax
given: delayed scaling."""

HOST = 409e-6
"""Seconds of the host for forward and backward of a compiled float8 linear of torchao, published: what one of
4096 × 4096 takes with 16 tokens, which leave the GPU nearly nothing to do (torchao, pull request 1459)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure.

    Attributes:
        who: Its author.
        what: What was measured.
        gpu: GPU, a key of `DEVICES`.
        published: Speed-up over bf16; None if only its sign was published: slower.
        predict: Predicts the speed-up.
        source: Source of the figure and the sizes.
        misses: Reason for a miss; empty for the others.
    """

    who: str
    what: str
    gpu: str
    published: float | None
    predict: Callable[[Gpu], float]
    source: str
    misses: str = ""

    @property
    def predicted(self) -> float:
        """The predicted speed-up."""
        return self.predict(DEVICES[self.gpu])

    @property
    def sign_is_right(self) -> bool:
        """Whether the prediction has the right sign."""
        return (self.predicted > 1) == (self.published is not None and self.published > 1)

    @property
    def is_close(self) -> bool:
        """Whether the prediction is within `WITHIN`, or has the right sign if only the sign was published."""
        if self.published is None:
            return self.sign_is_right
        return abs(self.predicted - self.published) <= WITHIN


def fp8(gpu: Gpu, linear: LinearCall, table: str) -> Cost:
    """Predict a linear layer with another library's quantizers."""
    elements = (linear.m * linear.k, linear.n * linear.k, linear.m * linear.n)
    x, w, g = (tuple(size * count for size in sizes) for sizes, count in zip(TABLES[table], elements, strict=True))
    share, exact = gpu.fp8_efficiency, gpu.exact_efficiency
    if table == "by block":
        share, exact = gpu.block_efficiency, 1.0
    elif table == "by row, two copies":
        share, exact = share * gpu.row_efficiency, gpu.row_exact_efficiency
    return fp8_cost(gpu, linear, Passes(forward=x + w, backward=g), gpu.fp8_tflops * 1e12 * share, exact)


def linears(shapes: list[tuple[int, int, int]], table: str) -> Callable[[Gpu], float]:
    """Predict the speed-up of linear layers (M, K, N), forward and backward."""

    def predict(gpu: Gpu) -> float:
        calls = [LinearCall(m=m, k=k, n=n) for m, k, n in shapes]
        return sum(bf16_linear(gpu, c).total for c in calls) / sum(fp8(gpu, c, table).total for c in calls)

    return predict


def block(side: int) -> Callable[[Gpu], float]:
    """Predict torchao's block, layer norm → linear → sigmoid, all sides equal: 20 bytes per element besides the linear.

    It was timed by the clock, so the host time is a lower bound.
    """

    def predict(gpu: Gpu) -> float:
        call = LinearCall(m=side, k=side, n=side)
        rest = 2 * memory_time(gpu, 4 * side**2) + 2 * memory_time(gpu, 6 * side**2)
        bf16 = bf16_linear(gpu, call)
        host = bf16.host + 4 * gpu.host_us * 1e-6
        return max(bf16.total + rest, host) / max(fp8(gpu, call, "by tensor").total + rest, HOST)

    return predict


@functools.cache
def llama(hidden: int, intermediate: int, layers: int, kv_heads: int, vocabulary: int, batch: int, seq: int) -> Trace:
    """One forward of a Llama, heads of 128."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from octavo.planner.fake import fake_copy, fake_tensors

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, vocab_size=vocabulary,
        num_attention_heads=hidden // 128, num_key_value_heads=kv_heads, max_position_embeddings=seq,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    named = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    with fake_tensors() as mode:
        copy: Any = fake_copy(model, mode, torch.device("cpu"))
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        modules = {name: copy.get_submodule(name) for name in named}
        return trace(copy, modules, lambda: copy(input_ids=ids, labels=ids, use_cache=False))


def training(
    sizes: tuple[int, int, int, int, int], batch: int, seq: int, table: str, step_config: StepConfig
) -> Callable[[Gpu], float]:
    """A training step, vocabulary head in bf16."""

    def predict(gpu: Gpu) -> float:
        traced = llama(*sizes, batch, seq)
        calls = [(name, call) for name, of_one in traced.calls.items() for call in of_one]
        arms = (
            [bf16_linear(gpu, call) for _, call in calls],
            [bf16_linear(gpu, c) if name == "lm_head" else fp8(gpu, c, table) for name, c in calls],
        )
        bf16, ours = (step_time(gpu, traced, costs, step_config, batch * seq).seconds for costs in arms)
        return bf16 / ours

    return predict


LLAMA_3_8B = (4096, 14336, 32, 8, 128256)
LLAMA_2_7B = (4096, 11008, 32, 32, 32000)
LLAMA_2_13B = (5120, 13824, 40, 40, 32000)
TITAN = StepConfig(gpus=8, eager=False, recompute=Recompute(linears=0.5, rest=1.0))
"""torchtitan compiled, its selective checkpointing by operation: every second product again, attention kept."""
COLOSSAL = StepConfig(gpus=8)
_README = "torchao `torchao/float8/README.md`"
_BLOCK = (
    "torchao, single-layer microbenchmark, by the clock: the host of a compiled float8 linear takes 0.41 ms (torchao, "
    "pull request 1459, 16 tokens)"
)
_TE = (
    "Transformer Engine documentation, linears of a 5B model; sizes of its profiling example taken (hidden 4096, "
    "intermediate 16384, 31 × 512 tokens)"
)
_COLOSSAL = "ColossalAI, FP8 announcement; batch and sequence not stated: 4 × 4096 tokens taken"
_UNSTATED = (
    "the source states no batch size, sequence length or recomputation, and the prediction assumes eager Transformers "
    "code where ColossalAI has fused kernels; with fused kernels, linears have a larger share of the time"
)
_OTHER_CARD = (
    "its bf16 products reach 825 TFLOP/s, and those of the H100 whose shares the prediction has 753 on average; its "
    "time in FP8 is predicted within 4 %"
)
_FIVE_B = [(15872, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))]

ROWS = (
    Row(who="torchao", what="block, dim 16384, compiled", gpu="h100", published=34.18 / 22.64, predict=block(16384),
        source=_BLOCK, misses=_OTHER_CARD),
    Row(who="torchao", what="block, dim 2048, compiled", gpu="h100", published=None, predict=block(2048),
        source=_BLOCK),
    Row(who="torchao", what="linear 1024×2048×1024, per-tensor, compiled", gpu="h100", published=0.80,
        predict=linears([(1024, 2048, 1024)], "by tensor"), source=_README),
    Row(who="torchao", what="linear 4096×8192×16384, per-tensor, compiled", gpu="h100", published=1.39,
        predict=linears([(4096, 8192, 16384)], "by tensor"), source=_README),
    Row(who="torchao", what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, per-tensor", gpu="h100",
        published=7689.5 / 6150, predict=training(LLAMA_3_8B, 1, 8192, "by tensor", TITAN), source=_README),
    Row(who="torchao", what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, per-row", gpu="h100",
        published=6768 / 6150, predict=training(LLAMA_3_8B, 1, 8192, "by row, two copies", TITAN), source=_README),
    Row(who="ColossalAI", what="LLaMA 2 7B, 8 GPUs", gpu="h800", published=1.35,
        predict=training(LLAMA_2_7B, 4, 4096, "by tensor", COLOSSAL), source=_COLOSSAL, misses=_UNSTATED),
    Row(who="ColossalAI", what="LLaMA 2 13B, 8 GPUs", gpu="h800", published=1.39,
        predict=training(LLAMA_2_13B, 4, 4096, "by tensor", COLOSSAL), source=_COLOSSAL, misses=_UNSTATED),
    Row(who="Transformer Engine", what="linears of a 5B layer, delayed scaling", gpu="h200", published=1.69,
        predict=linears(_FIVE_B, "amax given"), source=_TE),
    Row(who="Transformer Engine", what="linears of a 5B layer, current scaling", gpu="h200", published=1.58,
        predict=linears(_FIVE_B, "by tensor"), source=_TE),
    Row(who="Transformer Engine", what="linears of a 5B layer, blocks of 128", gpu="h200", published=1.40,
        predict=linears(_FIVE_B, "by block"), source=_TE),
)  # fmt: skip


UNPREDICTED = (
    "ColossalAI, Command-R 35B on 16 H800 (+10 %): its tensor parallelism is neither described nor modelled",
    "torchao, the same blocks in eager mode: each cast is a dozen operations, which no table here describes",
    "COAT, MS-AMP, VILA, nanochat, torchtitan at 70B and 405B: no batch, no shapes, or more than one thing changed",
)
"""Published figures without a prediction, and why."""

INTRODUCTION = """# The planner: predict the gain and memory of FP8 before a run

Generated by `python -m benchmarks predictions`; edit nothing here. Figures of Octavo on this page are predictions,
except where one H100 is named; [below](#predictions-and-an-h100) they stand beside what it measured.
[memory.md](memory.md) describes the memory of a step layer by layer.

```
octavo plan configs/llama3-70b.toml --gpu h100 --gpus 64          # linears; a step as configured, in bf16, at its best
octavo plan configs/demo.toml --gpu my-gpu.toml --json            # another GPU, described in TOML
octavo plan configs/demo.toml --gpu h100 --calibration h100.json  # with what octavo calibrate measured on such a GPU
```

```python
plan = octavo.plan(model, 4, 2048, device="h100", world_size=8)     # model: any module, also on meta
print(plan)                                                         # decision, reason and gain of each linear
plan.fits, plan.largest_batch                                       # and .planned, .bf16, .memory, .break_even
octavo.convert(model, plan=plan)                                    # leaves in bf16 what is predicted to lose
```

`octavo.plan` returns a `Plan` with predictions: `.rows` has `.name`, `.converted`, `.recipe`, `.reason` and `.gain` of
each linear layer. `octavo.Plan.from_json` reads its JSON. `octavo.convert` raises an error if a plan does not name all
linear layers that could be converted, as a plan of a smaller model would not; set `partial` in the plan to leave the
others in bf16.

`octavo plan CONFIG --gpu h100` shows three steps: in bf16; as configured, which converts exactly what `octavo train`
converts on that GPU; and the best plan, with each layer in the recipe that gains most, or in bf16. A recipe named in
the configuration also converts layers that lose; the columns show the cost. For products that PyTorch lacks on a GPU
(per-block scales on Blackwell and Ada) the planner assumes a rate of Octavo's Triton kernel, `triton_efficiency`.

Predicted cost decides for each layer: forward and backward, quantization included, against bf16. Narrow layers, few
tokens and LoRA ranks stay in bf16 if they would lose, and the reason states by how much. Vocabulary heads stay in bf16
to protect the loss, as in `octavo.convert`, and the reason states their gain (`heads=True` converts them). The models
are in `src/octavo/planner/roofline.py` (products and quantization), `src/octavo/planner/collective_cost.py`
(collectives) and `src/octavo/planner/step.py` (the rest of a step). One forward on fake tensors counts the calls of
each layer and their sizes, so any model works. If the blocks are equal, settings included, only two and three of them
run and the rest is extrapolated; otherwise all run. Of DeepSeek-V3's 61 blocks, of which the first three differ from
the others, six run. A plan takes 2.3 to 3.9 s of a core of a busy machine after the first, which also fills PyTorch's
caches (4.0 to 5.8 s when a step ran on five blocks and on six):

```
python -m timeit -v -n 1 -r 4 -s "import torch, octavo, transformers as t; torch.set_default_device('meta')" \\
  -s "model = t.DeepseekV3ForCausalLM(t.DeepseekV3Config()).bfloat16(); torch.set_default_device(None)" \\
  "octavo.plan(model, 1, 4096)"
```

**With a GPU present `octavo.convert(model)` decides the same way**, for 8192 tokens (`tokens=`); times that `octavo
calibrate` measured there take precedence. `octavo.convert(model, device="h100")` makes the decisions of that GPU on any
machine; `device="cpu"` decides by rule, also beside a GPU. A named recipe applies to all layers, whatever it gains:
`octavo.convert(model, "rowwise")`. On a GPU that is missing from the table below every layer is converted, and the
report notes that the cost is unknown. LoRA adapters of rank 64 or less, and layers with at most 64 features on one
side and at least eight times as many on the other (routers, small classifiers), are never converted by default, with
or without a GPU and for every recipe; `octavo.convert(model.score, "rowwise")` converts one. A run does the same with
`precision.recipe = "auto"`, for its own batch.

## Memory

The planner predicts parameters, gradients, optimizer states, activations and temporaries at the peak of a step, per
GPU if several share a model; whether they fit; and the largest batch that does. The step runs on a fake copy with three
of the model's blocks, or with two as well if something follows backward. What one block adds extrapolates to, say, 80,
event by event, and equals a run of all blocks to the byte (`pytest tests/planner/test_memory_extrapolation.py`); if the
blocks differ, all run. The largest batch takes two or three plans, because the peak is convex in the batch. Rules
predict the shares of FSDP2's ranks (`src/octavo/planner/sharded_memory.py`), within 5 % of FSDP2 steps recorded
storage by storage, for four models on 8, 64 and 512 ranks (`pytest tests/planner/test_sharded_memory.py`, all of them
with `-m ""`). The total is within 5 % of PyTorch's memory tracker on ten settings (`pytest
tests/planner/test_step_memory.py`), and of the trainer's steps on all blocks for six configurations, of models of up
to 8B parameters (`pytest tests/train/test_run_plan.py -m slow`; the largest difference is 0.01 %). Steps of
`octavo.AdamW` are assumed to need no memory besides its states, those of `octavo.optim.Muon` temporaries of its
products, too. On an H100 one run needed 4.4 GiB, where 4.3 were predicted; two needed 51.2 and 47.5, where 28.9 and
27.0 were, because of a leak at the start of training, mended since and not measured again.

## Tensor, pipeline, expert and context parallelism

```bash
octavo plan configs/llama3-8b.toml --gpu h100 --gpus 64 parallel.tp=8
octavo plan configs/llama3-8b.toml --gpu h100 --gpus 64 parallel.pp=4 optim.micro_batches=8
octavo plan configs/mixtral-8x7b.toml --gpu h100 --gpus 64 parallel.ep=8 optim.micro_batches=4
```

One rank runs in torch's fake process group, through the code of a run. That gives memory and the bytes of collectives
of tokens. FSDP2 is added by rule. The memory is that of the stage that needs most, with the micro-batches in flight
that torch's own schedule has. A simulation of it gives the bubble. A table shows GB and ms of what each GPU sends, by
kind. Compute waits for collectives of tokens (tensor, expert and context parallelism), and hides those of weights and
gradients. At level bf16, experts are not distributed: that column is FSDP2 alone.

On Gloo, parameters and optimizer states are within 1 % of those of 2 to 4 real ranks, activations within 10 % (of
experts not held, since rows depend on the router), messages of tokens and stages exact (`pytest -m slow
tests/train/test_hybrid_plan.py`). Not held against real steps: whole gradients and gathered weights of FSDP2 in a
pipeline, which stay until the end of a step. Not predicted: that a pipeline's model changes its embeddings or passes
on more than hidden states, which a run detects.

## Measured times

`octavo calibrate` stores the time of each product, in FP8 and in bf16, and of each quantization, by shape. With a table
of the planned GPU these kernel times replace the roofline; a layer's reason states which of its times are measured.
Between two measured shapes that differ in one dimension, by at most a factor of two, times are interpolated; they are
never extrapolated, nor transferred between GPUs. For an H100 SXM a small table comes with Octavo: 27 products of the
[measured card](performance.md), with the shares of its rates (`python -m benchmarks rates`); a table of yours replaces
its times.

## Predictions and published measurements

The table compares published and predicted speed-ups over bf16. A prediction counts the bytes that the quantization
kernels of the published code move. *Close*: within 10 percentage points, or the right sign if only that was published.
`tests/test_benchmarks_predictions.py` checks every line; misses are expected failures. Nothing was fitted to a line.
"""

LIMITS = """## What predictions leave out

* Clocks that drop under load, multiprocessors that collectives use, stragglers, data loading, clipping. Published
  steps are longer than predicted ones in bf16 and in FP8; costs that both have reduce the gain.
* The CPU time of compiled code. Small compiled layers are slower than predicted.
* Tensor, sequence, pipeline and expert parallelism, in time and in memory: GPUs share a model by FSDP2, HSDP or DDP.
  A model that is already distributed raises an error. Experts of a mixture are converted by rule
  and timed as bf16.
* Latency of collectives, and those at the start and end of a step, which nothing hides; [scaling.md](scaling.md) has
  both.
* The CUDA context and workspaces, for which 1 GiB of a GPU is reserved, and what the caching allocator cannot use.
"""


def document() -> str:
    """Return the text of docs/planner.md."""
    lines = [INTRODUCTION, "| source | what | on | published | predicted | |", "|---|---|---|---:|---:|---|"]
    for row in ROWS:
        published = "slower" if row.published is None else f"{row.published:.2f}"
        verdict = "close" if row.is_close else "miss"
        gpu = DEVICES[row.gpu].name
        lines.append(f"| {row.who} | {row.what} | {gpu} | {published} | {row.predicted:.2f} | {verdict} |")
    lines += ["", "Misses:", ""]
    lines += [f"* {row.who}, {row.what}: {row.misses}." for row in ROWS if row.misses]
    lines += ["", "Sources: " + "; ".join(dict.fromkeys(row.source for row in ROWS)) + ".", ""]
    lines += ["Published, without a prediction:", "", *(f"* {text}." for text in UNPREDICTED), ""]
    lines += [*errors.document(), "", *_sizes(), "", *errors.gpus()]
    return "\n".join([*lines, "", LIMITS])


def _sizes() -> list[str]:
    """Table of break-even sizes on every GPU with FP8."""
    lines = [
        "## Break-even sizes",
        "",
        "Smallest K = N from which `rowwise` is predicted to gain 2 % or more: compiled / in eager mode, including the",
        "host's time, which [host time](host_time.md) measures, or `octavo calibrate` on your machine.",
        "",
        "| tokens | " + " | ".join(gpu.name for gpu in DEVICES.values() if gpu.fp8_tflops) + " |",
        "|---:|" + "---:|" * sum(bool(gpu.fp8_tflops) for gpu in DEVICES.values()),
    ]
    for tokens in (512, 2048, 8192, 32768):
        cells = []
        for gpu in DEVICES.values():
            if gpu.fp8_tflops:
                sides = [break_even(gpu, tokens, candidates("rowwise"), eager=eager) for eager in (False, True)]
                cells.append(" / ".join("–" if side is None else str(side) for side in sides))
        lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return lines


def main(arguments: list[str]) -> None:
    """Write docs/planner.md."""
    argparse.ArgumentParser(
        prog="python -m benchmarks predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    write_text(DOCUMENT, document())
    print(f"written: {DOCUMENT.name}; {sum(row.is_close for row in ROWS)} of {len(ROWS)} published figures are close")
