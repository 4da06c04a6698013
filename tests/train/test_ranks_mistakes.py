"""What may go wrong on one rank of several: all of them end with the same message, at once, and nothing is lost."""

import os
import resource
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
from test_ranks import assert_same_ends
from tiny_runs import LLAMA, ONE_BLOCK, At, job, load, losses, slow

from octavo.train import ConfigError, NonFiniteError, RunResult, parse_config, run
from octavo.train import loop as loop_module
from octavo.train.checkpoint import shards as shards_module
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.checkpoint.store import load_checkpoint
from octavo.train.data.load import load_corpus
from octavo.train.ranks import STARTED_KEY, Ranks, _attempt_prefix, join_ranks
from octavo.train.record.metrics import MetricsWriter
from octavo.train.record.progress import NullProgress
from octavo.train.tasks import language as language_module
from octavo.train.trainer import Trainer
from processes import Failed

pytestmark = pytest.mark.dist


@pytest.fixture
def tables(tables):
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


def test_a_setting_that_differs_is_named_with_its_ranks(gloo, tables, tmp_path):
    one, other = (tables(optim={"lr": lr}, precision={"level": "fp8"}) for lr in (1e-2, 2e-2))
    for message in gloo.run(differing_job, 3, [one, other, other], str(tmp_path / "out")):
        assert message.startswith("SharedError: the ranks do not train the same: optim.lr = 0.01 on rank 0; 0.02 on ")
        assert "ranks 1, 2" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_data_that_differs_is_noticed_and_another_place_for_it_is_none(gloo, tables, tmp_path, text_files):
    here, there = (tables(run={"steps": 3}) for _ in range(2))
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
def test_data_may_take_longer_than_a_step(gloo, tables, tmp_path):
    assert gloo.run(slow_job, 2, tables(run={"steps": 3}), str(tmp_path / "out")) == [3, 3]


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
def test_what_fails_on_the_first_rank_ends_all(gloo, tables, tmp_path, place, error):
    """With an error of any type: the others would wait for the first one until the timeout."""
    settings = tables(run={"steps": 3}, precision={"level": "fp8"})
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
    config = parse_config(settings)
    with join_ranks(config) as ranks:
        trainer = Trainer(config, load(config), ranks.device, ranks=ranks)
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
def test_a_full_disk_of_one_rank(gloo, tables, tmp_path, save):
    for message in gloo.run(full_job, 2, tables(parallel=save), str(tmp_path / "out"), [1]):
        assert message.startswith("SharedError: the checkpoint of step 2 cannot be written: "), message
        assert "rank 1: " in message and "GiB are free there" in message
        assert "Those before it are as they were" in message
    assert left(tmp_path / "out") == ["step-000001"]


def test_a_full_disk_of_one_process(tables, tmp_path):
    message = full_job(tables(), tmp_path / "out", [0])
    assert "the checkpoint of step 2 cannot be written: " in message and "GiB are free there" in message
    assert left(tmp_path / "out") == ["step-000001"]


def elsewhere_job(settings, out):
    writer = shards_module.FileSystemWriter

    def written(folder, **options):
        return writer(Path(f"{folder}-elsewhere") if dist.get_rank() else folder, **options)

    with mock.patch.object(shards_module, "FileSystemWriter", written):
        return timed_error(job, settings, out)[0]


@pytest.mark.thorough
def test_a_folder_that_machines_do_not_share(gloo, tables, tmp_path):
    for message in gloo.run(elsewhere_job, 2, tables(run={"steps": 3}), str(tmp_path / "out")):
        assert "1 of 2 shards are missing (__1_0.distcp), of what was just written" in message
        assert "a folder that all machines share" in message
    assert not checkpoints(tmp_path / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", [{}, {"reshard_after_forward": False}], ids=str)
def test_one_rank_with_its_states_in_host_memory(gloo, tables, tmp_path, parallel):
    settings = tables(model={"type": "llama", "config": LLAMA}, run={"steps": 3}, precision={"level": "fp8"})
    gloo.run(job, 1, settings | {"parallel": {"cpu_offload": True} | parallel}, str(tmp_path / "offload"))
    job(settings, tmp_path / "one")
    assert_same_ends(settings, tmp_path, "offload", "one")


def damaged_job(settings, folder):
    config = parse_config(settings)
    broken = mock.patch.object(torch, "load", side_effect=ConfigError("invalid header"))
    with join_ranks(config) as ranks:
        trainer = Trainer(config, load(config), ranks.device, ranks=ranks)
        state = trainer.model, trainer.optimizer, trainer.loss_scale
        with broken if ranks.rank == 1 else nullcontext():
            return timed_error(load_checkpoint, Path(folder), *state, ranks)


def test_a_checkpoint_that_one_rank_cannot_read(gloo, tables, tmp_path):
    settings = tables(run={"steps": 3})
    job(settings, tmp_path / "run")
    for message, seconds in gloo.run(damaged_job, 2, settings, str(checkpoints(tmp_path / "run")[-1])):
        assert message.startswith("SharedError: ") and "damaged (rank 1: invalid header): remove " in message
        assert seconds < 60


def lost_job(settings, out, place):
    """The second rank ends while it reads a checkpoint, or tries the model."""
    owner, name = {"reading": (shards_module, "load"), "trying": (Trainer, "logits")}[place]
    if dist.get_rank() == 1:
        with mock.patch.object(owner, name, side_effect=lambda *_, **__: os._exit(1)):
            job(settings, out, resume=True)
    raise AssertionError(timed_error(job, settings, out, resume=True)[0])


@pytest.mark.thorough
@pytest.mark.parametrize("place", ["reading", slow("trying")])
def test_a_lost_rank_is_neither_a_damaged_checkpoint_nor_a_bad_model(gloo, tables, tmp_path, place):
    settings = tables(run={"steps": 3})
    gloo.run(job, 2, settings, str(tmp_path / "run"))
    with pytest.raises(Failed, match="rank 1: its process died") as failed:
        gloo.run(lost_job, 2, settings, str(tmp_path / "run"), place)
    assert "AssertionError: LostRankError: rank 0: another rank has ended" in str(failed.value)


@pytest.fixture
def launcher(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    yield store
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_run_that_was_not_begun_is_not_taken_for_one_to_go_on_with(launcher, tables, tmp_path, monkeypatch):
    """torchrun starts a process again that refused a folder; the folder is as little this run's as before."""
    settings = tables(run={"steps": 3})
    out = tmp_path / "out"
    job(settings, out)
    assert launcher.check([STARTED_KEY])
    launcher.delete_key(STARTED_KEY)
    for attempt in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        with pytest.raises(ConfigError, match="already holds a run"):
            job(settings, out)
    launcher.set(STARTED_KEY, "")
    longer = settings | {"run": settings["run"] | {"steps": 4}}
    job(longer, out)
    assert len(losses(out)) == 4


def test_an_interrupt_that_comes_twice_saves(launcher, tables, tmp_path):
    """Ctrl-C reaches the processes themselves, and then once more through torchrun."""

    def interrupt_twice():
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    result = run(parse_config(tables()), out=tmp_path / "out", progress=At(2, interrupt_twice))
    assert (result.stopped, result.steps) == ("sigterm", 2)
    assert [path.name for path in checkpoints(tmp_path / "out")] == ["step-000002"]


def test_a_run_that_diverged_leaves_no_group(launcher, tables, tmp_path):
    with pytest.raises(NonFiniteError):
        job(tables(optim={"lr": 1e38}), tmp_path / "out")
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
