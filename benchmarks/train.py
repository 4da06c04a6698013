"""Training: tokens/s and peak memory of whole steps, data aside: random tokens, so that nothing waits for a disk.

    octavo train   the loop behind `octavo train` (`octavo.train.trainer.Trainer`): micro-batches, masters, clipping
    plain loop     the shortest loop there is: forward, backward, fused AdamW on bf16 parameters; eager and compiled

The model has the width of Llama 3 8B and four of its layers, 1.1 billion parameters. Its vocabulary head, embeddings,
norms and attention are bf16 in every arm.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks import ceilings
from benchmarks.arms import Arm, available, build
from benchmarks.equalized_phases import hold_steady, phases
from benchmarks.session import Row, Session, begin, parser
from benchmarks.timing import Run

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
LOOPS: dict[str, tuple[Arm, ...]] = {
    "octavo train": (Arm("bf16"), Arm("octavo rowwise"), Arm("octavo tensorwise"), Arm("octavo rowwise_equalized")),
    "plain loop": (
        Arm("bf16"), Arm("octavo rowwise"), Arm("bf16", "compiled"), Arm("octavo rowwise", "compiled"),
        Arm("torchao tensorwise", "compiled"), Arm("torchao rowwise", "compiled"),
    ),
}  # fmt: skip


class RandomCorpus:
    """What `Trainer` needs of a corpus, with random tokens."""

    fingerprint = "random"

    def __init__(self, model: Model) -> None:
        self._model = model
        self.tokenizer = SimpleNamespace(size=model.vocabulary, end_id=0)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        generator = torch.Generator().manual_seed(seed + step)
        ids = torch.randint(1, self._model.vocabulary, (size, self._model.sequence + 1), generator=generator)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def octavo_train(session: Session, model: Model, arm: Arm) -> tuple[Any, Run]:
    """The model and one step of the loop behind `octavo train`."""
    from octavo.train.config.run_config import parse_config
    from octavo.train.trainer import Trainer

    precision = {"level": "fp8", "recipe": arm.recipe} if arm.recipe else {"level": "bf16"}
    config = parse_config(
        {
            "run": {"steps": 1000, "device": session.device.type},
            "model": {"type": "llama", "config": model.fields},
            "data": {"source": "random", "sequence_length": model.sequence, "vocab_size": model.vocabulary},
            "optim": {"lr": 1e-4, "batch": model.batch, "schedule": "constant"},
            "precision": precision,
        }
    )
    trainer = Trainer(config, RandomCorpus(model), session.device)  # type: ignore[arg-type]
    return trainer.model, trainer.train_step


def plain_loop(session: Session, model: Model, arm: Arm) -> tuple[Any, Run]:
    """The model and one step of the shortest loop."""
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

    return llama, step


def measure(session: Session, model: Model, make: Any, arm: Arm) -> Row:
    """Median tokens/s of a step, the first ones left out, and the most memory allocated."""
    session.clean()
    if session.gpu:
        torch.cuda.reset_peak_memory_stats(session.device)
    module, step = make(session, model, arm)
    eager = arm.mode == "eager"
    middle_ms = _middle_ms(session, hold_steady(module, [step]) if eager else [step])
    figures: Row = {"tokens_per_s": None}
    if middle_ms is not None:
        figures = {
            "wall_ms": round(middle_ms, 3),
            "tokens_per_s": round(1e3 * model.batch * model.sequence / middle_ms, 1),
            "peak_mib": round(torch.cuda.max_memory_allocated(session.device) / 2**20, 1) if session.gpu else None,
        }
    if eager:
        figures |= phases(module, [step], middle_ms, functools.partial(_middle_ms, session))
    return figures


def _middle_ms(session: Session, steps: Sequence[Run]) -> float | None:
    """Median milliseconds of a step, the first ones left out; None in a rehearsal."""
    (step,), seconds = steps, []
    for _ in range(2 if session.tiny else STEPS):
        start = time.perf_counter()
        step()
        if session.gpu:
            torch.cuda.synchronize(session.device)
        seconds.append(time.perf_counter() - start)
    return None if session.tiny else 1e3 * statistics.median(seconds[WARMUP:])


def main(arguments: list[str]) -> None:
    """Measure, print a row at a time, write `results/<device>/train.json`."""
    session = begin("train", parser("train", __doc__, EXAMPLES).parse_args(arguments), arguments)
    ceilings.measure(session)
    model = TINY if session.tiny else Model()
    makers = {"octavo train": octavo_train, "plain loop": plain_loop}
    todo = [(loop, arm) for loop, arms in LOOPS.items() for arm in (arms[:2] if session.options.quick else arms)]
    arms = set(available([arm for _, arm in todo]))
    for loop, arm in todo:
        if arm in arms:
            same: Row = {"stage": loop, "shape": "llama-3-8b width, 4 layers" if not session.tiny else "tiny"}
            one = functools.partial(measure, session, model, makers[loop], arm)
            session.attempt({**same, "arm": arm.name, "mode": arm.mode}, one)
    session.finish()
