"""Training on several ranks: the losses of one process, checkpoints that any number of ranks reads, mistakes told."""

import os
import shutil
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_runs import job, load, losses, slow
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import octavo.comm
from octavo.train import ConfigError, parse_config, read_metrics, run
from octavo.train import ranks as ranks_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.checkpoint.shards import state_of
from octavo.train.checkpoint.store import load_checkpoint, read_trainer_state
from octavo.train.ranks import (
    BEAT_SECONDS,
    GRACE_SECONDS,
    Heartbeat,
    LostRankError,
    _detect_lost_ranks,
    from_collective,
    join_ranks,
)
from octavo.train.trainer import Trainer
from processes import Failed, on_ranks

pytestmark = pytest.mark.dist

LAYER = "model.layers.0.mlp.up_proj.weight"

EVERYTHING = {"level": "fp8+activations+optimizer"}
DDP = {"dp_shard": 1, "dp_replicate": 2}
MODES = {"zero3": {}, "zero2": {"reshard_after_forward": False}, "ddp": DDP, "offload": {"cpu_offload": True}}


@pytest.mark.thorough
@pytest.mark.parametrize("precision", [slow({}), slow({"level": "fp8", "recipe": "tensorwise"}), EVERYTHING], ids=str)
@pytest.mark.parametrize("mode", ["zero3", *map(slow, ("ddp", "zero2", "offload"))])
def test_losses_are_those_of_one_process(gloo, tables, tmp_path, mode, precision):
    """Within what bf16 gradients of halves of a batch, rounded one by one, differ from those of the whole.

    With everything in FP8 such differences grow fast: one process with four micro-batches is 5e-5 from one with two in
    the first two steps, and 2.7e-3 in the third. So four steps are compared there, the first two closely.
    """
    steps, within = (4, 4e-3) if precision == EVERYTHING else (6, 2e-3)
    settings = tables(precision=precision, parallel=MODES[mode] | {"fp8_comm": "off"}, optim={"micro_batches": 2})
    results = gloo.run(job, 2, settings, str(tmp_path / "two"))
    job(settings | {"parallel": {}}, tmp_path / "one")
    two, one = losses(tmp_path / "two")[:steps], losses(tmp_path / "one")[:steps]
    assert two == pytest.approx(one, rel=within) and two[:2] == pytest.approx(one[:2], rel=4e-4)
    assert results[0].tokens == 6 * 8 * 16 and results[0].losses == results[1].losses


@pytest.mark.thorough
def test_gathering_in_fp8_changes_no_bit(gloo, tables, tmp_path):
    for comm in ("off", "gather"):
        gloo.run(job, 2, tables(precision={"level": "fp8"}, parallel={"fp8_comm": comm}), str(tmp_path / comm))
    assert losses(tmp_path / "gather") == losses(tmp_path / "off")


def opened(tables, folder):
    config = parse_config(tables)
    with join_ranks(config) as ranks:
        trainer = Trainer(config, load(config), ranks.device, ranks=ranks)
        load_checkpoint(Path(folder), trainer.model, trainer.optimizer, trainer.loss_scale, ranks)
        trainer.step = read_trainer_state(Path(folder))["step"]
    return trainer


def copied(tables, folder, out):
    opened(tables, folder).save(Path(out))


def state(tables, folder):
    trainer = opened(tables | {"parallel": {}}, folder)
    return state_of(trainer.model, trainer.optimizer)


def same(one, other):
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]
    assert not different, different
    return True


def assert_same_ends(settings, out, one, other):
    """Two runs with the same losses and gradient norms end in the same state, bit for bit."""
    curves = [[(row.loss, row.grad_norm) for row in read_metrics(out / name)] for name in (one, other)]
    assert curves[0] == curves[1]
    assert same(*(state(settings, checkpoints(out / name)[-1]) for name in (one, other)))


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor


def checkpoints_through(gloo, made, folder, layouts):
    """Train on four ranks, and take the checkpoint through layouts: not a bit changes."""
    gloo.run(job, 4, made, str(folder / "run"), timeout=300.0)
    last = checkpoints(folder / "run")[-1]
    expected = state(made, last)
    assert sum(name.startswith("optimizer.") for name in expected) > 20
    for number, (world, parallel) in enumerate(layouts):
        out, there = folder / str(number), made | {"parallel": parallel}
        if world == 1:
            copied(there, last, out)
        else:
            gloo.run(copied, world, there, str(last), str(out), timeout=300.0)
        last = checkpoints(out)[-1]
        assert (last / "shards").exists() == (world > 1) and same(state(made, last), expected)
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("precision", [{}, {"parameters": "fp32", "level": "fp8"}, EVERYTHING], ids=str)
def test_checkpoints_go_to_any_number_of_ranks(gloo, tables, tmp_path, precision):
    settings = tables(run={"steps": 3}, optim={"batch": 12}, precision=precision)
    layouts = [(2, {}), (1, {}), (3, {}), (4, {"dp_replicate": 2}), (2, {"dp_replicate": 2, "dp_shard": 1})]
    expected = checkpoints_through(gloo, settings, tmp_path, layouts)
    end = "_fp8" if f"optimizer.{LAYER}.exp_avg_fp8" in expected else ""
    assert not torch.equal(*(expected[f"optimizer.{LAYER}.{key}{end}"].float() for key in ("exp_avg", "exp_avg_sq")))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("parallel", "parts"), [({}, 1), ({"tp": 2}, 2), slow({"async_save": True}, 1), slow(DDP, 4), slow({"pp": 2}, 2)]
)
def test_a_resumed_run_is_the_uninterrupted_one(gloo, settings, tmp_path, parallel, parts):
    """Also of DDP, which synchronizes the last of micro-batches whose gradients add up in place."""
    optim, saves = {"micro_batches": parts}, {"save_every": 2, "keep": 2}
    made = settings("llama", run=saves, precision=EVERYTHING, parallel=parallel, optim=optim)
    gloo.run(job, 2, made, str(tmp_path / "whole"))
    assert [path.name for path in checkpoints(tmp_path / "whole")] == ["step-000004", "step-000006"]
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(checkpoints(tmp_path / "part")[-1])
    gloo.run(job, 2, made, str(tmp_path / "part"), resume=True)
    assert_same_ends(made, tmp_path, "part", "whole")


@pytest.mark.thorough
def test_damaged_checkpoints_are_told(gloo, tables, tmp_path):
    settings = tables(run={"steps": 3})
    gloo.run(job, 2, settings, str(tmp_path / "run"))
    shards = checkpoints(tmp_path / "run")[-1] / "shards"
    whole = (shards / "__1_0.distcp").read_bytes()
    for content, message in ((None, "__1_0.distcp is missing"), (whole[:-100], "__1_0.distcp is not what was written")):
        if content is None:
            (shards / "__1_0.distcp").unlink()
        else:
            (shards / "__1_0.distcp").write_bytes(content)
        with pytest.raises(ConfigError, match=f"{message}.*to resume from the one before"):
            job(settings | {"parallel": {}}, tmp_path / "run", resume=True)
        with pytest.raises(Failed, match=message):
            gloo.run(job, 2, settings, str(tmp_path / "run"), resume=True)
    (shards / "__1_0.distcp").write_bytes(whole)
    (shards / ".metadata").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"\.metadata is not what was written"):
        job(settings | {"parallel": {}}, tmp_path / "run", resume=True)


def mistakes_job(cases, out):
    messages = []
    for number, tables in enumerate(cases):
        try:
            run(parse_config(tables), out=Path(out) / str(number))
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def raised(error):
    raise error


OUT_OF_MEMORY = dist.DistBackendError("NCCL error: unhandled cuda error (out of memory), socket timeout")
ACTIONS = {
    "all-reduce": lambda: dist.all_reduce(torch.ones(4)),
    "all-reduce in FP8": lambda: octavo.comm.all_reduce(torch.ones(256)),
    "no timeout": lambda: dist.new_group(timeout=timedelta(seconds=-1)),
    "out of memory": lambda: raised(OUT_OF_MEMORY),
    "a word of timeouts": lambda: raised(RuntimeError("Expected timeout to be positive")),
    "other shapes": lambda: torch.ones(2) @ torch.ones(3),
}


def lost_job(action, signal_number):
    """The second rank gets a signal, and the first begins something that takes both."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    _set_pg_timeout(timedelta(seconds=3))
    try:
        with _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal_number)
            model(torch.ones(4)).sum().backward() if action == "backward" else ACTIONS[action]()
    except LostRankError as error:
        raise AssertionError(f"lost: {error}") from None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "signal_number"),
    [*((action, signal.SIGKILL) for action in ("all-reduce", "all-reduce in FP8", "backward")),
     ("all-reduce", signal.SIGSTOP)],
)  # fmt: skip
def test_a_rank_that_is_gone(gloo, action, signal_number):
    with pytest.raises(Failed, match=r"rank 1: (its process died|nothing within)") as failed:
        gloo.run(lost_job, 2, action, signal_number, timeout=30.0)
    assert "AssertionError: lost: rank 0: another rank has ended or does not answer" in str(failed.value)


@pytest.mark.parametrize("action", list(ACTIONS)[2:])
@on_ranks(2)
def test_an_error_while_all_ranks_are_alive_is_no_lost_rank(action):
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught, _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
        try:
            ACTIONS[action]()
        finally:
            dist.barrier()
    assert type(caught.value) in (RuntimeError, dist.DistBackendError)
    if action in ("no timeout", "out of memory"):
        assert "every other rank is alive" in caught.value.__notes__[0]
    assert time.monotonic() - start < GRACE_SECONDS


@pytest.mark.thorough
@on_ranks(2)
def test_a_rank_that_leaves_is_gone():
    expected = pytest.raises(ValueError if dist.get_rank() == 1 else LostRankError)
    with expected, _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
        if dist.get_rank() == 1:
            raise ValueError("own")
        time.sleep(2 * BEAT_SECONDS)
        raise OUT_OF_MEMORY


def test_who_counts_is_alive(monkeypatch):
    monkeypatch.setattr(ranks_module, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 1.0)
    store = dist.HashStore()
    beats = [Heartbeat(store, "a", rank, 3) for rank in range(3)]
    assert beats[0].gone() == []
    beats[2].close()
    assert beats[0].gone() == [2]
    beats[1].close()
    assert beats[0].gone() == [1, 2]
    beats[0].close()


def test_an_error_of_ddp_in_forward_is_a_collectives_and_one_process_has_none(monkeypatch):
    assert not from_collective(dist.DistBackendError("NCCL error"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for module, expected in (("torch.nn.parallel.distributed", True), ("my.model", False)):
        scope = {"__name__": module}
        exec("def forward():\n    raise RuntimeError('Connection closed by peer')", scope)
        with pytest.raises(RuntimeError) as caught:
            scope["forward"]()
        assert from_collective(caught.value) is expected
