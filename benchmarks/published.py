"""Workloads with public figures, run here: bf16, torchao, Octavo and Transformer Engine in turns in one process.

Another card, driver or clock changes every time, so a row compares ratios: the speed-up over bf16 measured beside it,
in turns, and the one that was published. `beside` is the first over the second: above 1, more is gained here. Octavo's
rows stand beside the best FP8 figure of their workload, others beside their own.

A training step needs the memory of two models at a time. It has as many layers as fit, and the published time is
scaled by layers. Transformer Engine's arms replace linear layers only (`te.Linear`), in bf16 and in FP8.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import layer
from benchmarks.arms import Arm, available, build, by_the_clock, compiled, in_turns, named, step
from benchmarks.layer import Size
from benchmarks.session import Row, Session, begin, parser
from benchmarks.timing import Run

STEPS, WARMUP = 3, 2  # Training steps in a turn, and before the first
MEMORY = 0.85  # Share of the free memory that two models may take


class RandomCorpus:
    """What `Trainer` needs of a corpus, with random tokens."""

    fingerprint = "random"

    def __init__(self, vocabulary: int, sequence: int) -> None:
        self._sequence = sequence
        self.tokenizer = SimpleNamespace(size=vocabulary, end_id=0)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed + step)
        ids = torch.randint(1, self.tokenizer.size, (size, self._sequence + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Workload:
    """One published measurement: the figure of each arm, of which Octavo has none, in `unit` (or `speedup` over bf16).

    `make` makes the module, or the step, of an arm; without `dgrad` backward leaves out the gradient of the input;
    `selective` checkpoints blocks, all products kept.
    """

    name: str
    make: str
    size: Size
    mode: str
    published: Mapping[str, float]
    source: str
    note: str = ""
    unit: str = "ms"
    clock: str = "wall_ms"
    dgrad: bool = True
    selective: bool = False

    def ratio(self, arm: str) -> float | None:
        figure, base = self.published.get(arm), self.published.get("bf16")
        if figure is None or base is None:
            return None
        return base / figure if self.unit == "ms" else figure / base

    def rival(self, arm: str) -> str | None:
        """The arm whose figure stands beside an arm's."""
        if not arm.startswith("octavo"):
            return arm if arm in self.published and arm != "bf16" else None
        fp8 = [name for name in self.published if name not in ("bf16", "te bf16")]
        return max(fp8, key=lambda name: self.ratio(name) or 0.0, default=None)


_TE = "Transformer Engine, tutorial te_llama, one H100, batch 8 × 256"
_TE_NOTE = "their layer also fuses norms and attention: FP8 alone gives {:.2f} ×"
_AO = "torchao issue 2262, layer norm → linear → sigmoid, one H100"
_NANO = "nanochat dev/LOG.md, 2026-02-02, H100"
_COAT = "COAT, benchmark/benchmark_{}layer.py (batch 8 × 2048), which has no table; the figure is {}"
_COLOSSAL = "ColossalAI, FP8 announcement, one H100"
_LLAMA_2 = Size(4096, 11008, 32, 32, 8, 256, layers=32)
_LLAMA_3 = Size(4096, 14336, 32, 8, 8, 256, layers=32, vocabulary=128256)

WORKLOADS = (
    Workload("te-llama-2-7b", "step", _LLAMA_2, "eager", {"bf16": 248, "te bf16": 185, "te fp8": 160}, _TE,
             _TE_NOTE.format(185 / 160)),
    Workload("nanochat-d26-mlp", "linear", Size(1664, 6656, 0, 0, 1, 65536), "compiled",
             {"bf16": 4.79, "torchao rowwise": 4.55, "torchao tensorwise": 4.06}, _NANO,
             "without dgrad: with it, their 2.79 ms of backward would exceed the card's peak", clock="kernel_ms",
             dgrad=False),
    Workload("coat-llama-2-7b", "layer", layer.LAYERS["llama-2-7b"], "eager", {"bf16": 1.0, "coat": 3.53 / 2.80},
             _COAT.format("llama", "of training on 8 H100 (README)"), unit="speedup", clock="kernel_ms"),
    Workload("torchao-16384", "layer", layer.LAYERS["dim-16384"], "compiled",
             {"bf16": 34.18, "torchao tensorwise": 22.64}, _AO),
    Workload("torchtitan-llama-3-8b", "step", replace(_LLAMA_3, batch=1, sequence=8192), "compiled",
             {"bf16": 6150, "torchao tensorwise": 7689.5, "torchao rowwise": 6768},
             "torchao torchao/float8/README.md, torchtitan on 8 H100, batch 1, 8192 tokens",
             "selective checkpointing keeps all products here, every second there; tensorwise gathers in FP8 there",
             unit="tokens_per_s", selective=True),
    Workload("te-llama-3-8b", "step", _LLAMA_3, "eager", {"bf16": 270, "te bf16": 217, "te fp8": 185}, _TE,
             _TE_NOTE.format(217 / 185)),
    Workload("nanochat-d26", "nanochat", Size(1664, 6656, 13, 13, 32, 2048), "compiled",
             {"bf16": 630e3, "torchao rowwise": 564e3, "torchao tensorwise": 740e3}, _NANO,
             "one block here, training on 8 GPUs there", unit="tokens_per_s", clock="kernel_ms"),
    Workload("coat-olmo-7b", "olmo", Size(4096, 11008, 32, 32, 8, 2048), "eager", {"bf16": 1.0, "coat": 1.43},
             _COAT.format("olmo", "the end-to-end one of arXiv 2410.19313"), unit="speedup", clock="kernel_ms"),
    *(Workload(f"colossalai-{side}", "linear", Size(side, side, 0, 0, 1, side), "eager", {}, _COLOSSAL,
               "published as a picture only: on par with Transformer Engine", clock="kernel_ms")
      for side in (8192, 4096, 16384)),
    Workload("torchao-2048", "layer", Size(2048, 2048, 0, 0, 1, 2048), "compiled",
             {"bf16": 0.9766, "torchao tensorwise": 1.1779}, _AO, "the host's time; eager: 0.130 bf16, 0.184 FP8"),
)  # fmt: skip
QUICK = 5  # The first so many workloads are the ones of `--quick`
ARMS = ("bf16", "octavo rowwise", "torchao tensorwise", "octavo tensorwise", "torchao rowwise", "te fp8", "te bf16")
TINY = {"step": Size(64, 96, 4, 2, 2, 16, vocabulary=320), "linear": Size(64, 96, 0, 0, 1, 32)}


class NanochatBlock(nn.Module):
    """nanochat's block, without its value embeddings and rotary positions: attention, and an MLP with relu²."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, inner, self.heads = size.hidden, size.intermediate, size.heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((width, inner), (inner, width)))

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:])
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class TransformerEngine(nn.Module):
    """A module with `te.Linear` for each linear layer, run under its FP8 context."""

    def __init__(self, module: nn.Module, fp8: bool) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.module, self.fp8 = module, fp8
        self.autocast = getattr(te, "autocast", None) or te.fp8_autocast  # the former is newer
        for name, linear in [(n, m) for n, m in module.named_modules() if isinstance(m, nn.Linear)]:
            made = te.Linear(linear.in_features, linear.out_features, bias=False, params_dtype=torch.bfloat16)
            if name:
                module.set_submodule(name, made)
            else:
                self.module = made

    def forward(self, *arguments: Any, **options: Any) -> Any:
        with self.autocast(enabled=self.fp8):
            return self.module(*arguments, **options)


def converted(module: nn.Module, arm: str, session: Session) -> Any:
    own = arm.startswith("te ")
    return TransformerEngine(module, arm == "te fp8") if own else build(module, Arm(arm), session)


def make_layer(session: Session, workload: Workload, arm: str) -> Run:
    size = workload.size
    torch.manual_seed(0)
    with torch.device(session.device):
        if workload.make == "linear":
            module: nn.Module = nn.Linear(size.hidden, size.intermediate, bias=False)
        elif workload.make == "layer":
            module = layer.block(size, session.device)
        else:
            module = NanochatBlock(size) if workload.make == "nanochat" else layer.Layer(size, "Olmo")
        x = torch.randn(size.batch, size.sequence, size.hidden).bfloat16()
        g = torch.randn(size.batch, size.sequence, size.hidden if size.heads else size.intermediate).bfloat16()
    model = converted(module.bfloat16(), arm, session)
    parameters = list(model.parameters())
    model = compiled(model, session) if workload.mode == "compiled" else model
    if not workload.dgrad:
        return lambda: torch.autograd.grad(model(x), parameters, g)
    return step(model, parameters, x.requires_grad_(), g)


def make_step(session: Session, workload: Workload, arm: str) -> Run:
    """A step of a Llama whose weights and moments are bf16, as in the tutorial: loss, backward, fused AdamW."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
    from transformers import LlamaConfig, LlamaForCausalLM

    from octavo.train.compiled_blocks import SAVED_OPS

    size = workload.size
    torch.manual_seed(0)
    with torch.device(session.device):
        llama: Any = LlamaForCausalLM(LlamaConfig(**size.llama, bos_token_id=0, eos_token_id=1)).bfloat16()
    llama.model = converted(llama.model, arm, session)
    if workload.selective:
        context = functools.partial(create_selective_checkpoint_contexts, SAVED_OPS)
        inner = llama.model.module if arm.startswith("te ") else llama.model
        for block in inner.layers:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, context_fn=context)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-5, fused=True)
    llama = compiled(llama, session) if workload.mode == "compiled" else llama
    corpus = RandomCorpus(size.vocabulary, size.sequence)
    inputs, targets = (ids.to(session.device) for ids in corpus.batch(0, 0, size.batch))

    def train_step() -> None:
        logits = llama(input_ids=inputs, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train_step


def sized(session: Session, workload: Workload) -> Workload:
    """The workload as it is measured here: a training step with as many layers as two models may have."""
    model, hidden, tokens = workload.size, workload.size.hidden, workload.size.tokens
    if session.tiny:
        block = layer.TINY["tiny-llama" if model.heads else "tiny-block"]
        return replace(workload, size=TINY.get(workload.make, block))
    if workload.make != "step" or not session.gpu:
        return workload
    kv = hidden * model.kv_heads // model.heads
    parameters = 2 * hidden * (hidden + kv) + 3 * hidden * model.intermediate
    # 8 bytes per parameter: bf16 weight, gradient, two moments. Saved per token: norms and MLP.
    one = 2 * 8 * parameters + tokens * (24 * hidden + 8 * model.intermediate)
    rest = 2 * 8 * 2 * model.vocabulary * hidden + 14 * tokens * model.vocabulary
    free = torch.cuda.mem_get_info(session.device)[0]
    layers = int(min(max((MEMORY * free - rest) // one, 1), model.layers))
    return replace(workload, size=replace(model, layers=layers))


def made(session: Session, workload: Workload, arm: str) -> Run:
    return (make_step if workload.make == "step" else make_layer)(session, workload, arm)


def beside(workload: Workload, arm: str, figures: Row, layers: int | None = None) -> Row:
    """The measured speed-up and the published one. `layers` of the published model scale its times."""
    mine, base = figures.get(workload.clock), figures.get(f"bf16_{workload.clock}")
    row: Row = {"speedup": round(base / mine, 4) if mine and base else None, "clock": workload.clock}
    rival = workload.rival(arm)
    row |= {"source": workload.source, "note": workload.note, "published_arm": rival or arm, "published_speedup": None}
    figure = workload.published.get(rival or arm)
    if figure is not None:
        row[f"published_{workload.unit}"] = round(figure, 4)
    if layers is not None:
        row |= {"layers": workload.size.layers, "layers_published": layers}
        if figure is not None and workload.unit == "ms":
            row["published_ms_scaled"] = round(figure * workload.size.layers / layers, 2)
    if rival is not None:
        published = workload.ratio(rival)
        row["published_speedup"] = round(published, 4)
        row["beside"] = round(row["speedup"] / published, 4) if row["speedup"] else None
    return row


def measure(session: Session, workload: Workload, base: Callable[[], Run], arm: str, layers: int) -> Row:
    """An arm in turns with bf16, which is built once; `layers` of the published model."""
    trains = workload.make == "step"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bf16 = base()
        run = bf16 if arm == "bf16" else made(session, workload, arm)
    for warm in (bf16, run) * (0 if session.tiny else WARMUP):
        warm()
    clock = functools.partial(by_the_clock, session, STEPS) if trains else None
    figures = in_turns(session, [bf16], [run], clock)
    return figures | beside(workload, arm, figures, layers if trains else None)


def main(arguments: list[str]) -> None:
    options = parser("published", __doc__, "--workloads te-llama-2-7b coat-llama-2-7b")
    names = [workload.name for workload in WORKLOADS]
    options.add_argument("--workloads", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    session = begin(options, arguments)
    arms = [arm.name for (arm,) in available([(arm,) for arm in named(*ARMS)])]
    wanted = session.options.workloads or names[: QUICK if session.options.quick else None]
    for workload in (workload for workload in WORKLOADS if workload.name in wanted):
        here = sized(session, workload)
        base = functools.cache(functools.partial(made, session, here, "bf16"))
        for arm in arms[:3] if session.options.quick else arms:
            identity: Row = {"stage": "published", "case": workload.name, "arm": arm, "mode": workload.mode}
            row = session.attempt(identity, measure, session, here, base, arm, workload.size.layers) or {}
            if row.get("speedup") and row.get("published_speedup"):
                print(f"    {row['published_arm']}, published: {row['published_speedup']:.2f} × bf16", flush=True)
        base.cache_clear()
        torch._dynamo.reset()  # which keeps all arms of a workload compiled, before the next asks for free memory
        session.clean()
    session.finish()
