"""Runs of weeks: which checkpoints stay, restarts after crashes, torchrun with killed processes, memory."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import assert_same, killed, losses

from octavo.cli.training import _supervised
from octavo.train import RunResult, parse_config, read_metrics, run
from octavo.train.checkpoint.retention import checkpoints, held_out_loss, obsolete_checkpoints
from octavo.train.record.metrics import RESTART, add_event, read_events
from octavo.train.signals import supervise
from octavo.train.trainer import Trainer

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


def last_step(out):
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
@pytest.mark.dist
def test_a_killed_rank_ends_the_run_and_a_restart_goes_on(written, tmp_path):
    config, _ = written(run={"steps": 30, "save_every": 4, "keep": 2})
    with Launched(config, tmp_path / "whole") as whole:
        assert whole.ended() == 0, whole.text()
    assert whole.text().count("report ") == 1  # the first rank talks
    out = tmp_path / "out"
    with Launched(config, out) as first:
        first.until(lambda: last_step(out) >= 6)
        os.kill(first.workers()[1], signal.SIGKILL)
        assert first.ended() != 0
    assert "another rank has ended or does not answer" in first.text()
    assert "the same command with --resume goes on" in first.text()
    assert "Traceback (most recent call last)" not in first.text().split("another rank")[0]
    assert checkpoints(out)
    with Launched(config, out, "--resume", restarts=1) as again:
        again.until(lambda: last_step(out) >= 14)
        os.kill(again.workers()[0], signal.SIGKILL)
        assert again.ended() == 0, again.text()
    assert losses(out) == losses(tmp_path / "whole")
    assert [path.name for path in checkpoints(out)] == ["step-000028", "step-000030"]


@pytest.mark.slow
@pytest.mark.dist
def test_twenty_kills(written, tmp_path):
    config, _ = written(run={"steps": 400, "save_every": 10, "keep": 2})
    with Launched(config, tmp_path / "whole") as whole:
        assert whole.ended() == 0, whole.text()
    out, choice = tmp_path / "out", random.Random(0)
    with Launched(config, out, restarts=20) as launched:
        for _ in range(20):
            before = set(launched.workers())
            target = last_step(out) + choice.randrange(16)
            launched.until(lambda at=target: last_step(out) >= at and len(launched.workers()) == 2)
            time.sleep(choice.random() * 0.2)
            os.kill(choice.choice(launched.workers()), signal.SIGKILL)
            launched.until(lambda old=before: not old & set(launched.workers()))
        assert launched.ended() == 0, launched.text()
    assert losses(out) == losses(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.dist
def test_sigterm_saves_and_one_process_goes_on(written, tmp_path):
    config, parsed = written(run={"steps": 400})
    with Launched(config, tmp_path / "two") as launched:
        launched.until(lambda: last_step(tmp_path / "two") >= 3)
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
@pytest.mark.dist
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


def steps_of(out):
    return [int(path.name.removeprefix("step-")) for path in checkpoints(out)]


RETENTIONS = [  # Newest, every, best
    ((2,), [60, 70]), ((1, 30), [30, 60, 70]), ((1, 0, 1), [20, 70]), ((1, 0, 3), [20, 40, 50, 70]),
    ((1, 30, 2), [20, 30, 40, 60, 70]),
]  # fmt: skip


@pytest.mark.parametrize(("retention", "left"), RETENTIONS, ids=str)
def test_which_checkpoints_stay(retention, left, tmp_path):
    losses = {10: 9.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.0, 60: "damaged", 70: 8.0}
    for step, loss in losses.items():
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        text = "{" if loss == "damaged" else json.dumps({} if loss is None else {"held_out_loss": loss})
        (folder / "trainer.json").write_text(text)
    obsolete = {int(path.name.removeprefix("step-")) for path in obsolete_checkpoints(tmp_path, *retention)}
    assert sorted(set(losses) - obsolete) == left


def test_a_run_keeps_its_best_and_every_nth_checkpoint(make_config, tmp_path, monkeypatch):
    settings = {"run": {"steps": 8, "save_every": 1, "keep": 1, "keep_best": 2, "keep_every": 3}}
    settings["eval"] = {"fraction": 0.2, "batches": 1}
    run(make_config(**settings), out=tmp_path / "run")
    measured = [row.held_out and row.held_out["loss"] for row in read_metrics(tmp_path / "run")]
    assert None not in measured  # at every save
    assert held_out_loss(checkpoints(tmp_path / "run")[-1]) == measured[-1]
    losses = [0.0, 5.0, 2.0, 6.0, 4.0, 3.0, 7.0, None, 8.0]
    monkeypatch.setattr(Trainer, "evaluate", lambda trainer: {"loss": losses[trainer.step]})
    run(make_config(**settings), out=tmp_path / "chosen")
    assert steps_of(tmp_path / "chosen") == [2, 3, 5, 6, 8]


ENDS = """
import json, os, sys
out, ends = sys.argv[1], json.loads(sys.argv[2])
calls = out + "/calls"
done = open(calls).read().splitlines() if os.path.exists(calls) else []
open(calls, "a").write(" ".join(sys.argv[3:]) + "\\n")
open(out + "/config.toml", "w").close()
end = ends[len(done)]
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
EXITS = [  # How processes end, the exit code and the number of processes
    ([0], 0, 1), ([1], 1, 1), ([2], 2, 1), ([-9, 0], 0, 2), ([-9, 2], 2, 2), ([-11, 70, 0], 0, 3), ([70] * 4, 70, 3),
    ([-9] * 4, 137, 3),
]  # fmt: skip


def supervised(out, ends, resume=False):
    """The exit code of processes with these ends, the options of each, and notes."""
    notes, command = [], [sys.executable, "-c", ENDS, str(out), json.dumps(ends)]
    code = supervise(command, out, resume=resume, restarts=2, note=notes.append)
    return code, (out / "calls").read_text().splitlines(), notes


@pytest.mark.parametrize(("ends", "code", "calls"), EXITS, ids=str)
def test_a_crashed_run_is_restarted(ends, code, calls, tmp_path):
    *ended, notes = supervised(tmp_path, ends)
    assert ended == [code, ["", *["--resume"] * (calls - 1)]]
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == [RESTART] * (calls - 1)
    assert len(notes) == calls - 1 + (calls == 3 and code != 0)
    if ends[0] == -9:
        assert notes[0] == "the run was ended by SIGKILL: restart 1 of 2, from the beginning: there is no checkpoint"


def test_a_crash_before_the_folder_is_checked_resumes_no_earlier_run(tmp_path):
    (tmp_path / "config.toml").touch()
    assert supervised(tmp_path, [-9, 2])[:2] == (2, ["", ""]) and not read_events(tmp_path)


def test_a_restart_that_is_not_recorded_is_said(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "events.jsonl").mkdir()
    code, _, notes = supervised(tmp_path, [-9, 0], resume=True)
    message = r"the restart is not recorded: .*events\.jsonl cannot be written: Is a directory"
    assert code == 0 and re.fullmatch(message, notes[1])


def test_a_command_with_a_double_dash_is_supervised(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["octavo", "train", "--", "a.toml"])
    monkeypatch.setattr("octavo.train.signals.supervise", lambda command, out, **options: command[2:])
    assert _supervised(tmp_path, resume=False, restarts=1) == ["octavo", "train", "a.toml", "--supervised"]


def test_a_restart_is_recorded_after_an_event_that_a_kill_left_unfinished(make_config, tmp_path):
    config = make_config(run={"steps": 6, "save_every": 2})
    killed(config, tmp_path / "run", 3)
    whole = json.dumps({"step": 1, "event": "move", "text": "…"}, ensure_ascii=False) + "\n"
    (tmp_path / "run" / "events.jsonl").write_text(whole + '{"step": 3, "ev', encoding="utf-8")
    add_event(tmp_path / "run", 2, RESTART, "the run was ended by SIGKILL")
    run(config, out=tmp_path / "run", resume=True)
    assert [event["event"] for event in read_events(tmp_path / "run")] == ["move", RESTART]


def reached(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
def test_kills_at_random_steps_leave_the_losses_of_an_undisturbed_run(make_config, tmp_path):
    settings = {"run": {"steps": 60, "save_every": 4, "keep_best": 1, "restarts": 6}}
    settings |= {"eval": {"fraction": 0.2, "batches": 1}, "precision": {"level": "fp8+activations+optimizer"}}
    config, out, choice = make_config(**settings), tmp_path / "killed", random.Random(0)
    run(config, out=tmp_path / "whole")
    kills = sorted(choice.sample(range(1, 58), 6))
    (tmp_path / "config.toml").write_text(config.to_toml())
    with Launched(tmp_path / "config.toml", out, torchrun=False) as supervisor:
        for step in kills:
            supervisor.until(lambda step=step: supervisor.workers() and reached(out) >= step)
            (victim,) = supervisor.workers()
            time.sleep(choice.random() * 0.1)
            os.kill(victim, signal.SIGKILL)
            supervisor.until(lambda old=victim: old not in supervisor.workers())
        assert supervisor.ended() == 0, supervisor.text()
    assert supervisor.text().count("was ended by SIGKILL: restart ") == 6, supervisor.text()
    assert_same(tmp_path / "whole", out)
    assert [event["event"] for event in read_events(out)].count(RESTART) == 6
    assert steps_of(out) == steps_of(tmp_path / "whole")


MEASURE = """
import json, sys
from pathlib import Path
import torch
from octavo.train import parse_config, run
from octavo.train.record.progress import NullProgress

torch.set_num_threads(1)

class Sizes(NullProgress):
    sizes = []
    def step(self, row):
        if row.step % 50 == 0:
            kib = next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]
            self.sizes.append(int(kib) * 1024)

run(parse_config(json.loads(sys.argv[1])), out=Path(sys.argv[2]), progress=Sizes())
print(json.dumps(Sizes.sizes))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", ["bf16", "fp8+activations+optimizer"])
def test_memory_does_not_grow_after_the_first_steps(level, make_config, tmp_path):
    settings = {"run": {"steps": 400, "save_every": 20}, "eval": {"every": 10, "batches": 1}}
    settings |= {"precision": {"level": level}, "inspect": {"every": 10}, "guard": {"spike": 8.0}}
    config = make_config(**settings).model_dump(mode="json", exclude_none=True)
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(config), str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    growth = [size - sizes[1] for size in sizes[2:]]  # after step 100
    assert max(growth) < 4 << 20, [f"{step / 2**20:.2f}" for step in growth]
