"""Ranks of a hybrid layout that fail: alone, for all to raise, or killed, for all to end and to resume."""

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_hybrid import LAYOUTS, settings, slow  # noqa: F401  a fixture
from test_ranks import job, losses, same, state, tables  # noqa: F401  a fixture

from octavo.tensor import local_tensor
from octavo.train import ConfigError, parse_config, read_metrics, run
from octavo.train import trainer as trainer_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.ranks import LostRankError
from octavo.train.trainer import Trainer
from processes import Failed, gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist
MESHES = LAYOUTS | {"ep": (2, {"ep": 2}), "ep-fsdp": (4, {"ep": 2})}
DDP = {"dp_shard": 1, "dp_replicate": 2}


def broken_stage_job(tables, out):  # noqa: F811
    """A run whose last block raises an error."""
    make = trainer_module.make_optimizer

    def fail(module, args):
        raise RuntimeError("shapes do not fit")

    def hooked(model, *args):
        if (block := dict(model.named_modules()).get("model.layers.3.mlp")) is not None:
            block.register_forward_pre_hook(fail)
        return make(model, *args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError) as error:
        patch.setattr(trainer_module, "make_optimizer", hooked)
        run(parse_config(tables), out=Path(out))
    return str(error.value)


@pytest.mark.thorough
def test_a_stage_that_cannot_run_ends_all(gloo, settings, tmp_path):  # noqa: F811
    made = settings(parallel={"pp": 2}, optim={"micro_batches": 2})
    texts = gloo.run(broken_stage_job, 2, made, str(tmp_path / "out"))
    assert texts[0] == texts[1]
    assert "rank 1: the model cannot run a batch of [4, 16]: shapes do not fit" in texts[0]


def killed_job(tables, out, step):  # noqa: F811
    """Rank 1 is killed when a step begins; the others leave the text of their error in a file and exit."""
    train_step = Trainer.train_step

    def killed_step(self):
        if self.step == step and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LostRankError) as error:
        patch.setattr(Trainer, "train_step", killed_step)
        run(parse_config(tables), out=Path(out))
    Path(f"{out}-{dist.get_rank()}").write_text(str(error.value))
    os._exit(1)  # as a process does whose training raises


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_a_rank_that_is_killed(gloo, settings, tmp_path, monkeypatch, mesh):  # noqa: F811
    """The others raise an error long before the timeout of ten minutes, and all resume as if nothing had been."""
    monkeypatch.setattr("processes._AFTER_THE_FIRST", 90.0)
    world, parallel = MESHES[mesh]
    family = "mixtral" if "ep" in parallel else "llama"
    made = settings(family, run={"save_every": 2}, parallel=parallel, optim={"micro_batches": 2})
    gloo.run(job, world, made, str(tmp_path / "whole"), timeout=300.0)
    with pytest.raises(Failed, match="rank 1: its process died"):
        gloo.run(killed_job, world, made, str(tmp_path / "killed"), 4, timeout=300.0)
    for rank in {*range(world)} - {1}:
        assert f"rank {rank}: another rank has ended" in (tmp_path / f"killed-{rank}").read_text()
    gloo.run(job, world, made, str(tmp_path / "killed"), resume=True, timeout=300.0)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    last = [checkpoints(tmp_path / name)[-1] for name in ("killed", "whole")]
    assert same(state(made, last[0]), state(made, last[1]))


def overflowing_job(tables, out, step, rank):  # noqa: F811
    """A run of which one rank's layers make an infinity in a step; losses, and parameters that this rank then has."""
    train_step, kept = Trainer.train_step, []

    def spoil(module, args, y):
        return y + torch.inf

    def spoiled_step(self):
        spoils, own = self.step == step and self.ranks.rank == rank, dict(self.model.named_modules())
        layers = [layer for name, layer in own.items() if name.endswith("self_attn.o_proj")]
        hooks = [layer.register_forward_hook(spoil) for layer in layers[:spoils]]
        before = [local_tensor(p).clone() for p in self.model.parameters()]
        row = train_step(self)
        if self.step == step + 1:
            kept.append(all(map(torch.equal, before, map(local_tensor, self.model.parameters()))))
        for hook in hooks:
            hook.remove()
        return row

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", spoiled_step)
        run(parse_config(tables), out=Path(out))
    return kept


@pytest.mark.thorough
@pytest.mark.parametrize("mesh", ["tp", "pp", *map(slow, ("tp-whole", "tp-fsdp", "pp-tp", "pp-fsdp", "cp", "ep"))])
def test_all_ranks_skip_a_step_that_one_overflows(gloo, settings, tmp_path, mesh):  # noqa: F811
    """One stage, one rank of tensor parallelism or one rank's tokens; no rank's parameters change in that step."""
    world, parallel = MESHES[mesh]
    precision = {"level": "fp8", "parameters": "fp32", "loss_scale": "dynamic"}
    family = "mixtral" if "ep" in parallel else "llama"
    made = settings(family, parallel=parallel, precision=precision, optim={"micro_batches": 2})
    results = gloo.run(overflowing_job, world, made, str(tmp_path / "out"), 3, world - 1)
    assert results == [[True]] * world
    assert [row.step for row in read_metrics(tmp_path / "out") if row.skipped] == [4]


def reduced_nan_job(tables, out, step):  # noqa: F811
    """Steps that a run skipped, and its parameters, where one copy alone has a NaN after gradients were reduced."""
    forward_backward, models = Trainer.forward_backward, []

    def spoiled(self, *batch):
        loss = forward_backward(self, *batch)
        if self.step == step and self.ranks.rank == 1:
            next(iter(self.optimizer.gradients().values())).view(-1)[0] = torch.nan
        models[:] = [self.model]
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "forward_backward", spoiled)
        skipped = run(parse_config(tables), out=Path(out)).skipped_steps
    return skipped, [p.detach().clone() for p in models[0].parameters()]


@pytest.mark.thorough
def test_all_copies_skip_a_step_in_which_one_has_a_nan(gloo, settings, tmp_path):  # noqa: F811
    """The norm is summed over the ranks, so DDP's copies, which nothing reduces again, decide together."""
    made = settings(parallel=DDP, precision={"level": "fp8", "parameters": "fp32", "loss_scale": "dynamic"})
    (skipped, one), (other_skipped, other) = gloo.run(reduced_nan_job, 2, made, str(tmp_path / "out"), 3)
    assert skipped == other_skipped == 1 and all(map(torch.equal, one, other))
