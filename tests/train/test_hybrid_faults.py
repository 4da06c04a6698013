"""Ranks of a hybrid layout that fail: alone, for all to raise, or killed, for all to end and to resume."""

import os
import signal
from pathlib import Path

import pytest
from test_hybrid import settings  # noqa: F401  a fixture
from test_ranks import job, losses, same, state, tables  # noqa: F401  a fixture

from octavo.train import ConfigError, parse_config, run
from octavo.train import trainer as trainer_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.ranks import LostRankError
from octavo.train.trainer import Trainer
from processes import Failed, gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist


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
    """Rank 1 is killed when a step begins; the text of the error of the other."""
    train_step = Trainer.train_step

    def killed_step(self):
        if self.step == step and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(LostRankError) as error:
        patch.setattr(Trainer, "train_step", killed_step)
        run(parse_config(tables), out=Path(out))
    raise error.value  # `gloo.run` tells what ranks raised, and that one died


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=str)
def test_a_rank_that_is_killed(gloo, settings, tmp_path, monkeypatch, parallel):  # noqa: F811
    """The other one raises an error within the timeout, and both resume as if nothing had been."""
    monkeypatch.setattr("processes._AFTER_THE_FIRST", 60.0)
    made = settings(run={"save_every": 2}, parallel=parallel, optim={"micro_batches": 2})
    gloo.run(job, 2, made, str(tmp_path / "whole"))
    with pytest.raises(Failed) as failed:
        gloo.run(killed_job, 2, made, str(tmp_path / "killed"), 4)
    assert "rank 1: its process died" in str(failed.value)
    assert "LostRankError: rank 0: another rank has ended" in str(failed.value)
    gloo.run(job, 2, made, str(tmp_path / "killed"), resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    last = [checkpoints(tmp_path / name)[-1] for name in ("killed", "whole")]
    assert same(state(made, last[0]), state(made, last[1]))
