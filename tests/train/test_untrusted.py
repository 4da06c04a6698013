"""Prepared checkpoints, from a stranger: nothing in them is run, and they are refused with the reason."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tiny_runs import LLAMA, ONE_BLOCK, job, load, rejected
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.train import ConfigError, parse_config
from octavo.train.checkpoint.digests import write_digests
from octavo.train.checkpoint.export import export
from octavo.train.checkpoint.pretrained import load_model_config, load_pretrained
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.checkpoint.shards import read_index
from octavo.train.checkpoint.store import shards
from octavo.train.model import build_model
from octavo.train.ranks import share_on_machine

pytestmark = pytest.mark.dist


class Payload:
    """Leaves a mark where it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def refused_job(tables, out):
    try:
        job(tables, out, resume=True)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.fixture
def tables(make_config):
    config = make_config(model=ONE_BLOCK, run={"steps": 1}, optim={"warmup": 0, "schedule": "constant"})
    return config.model_dump(exclude_none=True) | {"parallel": {"fp8_comm": "off"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def prepared(gloo, tables, runs, tmp_path):
    """A copy of a run of one or two ranks; its newest checkpoint."""

    def make(ranks):
        if not (runs / str(ranks)).exists():
            gloo.run(job, ranks, tables, str(runs / str(ranks)))
        shutil.copytree(runs / str(ranks), tmp_path / "run")
        return checkpoints(tmp_path / "run")[-1]

    return make


def signed(folder):
    """With digests that fit: a stranger makes those too."""
    (folder / "digests.json").unlink()
    write_digests(folder, {})


def longer(tables):
    return tables | {"run": tables["run"] | {"steps": 2}}


def metadata(folder):
    return pickle.loads((folder / "shards" / ".metadata").read_bytes())


def entry(stored):
    """Where the weights of the embedding are."""
    return next(index for index in stored.storage_data if index.fqn == "model.model.embed_tokens.weight")


def prepare(folder, kind, mark):
    """Change the index or a shard of a checkpoint. Returns what is to be named."""
    index, stored = folder / "shards" / ".metadata", metadata(folder)
    info = stored.storage_data[entry(stored)]
    error_text = f"points to '{info.relative_path}'"
    if kind == "command":
        index.write_bytes(pickle.dumps(Payload(mark)))
        return f"{os.mkdir.__module__}.mkdir"
    if kind == "hidden command":
        stored.planner_data["x"] = Payload(mark)
        error_text = f"{os.mkdir.__module__}.mkdir"
    elif kind == "bytes":
        stored.state_dict_metadata[entry(stored).fqn] = BytesStorageMetadata()
        error_text = "BytesStorageMetadata"
    elif kind == "number":
        info.offset = -1
        error_text = r"points to \(-1, \d+\) in "
    elif kind == "transformed":
        info.transform_descriptors = ["zstd"]
        error_text = "is transformed"
    elif kind == "shard":
        file = io.BytesIO()
        torch.save(Payload(mark), file)
        with (folder / "shards" / info.relative_path).open("ab") as shard:
            info.offset, info.length = shard.tell(), len(file.getvalue())
            shard.write(file.getvalue())
        error_text = "[Ww]eights.only"
    else:
        shutil.copy(folder / "shards" / info.relative_path, mark.parent / "outside.distcp")
        to = mark.parent / "outside.distcp" if kind == "absolute" else Path("../../outside.distcp")
        for other in stored.storage_data.values():
            other.relative_path = str(to) if other.relative_path == info.relative_path else other.relative_path
        error_text = "no file beside it"
    index.write_bytes(pickle.dumps(stored))
    return error_text


KINDS = ["command", "hidden command", "bytes", "number", "transformed", "shard", "parent", "absolute"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_index_of_shards_runs_nothing(gloo, prepared, tables, tmp_path, kind):
    folder = prepared(2)
    error_text = prepare(folder, kind, tmp_path / "mark")
    signed(folder)
    rejected(error_text, export, folder, tmp_path / "exported")
    rejected(error_text, lambda: job(longer(tables) | {"parallel": {}}, tmp_path / "run", resume=True))
    if kind in ("command", "shard"):
        for message in gloo.run(refused_job, 2, longer(tables), str(tmp_path / "run")):
            assert (error_text in message) if kind == "command" else ("weights" in message.lower()), message
    assert not (tmp_path / "mark").exists() and not (tmp_path / "exported").exists()


def test_the_payload_leaves_a_mark(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark")))
    assert (tmp_path / "mark").exists()


def remote_code(folder, mark):
    """Point the configuration of a model to code beside it."""
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    settings = json.loads((folder / "config.json").read_text())
    changes = {"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}
    (folder / "config.json").write_text(json.dumps(settings | changes))


def as_torch_file(folder, mark):
    (folder / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Payload(mark)}, folder / "pytorch_model.bin")


PREPARED = {
    "optimizer": lambda folder, mark: torch.save({"adamw": Payload(mark), "masters": {}}, folder / "optimizer.pt"),
    "model": remote_code, "weights": as_torch_file,
}  # fmt: skip


@pytest.mark.parametrize("kind", PREPARED)
def test_a_prepared_checkpoint_of_one_process_runs_nothing(prepared, tables, tmp_path, kind):
    folder = prepared(1)
    mark = tmp_path / "mark"
    PREPARED[kind](folder, mark)
    signed(folder)
    fresh = tables | {"model": {"path": str(folder)}, "parallel": {}}
    actions = {
        "resume": lambda: job(longer(tables) | {"parallel": {}}, tmp_path / "run", resume=True),
        "export": lambda: export(folder, tmp_path / "exported"),
        "start": lambda: job(fresh, tmp_path / "fresh"),
    }
    for name, action in actions.items():
        if kind == "optimizer" and name != "resume":  # which read nothing of it
            action()
        else:
            with pytest.raises(ConfigError):
                action()
        assert not mark.exists(), name


# --- the file that ranks share ---


def sharing_job(tables):
    config = parse_config(tables)
    from octavo.train.ranks import join_ranks

    with join_ranks(config) as ranks:
        corpus = load(config)
        model = share_on_machine(lambda: build_model(config, corpus.tokenizer), ranks)
        expected = build_model(config, corpus.tokenizer)
        same = all(torch.equal(value, model.state_dict()[name]) for name, value in expected.state_dict().items())
        tied = model.lm_head.weight is model.model.embed_tokens.weight
        buffers = all(torch.equal(one, other) for one, other in zip(expected.buffers(), model.buffers(), strict=True))
        gradients = all(parameter.requires_grad for parameter in model.parameters())
        return same and tied and buffers and gradients and type(model) is type(expected)


def test_ranks_share_tensors(gloo, tables, tmp_path):
    tied = tables | {"model": {"type": "llama", "config": tables["model"]["config"] | {"tie_word_embeddings": True}}}
    tied["data"] = tables["data"] | {"cache": str(tmp_path)}
    assert gloo.run(sharing_job, 2, tied) == [True, True]


KERNEL = "someone/kernel"
NAMES = KERNEL, f"paged|{KERNEL}", {"": "sdpa", "text_config": {"": KERNEL}}
FROM_THE_HUB = [{"_attn_implementation": KERNEL}, {"text_config": {"attn_implementation": KERNEL}}]
FROM_THE_HUB += [{"attn_implementation": name} for name in NAMES]


def save_config(folder):
    config = LlamaConfig(**LLAMA)
    config.save_pretrained(folder)
    return config


@pytest.mark.parametrize("settings", FROM_THE_HUB, ids=str)
def test_attention_from_the_hub_is_refused(settings, tmp_path):
    save_config(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"attn_implementation": "eager"}))
    assert load_model_config(tmp_path).model_type == "llama"
    path.write_text(json.dumps(config | settings))
    rejected(f'from the hub .*{KERNEL}.* to "sdpa" or "eager"', load_pretrained, tmp_path, torch.float32)


def test_an_adapter_is_no_model(tmp_path):
    LlamaForCausalLM(save_config(tmp_path)).save_pretrained(tmp_path)
    assert load_pretrained(tmp_path, torch.float32).config.model_type == "llama"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "a/b"}))
    rejected("PEFT adapter.*merge_and_unload", load_pretrained, tmp_path, torch.float32)


def test_a_pickle_cannot_change_the_records_it_is_read_into(tmp_path):
    """A state of slots for a class sets attributes of the class."""
    folder = tmp_path / "shards"
    shards.write(folder, {"a": torch.zeros(2)})
    good = (folder / ".metadata").read_bytes()
    poison = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n(N}X\x0c\x00\x00\x00__setstate__"
        b"ctorch.distributed.checkpoint.metadata\nMetadata\ns\x86b."
    )
    (folder / ".metadata").write_bytes(poison)
    rejected("cannot be read", read_index, folder)
    (folder / ".metadata").write_bytes(good)
    assert read_index(folder).state_dict_metadata["a"].size == (2,)
