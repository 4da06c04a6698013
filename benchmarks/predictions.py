"""Compare the planner with published measurements, and with an H100's (`benchmarks.errors`), and write the
tables of docs/planner.md. Needs no GPU.

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
from benchmarks.pages import fill, table
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


def document() -> str:
    """Return the text of docs/planner.md with its tables anew."""
    made = []
    for row in ROWS:
        published = "slower" if row.published is None else f"{row.published:.2f}"
        verdict = "close" if row.is_close else "miss"
        made.append((row.who, row.what, DEVICES[row.gpu].name, published, f"{row.predicted:.2f}", verdict))
    published = table(("source", "what", "on", "published", "predicted", ""), made, "lllrrl")
    lines = ["", "Misses:", "", *(f"* {row.who}, {row.what}: {row.misses}." for row in ROWS if row.misses), ""]
    published += "\n".join([*lines, "Sources: " + "; ".join(dict.fromkeys(row.source for row in ROWS)) + "."])
    return fill(DOCUMENT.read_text("utf-8"), {"published": published, "sizes": _sizes(), **errors.tables()})


def _sizes() -> str:
    """Table of break-even sizes on every GPU with FP8."""
    gpus = [gpu for gpu in DEVICES.values() if gpu.fp8_tflops]
    made = []
    for tokens in (512, 2048, 8192, 32768):
        cells = []
        for gpu in gpus:
            sides = [break_even(gpu, tokens, candidates("rowwise"), eager=eager) for eager in (False, True)]
            cells.append(" / ".join("–" if side is None else str(side) for side in sides))
        made.append((tokens, *cells))
    return table(("tokens", *(gpu.name for gpu in gpus)), made, "r")


def main(arguments: list[str]) -> None:
    """Write the tables of docs/planner.md."""
    argparse.ArgumentParser(
        prog="python -m benchmarks predictions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(arguments)
    write_text(DOCUMENT, document())
    print(f"written: {DOCUMENT.name}; {sum(row.is_close for row in ROWS)} of {len(ROWS)} published figures are close")
