"""What ranks of a mesh cannot share raises an error on all of them; remainders that they can share train."""

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from test_hybrid import PIPELINE, settings  # noqa: F401  a fixture
from test_ranks import job, losses, mistakes_job, tables  # noqa: F401  a fixture

from octavo.train import ConfigError, parse_config, run
from processes import gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist
PARTS = {"optim": {"micro_batches": 2}}
UNTIED = {"tie_word_embeddings": False}
TENSORWISE = {"precision": {"level": "fp8", "recipe": "tensorwise"}}
MISTAKES = [
    (
        {"tp": 2},
        {},
        {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3},
        "Fp8ColwiseParallel: heads = 3 is not divided by 2 ranks of tensor parallelism: take one of [1] ranks",
    ),
    ({"tp": 2}, {}, {"num_key_value_heads": 1}, "Fp8ColwiseParallel: heads = 1 is not divided by 2 ranks"),
    ({"tp": 2}, {}, {"intermediate_size": 255}, "out_features = 255 is not divided by 2 ranks of tensor parallelism"),
    ({"tp": 2}, {"precision": {"level": "fp8", "recipe": "delayed"}}, {}, "recipe 'delayed' has one scale per tensor"),
    ({"tp": 2}, TENSORWISE, {}, "recipe 'tensorwise' has one scale per tensor"),
    ({"pp": 2}, PARTS | TENSORWISE, UNTIED, "recipe 'tensorwise', whose scales per tensor would depend on how a batch"),
    (
        {"pp": 2},
        PARTS | {"precision": {"level": "fp8", "recipe": "delayed"}},
        UNTIED,
        "has recipe 'delayed', whose scales per tensor would depend on how a batch is cut into micro-batches",
    ),
    ({"cp": 2}, {}, {"num_key_value_heads": 1}, "2 ranks do not divide the 4 heads of queries and 1 of keys"),
    (
        {"pp": 2, "schedule": "LoopedBFS"},
        {"optim": {"micro_batches": 4}},
        UNTIED | {"num_hidden_layers": 3},
        "has 3 blocks, fewer than 4 stages: use fewer ranks, or a schedule with one stage per rank (GPipe, 1F1B)",
    ),
    (
        {"pp": 2, "schedule": "DualPipeV", "dp_shard": 1},
        {"optim": {"micro_batches": 2}},
        UNTIED,
        "optim.micro_batches = 2 do not fill a pipeline of parallel.pp = 2 with schedule DualPipeV: set it to 4",
    ),
    ({"pp": 2}, PARTS, {"tie_word_embeddings": True}, "set tie_word_embeddings = false"),
]
EXPERTS = [
    ({"ep": 2}, {}, {"num_local_experts": 3}, "cannot share the 3 experts of 'model.layers.0.mlp.experts' equally"),
    ({"pp": 2}, PARTS, UNTIED | {"output_router_logits": True}, "adds a loss of the routers of all blocks"),
]


@pytest.mark.thorough
def test_sizes_that_ranks_cannot_share(gloo, settings, tmp_path):  # noqa: F811
    cases, texts = [], []
    for family, mistakes in (("llama", MISTAKES), ("mixtral", EXPERTS)):
        for parallel, sections, changes, text in mistakes:
            made = settings(family, parallel=parallel, **sections)
            made["model"]["config"] = made["model"]["config"] | changes
            cases.append(made)
            texts.append(text)
    for messages in gloo.run(mistakes_job, 2, cases, str(tmp_path)):
        for message, text in zip(messages, texts, strict=True):
            assert text in message, message


def stage_job(tables, out):  # noqa: F811
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
def test_a_stage_that_cannot_run_is_no_lost_rank(gloo, settings, tmp_path):  # noqa: F811
    made = settings("llama", parallel={"pp": 2}, **PARTS)
    made["model"]["config"] = PIPELINE
    other, failing = gloo.run(stage_job, 2, made, str(tmp_path / "run"))
    assert other == ("SharedError", "rank 1: RuntimeError: this layer cannot run")
    assert failing == ("RuntimeError", "this layer cannot run", "every rank was alive after this error")


def differing_job(tables, out, differences):  # noqa: F811
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


def test_settings_that_differ_between_ranks(gloo, settings, tmp_path):  # noqa: F811
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


REMAINDERS = {
    "words that tp does not divide": ("llama", {"tp": 2}, {"data": {"vocab_size": 301}}),
    "a width that tp does not divide": ("mistral", {"tp": 2}, {}),
    "words that pp does not divide": ("llama", {"pp": 2}, {"data": {"vocab_size": 301}} | PARTS),
    "one token for each rank of tp": ("llama", {"tp": 2}, {"data": {"sequence_length": 2}}),
    "one token for each rank of cp": ("llama", {"cp": 2}, {"data": {"sequence_length": 2}}),
    "one token for all of tp": ("llama", {"tp": 2, "sequence_parallel": False}, {"data": {"sequence_length": 1}}),
    "one token in a message": ("llama", {"pp": 2}, {"data": {"sequence_length": 1}, "optim": {"micro_batches": 8}}),
    "one token for the experts": ("mixtral", {"ep": 2}, {"data": {"sequence_length": 1}, "optim": {"batch": 2}}),
    "blocks that pp does not divide": ("llama", {"pp": 2}, PARTS),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * case.startswith(("one token in", "words that")))
        for case in REMAINDERS
    ],
)
def test_remainders_train_as_one_process_does(gloo, settings, tmp_path, case):  # noqa: F811
    family, parallel, sections = REMAINDERS[case]
    made = settings(family, parallel=parallel, run={"steps": 4}, **sections)
    if "blocks" in case:
        made["model"]["config"] = PIPELINE | {"num_hidden_layers": 3}
    if "width" in case:
        made["model"]["config"] = made["model"]["config"] | {"hidden_size": 129}
    gloo.run(job, 2, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=3e-3)
