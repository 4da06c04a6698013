"""Runs on hybrid meshes: losses, checkpoints, mistakes, what goes with every mesh, and FP8 beside plain bf16."""

import json
import os
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_faults import models_with
from test_guard import GUARDED, LASTING, harder, without_batches
from test_ranks import DDP, EVERYTHING, assert_same_ends, checkpoints_through, mistakes_job
from tiny_runs import GPT2, MIXTRAL, PIPELINE, Recorder, before_steps, job, losses, rejected, slow, trainer_of_ranks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from bf16_products import Float32Products
from octavo.parallel.combinations import ZERO_BUBBLE
from octavo.parallel.pipeline_model import SCHEDULES, check_pipeline_model, divide, stages_of
from octavo.tensor import local_tensor
from octavo.train import ConfigError, LostRankError, NonFiniteError, parse_config, read_metrics, run
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.record.metrics import read_events, read_statistics
from octavo.train.run_plan import plan_memory
from octavo.train.trainer import Trainer
from processes import Failed

pytestmark = pytest.mark.dist
LAYOUTS = {
    "tp": (2, {"tp": 2}), "tp-whole": (2, {"tp": 2, "sequence_parallel": False}), "cp": (2, {"cp": 2}),
    "tp-fsdp": (4, {"tp": 2}), "cp-fsdp": (4, {"cp": 2}), "cp-hsdp": (4, {"cp": 2, "dp_replicate": 2}),
    "pp": (2, {"pp": 2}), "pp-fsdp": (4, {"pp": 2}), "pp-tp": (4, {"pp": 2, "tp": 2}),
}  # fmt: skip


def norms(out):
    return [row.grad_norm for row in read_metrics(Path(out))]


def new_process_job(tables, out):
    """As in a process of a machine with several, that has made no model yet, unlike those that tests share."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    _CAN_RECORD_REGISTRY.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))
        return job(tables, out)


@dataclass(frozen=True)
class Case:
    """A run on some ranks beside the same in one process: how far losses, and gradient norms, may differ."""

    world: int
    parallel: dict
    sections: dict = field(default_factory=dict)
    model: str = "llama"
    fields: dict = field(default_factory=dict)
    losses: float = 2e-3
    norms: float | None = None


PARTS, FP32 = {"optim": {"micro_batches": 2}}, {"precision": {"parameters": "fp32"}}
ROUTERS = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
SLIDING = {
    "parallel": {"pp": 2, "tp": 2, "fp8_comm": "off"}, "sections": FP32 | PARTS | {"run": {"steps": 3}},
    "model": "mistral", "losses": 1e-4, "norms": 2e-3,
}  # fmt: skip
PACKED = FP32 | PARTS | {"data": {"packing": "documents", "sequence_length": 48}, "eval": {}}
SHORT = {"run": {"steps": 3}}
STARCODER = {key: value for key, value in PIPELINE.items() if key != "head_dim"}
DROPOUT = {"residual_dropout": 0.2, "embedding_dropout": 0.1}
"""Of the residual stream, which ranks of tensor parallelism have all, or their tokens of."""


def last_batch(parts):
    evaluated = {"eval": {"every": 1, "fraction": 0.3, "batches": 100}}
    return FP32 | SHORT | evaluated | {"optim": {"batch": 10, "micro_batches": parts, "lr": 1e-3}}


def words(length):
    return SHORT | {"data": {"sequence_length": length}}


CASES = {
    # Gradients and messages in FP8.
    **{name: Case(world, own, PARTS if "pp" in own else {}, norms=3e-2) for name, (world, own) in LAYOUTS.items()},
    "ep": Case(2, {"ep": 2}, model="mixtral", norms=2e-2),
    "ep-fsdp": Case(4, {"ep": 2}, model="mixtral", norms=2e-2),
    **{f"{name}, routers' loss": Case(2, own, model="mixtral", fields=ROUTERS, losses=3e-3)
       for name, own in (("fsdp", {}), ("ep", {"ep": 2}))},
    **{name: Case(2, {"pp": 2, "schedule": name, "dp_shard": 1}, {"optim": {"micro_batches": 4}})
       for name in SCHEDULES},
    # Every rank drops the same of the residual stream.
    "tp-whole, dropout": Case(2, LAYOUTS["tp-whole"][1], PARTS, "starcoder2", STARCODER | DROPOUT),
    # Autocast with fp32 parameters; tensor parallelism sends bf16.
    **{f"{name}, fp32": Case(world, own, FP32 | PARTS, losses=3e-4) for name, (world, own) in LAYOUTS.items()},
    # Under sequence parallelism hidden states have half the tokens that masks are for; a window of 12 is between both.
    **{f"window of {size}": Case(4, **SLIDING, fields=PIPELINE | {"sliding_window": size}) for size in (4, 12)},
    # Ranks with other numbers of targets, trained and held out; gradients of halves of a batch add up in another order.
    "fsdp, packed": Case(2, {"fp8_comm": "off"}, PACKED, losses=5e-4),
    "ddp, packed": Case(2, {"fp8_comm": "off", "dp_replicate": 2, "dp_shard": 1}, PACKED, losses=5e-4),
    "fsdp, packed without masks": Case(2, {"fp8_comm": "off"}, PACKED | {"attention": "varlen"}, losses=5e-4),
    # Six held-out rows for batches of ten, so that ranks and micro-batches have five or one.
    **{f"{name}, last batch": Case(*LAYOUTS[name], last_batch(2 if "pp" in name else 1), losses=3e-4)
       for name in ("tp", "pp-tp", "tp-whole", "tp-fsdp", "cp")},
    # Remainders.
    "words that tp does not divide": Case(2, {"tp": 2}, SHORT | {"data": {"vocab_size": 301}}, losses=3e-3),
    "words that pp does not divide": Case(2, {"pp": 2}, SHORT | PARTS | {"data": {"vocab_size": 301}}, losses=3e-3),
    "a width that tp does not divide": Case(2, {"tp": 2}, SHORT, "mistral", {"hidden_size": 129}, losses=3e-3),
    "one token for each rank of tp": Case(2, {"tp": 2}, words(2), losses=3e-3),
    "one token for each rank of cp": Case(2, {"cp": 2}, words(2), losses=3e-3),
    "one token for all of tp": Case(2, {"tp": 2, "sequence_parallel": False}, words(1), losses=3e-3),
    "one token in a message": Case(2, {"pp": 2}, words(1) | {"optim": {"micro_batches": 8}}, losses=3e-3),
    "one token for the experts": Case(2, {"ep": 2}, words(1) | {"optim": {"batch": 2}}, "mixtral", losses=3e-3),
    "blocks that pp does not divide": Case(2, {"pp": 2}, SHORT | PARTS, fields={"num_hidden_layers": 3}, losses=3e-3),
}  # fmt: skip
OFTEN = {
    "tp", "cp", "ep, routers' loss", "window of 4", "fsdp, packed", "ddp, packed", "fsdp, packed without masks",
    "a width that tp does not divide", "one token for each rank of tp", "one token for each rank of cp",
    "one token for the experts", "blocks that pp does not divide",
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name if name in OFTEN else slow(name) for name in CASES])
def test_losses_are_those_of_one_process(gloo, settings, lines, tmp_path, name):
    case = CASES[name]
    sections = {key: keys for key, keys in case.sections.items() if key != "attention"}
    if "packing" in sections.get("data", {}):
        sections["data"] = sections["data"] | lines
    made = settings(case.model, case.fields, parallel=case.parallel, **sections)
    if "attention" in case.sections:
        made["model"]["attention"] = case.sections["attention"]
    results = gloo.run(new_process_job, case.world, made, str(tmp_path / "ranks"))
    alone = job(made | {"parallel": {}}, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=case.losses)
    if case.norms:
        assert norms(tmp_path / "ranks") == pytest.approx(norms(tmp_path / "one"), rel=case.norms)
    assert results[0].losses == results[1].losses and results[0].held_out == results[1].held_out
    assert (results[0].tokens, results[0].parameters) == (alone.tokens, alone.parameters)
    held_out = [[row.held_out or {} for row in read_metrics(tmp_path / name)] for name in ("ranks", "one")]
    assert any(held_out[1]) == ("eval" in case.sections)
    for row, expected in zip(*held_out, strict=True):
        assert row == pytest.approx(expected, rel=case.losses)


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{"level": "fp8"}, EVERYTHING], ids=str)
def test_checkpoints_go_to_any_layout(gloo, settings, tmp_path, precision):
    made = settings(fields=PIPELINE, precision=precision, parallel={"tp": 2}, **SHORT, **PARTS)
    tp, cp, pp = {"tp": 2}, {"cp": 2}, {"pp": 2}
    layouts = [(4, {}), (1, {}), (2, tp), (2, cp), (1, {}), (2, pp), (4, pp | tp), (1, {})]
    checkpoints_through(gloo, made, tmp_path, layouts)


def layout_of_ranks(tables):
    with trainer_of_ranks(tables) as trainer:
        inputs, targets = trainer._batch(0)
        return inputs, targets, trainer.layout.positions(inputs)


@pytest.mark.thorough
def test_ranks_share_batches_and_tokens(gloo, settings):
    whole = layout_of_ranks(settings())
    for parallel, rows, in_parts in (({"tp": 2}, 2, False), ({"cp": 2}, 2, True)):
        ranks = gloo.run(layout_of_ranks, 4, settings(parallel=parallel))
        for rank, (inputs, targets, positions) in enumerate(ranks):
            row, part = rank // 2, rank % 2
            own_positions = positions["position_ids"][0].tolist() if in_parts else list(positions)
            assert own_positions == (list(range(8 * part, 8 * part + 8)) if in_parts else [])
            own = [t.chunk(rows)[row] for t in whole[:2]]
            assert torch.equal(targets, own[1].chunk(2, 1)[part])
            assert torch.equal(inputs, own[0].chunk(2, 1)[part] if in_parts else own[0])


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [{"pp": 2, "fp8_comm": "off"}, {"tp": 2}], ids=str)
def test_exact_messages_and_statistics(gloo, settings, tmp_path, parallel):
    """Of all stages; and X before it is gathered in FP8, also where attention gathers it for q, k and v."""
    exact = {"precision": {"level": "fp8", "parameters": "fp32"}} | PARTS if "pp" in parallel else {}
    made = settings(parallel=parallel, inspect={"every": 1}, **SHORT, **exact)
    gloo.run(job, 2, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "one"), rel=1e-5 if exact else 2e-3)
    of_runs = [read_statistics(tmp_path / name) for name in ("ranks", "one")]
    rows, expected = ({(r.step, r.layer, r.operand): r.sqnr for r in of_run} for of_run in of_runs)
    assert len(rows) == 3 * (28 if exact else 14) * 4 and rows == pytest.approx(expected, abs=0.7)


MLP = "model.layers.{}.mlp"


def outlier_channels(module, args):
    scale = torch.full((args[0].shape[-1],), 1e-4, dtype=args[0].dtype)
    scale[5] = 1e3
    return args[0] * scale


def piloted_job(tables, out, resume=False):
    """A run of which the last block's MLP gets outlier channels; the recipes of its layers on this rank."""
    with models_with(outlier_channels, MLP.format(tables["model"]["config"]["num_hidden_layers"] - 1)):
        return job(tables, out, resume)


def moves(out):
    texts = [event["text"] for event in read_events(out) if event["event"] == "move"]
    return sorted(tuple(text.split(": ")[1:3]) for text in texts)


def poisoned_job(tables, out, layer, backward):
    """The origin that a rank names where a layer makes NaN in step 3: in one stage, or on one rank that shares it."""

    def hook(module, inputs, y):
        return y.register_hook(lambda g: g * torch.nan) and None if backward else y * torch.nan

    def poison(trainer):
        has_it = "pp" in tables["parallel"] or trainer.ranks.rank == 1
        if trainer.step == 2 and has_it and (module := dict(trainer.model.named_modules()).get(layer)) is not None:
            module.register_forward_hook(hook)

    with before_steps(poison), pytest.raises(NonFiniteError) as error:
        run(parse_config(tables), out=Path(out), progress=Recorder())
    return error.value.origin


INTERLEAVED = {"pp": 2, "schedule": "Interleaved1F1B"}
POISONED = [(layer, layer == 2, parallel) for parallel in ({"pp": 2}, INTERLEAVED) for layer in (1, 2)]
POISONED += [(1, backward, {"tp": 2}) for backward in (False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "backward", "parallel"), POISONED, ids=str)
def test_the_origin_of_a_nan(gloo, settings, tmp_path, layer, backward, parallel):
    """Other stages get it in messages, and the first of them sees it among the first values that it looks at."""
    name = f"model.layers.{layer}.mlp.up_proj"
    made = settings(fields=PIPELINE, parallel=parallel, **PARTS)
    origins = gloo.run(poisoned_job, 2, made, str(tmp_path / "out"), name, backward)
    assert origins[0] == origins[1] and f"output of {name} (first operand: " in origins[0]


def test_blocks_are_divided_evenly():
    assert [len(part) for part in divide(10, 4)] == [2, 3, 3, 2]
    assert [len(part) for part in divide(7, 2)] == [4, 3] and [len(part) for part in divide(3, 2)] == [2, 1]
    assert [list(part) for part in divide(4, 4)] == [[0], [1], [2], [3]]
    assert stages_of(1, 4, "1F1B") == [1] and stages_of(1, 4, "LoopedBFS") == [1, 5]
    assert stages_of(1, 4, "ZBVZeroBubble") == [1, 6]


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"tie_word_embeddings": True}, "tie_word_embeddings = false"),
        ("llama", {"num_hidden_layers": 1}, "has 1 blocks, fewer than 2 stages"),
        ("granite", {"embedding_multiplier": 12.0}, "changes inputs_embeds before its first block"),
        ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}, "is not embed_tokens, a list of blocks"),
        ("mixtral", {"output_router_logits": True}, "adds a loss of the routers"),
    ],
)
def test_models_that_are_no_pipeline(family, changes, message):
    config = CONFIG_MAPPING[family](vocab_size=64, **(MIXTRAL | {"tie_word_embeddings": False} | changes))
    model = AutoModelForCausalLM.from_config(config)
    before = model.state_dict().keys()
    with pytest.raises(ValueError, match=message):
        check_pipeline_model(model, 2)
    assert model.training and model.state_dict().keys() == before


def test_blocks_that_pass_on_more_than_hidden_states():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **PIPELINE))
    check_pipeline_model(model, 2)
    seen = []
    model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(output))
    model.model.layers[1].register_forward_hook(lambda module, args, output: output + seen[-1])
    with pytest.raises(ValueError, match="pass on more than hidden states"):
        check_pipeline_model(model, 2)


@pytest.mark.parametrize("parallel", [{"dp_shard": 8}, {"tp": 2}, {"cp": 2}, {"ep": 4}, {"pp": 3}], ids=str)
def test_one_process_alone(settings, tmp_path, parallel):
    count = max(parallel.values())
    made = settings(parallel=parallel)
    rejected(f"asks for {count} processes.*--nproc-per-node {count}", job, made, tmp_path / "out")
    if "dp_shard" not in parallel:
        rejected("--memory predicts one GPU; for several give --gpu and --gpus", plan_memory, parse_config(made))


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
    ("llama", {}, {"optim": {"batch": 4, "micro_batches": 4}}, {},
     "to a multiple of 8, as 8, or optim.micro_batches = 2"),
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
    ("llama", {"pp": 2}, PARTS | TENSORWISE, UNTIED,
     "recipe 'tensorwise', whose scales per tensor would depend on how a batch"),
    ("llama", LOOPED, {"optim": {"micro_batches": 4}}, UNTIED | {"num_hidden_layers": 3}, "has 3 blocks, fewer than 4"),
    ("llama", {}, {}, {}, "the output folder"),
]  # fmt: skip


@pytest.mark.thorough
def test_what_ranks_cannot_share_is_an_error_on_all(gloo, settings, tmp_path):
    cases = []
    for family, parallel, sections, changes, _ in MISTAKES:
        made = settings(family, changes, parallel=parallel, **sections)
        cases.append(made | {"model": GPT2} if family == "gpt2" else made)
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
        job(tables, out)
    return type(error.value).__name__, str(error.value), *getattr(error.value, "__notes__", ())


@pytest.mark.thorough
def test_a_stage_that_cannot_run_is_no_lost_rank(gloo, settings, tmp_path):
    made = settings("llama", parallel={"pp": 2}, **PARTS)
    other, failing = gloo.run(stage_job, 2, made, str(tmp_path / "run"))
    assert other == ("SharedError", "rank 1: RuntimeError: this layer cannot run")
    assert failing == ("RuntimeError", "this layer cannot run", "every rank was alive after this error")


def differing_job(tables, out, differences):
    messages, last = [], dist.get_rank() > 0
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
        "parallel.dp_replicate": 2, "optim.lr": 2e-2,
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CPU_PRODUCTS", "exact")
        made = settings(parallel={"tp": 2}, optim={"micro_batches": 2})
        messages = gloo.run(differing_job, 3, made, str(tmp_path), differences)
    assert messages[0] == messages[1] == messages[2]
    for message, key in zip(messages[0], differences, strict=True):
        assert f"the ranks do not train the same: {key} = " in message
        assert "on rank 0; " in message and "on ranks 1, 2. " in message


# --- what goes with every mesh: dropout, checkpointing, remainders of a batch, guard, faults and kills ---


MESHES = LAYOUTS | {"ep": (2, {"ep": 2}), "ep-fsdp": (4, {"ep": 2})}


@pytest.fixture
def dropping(settings):
    def make(layout, attention=0.1, **sections):
        parallel = MESHES[layout][1]
        sections["optim"] = {"micro_batches": 2} | sections.get("optim", {})
        made = settings(None if "ep" in parallel else "starcoder2", parallel=parallel, **sections)
        dropout = {"attention_dropout": attention} | ({} if "ep" in parallel else DROPOUT)
        made["model"]["config"] = (MIXTRAL if "ep" in parallel else STARCODER) | dropout
        return made

    return make


SOME = ["tp", "pp", *map(slow, ("tp-whole", "tp-fsdp", "pp-tp", "pp-fsdp", "cp", "ep"))]


@pytest.mark.slow
@pytest.mark.parametrize("layout", SOME)
def test_checkpointing_recomputes_with_the_same_dropout(gloo, dropping, tmp_path, layout):
    for name in ("none", "full"):
        made = dropping(layout, precision={"level": "fp8", "checkpointing": name}, run={"save_every": 3})
        gloo.run(job, MESHES[layout][0], made, str(tmp_path / name))
    assert losses(tmp_path / "full") == losses(tmp_path / "none")
    shutil.rmtree(checkpoints(tmp_path / "full")[-1])
    gloo.run(job, MESHES[layout][0], made, str(tmp_path / "full"), resume=True)
    assert losses(tmp_path / "full") == losses(tmp_path / "none")
    without = dropping(layout, attention=0.0)
    without["model"]["config"] |= dict.fromkeys(DROPOUT if "ep" not in layout else (), 0.0)
    gloo.run(job, MESHES[layout][0], without, str(tmp_path / "without"))
    assert losses(tmp_path / "without")[0] != losses(tmp_path / "none")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "schedule"), [*(("pp", name) for name in SCHEDULES), ("pp-fsdp", "1F1B"), ("pp-tp", "1F1B")]
)
def test_the_stages_of_a_pipeline_evaluate(gloo, dropping, tmp_path, layout, schedule):
    world, parts = MESHES[layout][0], {"micro_batches": 4, "batch": 8, "ema": 0.9}
    made = dropping(layout, optim=parts, precision={"level": "fp8"}, run={"steps": 4})
    made["parallel"] |= {"schedule": schedule, "reshard_after_forward": schedule not in ZERO_BUBBLE}
    evaluated = made | {"eval": {"every": 1, "fraction": 0.3, "batches": 3, "ema": True}}
    often, rare = (evaluated | {"eval": evaluated["eval"] | {"every": every}} for every in (1, 0))
    results = gloo.run(job, world, often, str(tmp_path / "often"))
    gloo.run(job, world, rare, str(tmp_path / "rare"))
    assert losses(tmp_path / "often") == losses(tmp_path / "rare")
    assert all(result.held_out == results[0].held_out for result in results)
    made["model"]["config"] |= dict.fromkeys((*DROPOUT, "attention_dropout"), 0.0)
    for name, there in (("ranks", made["parallel"]), ("one", {})):
        tables_of_run = evaluated | {"model": made["model"], "parallel": there}
        gloo.run(job, world, tables_of_run, str(tmp_path / name)) if there else job(tables_of_run, tmp_path / name)
    for row, expected in zip(*(read_metrics(tmp_path / name) for name in ("ranks", "one")), strict=True):
        assert row.held_out == pytest.approx(expected.held_out, rel=2e-3)
        assert row.held_out.keys() == {"loss", "loss_high_precision", "loss_ema"}


def spoiled_job(tables, out):
    with harder(LASTING, 3.0, "forward_backward"):  # stages have no loss of their own
        job(tables, out)


def without_job(tables, out, first, count):
    with without_batches(first, count):
        job(tables, out)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp", "tp-whole", "pp", "pp-tp", "cp", "ep"])
def test_all_ranks_roll_back_after_a_spike(gloo, settings, tmp_path, layout):
    world, parallel = MESHES[layout]
    guarded = GUARDED | {"optim": GUARDED["optim"] | {"micro_batches": 2}}
    made = settings(parallel=parallel, **guarded)
    gloo.run(spoiled_job, world, made, str(tmp_path / "spoiled"), timeout=240.0)
    events = [(event["step"], event["event"], event["to"]) for event in read_events(tmp_path / "spoiled")]
    assert events == [(29, "rollback", 20)]
    gloo.run(without_job, world, made, str(tmp_path / "without"), 20, 9, timeout=240.0)
    assert losses(tmp_path / "spoiled") == losses(tmp_path / "without")


RANKS = LAYOUTS | {"fsdp": (2, {}), "ddp": (2, DDP)}


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(RANKS.keys() - {"cp-hsdp"}))
def test_the_autopilot_equalizes_layers(gloo, settings, tmp_path, layout):
    """As in one process, although layers that ranks hold together have no channel scales in the repeated step."""
    world, parallel = RANKS[layout]
    piloted = {"level": "fp8", "autopilot": True}
    parts = {"micro_batches": 2}
    made = settings(fields=PIPELINE, run={"steps": 4}, precision=piloted, parallel=parallel, optim=parts)
    gloo.run(piloted_job, world, made, str(tmp_path / "ranks"))
    mlp = MLP.format(PIPELINE["num_hidden_layers"] - 1)
    equalized = [(f"{mlp}.{name}", "rowwise → rowwise_equalized") for name in ("gate_proj", "up_proj")]
    assert [(layer, change.split(" (")[0]) for layer, change in moves(tmp_path / "ranks")] == equalized


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp", "pp-tp", "pp-fsdp"])
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_equalized"])
def test_statistics_of_the_first_step_of_a_pipeline(gloo, settings, tmp_path, layout, recipe):
    """torch infers shapes in it, on uninitialized memory."""
    world, parallel = LAYOUTS[layout]
    shared = {"inspect": {"every": 1}, "run": {"steps": 3}, "optim": {"micro_batches": 2}}
    made = settings(precision={"level": "fp8", "recipe": recipe}, parallel=parallel, **shared)
    gloo.run(job, world, made, str(tmp_path / "ranks"))
    job(made | {"parallel": {}}, tmp_path / "one")
    assert not read_events(tmp_path / "ranks")
    rows = [{(r.step, r.layer, r.operand): r for r in read_statistics(tmp_path / name)} for name in ("ranks", "one")]
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[1].items():
        assert rows[0][key].sqnr > row.sqnr - 0.7, key
        if key[2] in "xw" and recipe == "rowwise":
            assert rows[0][key].amax == pytest.approx(row.amax, rel=0.2), key
    if recipe == "rowwise_equalized" and layout == "pp":
        for key in rows[0].keys() & {key for key, row in rows[1].items() if row.channel_scales}:
            pairs = zip(rows[0][key].channel_scales, rows[1][key].channel_scales, strict=True)
            assert max(abs(a - b) for a, b in pairs) <= 1, key


def killed_job(tables, out, step):
    """Rank 1 is killed when a step begins; the others leave the text of their error in a file and exit."""

    def kill(trainer):
        if trainer.step == step and trainer.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    with before_steps(kill), pytest.raises(LostRankError) as error:
        job(tables, out)
    Path(f"{out}-{dist.get_rank()}").write_text(str(error.value))
    os._exit(1)  # as a process does whose training raises


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_is_killed(gloo, settings, tmp_path, monkeypatch, mesh):
    monkeypatch.setattr("benchmarks.processes.AFTER_THE_FIRST", 90.0)
    world, parallel = MESHES[mesh]
    made = settings(run={"save_every": 2}, parallel=parallel, optim={"micro_batches": 2})
    gloo.run(job, world, made, str(tmp_path / "whole"), timeout=300.0)
    with pytest.raises(Failed, match="rank 1: its process died"):
        gloo.run(killed_job, world, made, str(tmp_path / "killed"), 4, timeout=300.0)
    for rank in {*range(world)} - {1}:
        assert f"rank {rank}: another rank has ended" in (tmp_path / f"killed-{rank}").read_text()
    gloo.run(job, world, made, str(tmp_path / "killed"), resume=True, timeout=300.0)
    assert_same_ends(made, tmp_path, "killed", "whole")


def overflowing_job(tables, out, step, rank):
    """A run of which one rank's layers make an infinity in a step; whether its parameters are then as before."""
    train_step, kept = Trainer.train_step, []

    def spoiled_step(self):
        spoils, own = self.step == step and self.ranks.rank == rank, dict(self.model.named_modules())
        layers = [layer for name, layer in own.items() if name.endswith("self_attn.o_proj")]
        hooks = [layer.register_forward_hook(lambda module, args, y: y + torch.inf) for layer in layers[:spoils]]
        before = [local_tensor(p).clone() for p in self.model.parameters()]
        row = train_step(self)
        if self.step == step + 1:
            kept.append(all(map(torch.equal, before, map(local_tensor, self.model.parameters()))))
        for hook in hooks:
            hook.remove()
        return row

    with mock.patch.object(Trainer, "train_step", spoiled_step):
        job(tables, out)
    return kept


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["tp", *map(slow, ("pp", "tp-whole", "tp-fsdp", "pp-tp", "pp-fsdp", "cp", "ep"))])
def test_all_ranks_skip_a_step_that_one_overflows(gloo, settings, tmp_path, mesh):
    """One stage, one rank of tensor parallelism or one rank's tokens; no rank's parameters change in that step."""
    world, parallel = MESHES[mesh]
    precision = {"level": "fp8", "parameters": "fp32", "loss_scale": "dynamic"}
    made = settings(parallel=parallel, precision=precision, optim={"micro_batches": 2})
    results = gloo.run(overflowing_job, world, made, str(tmp_path / "out"), 3, world - 1)
    assert results == [[True]] * world
    assert [row.step for row in read_metrics(tmp_path / "out") if row.skipped] == [4]


def reduced_nan_job(tables, out, step):
    """Steps that a run skipped, and its parameters, where one copy alone has a NaN after gradients were reduced."""
    forward_backward, models = Trainer.forward_backward, []

    def spoiled(self, *batch):
        loss = forward_backward(self, *batch)
        if self.step == step and self.ranks.rank == 1:
            next(iter(self.optimizer.gradients().values())).view(-1)[0] = torch.nan
        models[:] = [self.model]
        return loss

    with mock.patch.object(Trainer, "forward_backward", spoiled):
        skipped = job(tables, out).skipped_steps
    return skipped, [p.detach().clone() for p in models[0].parameters()]


@pytest.mark.thorough
def test_all_copies_skip_a_step_in_which_one_has_a_nan(gloo, settings, tmp_path):
    """The norm is summed over the ranks, so DDP's copies, which nothing reduces again, decide together."""
    made = settings(parallel=DDP, precision={"level": "fp8", "parameters": "fp32", "loss_scale": "dynamic"})
    (skipped, one), (other_skipped, other) = gloo.run(reduced_nan_job, 2, made, str(tmp_path / "out"), 3)
    assert skipped == other_skipped == 1 and all(map(torch.equal, one, other))


# --- longer runs of typical architectures, FP8 beside plain bf16 in one process ---


SHAPE = PIPELINE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}
WITHOUT_HEAD_DIM = {key: value for key, value in SHAPE.items() if key != "head_dim"}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
MODELS = {
    "cohere": (WITHOUT_HEAD_DIM | {"logit_scale": 1.0, "num_hidden_layers": 4}, {"pp": 2, "tp": 2}),
    "mixtral": (SHAPE | EXPERTS, {"ep": 2}),
    "qwen3_moe": (WITHOUT_HEAD_DIM | SMALL | {"num_experts": 4}, {"tp": 2}),
    "deepseek_v3": (WITHOUT_HEAD_DIM | LATENT | SMALL | DEEPSEEK, {"ep": 2}),
}
STEPS, SEEDS = 200, (1, 2, 3)


def long_run(family, seed, cache, level="bf16", parallel=None):
    config, _ = MODELS[family]
    return {
        "run": {"steps": STEPS, "seed": seed, "device": "cpu"}, "model": {"type": family, "config": config},
        "data": {"source": "python-stdlib", "sequence_length": 64, "vocab_size": 300, "cache": str(cache)},
        "optim": {"lr": 1e-3, "batch": 8, "micro_batches": 2, "warmup": 20}, "precision": {"level": level},
        "parallel": parallel or {},
    }  # fmt: skip


def float32_job(tables, out):
    with Float32Products():
        return job(tables, out)


def final(out):
    values = losses(out)
    assert len(values) == STEPS
    return sum(values[-20:]) / 20


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_fp8_on_a_hybrid_mesh_is_within_the_noise_of_seeds(gloo, tmp_path, family):
    """At least 95 % of the matrix weights in FP8; the gap to bf16 is less than bf16's own spread over seeds."""
    cache, parallel = tmp_path / "cache", MODELS[family][1]
    plain = {}
    for seed in SEEDS:
        float32_job(long_run(family, seed, cache), tmp_path / f"bf16-{seed}")
        plain[seed] = final(tmp_path / f"bf16-{seed}")
    results = gloo.run(float32_job, 4, long_run(family, 1, cache, "fp8", parallel), str(tmp_path / "fp8"), timeout=3000)
    spread = max(plain.values()) - min(plain.values())
    gap = final(tmp_path / "fp8") - plain[1]
    share = int(results[0].converted.split("% of the matrix weights")[0].rpartition("(")[2])
    print(json.dumps({"model": family, **parallel, "bf16": plain, "gap": gap, "spread": spread, "fp8": share}))
    assert share >= 95 and abs(gap) < spread
    assert checkpoints(tmp_path / "fp8")
