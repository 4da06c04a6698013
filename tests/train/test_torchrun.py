"""`torchrun … -m octavo train`: what a person starts, and what happens when a process is killed under it."""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import losses

from octavo.train import RunResult, read_metrics
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.config.run_config import parse_config
from octavo.train.loop import run

pytestmark = pytest.mark.dist

PATIENCE = 600.0  # Seconds that anything here may take, on a busy machine


class Launched:
    """A run under torchrun, or under its own supervisor; killed at the end, if it still runs."""

    def __init__(self, config, out, *options, torchrun=True, restarts=0):
        self.log = out.parent / f"{out.name}.log"
        self._file = self.log.open("w")
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
        command = ["-m", "octavo", "train", str(config), "--out", str(out), *options]
        self._process = subprocess.Popen(
            [sys.executable, *(launcher if torchrun else ()), *command], stdout=self._file, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        for worker in self.workers():
            os.kill(worker, signal.SIGKILL)
        self._process.wait()
        self._file.close()

    @property
    def pid(self):
        return self._process.pid

    def workers(self):
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return sorted(map(int, path.read_text().split())) if path.exists() else []

    def until(self, condition):
        end = time.monotonic() + PATIENCE
        while not (value := condition()):
            assert self._process.poll() is None, self.text()
            assert time.monotonic() < end, self.text()
            time.sleep(0.002)
        return value

    def ended(self):
        return self._process.wait(PATIENCE)

    def text(self):
        return self.log.read_text()


def steps_of(out):
    return max((row.step for row in read_metrics(out)), default=0)


@pytest.fixture
def written(make_config, tmp_path):
    def write(**sections):
        config = make_config(**{"optim": {"batch": 8}, "precision": {"level": "fp8+activations+optimizer"}} | sections)
        tables = config.model_dump(exclude_none=True) | {"parallel": {"fp8_comm": "gather", "timeout": 60.0}}
        path = tmp_path / "config.toml"
        path.write_text(parse_config(tables).to_toml())
        return path, parse_config(tables)

    return write


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_a_restart_goes_on(written, tmp_path):
    config, _ = written(run={"steps": 30, "save_every": 4, "keep": 2})
    with Launched(config, tmp_path / "whole") as whole:
        assert whole.ended() == 0, whole.text()
    assert whole.text().count("report ") == 1  # the first rank talks
    out = tmp_path / "out"
    with Launched(config, out) as first:
        first.until(lambda: steps_of(out) >= 6)
        os.kill(first.workers()[1], signal.SIGKILL)
        assert first.ended() != 0
    assert "another rank has ended or does not answer" in first.text()
    assert "the same command with --resume goes on" in first.text()
    assert "Traceback (most recent call last)" not in first.text().split("another rank")[0]
    assert checkpoints(out)
    with Launched(config, out, "--resume", restarts=1) as again:
        again.until(lambda: steps_of(out) >= 14)
        os.kill(again.workers()[0], signal.SIGKILL)
        assert again.ended() == 0, again.text()
    assert losses(out) == losses(tmp_path / "whole")
    assert [path.name for path in checkpoints(out)] == ["step-000028", "step-000030"]


@pytest.mark.slow
def test_twenty_kills(written, tmp_path):
    config, _ = written(run={"steps": 400, "save_every": 10, "keep": 2})
    with Launched(config, tmp_path / "whole") as whole:
        assert whole.ended() == 0, whole.text()
    out, choice = tmp_path / "out", random.Random(0)
    with Launched(config, out, restarts=20) as launched:
        for _ in range(20):
            before = set(launched.workers())
            target = steps_of(out) + choice.randrange(16)
            launched.until(lambda at=target: steps_of(out) >= at and len(launched.workers()) == 2)
            time.sleep(choice.random() * 0.2)
            os.kill(choice.choice(launched.workers()), signal.SIGKILL)
            launched.until(lambda old=before: not old & set(launched.workers()))
        assert launched.ended() == 0, launched.text()
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.thorough
def test_sigterm_saves_and_one_process_goes_on(written, tmp_path):
    config, parsed = written(run={"steps": 400})
    with Launched(config, tmp_path / "two") as launched:
        launched.until(lambda: steps_of(tmp_path / "two") >= 3)
        for worker in (launched.pid, *launched.workers()):
            os.kill(worker, signal.SIGTERM)
        launched.ended()
    stopped = RunResult.read(tmp_path / "two")
    assert stopped.stopped == "sigterm", launched.text()
    assert [path.name for path in checkpoints(tmp_path / "two")] == [f"step-{stopped.steps:06d}"]
    more = parsed.run.model_copy(update={"steps": stopped.steps + 2})
    result = run(parsed.model_copy(update={"run": more}), out=tmp_path / "two", resume=True)
    assert result.steps == stopped.steps + 2 and result.losses.final < losses(tmp_path / "two")[0]


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_unreachable_rendezvous(written, tmp_path, rank):
    """The first rank that nobody joins, and another that finds nobody."""
    config, _ = written()
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
    here = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    options = ["parallel.timeout=2", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "octavo", "train", str(config), *options]
    result = subprocess.run(command, env=os.environ | here, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 2, result.stderr
    assert f"rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "out").exists()
