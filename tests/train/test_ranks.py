"""Training on several ranks: the losses of one process, checkpoints that any number of ranks reads, and mistakes."""

import os
import resource
import shutil
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiny_runs import LLAMA, ONE_BLOCK, At, job, losses, rejected, slow, trainer_of_ranks
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import octavo.comm
from octavo.train import ConfigError, NonFiniteError, RunResult, parse_config, read_metrics, run
from octavo.train import loop as loop_module
from octavo.train import ranks as ranks_module
from octavo.train.checkpoint import shards as shards_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.checkpoint.shards import state_of
from octavo.train.checkpoint.store import load_checkpoint, read_trainer_state
from octavo.train.data.load import load_corpus
from octavo.train.ranks import Heartbeat, LostRankError, Ranks, _attempt_prefix, _detect_lost_ranks, from_collective
from octavo.train.record.metrics import MetricsWriter
from octavo.train.record.progress import NullProgress
from octavo.train.tasks import language as language_module
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
    with trainer_of_ranks(tables) as trainer:
        load_checkpoint(Path(folder), trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks)
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
    rejected(r"\.metadata is not what was written", job, settings | {"parallel": {}}, tmp_path / "run", resume=True)


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
    assert time.monotonic() - start < ranks_module.GRACE_SECONDS


@pytest.mark.thorough
@on_ranks(2)
def test_a_rank_that_leaves_is_gone():
    expected = pytest.raises(ValueError if dist.get_rank() == 1 else LostRankError)
    with expected, _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
        if dist.get_rank() == 1:
            raise ValueError("own")
        time.sleep(2 * ranks_module.BEAT_SECONDS)
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


# --- what goes wrong on one rank: all end with the same message, at once, and nothing is lost ---


@pytest.fixture
def small(tables):
    return lambda **sections: tables(**{"model": ONE_BLOCK} | sections)


def timed_error(function, *args, **options):
    start = time.monotonic()
    try:
        function(*args, **options)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def differing_job(by_rank, out):
    return timed_error(job, by_rank[dist.get_rank()], out)[0]


@pytest.mark.thorough
def test_data_that_differs_is_noticed_and_another_place_for_it_is_none(gloo, small, tmp_path, text_files):
    here, there = (small(run={"steps": 3}) for _ in range(2))
    there["data"] |= {"source": str(text_files / "[0-9].txt"), "cache": str(tmp_path / "cache")}
    assert gloo.run(differing_job, 2, [here, there], str(tmp_path / "same")) == ["", ""]
    there["data"] |= {"source": str(text_files / "[0-2].txt")}
    for message in gloo.run(differing_job, 2, [here, there], str(tmp_path / "other")):
        assert "the content of data.source = " in message


def slow_job(settings, out):
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2))
    seconds = 4 if dist.get_rank() == 0 else 0
    slowly = lambda *args: (time.sleep(seconds), load_corpus(*args))[1]  # noqa: E731
    with mock.patch.object(language_module, "load_corpus", side_effect=slowly):
        return job(settings, out).steps


@pytest.mark.thorough
def test_data_may_take_longer_than_a_step(gloo, small, tmp_path):
    assert gloo.run(slow_job, 2, small(run={"steps": 3}), str(tmp_path / "out")) == [3, 3]


PLACES = {
    "settings": (loop_module, "_write_description"), "metrics": (MetricsWriter, "__init__"),
    "step": (MetricsWriter, "write"), "close": (MetricsWriter, "__exit__"), "result": (RunResult, "write"),
    "progress": (NullProgress, "step"),
}  # fmt: skip


def first_fails_job(settings, out, place, error):
    """The error of a run whose first rank cannot write something, or has an error in a logger or a progress."""
    start, (owner, name) = time.monotonic(), PLACES[place]
    with mock.patch.object(owner, name, side_effect=error) if dist.get_rank() == 0 else nullcontext():
        with pytest.raises(Exception) as caught:
            job(settings, out)
    return type(caught.value).__name__, str(caught.value), time.monotonic() - start


FULL = OSError(28, "No space left on device")
FAILS = [("metrics", FULL), ("result", FULL), ("progress", KeyError("loss")), ("close", KeyError("loss"))]


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "error"), [*FAILS, slow("settings", FULL), slow("step", FULL)])
def test_what_fails_on_the_first_rank_ends_all(gloo, small, tmp_path, place, error):
    """With an error of any type: the others would wait for the first one until the timeout."""
    settings = small(run={"steps": 3}, precision={"level": "fp8"})
    first, second = gloo.run(first_fails_job, 2, settings, str(tmp_path / "out"), place, error)
    assert first[0] == ("KeyError" if error is not FULL else "SharedError") and second[0] == "SharedError"
    text = "No space left on device" if error is FULL else "'loss'"
    assert all(text in message and seconds < 60 for _, message, seconds in (first, second))


@contextmanager
def full_disk(after):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_job(settings, out, full):
    with trainer_of_ranks(settings) as trainer:
        ranks = trainer.ranks
        for step in range(2):
            trainer.train_step()
            small = full_disk(20_000 if ranks.is_main else 4_000) if step and ranks.rank in full else nullcontext()
            with small:
                message = timed_error(lambda: (trainer.save(Path(out)), trainer.saver.finish()))[0]
    return message


def left(out):
    return [path.name for path in (out / "checkpoints").iterdir()]


@pytest.mark.thorough
@pytest.mark.parametrize("save", [{}, {"async_save": True}], ids=str)
def test_a_full_disk_of_one_rank(gloo, small, tmp_path, save):
    for message in gloo.run(full_job, 2, small(parallel=save), str(tmp_path / "out"), [1]):
        assert message.startswith("SharedError: the checkpoint of step 2 cannot be written: "), message
        assert "rank 1: " in message and "GiB are free there" in message
        assert "Those before it are as they were" in message
    assert left(tmp_path / "out") == ["step-000001"]


def test_a_full_disk_of_one_process(small, tmp_path):
    message = full_job(small(), tmp_path / "out", [0])
    assert "the checkpoint of step 2 cannot be written: " in message and "GiB are free there" in message
    assert left(tmp_path / "out") == ["step-000001"]


def elsewhere_job(settings, out):
    writer = shards_module.FileSystemWriter

    def written(folder, **options):
        return writer(Path(f"{folder}-elsewhere") if dist.get_rank() else folder, **options)

    with mock.patch.object(shards_module, "FileSystemWriter", written):
        return timed_error(job, settings, out)[0]


@pytest.mark.thorough
def test_a_folder_that_machines_do_not_share(gloo, small, tmp_path):
    for message in gloo.run(elsewhere_job, 2, small(run={"steps": 3}), str(tmp_path / "out")):
        assert "1 of 2 shards are missing (__1_0.distcp), of what was just written" in message
        assert "a folder that all machines share" in message
    assert not checkpoints(tmp_path / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [{}, {"reshard_after_forward": False}], ids=str)
def test_one_rank_with_its_states_in_host_memory(gloo, small, tmp_path, parallel):
    settings = small(model={"type": "llama", "config": LLAMA}, run={"steps": 3}, precision={"level": "fp8"})
    gloo.run(job, 1, settings | {"parallel": {"cpu_offload": True} | parallel}, str(tmp_path / "offload"))
    job(settings, tmp_path / "one")
    assert_same_ends(settings, tmp_path, "offload", "one")


def damaged_job(settings, folder):
    broken = mock.patch.object(torch, "load", side_effect=ConfigError("invalid header"))
    with trainer_of_ranks(settings) as trainer, broken if trainer.ranks.rank == 1 else nullcontext():
        state = trainer.model, trainer.optimizer, trainer.loss_scale, trainer.ranks
        return timed_error(load_checkpoint, Path(folder), *state)


def test_a_checkpoint_that_one_rank_cannot_read(gloo, small, tmp_path):
    settings = small(run={"steps": 3})
    job(settings, tmp_path / "run")
    for message, seconds in gloo.run(damaged_job, 2, settings, str(checkpoints(tmp_path / "run")[-1])):
        assert message.startswith("SharedError: ") and "damaged (rank 1: invalid header): remove " in message
        assert seconds < 60


def lost_in_job(settings, out, place):
    """The second rank ends while it reads a checkpoint, or tries the model."""
    owner, name = {"reading": (shards_module, "load"), "trying": (Trainer, "logits")}[place]
    if dist.get_rank() == 1:
        with mock.patch.object(owner, name, side_effect=lambda *_, **__: os._exit(1)):
            job(settings, out, resume=True)
    raise AssertionError(timed_error(job, settings, out, resume=True)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["reading", slow("trying")])
def test_a_lost_rank_is_neither_a_damaged_checkpoint_nor_a_bad_model(gloo, small, tmp_path, place):
    settings = small(run={"steps": 3})
    gloo.run(job, 2, settings, str(tmp_path / "run"))
    with pytest.raises(Failed, match="rank 1: its process died") as failed:
        gloo.run(lost_in_job, 2, settings, str(tmp_path / "run"), place)
    assert "AssertionError: LostRankError: rank 0: another rank has ended" in str(failed.value)


@pytest.fixture
def launcher(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_that_was_not_begun_is_not_taken_for_one_to_go_on_with(launcher, small, tmp_path, monkeypatch):
    """torchrun starts a process again that refused a folder; the folder is as little this run's as before."""
    settings = small(run={"steps": 3})
    out = tmp_path / "out"
    job(settings, out)
    assert launcher.check([ranks_module.STARTED_KEY])
    launcher.delete_key(ranks_module.STARTED_KEY)
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        rejected("already holds a run", job, settings, out)
    launcher.set(ranks_module.STARTED_KEY, "")
    longer = settings | {"run": settings["run"] | {"steps": 4}}
    job(longer, out)
    assert len(losses(out)) == 4


def test_an_interrupt_that_comes_twice_saves(launcher, small, tmp_path):
    """Ctrl-C reaches the processes themselves, and then once more through torchrun."""

    def interrupt_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    result = run(parse_config(small()), out=tmp_path / "out", progress=At(2, interrupt_twice))
    assert (result.stopped, result.steps) == ("sigterm", 2)
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["step-000002"]


def test_a_run_that_diverged_leaves_no_group(launcher, small, tmp_path):
    with pytest.raises(NonFiniteError):
        job(small(optim={"lr": 1e38}), tmp_path / "out")
    assert not dist.is_initialized()


def test_attempts_do_not_meet_the_dead(tmp_path):
    """Ranks of one attempt find each other, whatever earlier ones left in the store and whoever comes first."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=20))
    names = []
    for order in ((1, 2, 0), (0, 2, 1)):
        store.set("octavo/asks/1", "dead")
        with ThreadPoolExecutor(3) as pool:
            found = [(pool.submit(_attempt_prefix, store, rank, 3, 20.0), time.sleep(0.1))[0] for rank in order]
        (name,) = {future.result() for future in found}
        names.append(name)
    assert names[0] != names[1]
    with pytest.raises(RuntimeError, match="ranks 1, 2, 3, 4 and 1 more did not come"):
        _attempt_prefix(dist.HashStore(), 0, 6, 0.1)


def test_only_what_torchrun_started_remembers():
    assert not Ranks(torch.device("cpu")).restarted
    ranks = Ranks(torch.device("cpu"), store=dist.HashStore())
    assert not ranks.restarted
    ranks.begin()
    assert ranks.restarted
