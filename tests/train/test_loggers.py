"""Metrics on servers that may be slow, away or broken; the servers are stand-ins."""

import json
import sys
import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tiny_runs import refused_run

from octavo.train import run
from octavo.train.record import loggers
from octavo.train.record.loggers import LOGGERS_FILE, ScalarLog


class Server:
    def __init__(self):
        self.runs, self.closed, self.names = {}, [], []

    def remote(self, out, name, config, id):
        self.names.append((name, config))
        id = id or f"run{len(self.runs)}"
        log = lambda step, scalars: self.runs[id].append((step, dict(scalars)))  # noqa: E731
        close = partial(self.closed.append, id)
        return SimpleNamespace(id=id, open=lambda: self.runs.setdefault(id, []), log=log, close=close)


@pytest.fixture
def server(monkeypatch):
    server = Server()
    monkeypatch.setitem(loggers.REMOTES, "wandb", server.remote)
    return server


def log_of(tmp_path, notes, names=("wandb",)):
    return ScalarLog(Mock(), names, tmp_path, "a run", {"run.steps": 3}, notes.append)


def write(log, steps):
    for step in steps:
        log.add_scalar("train/loss", 1.0 / step, step)
        log.add_scalar("train/lr", 0.1, step)


def test_scalars_arrive_by_step_and_a_later_process_goes_on(tmp_path, server):
    notes = []
    log = log_of(tmp_path, notes)
    write(log, (1, 2))
    log.close()
    again = log_of(tmp_path, notes)
    write(again, (2, 3))  # as after a rollback
    again.close()
    expected = [(step, {"train/loss": 1.0 / step, "train/lr": 0.1}) for step in (1, 2, 2, 3)]
    assert server.runs == {"run0": expected} and server.closed == ["run0", "run0"] and not notes
    assert json.loads((tmp_path / LOGGERS_FILE).read_text()) == {"wandb": "run0"}
    assert log._board.close.called and log._board.add_scalar.call_count == 4


@pytest.mark.parametrize("when", ["make", "open", "log", "close"])
def test_a_server_that_fails_is_noted_once_and_training_goes_on(tmp_path, monkeypatch, when):
    make = Mock(return_value=Mock(id="1"))
    (make if when == "make" else getattr(make.return_value, when)).side_effect = ConnectionError(
        "no route to host\nmore"
    )
    monkeypatch.setitem(loggers.REMOTES, "mlflow", make)
    notes = []
    log = log_of(tmp_path, notes, ("mlflow",))
    write(log, range(1, 50))
    log.close()
    assert notes == ["mlflow gets no more metrics (no route to host); training goes on, metrics.jsonl has all"]
    assert log._board.add_scalar.call_count == 98


def test_a_server_that_hangs_takes_a_limited_memory_and_is_noted_once(tmp_path, monkeypatch):
    release, failed = threading.Event(), threading.Event()

    def opened(*_):
        release.wait(20)
        failed.set()
        raise ConnectionError("too late")

    monkeypatch.setattr(loggers, "CLOSING_S", 0.05)
    monkeypatch.setattr(loggers, "PENDING", 10)
    monkeypatch.setitem(loggers.REMOTES, "wandb", opened)
    notes = []
    log = log_of(tmp_path, notes)
    write(log, range(1, 100))
    assert log._senders[0]._queue.qsize() == 10
    log.close()
    release.set()
    assert failed.wait(10)
    log._senders[0]._thread.join(10)
    assert notes == ["wandb gets no more metrics (10 values wait for it); training goes on, metrics.jsonl has all"]


def test_a_client_that_exits_is_noted(tmp_path, monkeypatch):
    """A thread ends in silence with SystemExit."""
    monkeypatch.setitem(loggers.REMOTES, "wandb", lambda *_: sys.exit("no key"))
    notes = []
    log = log_of(tmp_path, notes)
    log.close()
    assert notes == ["wandb gets no more metrics (no key); training goes on, metrics.jsonl has all"]


def test_a_run_and_its_resumption_on_one_server(tmp_path, make_config, server, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: name)
    config = make_config(run={"name": "r", "steps": 2, "loggers": "wandb"}, optim={"warmup": 0})
    run(config, out=tmp_path / "out")
    longer = make_config(run={"name": "r", "steps": 3, "loggers": ["wandb"]}, optim={"warmup": 0})
    result = run(longer, out=tmp_path / "out", resume=True)
    (rows,) = server.runs.values()
    assert [step for step, _ in rows] == [1, 2, 3] and len(server.closed) == 2
    assert rows[-1][1]["train/loss"] == result.losses.final
    name, settings = server.names[0]
    assert name == "r" and settings["run.steps"] == 2 and settings["optim.batch"] == config.optim.batch


def test_a_run_without_the_package_writes_nothing(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr(loggers, "find_spec", lambda name: None)
    config = make_config(run={"steps": 1, "loggers": ["wandb"]}, optim={"warmup": 0})
    refused_run("pip install wandb", config, tmp_path / "out")
