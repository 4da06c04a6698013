"""The planner against what others published, and docs/planner.md, which shows both. Needs no GPU.

Each row is a speed-up of FP8 over bf16 that somebody measured and described well enough to be predicted: the shapes, or
the model, and the GPU. It is predicted with what *their* code moves (`TABLES`), from the device table that
`octavo plan` uses. One row is marked as fitted: the share of the FP8 peak in that table comes from its 22.64 ms, and it
is no test. Nothing was adjusted to any other row; those that miss say why, and stay.
"""

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import write_text
from octavo.planner.decide import break_even, candidates
from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import Cost, Linear, Passes, bf16_linear, cost, moving
from octavo.planner.step import Recompute, Setting, step_time
from octavo.planner.trace import Trace, trace

DOCUMENT = Path(__file__).parent.parent / "docs" / "planner.md"
WITHIN = 0.10
"""How far a prediction may be from the published speed-up over bf16: 10 points."""

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
        who: Whose.
        what: What was measured.
        gpu: Where, a name in `DEVICES`.
        published: The speed-up over bf16; None where only its sign was published: slower.
        predict: The same, predicted.
        source: Where the figure and the sizes are from.
        misses: Why the prediction is off, for those that are; empty for the others.
        fitted: Whether the device table was fitted to this row.
    """

    who: str
    what: str
    gpu: str
    published: float | None
    predict: Callable[[Gpu], float]
    source: str
    misses: str = ""
    fitted: bool = False

    @property
    def predicted(self) -> float:
        """The predicted speed-up."""
        return self.predict(DEVICES[self.gpu])

    @property
    def sign_is_right(self) -> bool:
        """Whether faster was predicted as faster, and slower as slower."""
        return (self.predicted > 1) == (self.published is not None and self.published > 1)

    @property
    def is_close(self) -> bool:
        """Whether the prediction is within `WITHIN`, or has the right sign where no size was published."""
        if self.published is None:
            return self.sign_is_right
        return abs(self.predicted - self.published) <= WITHIN


def fp8(gpu: Gpu, linear: Linear, table: str) -> Cost:
    """A linear with another library's quantizers."""
    elements = (linear.m * linear.k, linear.n * linear.k, linear.m * linear.n)
    x, w, g = (tuple(size * count for size in sizes) for sizes, count in zip(TABLES[table], elements, strict=True))
    share = gpu.block_efficiency if table == "by block" else gpu.fp8_efficiency
    return cost(gpu, linear, Passes(forward=x + w, backward=g), gpu.fp8_tflops * 1e12 * share)


def linears(shapes: list[tuple[int, int, int]], table: str) -> Callable[[Gpu], float]:
    """Linears (M, K, N), forward and backward."""

    def predict(gpu: Gpu) -> float:
        calls = [Linear(m=m, k=k, n=n) for m, k, n in shapes]
        return sum(bf16_linear(gpu, c).total for c in calls) / sum(fp8(gpu, c, table).total for c in calls)

    return predict


def block(side: int) -> Callable[[Gpu], float]:
    """The block of torchao, layer norm → linear → sigmoid, all sides equal: 20 bytes an element beside the linear.

    Timed by the clock, so no shorter than the host takes.
    """

    def predict(gpu: Gpu) -> float:
        call = Linear(m=side, k=side, n=side)
        rest = 2 * moving(gpu, 4 * side**2) + 2 * moving(gpu, 6 * side**2)
        bf16 = bf16_linear(gpu, call)
        host = (bf16.launches + 4) * gpu.host_us * 1e-6
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
    sizes: tuple[int, int, int, int, int], batch: int, seq: int, table: str, setting: Setting
) -> Callable[[Gpu], float]:
    """A training step, vocabulary head in bf16."""

    def predict(gpu: Gpu) -> float:
        found = llama(*sizes, batch, seq)
        calls = [(name, call) for name, of_one in found.calls.items() for call in of_one]
        arms = (
            [bf16_linear(gpu, call) for _, call in calls],
            [bf16_linear(gpu, c) if name == "lm_head" else fp8(gpu, c, table) for name, c in calls],
        )
        bf16, ours = (step_time(gpu, found, costs, setting, batch * seq).seconds for costs in arms)
        return bf16 / ours

    return predict


LLAMA_3_8B = (4096, 14336, 32, 8, 128256)
LLAMA_2_7B = (4096, 11008, 32, 32, 32000)
LLAMA_2_13B = (5120, 13824, 40, 40, 32000)
TITAN = Setting(gpus=8, eager=False, recompute=Recompute(linears=0.5, rest=1.0))
"""torchtitan compiled, its selective checkpointing by operation: every second product again, attention kept."""
COLOSSAL = Setting(gpus=8)
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
    "batch, sequence and recomputation are not stated, and eager Transformers code is taken for what is not a linear, "
    "where theirs has fused kernels: the less there is beside linears, the more FP8 gains"
)
_FIVE_B = [(15872, k, n) for k, n in ((4096, 12288), (4096, 4096), (4096, 16384), (16384, 4096))]

ROWS = (
    Row(who="torchao", what="block, dim 16384, compiled", gpu="h100", published=34.18 / 22.64, predict=block(16384),
        source=_BLOCK, fitted=True),
    Row(who="torchao", what="block, dim 2048, compiled", gpu="h100", published=None, predict=block(2048),
        source=_BLOCK),
    Row(who="torchao", what="linear 1024×2048×1024, by tensor, compiled", gpu="h100", published=0.80,
        predict=linears([(1024, 2048, 1024)], "by tensor"), source=_README),
    Row(who="torchao", what="linear 4096×8192×16384, by tensor, compiled", gpu="h100", published=1.39,
        predict=linears([(4096, 8192, 16384)], "by tensor"), source=_README),
    Row(who="torchao", what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, by tensor", gpu="h100",
        published=7689.5 / 6150, predict=training(LLAMA_3_8B, 1, 8192, "by tensor", TITAN), source=_README),
    Row(who="torchao", what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, by row", gpu="h100",
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
    "ColossalAI, Command-R 35B on 16 H800 (+10 %): how tensor parallelism cuts it is not stated, nor is it modelled",
    "torchao, the same blocks in eager mode: its casts are then a dozen operations each, which no table here describes",
    "COAT, MS-AMP, VILA, nanochat, torchtitan at 70B and 405B: no batch, no shapes, or more than one thing changed",
)
"""Published figures without a prediction, and why."""

INTRODUCTION = """# The planner: what FP8 will gain and take, before it is run

Generated by `python -m benchmarks predictions`; edit nothing here. **Every figure of Octavo on this page is a
prediction**; no GPU was used. What a step's memory goes to, layer by layer, has a page of its own:
[memory.md](memory.md).

```
octavo plan configs/llama3-70b-64gpu.toml --gpu h100 --gpus 64    # linears; a step as configured, in bf16, at its best
octavo plan configs/demo.toml --gpu my-gpu.toml --json            # another GPU, described in TOML
octavo plan configs/demo.toml --gpu h100 --calibration h100.json  # with what octavo calibrate measured on such a GPU
```

```python
plan = octavo.plan(model, 4, 2048, device="h100", world=8)          # model: any module, also on meta
print(plan)                                                         # decision, reason and gain of each linear
plan.fits, plan.largest_batch                                       # and .planned, .bf16, .memory, .break_even
octavo.convert(model, plan=plan)                                    # leaves in bf16 what is predicted to lose
```

What `octavo.plan` returns is a `Plan`: `.rows` with `.name`, `.converted`, `.recipe`, `.reason` and `.gain` of each
linear, and with the predictions beside them. Its JSON is read back by `octavo.Plan.from_json`.

`octavo plan CONFIG --gpu h100` shows three steps: in bf16, as the configuration has it, which converts exactly what
`octavo train` converts on that GPU, and the best plan, each linear in the recipe that gains most or in bf16. A recipe
that is named in the configuration converts layers that lose, too: the columns show what that costs. Products that
PyTorch does not have on a GPU (scales by block on Blackwell and Ada) are those of Octavo's Triton kernel, at an
assumed rate. In a pipe no line is folded.

Each linear is decided by its predicted cost, forward and backward, quantizing included, against bf16: narrow layers,
few tokens and LoRA ranks stay in bf16 where they would lose, and the reason says by how much. Vocabulary heads stay in
bf16 for the sake of the loss, as in `octavo.convert`, and the reason says what they would gain (`heads=True` takes
them). The models are stated in `src/octavo/planner/roofline.py` (products and quantizing), `src/octavo/planner/wire.py`
(collectives) and `src/octavo/planner/step.py` (the rest of a step). How often and at what sizes a linear is called is
found by one forward without storage, so that any model works; Llama 3 70B takes seconds. Where blocks are alike, their
settings included, two and three of them are run and the rest is worked out; where they are not, all are.

**Where a GPU is present `octavo.convert(model)` decides so by itself**, for 8192 tokens (`tokens=`), with what `octavo
calibrate` measured there before anything predicted. A recipe that is named is taken everywhere, whatever it gains:
`octavo.convert(model, "rowwise")`. On a GPU that the table below does not have, every linear is converted, and the
report says that no cost was known. LoRA adapters of rank 64 and less, and linears with at most 64 features on one
side and eight times as many on the other (routers, small classifiers), stay as they are on every machine, with or
without a GPU, and whatever recipe is named; `octavo.convert(model.score, "rowwise")` converts one all the same. A run
does the same with `precision.recipe = "auto"`, for its own batch.

## Memory

Parameters, gradients, optimizer states, activations and temporaries at the worst moment of a step, of each GPU where
several share a model; whether they fit; and the largest batch that does. A step is followed on copies without storage
that have two and three of the model's blocks. What 80 of them take follows from the difference, moment by moment, and
is to the byte what following all of them gives (`pytest tests/planner/test_timeline_moments.py`); where blocks are not
alike, all are followed. The largest batch is found from two or three batches: a peak grows by no less from each
sequence to the next. The shares of FSDP2's ranks are rules (`src/octavo/planner/shards.py`), within 5 % of steps of
FSDP2 that were followed storage by storage, for four models on 8, 64 and 512 ranks (`pytest
tests/planner/test_shards.py`, all of them with `-m ""`). Against PyTorch's memory tracker the whole is within 5 % on
ten settings (`pytest tests/inspect/test_footprints.py`), and on the steps of six configurations, of models of up to 8B
parameters, that the trainer takes on all blocks (`pytest tests/train/test_plan.py -m slow`; the largest difference is
0.01 %). A step of `octavo.AdamW` is taken to need nothing beside its states. On a GPU none of it has been compared yet.

## Measured times

`octavo calibrate` keeps the time of each product, in FP8 and in bf16, and of each quantization, by shape. With a table
of the GPU that is planned for these times go before the roofline; the reason of a linear says which of its times were
measured. Between two measured shapes that differ in one dimension, by at most a factor of two, a time is interpolated;
nothing is extrapolated, nor carried over from one GPU to another.

## Predicted beside published

Speed-up over bf16 of the same code. Predicted with what that code's quantizers move, from the same device table;
*close* is within 10 points, or the right sign where only that was published. `tests/test_benchmarks_predictions.py`
holds every line, and those that miss as expected failures. *Fitted*: the share of the FP8 peak was set by that row's
22.64 ms, so it tests nothing.
"""

LIMITS = """## What is not in a prediction

* Clocks that fall under load, collectives that take multiprocessors away, stragglers, data loading, clipping. Published
  steps are longer than predicted ones in bf16 and in FP8; what is there in both makes the gain smaller.
* The CPU time of compiled code. Small compiled layers are predicted as faster than they are.
* Tensor, sequence, pipeline and expert parallelism, in time and in memory: a model is shared by FSDP2, HSDP or DDP.
  A model that is spread so already is refused. Experts of a mixture, whose products are grouped, stay in bf16.
* Latency of collectives, and the first and last of a step, which nothing hides; [scaling.md](scaling.md) has both.
* The CUDA context and workspaces, for which 1 GiB of a GPU is set aside, and what the caching allocator cannot use.
"""


def document() -> str:
    """The text of docs/planner.md."""
    lines = [INTRODUCTION, "| whose | what | on | published | predicted | |", "|---|---|---|---:|---:|---|"]
    for row in ROWS:
        published = "slower" if row.published is None else f"{row.published:.2f}"
        verdict = "fitted" if row.fitted else "close" if row.is_close else "miss"
        gpu = DEVICES[row.gpu].name
        lines.append(f"| {row.who} | {row.what} | {gpu} | {published} | {row.predicted:.2f} | {verdict} |")
    lines += ["", "The misses:", ""]
    lines += [f"* {row.who}, {row.what}: {row.misses}." for row in ROWS if row.misses]
    lines += ["", "Sources: " + "; ".join(dict.fromkeys(row.source for row in ROWS)) + ".", ""]
    lines += ["Published, and not predicted:", "", *(f"* {text}." for text in UNPREDICTED), "", *_sizes(), "", *_gpus()]
    return "\n".join([*lines, "", LIMITS])


def _sizes() -> list[str]:
    """Where FP8 begins to pay, on every GPU that has it."""
    lines = [
        "## Where FP8 begins to pay",
        "",
        "Smallest K = N from which on `rowwise` gains 2 % or more, predicted: time of the GPU / of eager PyTorch,",
        "whose host takes as long as its launches do.",
        "",
        "| tokens | " + " | ".join(gpu.name for gpu in DEVICES.values() if gpu.fp8_tflops) + " |",
        "|---:|" + "---:|" * sum(bool(gpu.fp8_tflops) for gpu in DEVICES.values()),
    ]
    for tokens in (512, 2048, 8192, 32768):
        cells = []
        for gpu in DEVICES.values():
            if gpu.fp8_tflops:
                found = [break_even(gpu, tokens, candidates("rowwise"), eager=eager) for eager in (False, True)]
                cells.append(" / ".join("–" if side is None else str(side) for side in found))
        lines.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return lines


def _gpus() -> list[str]:
    lines = [
        "## GPUs",
        "",
        "Dense rates, and the shares of them that large products and copies are taken to reach. Another GPU is a table",
        'in TOML with the fields of `octavo.planner.devices.Gpu`; `like = "h100"` takes the rest from a known one.',
        "",
        "| `--gpu` | bf16, FP8 TFLOP/s | reached | memory | reached | links GB/s | rates from | shares |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for name, gpu in DEVICES.items():
        rates = f"{gpu.bf16_tflops:g}, {gpu.fp8_tflops:g}" if gpu.fp8_tflops else f"{gpu.bf16_tflops:g}, none"
        shares = f"{gpu.bf16_efficiency:.0%}, {gpu.fp8_efficiency:.0%}"
        kind = "measured, fitted" if gpu.efficiency_from == DEVICES["h100"].efficiency_from else gpu.efficiency_from
        lines.append(
            f"| `{name}` | {rates} | {shares} | {gpu.memory_tbs:g} TB/s, {gpu.memory_gb:g} GB | "
            f"{gpu.memory_efficiency:.0%} | {gpu.link_gbs:g} | {gpu.rates_from} | {kind} |"
        )
    return [*lines, "", f"Measured, fitted: {DEVICES['h100'].efficiency_from}."]


def main(arguments: list[str]) -> None:
    """Write docs/planner.md."""
    argparse.ArgumentParser(
        prog="python -m benchmarks predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    write_text(DOCUMENT, document())
    print(f"written: {DOCUMENT.name}; {sum(row.is_close for row in ROWS if not row.fitted)} of "
          f"{sum(not row.fitted for row in ROWS)} published figures predicted closely")  # fmt: skip
