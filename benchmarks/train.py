"""Training: tokens/s and peak memory of the shortest loop there is: forward, backward, fused AdamW on bf16 parameters.

Eager and compiled, beside torchao, on random tokens; `python -m benchmarks run` measures `octavo train` itself. The
model has the width of Llama 3 8B and four of its layers, 1.1 billion parameters. Its vocabulary head, embeddings, norms
and attention are bf16 in every arm.
"""

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.arms import Arm, available, build
from benchmarks.kernels import ceilings
from benchmarks.session import Row, Session, begin, parser

EXAMPLES = """train
train --quick
train --rehearse"""


@dataclass(frozen=True)
class Model:
    """A Llama and its batch."""

    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 32000
    batch: int = 8
    sequence: int = 2048

    @property
    def fields(self) -> dict[str, Any]:
        """As `LlamaConfig` calls them."""
        return {
            "hidden_size": self.hidden, "intermediate_size": self.intermediate, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocabulary,
            "max_position_embeddings": self.sequence, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip


TINY = Model(hidden=64, intermediate=96, layers=1, heads=4, kv_heads=2, vocabulary=320, batch=2, sequence=16)
STEPS, WARMUP = 10, 3
ARMS = (
    Arm("bf16"), Arm("octavo rowwise"), Arm("bf16", "compiled"), Arm("octavo rowwise", "compiled"),
    Arm("torchao tensorwise", "compiled"), Arm("torchao rowwise", "compiled"),
)  # fmt: skip


class RandomCorpus:
    """What `Trainer` needs of a corpus, with random tokens."""

    fingerprint = "random"

    def __init__(self, model: Model) -> None:
        self._model = model
        self.tokenizer = SimpleNamespace(size=model.vocabulary, end_id=0)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed + step)
        ids = torch.randint(1, self._model.vocabulary, (size, self._model.sequence + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def plain_loop(session: Session, model: Model, arm: Arm) -> Callable[[], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(session.device):
        llama: Any = LlamaForCausalLM(LlamaConfig(**model.fields)).bfloat16()
    llama.model = build(llama.model, Arm(arm.name), session)
    parameters = list(llama.parameters())
    if arm.mode == "compiled":
        torch._dynamo.reset()
        llama = torch.compile(llama, dynamic=False, backend="inductor" if session.gpu else "aot_eager")
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    inputs, targets = (ids.to(session.device) for ids in RandomCorpus(model).batch(0, 0, model.batch))

    def step() -> float:
        logits = llama(input_ids=inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def measure(session: Session, model: Model, arm: Arm) -> Row:
    """Median tokens/s of a step, the first ones left out, and the most memory allocated."""
    session.clean()
    if session.gpu:
        torch.cuda.reset_peak_memory_stats(session.device)
    step = plain_loop(session, model, arm)
    seconds = []
    for _ in range(2 if session.tiny else STEPS):
        start = time.perf_counter()
        step()
        if session.gpu:
            torch.cuda.synchronize(session.device)
        seconds.append(time.perf_counter() - start)
    if session.tiny:
        return {"tokens_per_s": None}
    middle = statistics.median(seconds[WARMUP:])
    return {
        "wall_ms": round(1e3 * middle, 3),
        "tokens_per_s": round(model.batch * model.sequence / middle, 1),
        "peak_mib": round(torch.cuda.max_memory_allocated(session.device) / 2**20, 1) if session.gpu else None,
    }


def main(arguments: list[str]) -> None:
    session = begin("train", parser("train", __doc__, EXAMPLES).parse_args(arguments), arguments)
    ceilings(session)
    model = TINY if session.tiny else Model()
    for arm in available(ARMS[:2] if session.options.quick else ARMS):
        same: Row = {"stage": "plain loop", "shape": "llama-3-8b width, 4 layers" if not session.tiny else "tiny"}
        one = functools.partial(measure, session, model, arm)
        session.attempt({**same, "arm": arm.name, "mode": arm.mode}, one)
    session.finish()
