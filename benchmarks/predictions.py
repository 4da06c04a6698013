"""Compare the planner with published measurements and with an H100's, and write the tables of docs/planner.md. No row
was used for fitting: shares of the data sheet's rates come from products alone. Misses stay.
"""

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command, shapes
from benchmarks.environment import RESULTS, write_text
from benchmarks.pages import fill, table
from octavo.numerics.recipe import RECIPES
from octavo.planner.decide import break_even, candidates
from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import Cost, LinearCall, bf16_linear, fp8_linear, fp8_rate, memory_time, product
from octavo.planner.step import Recompute, StepConfig, StepTime, step_time
from octavo.planner.trace import Trace, trace

DOCUMENT = Path(__file__).parent.parent / "docs" / "planner.md"
WITHIN = 0.10  # Maximum difference between a close prediction and the published speed-up over bf16: 10 points
TABLES: Mapping[str, tuple[int, ...]] = {
    "by tensor": (2, 4), "amax given": (4,), "by row, two copies": (3, 5), "by block": (4,),
}  # fmt: skip
"""Bytes per element of X, of W and of G in each pass: bf16 read at 2, FP8 written at 1 per memory order. By tensor: the
maximum, then one cast into both orders. Two copies: by row, and by column, which looks for maxima by itself. Amax
given: delayed scaling."""
HOST = 409e-6
"""Seconds of the host for forward and backward of a compiled float8 linear of torchao, published: what one of
4096 × 4096 takes with 16 tokens, which leave the GPU nearly nothing to do (torchao, pull request 1459)."""
H100 = replace(DEVICES["h100"], measured=None)
LOGGED = {"bf16": 135_700, "octavo rowwise": 151_500}
"""Tokens/s of `octavo train` at 0.42 B parameters, read from logs: docs/performance.md."""

Predict = Callable[[Gpu], float]
Sizes = tuple[int, int, int, int, int]  # Of a Llama: hidden, intermediate, layers, heads of k and v, vocabulary


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published speed-up over bf16, None if only its sign was published: slower; and the reason where one misses."""

    who: str
    what: str
    gpu: str
    published: float | None
    predict: Predict
    source: str
    misses: str = ""

    @property
    def predicted(self) -> float:
        return self.predict(DEVICES[self.gpu])

    @property
    def sign_is_right(self) -> bool:
        return (self.predicted > 1) == (self.published is not None and self.published > 1)

    @property
    def is_close(self) -> bool:
        """Whether the prediction is within `WITHIN`, or has the right sign if only the sign was published."""
        return self.sign_is_right if self.published is None else abs(self.predicted - self.published) <= WITHIN


def fp8(gpu: Gpu, linear: LinearCall, table: str) -> Cost:
    """Predict a linear layer with the quantization passes of another library."""
    elements = (linear.m * linear.k, linear.n * linear.k, linear.m * linear.n)
    x, w, g = (tuple(size * count for size in TABLES[table]) for count in elements)
    share, exact = gpu.fp8_efficiency, gpu.exact_efficiency
    if table == "by block":
        share, exact = gpu.block_efficiency, 1.0
    elif table == "by row, two copies":
        share, exact = share * gpu.row_efficiency, gpu.row_exact_efficiency
    rate = gpu.fp8_tflops * 1e12 * share
    forward, *backward = (
        product(gpu, *sizes, operand=1, rate=rate if name == "forward" else rate * exact)
        for name, sizes in linear.named_products.items()
    )
    return Cost(
        forward=forward + sum(memory_time(gpu, size) for size in x + w),
        backward=sum(backward) + sum(memory_time(gpu, size) for size in g),
        host=(1 + len(backward) + len(x + w + g)) * gpu.host_us * 1e-6,
    )


def linears(sizes: list[tuple[int, int, int]], table: str) -> Predict:
    calls = [LinearCall(m=m, k=k, n=n) for m, k, n in sizes]
    return lambda gpu: sum(bf16_linear(gpu, c).total for c in calls) / sum(fp8(gpu, c, table).total for c in calls)


def block(side: int) -> Predict:
    """Predict torchao's block, all sides equal: 20 bytes per element besides the linear, and the host's time."""

    def predict(gpu: Gpu) -> float:
        call = LinearCall(m=side, k=side, n=side)
        rest = 2 * memory_time(gpu, 4 * side**2) + 2 * memory_time(gpu, 6 * side**2)
        bf16 = bf16_linear(gpu, call)
        host = bf16.host + 4 * gpu.host_us * 1e-6
        return max(bf16.total + rest, host) / max(fp8(gpu, call, "by tensor").total + rest, HOST)

    return predict


@functools.cache
def llama(hidden: int, intermediate: int, layers: int, kv_heads: int, vocabulary: int, batch: int, seq: int) -> Trace:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from octavo.planner.fake import fake_copy, fake_tensors

    config = LlamaConfig(**shapes.llama(hidden, intermediate, layers, hidden // 128, kv_heads, vocabulary, seq))
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    named = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    with fake_tensors() as mode:
        copy: Any = fake_copy(model, mode, torch.device("cpu"))
        ids = torch.zeros(batch, seq, dtype=torch.int64)
        modules = {name: copy.get_submodule(name) for name in named}
        return trace(copy, modules, lambda: copy(input_ids=ids, labels=ids, use_cache=False))


def step(
    gpu: Gpu, sizes: Sizes, batch: int, seq: int, config: StepConfig, cost: Callable[[Gpu, LinearCall], Cost]
) -> StepTime:
    """Predict a step of a Llama with the cost of its linears; its head is in bf16."""
    traced = llama(*sizes, batch, seq)
    calls = [(bf16_linear if name == "lm_head" else cost, call) for name, some in traced.calls.items() for call in some]
    return step_time(gpu, traced, [of_one(gpu, call) for of_one, call in calls], config, batch * seq)


def training(sizes: Sizes, batch: int, seq: int, table: str, config: StepConfig) -> Predict:
    def predict(gpu: Gpu) -> float:
        costs = bf16_linear, functools.partial(fp8, table=table)
        bf16, ours = (step(gpu, sizes, batch, seq, config, cost).seconds for cost in costs)
        return bf16 / ours

    return predict


LLAMA_3_8B = (4096, 14336, 32, 8, 128256)
TITAN = StepConfig(gpus=8, eager=False, recompute=Recompute(linears=0.5, rest=1.0))
"""torchtitan compiled, its selective checkpointing by operation: every second product again, attention kept."""
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
_ao = functools.partial(Row, who="torchao", gpu="h100", source=_README)
_te = functools.partial(Row, who="Transformer Engine", gpu="h200", source=_TE)
_colossal = functools.partial(Row, who="ColossalAI", gpu="h800", source=_COLOSSAL, misses=_UNSTATED)

ROWS = (
    _ao(what="block, dim 16384, compiled", published=34.18 / 22.64, predict=block(16384), source=_BLOCK,
        misses=_OTHER_CARD),
    _ao(what="block, dim 2048, compiled", published=None, predict=block(2048), source=_BLOCK),
    _ao(what="linear 1024×2048×1024, per-tensor, compiled", published=0.80,
        predict=linears([(1024, 2048, 1024)], "by tensor")),
    _ao(what="linear 4096×8192×16384, per-tensor, compiled", published=1.39,
        predict=linears([(4096, 8192, 16384)], "by tensor")),
    _ao(what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, per-tensor", published=7689.5 / 6150,
        predict=training(LLAMA_3_8B, 1, 8192, "by tensor", TITAN)),
    _ao(what="Llama 3 8B, 1 × 8192 tokens, 8 GPUs, compiled, per-row", published=6768 / 6150,
        predict=training(LLAMA_3_8B, 1, 8192, "by row, two copies", TITAN)),
    _colossal(what="LLaMA 2 7B, 8 GPUs", published=1.35,
              predict=training((4096, 11008, 32, 32, 32000), 4, 4096, "by tensor", StepConfig(gpus=8))),
    _colossal(what="LLaMA 2 13B, 8 GPUs", published=1.39,
              predict=training((5120, 13824, 40, 40, 32000), 4, 4096, "by tensor", StepConfig(gpus=8))),
    _te(what="linears of a 5B layer, delayed scaling", published=1.69, predict=linears(_FIVE_B, "amax given")),
    _te(what="linears of a 5B layer, current scaling", published=1.58, predict=linears(_FIVE_B, "by tensor")),
    _te(what="linears of a 5B layer, blocks of 128", published=1.40, predict=linears(_FIVE_B, "by block")),
)  # fmt: skip


# What an H100 measured


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A measured time and its prediction, in milliseconds: kernel time; of steps by the clock."""

    kind: str
    where: str
    arm: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def comparisons() -> list[Comparison]:
    readers = {"kernels": _products, "linear": _linears, "layer": _layers, "train": _steps}
    folder = RESULTS / "nvidia-h100-80gb-hbm3"
    rows = {name: json.loads((folder / f"{name}.json").read_text())["rows"] for name in readers}
    return [
        Comparison(kind=kind, where=where, arm=arm.removeprefix("octavo "), measured=ms, predicted=1e3 * seconds)
        for name, read in readers.items()
        for kind, where, arm, ms, seconds in read(rows[name])
    ]


Measured = Iterator[tuple[str, str, str, float, float]]


def _products(rows: Sequence[Mapping[str, Any]]) -> Measured:
    for row in (row for row in rows if row["arm"] in ("bf16", "torch_scaled")):
        m, k, n = map(int, row["shape"].split("×"))
        if row["arm"] == "bf16":
            yield "product", row["shape"], "bf16", row["kernel_ms"], product(H100, m, n, k)
        else:
            recipe, _, name = row["case"].partition(" ")
            rate = fp8_rate(H100, RECIPES[recipe], exact=name != "forward")
            yield "product", row["shape"], row["case"], row["kernel_ms"], product(H100, m, n, k, operand=1, rate=rate)


def _cost(arm: str) -> Callable[[Gpu, LinearCall], Cost]:
    return bf16_linear if arm == "bf16" else functools.partial(fp8_linear, recipe=RECIPES[arm.removeprefix("octavo ")])


def _linears(rows: Sequence[Mapping[str, Any]]) -> Measured:
    for row in (row for row in rows if row["arm"].removeprefix("octavo ") in ("bf16", *RECIPES)):
        cost = _cost(row["arm"])(H100, LinearCall(m=row["m"], k=row["k"], n=row["n"]))
        yield "linear", f"{row['shape']}, {row['mode']}", row["arm"], row["kernel_ms"], cost.total


def _layers(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Layers of Llama 3 8B: what a model of two has beyond a model of one."""
    config = StepConfig(eager=False)
    for row in (row for row in rows if row["arm"] in ("bf16", "octavo rowwise")):
        models = ((4096, 14336, layers, 8, 32000) for layers in (2, 1))
        two, one = (step(H100, sizes, 1, row["tokens"], config, _cost(row["arm"])) for sizes in models)
        seconds = two.seconds - two.optimizer - (one.seconds - one.optimizer)
        yield "layer", f"{row['shape']}, compiled", row["arm"], row["kernel_ms"], seconds


def _steps(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Steps of `octavo train`: of the result file, and of logs."""
    wide, small = ((4096, 14336, 4, 8, 32000), 8, 2048), ((2048, 5632, 8, 8, 8192), 32, 1024)
    of_train = (row for row in rows if row["stage"] == "octavo train")
    runs = [(row["arm"], row["shape"], row["mode"], wide, row["wall_ms"]) for row in of_train]
    runs += [(arm, "0.42 B", "eager", small, 1e3 * 32 * 1024 / tokens_per_s) for arm, tokens_per_s in LOGGED.items()]
    for arm, what, mode, shape, ms in runs:
        seconds = step(H100, *shape, StepConfig(eager=mode == "eager"), _cost(arm)).seconds
        yield "step", f"{what}, {mode}", arm, ms, seconds


# The page


def document() -> str:
    rows = comparisons()
    measured = {"errors": _errors(rows), "rows": _rows(rows)}
    return fill(DOCUMENT.read_text("utf-8"), measured | {"published": _published(), "sizes": _sizes(), "gpus": _gpus()})


def _published() -> str:
    made = []
    for row in ROWS:
        published = "slower" if row.published is None else f"{row.published:.2f}"
        verdict = "close" if row.is_close else "miss"
        made.append((row.who, row.what, DEVICES[row.gpu].name, published, f"{row.predicted:.2f}", verdict))
    text = table(("source", "what", "on", "published", "predicted", ""), made, "lllrrl")
    lines = ["", "Misses:", "", *(f"* {row.who}, {row.what}: {row.misses}." for row in ROWS if row.misses), ""]
    return text + "\n".join([*lines, "Sources: " + "; ".join(dict.fromkeys(row.source for row in ROWS)) + "."])


def _errors(rows: Sequence[Comparison]) -> str:
    summary = []
    for kind in dict.fromkeys(row.kind for row in rows):
        of_kind = [row.error for row in rows if row.kind == kind]
        mean, worst = sum(map(abs, of_kind)) / len(of_kind), max(of_kind, key=abs)
        summary.append((f"{kind}s", len(of_kind), f"{mean:.1%}", f"{worst:+.1%}"))
    return table(("", "rows", "mean error", "worst"), summary)


def _rows(rows: Sequence[Comparison]) -> str:
    bf16 = {(row.kind, row.where): row for row in rows if row.arm == "bf16"}
    each = []
    for row in rows:
        numbers = _number(row.measured), _number(row.predicted), f"{row.error:+.1%}"
        base = None if row.arm == "bf16" else bf16.get((row.kind, row.where))
        gains = (None, None) if base is None else (base.measured / row.measured, base.predicted / row.predicted)
        each.append((row.kind, row.where, row.arm, *numbers, *(gain and f"{gain:.2f}" for gain in gains)))
    columns = ("", "where", "", "measured ms", "predicted", "error", "× bf16, measured", "predicted")
    return table(columns, each, "lllr")


def _gpus() -> str:
    made = []
    for name, gpu in DEVICES.items():
        rates = f"{gpu.bf16_tflops:g}, {gpu.fp8_tflops:g}" if gpu.fp8_tflops else f"{gpu.bf16_tflops:g}, none"
        by_row = gpu.fp8_efficiency * gpu.row_efficiency * gpu.row_exact_efficiency
        of_fp8 = (gpu.fp8_efficiency, gpu.fp8_efficiency * gpu.exact_efficiency, by_row)
        shares = f"{gpu.bf16_efficiency:.0%}; {', '.join(f'{share:.0%}' for share in of_fp8)}"
        copies = f"{gpu.memory_efficiency:.0%}, {gpu.memory_efficiency * gpu.maxima_efficiency:.0%}"
        memory = f"{gpu.memory_tbs:g} TB/s, {gpu.memory_gib:g} GB"
        sources = gpu.rates_from, gpu.efficiency_from
        made.append((f"`{name}`", rates, shares, memory, copies, f"{gpu.link_gbs:g}", *sources))
    heads = ("`--gpu`", "bf16, FP8 TFLOP/s", "reached", "memory", "reached", "links GB/s", "rates from", "shares")
    return table(heads, made, "lrrrrrl")


def _number(value: float) -> str:
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def _sizes() -> str:
    gpus = [gpu for gpu in DEVICES.values() if gpu.fp8_tflops]

    def sides(gpu: Gpu, tokens: int) -> str:
        pair = (break_even(gpu, tokens, candidates("rowwise"), eager=eager) for eager in (False, True))
        return " / ".join("–" if side is None else str(side) for side in pair)

    made = [(tokens, *(sides(gpu, tokens) for gpu in gpus)) for tokens in (512, 2048, 8192, 32768)]
    return table(("tokens", *(gpu.name for gpu in gpus)), made, "r")


def main(arguments: list[str]) -> None:
    command("predictions", __doc__).parse_args(arguments)
    write_text(DOCUMENT, document())
    print(f"written: {DOCUMENT.name}; {sum(row.is_close for row in ROWS)} of {len(ROWS)} published figures are close")
