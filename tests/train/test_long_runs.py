"""Runs of weeks: which checkpoints stay, restarts after crashes, and the memory of the process."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from test_torchrun import Launched
from tiny_runs import assert_same, killed

from octavo.train import read_metrics, run
from octavo.train.checkpoint.retention import checkpoints, held_out_loss, obsolete_checkpoints
from octavo.train.config.run_config import parse_config
from octavo.train.record.metrics import RESTART, add_event, read_events
from octavo.train.signals import supervise
from octavo.train.trainer import Trainer


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


@pytest.mark.parametrize(("ends", "code", "calls"), EXITS, ids=str)
def test_a_crashed_run_is_restarted(ends, code, calls, tmp_path):
    notes = []
    command = [sys.executable, "-c", ENDS, str(tmp_path), json.dumps(ends)]
    assert supervise(command, tmp_path, resume=False, restarts=2, note=notes.append) == code
    assert (tmp_path / "calls").read_text().splitlines() == ["", *["--resume"] * (calls - 1)]
    events = read_events(tmp_path)
    assert [event["event"] for event in events] == [RESTART] * (calls - 1)
    assert len(notes) == calls - 1 + (calls == 3 and code != 0)
    if ends[0] == -9:
        assert notes[0] == "the run was ended by SIGKILL: restart 1 of 2, from the beginning: there is no checkpoint"


def test_a_crash_before_the_folder_is_checked_resumes_no_earlier_run(tmp_path):
    (tmp_path / "config.toml").touch()
    command = [sys.executable, "-c", ENDS, str(tmp_path), json.dumps([-9, 2])]
    assert supervise(command, tmp_path, resume=False, restarts=2, note=lambda text: None) == 2
    assert (tmp_path / "calls").read_text().splitlines() == ["", ""]
    assert not read_events(tmp_path)


def test_a_restart_that_is_not_recorded_is_said(tmp_path):
    (tmp_path / "config.toml").touch()
    (tmp_path / "events.jsonl").mkdir()
    notes, command = [], [sys.executable, "-c", ENDS, str(tmp_path), json.dumps([-9, 0])]
    assert supervise(command, tmp_path, resume=True, restarts=1, note=notes.append) == 0
    assert re.fullmatch(r"the restart is not recorded: .*events\.jsonl cannot be written: Is a directory", notes[1])


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
    assert parse_config(config).run.steps == 400
    command = [sys.executable, "-W", "ignore", "-c", MEASURE, json.dumps(config), str(tmp_path / "run")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])
    growth = [size - sizes[1] for size in sizes[2:]]  # after step 100
    assert max(growth) < 4 << 20, [f"{step / 2**20:.2f}" for step in growth]
