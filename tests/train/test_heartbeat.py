"""A rank that is gone, and errors of collectives that only read as if one were."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.nn.parallel import DistributedDataParallel

import octavo.comm
from octavo.train.ranks import (
    BEAT_SECONDS,
    GRACE_SECONDS,
    LEFT,
    Heartbeat,
    LostRankError,
    _detect_lost_ranks,
    from_collective,
)
from processes import Failed, gloo  # noqa: F401  a fixture

pytestmark = pytest.mark.dist


def all_reduce():
    dist.all_reduce(torch.ones(4))


def in_fp8():
    octavo.comm.all_reduce(torch.ones(256))


def objects():
    dist.all_gather_object([None] * dist.get_world_size(), "text")


def invalid():
    dist.new_group(timeout=timedelta(seconds=-1))


def out_of_memory():
    raise dist.DistBackendError("NCCL error: unhandled cuda error (out of memory), socket timeout")


def positive():
    raise RuntimeError("Expected timeout to be positive")


def other_shapes():
    return torch.ones(2) @ torch.ones(3)


def lost_job(action, signal_number):
    """The second rank gets a signal, and the first begins something that takes both."""
    model = DistributedDataParallel(nn.Linear(4, 4))
    _set_pg_timeout(timedelta(seconds=3))
    try:
        with _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
            dist.barrier()
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal_number)
            model(torch.ones(4)).sum().backward() if action is None else action()
    except LostRankError as error:
        raise AssertionError(f"lost: {error}") from None


CASES = [
    (all_reduce, signal.SIGKILL),
    (in_fp8, signal.SIGKILL),
    (objects, signal.SIGKILL),
    (None, signal.SIGKILL),
    (all_reduce, signal.SIGSTOP),
]


@pytest.mark.slow
@pytest.mark.parametrize(("action", "signal_number"), CASES)
def test_a_rank_that_is_gone(gloo, action, signal_number):  # noqa: F811
    with pytest.raises(Failed, match=r"rank 1: (its process died|nothing within)") as failed:
        gloo.run(lost_job, 2, action, signal_number, timeout=30.0)
    assert "AssertionError: lost: rank 0: another rank has ended or does not answer" in str(failed.value)


def alive_job(action):
    """What comes of an error while all ranks are there, and how long that takes."""
    start = time.monotonic()
    try:
        with _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
            try:
                action()
            finally:
                dist.barrier()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "__notes__", []), time.monotonic() - start
    return None


@pytest.mark.parametrize("action", [invalid, out_of_memory, positive, other_shapes])
def test_an_error_while_all_ranks_are_alive_is_no_lost_rank(gloo, action):  # noqa: F811
    for name, _, notes, seconds in gloo.run(alive_job, 2, action):
        assert name in ("RuntimeError", "DistBackendError")
        if action in (invalid, out_of_memory):
            assert "every other rank is alive" in notes[0]
        assert seconds < GRACE_SECONDS


def leaving_job():
    """A rank that fails for a reason of its own, before the other begins a collective."""
    try:
        with _detect_lost_ranks(dist.get_rank(), dist.get_world_size()):
            if dist.get_rank() == 1:
                raise ValueError("own")
            time.sleep(2 * BEAT_SECONDS)
            out_of_memory()
    except (LostRankError, ValueError) as error:
        return type(error).__name__


def test_a_rank_that_leaves_is_gone_at_once(gloo):  # noqa: F811
    assert gloo.run(leaving_job, 2) == ["LostRankError", "ValueError"]


def test_who_counts_is_alive():
    store = dist.HashStore()
    beats = [Heartbeat(store, "a", rank, 3) for rank in range(3)]
    assert beats[0].gone() == []
    beats[2].close()
    start = time.monotonic()
    assert beats[0].gone() == [2] and time.monotonic() - start < GRACE_SECONDS
    beats[1].close()
    assert beats[0].gone() == [1, 2]
    beats[0].close()
    assert dist.PrefixStore("octavo/alive/a", store).get("0").decode() == LEFT


def test_one_process_has_no_collectives():
    assert not from_collective(dist.DistBackendError("NCCL error"))


def test_an_error_of_ddp_in_forward_is_a_collectives(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for module, expected in (("torch.nn.parallel.distributed", True), ("my.model", False)):
        scope = {"__name__": module}
        exec("def forward():\n    raise RuntimeError('Connection closed by peer')", scope)
        with pytest.raises(RuntimeError) as caught:
            scope["forward"]()
        assert from_collective(caught.value) is expected
