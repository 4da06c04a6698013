"""Runs small enough for a test: a Llama of 32 features on a few kilobytes of made-up text."""

import json
import os
import signal
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from octavo.train import ConfigError, parse_config, read_metrics, run
from octavo.train.checkpoint.digests import write_digests
from octavo.train.checkpoint.retention import latest_checkpoint
from octavo.train.data.load import load_corpus
from octavo.train.model import check_model
from octavo.train.ranks import join_ranks
from octavo.train.record.progress import NullProgress
from octavo.train.tasks.registry import task_of
from octavo.train.trainer import Trainer

LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
TIED = {"type": "llama", "config": LLAMA | {"tie_word_embeddings": True}}
ONE_BLOCK = {"type": "llama", "config": LLAMA | {"num_hidden_layers": 1}}
WIDE_LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64,
}  # fmt: skip
"""Heads and features that two ranks can share."""
MIXTRAL = WIDE_LLAMA | {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
PIPELINE = WIDE_LLAMA | {"num_hidden_layers": 4, "tie_word_embeddings": False}


def build_task(config):
    """The model of a run, after its settings were checked and its data read."""
    kind = task_of(config)
    check_model(config.model, kind.kind)
    return kind(config, kind.load(config, NullProgress())).build()


def slow(*values, unless=False):
    """A case that takes minutes, unless something holds."""
    return pytest.param(*values, marks=() if unless else pytest.mark.slow)


class Recorder(NullProgress):
    def __init__(self):
        self.notes = []
        self.rows = []
        self.stages = []

    def stage(self, text):
        self.stages.append(text)

    def step(self, row):
        self.rows.append(row)

    def note(self, text):
        self.notes.append(text)


def sentences(count, seed=0):
    words = "the leaf folds eight times before a printer cuts it into pages and binds them".split()
    rng = np.random.default_rng(seed)
    return "\n".join(" ".join(rng.choice(words, 8)) + "." for _ in range(count))


def flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def rewrite(path, content):
    """Change a file of a checkpoint with its digests, as before they were written, or by who can write them."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    write_digests(path.parent, {})


def put(path, *rows):
    """Write lines of JSON, or of text as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def put_texts(path, texts):
    return put(path, *({"text": text} for text in texts))


GPT2 = {"type": "gpt2", "config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}}


class At(Recorder):
    def __init__(self, step, action):
        super().__init__()
        self._at = step
        self._action = action

    def step(self, row):
        super().step(row)
        if row.step == self._at:
            self._action()


def job(tables, out, resume=False):
    return run(parse_config(tables), out=Path(out), resume=resume)


def load(config, progress=None):
    return load_corpus(config.data, config.model, progress or NullProgress(), config.eval)


def make_trainer(config):
    return Trainer(config, load_corpus(config.data, config.model, NullProgress()), torch.device("cpu"))


@contextmanager
def trainer_of_ranks(tables):
    """The trainer of a run on the ranks of this group, or alone."""
    config = parse_config(tables)
    with join_ranks(config) as ranks:
        yield Trainer(config, load(config), ranks.device, ranks=ranks)


def image_tables(model, data, /, **sections):
    """The tables of a tiny run on images; keyword arguments replace keys, and None leaves a key out."""
    settings = {
        "run": {"steps": 6, "seed": 3, "device": "cpu"}, "model": model, "data": {"source": "digits"} | data,
        "optim": {"lr": 1e-2, "batch": 8, "warmup": 2},
    }  # fmt: skip
    for name, keys in sections.items():
        settings[name] = {key: value for key, value in (settings.get(name, {}) | keys).items() if value is not None}
    return settings


def scaled_losses(factor, name="loss"):
    """Trainers whose losses, or what else a method returns, are multiplied by `factor(trainer)`."""
    method = getattr(Trainer, name)
    return mock.patch.object(Trainer, name, lambda trainer, *batch: method(trainer, *batch) * factor(trainer))


def recorded(config, out, **options):
    """What a run tells, and its `result`."""
    seen = Recorder()
    seen.result = run(config, out=out, progress=seen, **options)
    return seen


def rejected(message, function, *args, **options):
    """The error of a call: one line that matches."""
    with pytest.raises(ConfigError, match=message) as caught:
        function(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refused_run(message, config, out, **options):
    """A run that raises this error, and changes and leaves no file."""

    def files():
        return out.exists(), {path: path.is_file() and path.read_bytes() for path in out.rglob("*")}

    before = files()
    rejected(message, run, config, out=out, **options)
    assert files() == before


def before_steps(action):
    """Runs in which each step begins with `action(trainer)`."""
    train_step = Trainer.train_step
    return mock.patch.object(Trainer, "train_step", lambda trainer: action(trainer) or train_step(trainer))


def fail():
    raise RuntimeError("killed")


def killed(config, out, step):
    """A run that dies after a step."""
    with pytest.raises(RuntimeError, match="killed"):
        run(config, out=out, progress=At(step, fail))


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def saved(out):
    folder = latest_checkpoint(out)
    assert folder is not None
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    flat = {"trainer": json.loads((folder / "trainer.json").read_text())}
    flat |= load_file(next(folder.glob("*.safetensors")))
    flat |= {f"master.{name}": tensor for name, tensor in optimizer["masters"].items()}
    flat |= {f"ema.{name}": tensor for name, tensor in optimizer.get("ema", {}).items()}
    for index, moments in optimizer["adamw"]["state"].items():
        flat |= {f"{index}.{name}": tensor for name, tensor in moments.items()}
    return flat


def assert_same(a, b, without=()):
    """Bitwise the same weights, masters, moments, loss scale, step and curve, but for keys of `trainer.json`."""
    first, second = saved(a), saved(b)
    for state, key in product((first, second), without):
        state["trainer"].pop(key, None)
    assert first.keys() == second.keys() and len(first) > 20
    for name, value in first.items():
        same = torch.equal(value, second[name]) if isinstance(value, torch.Tensor) else value == second[name]
        assert same, (name, value, second[name]) if not isinstance(value, torch.Tensor) else name
    assert curve(a) == curve(b)
    evaluated = [[(row.held_out, row.samples) for row in read_metrics(out)] for out in (a, b)]
    assert without or evaluated[0] == evaluated[1]


def assert_resumes(config, folder):
    """A run killed after its third step goes on to all that the whole one has, which is in `folder / "whole"`."""
    killed(config, folder / "halves", 3)
    run(config, out=folder / "halves", resume=True)
    assert_same(folder / "whole", folder / "halves")


def assert_no_trace(often, never, *, statistics):
    """Bitwise the same run, with evaluations or samples or without, but for what it says of them."""
    assert_same(often, never, without=("config", "digests", "held_out_loss"))
    if statistics:
        assert (often / "statistics.jsonl").read_text() == (never / "statistics.jsonl").read_text()


def losses(out):
    return [row.loss for row in read_metrics(Path(out))]


def curve(out):
    return [(r.step, r.tokens, r.loss, r.lr, r.grad_norm, r.loss_scale, r.skipped) for r in read_metrics(out)]


GROUPS = [{"match": "*norm*", "lr": 1e-3}, {"match": "model.layers.0", "weight_decay": 0.0}]
VARIANTS = [
    slow({}),
    {"precision": {"level": "fp8"}, "optim": {"micro_batches": 2}},
    slow({"precision": {"parameters": "fp16", "loss_scale": "dynamic"}}),
    slow({"precision": {"parameters": "fp32", "checkpointing": "selective"}}),
    {"precision": {"level": "fp8", "master": "remainder"}, "optim": {"states": "fp8", "micro_batches": 2}},
    {"model": GPT2},  # dropout
    slow({"model": TIED, "precision": {"master": "none"}}),
    {"optim": {"groups": GROUPS}, "precision": {"level": "fp8+activations+optimizer"}},
    {"optim": {"name": "muon", "ema": 0.5}, "precision": {"level": "fp8+activations+optimizer"}},
    {
        "data": {"packing": "documents", "sequence_length": 48}, "eval": {"every": 2, "fraction": 0.2, "batches": 1},
        "precision": {"level": "fp8", "checkpointing": "full"}, "optim": {"micro_batches": 2},
    },
    {
        "sample": {"every": 2, "prompts": ["the leaf"], "tokens": 3, "temperature": 1.0},
        "precision": {"level": "fp8"}, "eval": {"every": 2, "fraction": 0.3, "batches": 1},
    },
]  # fmt: skip
