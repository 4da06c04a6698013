"""Fixtures of tests that run the trainer."""

import warnings

import numpy as np
import pytest
import torch
from tensorboard.summary.writer import event_file_writer
from tiny_runs import LLAMA, MIXTRAL, PIPELINE, WIDE_LLAMA, load, put_texts, rejected, sentences

from octavo.train.config.run_config import parse_config
from octavo.train.model import build_model
from processes import gloo  # noqa: F401  a fixture

with warnings.catch_warnings():
    # Where torchao is installed, transformers imports it with its first model, and torchao's own source warns.
    warnings.simplefilter("ignore")
    from transformers import LlamaForCausalLM  # noqa: F401


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ordered_event_files(monkeypatch):
    """TensorBoard reads files of one second in the order of their numbers as text, in which 10 comes before 9."""
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(100))


@pytest.fixture(scope="session")
def text_files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(4):
        (folder / f"{number}.txt").write_text(sentences(40, seed=number), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def make_config(text_files, cache):
    """Makes the config of a tiny run; keyword arguments replace keys, a section at a time."""

    def make(**sections):
        where = {"source": str(text_files / "*.txt"), "cache": str(cache)}
        tables = {
            "run": {"steps": 6, "seed": 3, "device": "cpu"}, "model": {"type": "llama", "config": LLAMA},
            "data": where | {"sequence_length": 16, "vocab_size": 300},
            "optim": {"lr": 1e-2, "batch": 4, "warmup": 2}, "precision": {},
        }  # fmt: skip
        for name, keys in sections.items():
            tables[name] = tables.get(name, {}) | keys if name != "model" else keys
        return parse_config(tables)

    return make


@pytest.fixture(scope="session")
def read(make_config):
    """Loads a source of text; keyword arguments are keys of `[data]`."""
    return lambda source, seen=None, **keys: load(make_config(data={"source": str(source)} | keys), seen)


@pytest.fixture
def saved_model(make_config, tmp_path):
    """The folder of an untrained model and its tokenizer."""
    config = make_config(precision={"parameters": "fp32"})
    tokenizer = load(config).tokenizer
    build_model(config, tokenizer).save_pretrained(tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="session")
def refuse(read):
    return lambda source, message, **keys: rejected(message, read, source, **keys)


@pytest.fixture(scope="session")
def tables(make_config):
    """Sections of a tiny run with batches that four ranks can share."""

    def make(**sections):
        sections.setdefault("optim", {})
        sections["optim"] = {"batch": 8} | sections["optim"]
        config = make_config(**{name: keys for name, keys in sections.items() if name != "parallel"})
        return config.model_dump(exclude_none=True) | {"parallel": sections.get("parallel", {})}

    return make


@pytest.fixture(scope="session")
def settings(tables):
    """The same of a Llama, or a Mixtral, whose heads and features two ranks can share, with some fields changed."""

    def make(family=None, fields=None, **sections):
        family = family or ("mixtral" if sections.get("parallel", {}).get("ep") else "llama")
        sections["optim"] = {"lr": 3e-4} | sections.get("optim", {})
        made = tables(**({"precision": {"level": "fp8"}} | sections))
        config = PIPELINE if sections.get("parallel", {}).get("pp") else WIDE_LLAMA
        config = MIXTRAL if family == "mixtral" else config
        return made | {"model": {"type": family, "config": config | (fields or {})}}

    return make


@pytest.fixture
def lines(tmp_path):
    """Documents of many lengths, some longer than a row."""
    rng = np.random.default_rng(0)
    words = sentences(60).split()
    texts = [" ".join(rng.choice(words, rng.integers(1, 30))) for _ in range(120)]
    return {"source": put_texts(tmp_path / "a.jsonl", texts)}
