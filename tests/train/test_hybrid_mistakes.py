"""What ranks of a mesh cannot share raises an error on all of them; remainders that they can share train."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from test_ranks import mistakes_job
from tiny_runs import GPT2, PIPELINE

from octavo.train import ConfigError, parse_config, run

pytestmark = pytest.mark.dist
PARTS = {"optim": {"micro_batches": 2}}
UNTIED = {"tie_word_embeddings": False}
TENSORWISE = {"precision": {"level": "fp8", "recipe": "tensorwise"}}
THREE_HEADS = {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3}
LOOPED = {"pp": 2, "schedule": "LoopedBFS"}
DUAL = {"pp": 2, "schedule": "DualPipeV", "dp_shard": 1}
# Model, [parallel], other sections, fields of the model, what the error says.
MISTAKES = [
    ("llama", {"tp": 4}, {}, {}, "parallel.tp = 4 does not divide the 2 processes: take [1, 2]"),
    ("llama", {"tp": 2, "pp": 2}, PARTS, {}, "parallel.tp × cp × pp = 4 does not divide the 2 processes: take [1, 2]"),
    ("llama", {"tp": 2, "dp_shard": 2}, {}, {}, "does not equal the world size 1"),
    ("llama", {"dp_replicate": 3}, {}, {}, "parallel.dp_replicate = 3"),
    ("llama", {}, {"optim": {"batch": 3}}, {}, "optim.batch = 3 sequences in 1 micro-batches cannot be shared by 2"),
    (
        "llama",
        {},
        {"optim": {"batch": 4, "micro_batches": 4}},
        {},
        "to a multiple of 8, as 8, or optim.micro_batches = 2",
    ),
    ("llama", {}, {"data": {"source": "nothing-*.txt"}}, {}, "matches no file"),
    ("llama", {"tp": 2}, {}, THREE_HEADS, "heads = 3 is not divided by 2 ranks of tensor parallelism: take one of [1]"),
    ("llama", {"tp": 2}, {}, {"intermediate_size": 255}, "out_features = 255 is not divided by 2 ranks of tensor"),
    ("llama", {"tp": 2}, TENSORWISE, {}, "recipe 'tensorwise' has one scale per tensor"),
    ("llama", {"tp": 2}, {"data": {"sequence_length": 15}}, {}, "data.sequence_length = 15 is not divided by"),
    ("llama", {"cp": 2}, {"data": {"sequence_length": 15}}, {}, "parallel.cp = 2: set it to a multiple, as 16"),
    ("llama", {"cp": 2}, {}, {"num_key_value_heads": 1}, "2 ranks do not divide the 4 heads of queries and 1 of keys"),
    ("llama", {"ep": 2}, {}, {}, "[parallel]: expert_parallel distributes experts"),
    ("mixtral", {"ep": 2}, {"precision": {}}, {}, 'precision.level = "bf16"'),
    ("mixtral", {"ep": 2}, {}, {"num_local_experts": 3}, "cannot share the 3 experts of 'model.layers.0.mlp.experts'"),
    ("gpt2", {"tp": 2}, {}, {}, "has no plan for tensor parallelism"),
    ("gpt2", {"pp": 2}, PARTS, {}, "parallel.pp: GPT2LMHeadModel cannot be a pipeline"),
    ("llama", {"pp": 2}, {}, {}, "optim.micro_batches = 1 do not fill a pipeline of parallel.pp = 2"),
    ("llama", DUAL, PARTS, UNTIED, "parallel.pp = 2 with schedule DualPipeV: set it to 4"),
    (
        "llama",
        {"pp": 2},
        PARTS | TENSORWISE,
        UNTIED,
        "recipe 'tensorwise', whose scales per tensor would depend on how a batch",
    ),
    ("llama", LOOPED, {"optim": {"micro_batches": 4}}, UNTIED | {"num_hidden_layers": 3}, "has 3 blocks, fewer than 4"),
    ("llama", {"pp": 2}, PARTS, {"tie_word_embeddings": True}, "set tie_word_embeddings = false"),
    ("mixtral", {"pp": 2}, PARTS, UNTIED | {"output_router_logits": True}, "adds a loss of the routers of all blocks"),
    ("llama", {}, {}, {}, "the output folder"),
]


@pytest.mark.thorough
def test_what_ranks_cannot_share_is_an_error_on_all(gloo, settings, tmp_path):
    cases = []
    for family, parallel, sections, changes, _ in MISTAKES:
        made = settings(family, parallel=parallel, **sections)
        made["model"] = GPT2 if family == "gpt2" else made["model"] | {"config": made["model"]["config"] | changes}
        cases.append(made)
    (tmp_path / str(len(cases) - 1)).write_text("a file")
    for texts in gloo.run(mistakes_job, 2, cases, str(tmp_path)):
        for text, (*_, message) in zip(texts, MISTAKES, strict=True):
            assert message in text, text
    assert not list(tmp_path.rglob("step-*"))


def stage_job(tables, out):
    """The error, with notes, of a run whose second stage cannot compute, raised by an operation of DTensors."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    fails = {"__name__": "torch.distributed.tensor._dispatch"}
    exec("def forward(self, x): raise RuntimeError('this layer cannot run')", fails)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Exception) as error:
        if dist.get_rank() == 1:
            patch.setattr(LlamaMLP, "forward", fails["forward"])
        run(parse_config(tables), out=Path(out))
    return type(error.value).__name__, str(error.value), *getattr(error.value, "__notes__", ())


@pytest.mark.thorough
def test_a_stage_that_cannot_run_is_no_lost_rank(gloo, settings, tmp_path):
    made = settings("llama", parallel={"pp": 2}, **PARTS)
    made["model"]["config"] = PIPELINE
    other, failing = gloo.run(stage_job, 2, made, str(tmp_path / "run"))
    assert other == ("SharedError", "rank 1: RuntimeError: this layer cannot run")
    assert failing == ("RuntimeError", "this layer cannot run", "every rank was alive after this error")


def differing_job(tables, out, differences):
    """The error of each setting, or variable of the environment, that only the second rank changes."""
    messages, last = [], dist.get_rank() == 1
    for key, value in differences.items():
        section, _, name = key.partition(".")
        changed = {section: tables[section] | {name: value}} if last and name else {}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
            if last and not name:
                patch.setenv(key, value)
            run(parse_config(tables | changed), out=Path(out) / key)
        messages.append(str(error.value))
        assert not os.path.exists(Path(out) / key)
    return messages


def test_settings_that_differ_between_ranks(gloo, settings, tmp_path):
    differences = {
        "parallel.tp": 1, "parallel.sequence_parallel": False, "parallel.schedule": "GPipe", "parallel.fp8_comm": "off",
        "optim.micro_batches": 4, "precision.recipe": "blockwise", "run.seed": 9, "OCTAVO_CPU_PRODUCTS": "fast",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CPU_PRODUCTS", "exact")
        made = settings(parallel={"tp": 2}, optim={"micro_batches": 2})
        messages = gloo.run(differing_job, 2, made, str(tmp_path), differences)
    assert messages[0] == messages[1]
    for message, key in zip(messages[0], differences, strict=True):
        assert f"the ranks do not train the same: {key} = " in message
        assert "on rank 0; " in message and "on rank 1. " in message
