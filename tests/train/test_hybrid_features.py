"""What goes with every mesh: dropout, checkpointing, comparisons, remainders of a batch, guard, faults and kills."""

import os
import shutil
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from test_guard import GUARDED, LASTING, harder, without_batches
from test_hybrid import DROPOUT, LAYOUTS, MLP, STARCODER, moves, piloted_job
from test_ranks import DDP, assert_same_ends
from tiny_runs import MIXTRAL, PIPELINE, before_steps, job, losses, slow

from octavo.parallel.combinations import ZERO_BUBBLE
from octavo.parallel.pipeline_model import SCHEDULES
from octavo.tensor import local_tensor
from octavo.train import read_metrics
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.ranks import LostRankError
from octavo.train.record.metrics import read_events, read_statistics
from octavo.train.trainer import Trainer
from processes import Failed

pytestmark = pytest.mark.dist
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
@pytest.mark.parametrize(
    "layout", ["fsdp", "tp-fsdp", "ddp", "tp", "tp-whole", "cp", "cp-fsdp", "pp", "pp-fsdp", "pp-tp"]
)
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
