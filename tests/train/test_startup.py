"""From the command to the first step: seconds of each stage, and what is not imported before."""

import json
import os
import subprocess
import sys
import time

import pytest

from octavo.runtime.stopwatch import Stopwatch, timed
from octavo.train import read_metrics

LATER = (
    "plotly", "datasets", "pandas", "torch.distributed.pipelining", "torch._inductor.compile_fx",
    "torch._inductor.codegen", "octavo.experiments.fit_layout", "octavo.parallel.pipeline",
    "octavo.kernels.launch", "octavo.kernels.gemm.triton", "octavo.kernels.quantize.triton",
)  # fmt: skip
"""What no run on a CPU needs before its first step. Transformers itself imports Dynamo and DTensor."""


def test_stages_add_up_without_gaps(monkeypatch):
    wall, cpu = [100.0], [7.0]
    monkeypatch.setattr(time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(time, "process_time", lambda: cpu[0])
    watch = Stopwatch()
    for stage, seconds in [("imports", 4.0), ("weights", 2.0), ("resume", 0.01), ("imports", 1.0)]:
        wall[0], cpu[0] = wall[0] + seconds, cpu[0] + 2 * seconds
        watch.lap(stage)
    with timed("kernel probes"):
        wall[0] += 3
    wall[0] += 3
    assert watch.running
    line = watch.finish("first step")
    stages = "imports 5.0, weights 2.0, first step 3.0, kernel probes 3.0"
    assert line == f"first step after 13.0 s (14.0 of CPUs): {stages}, others 0.0"
    assert watch.stages["imports"] == {"wall": 5.0, "cpu": 10.0} and not watch.running


@pytest.mark.thorough
def test_the_command_reaches_its_first_step(make_config, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(make_config(precision={"level": "fp8"}).to_toml())
    before = time.time()
    command = [sys.executable, "-X", "importtime", "-m", "octavo", "train", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}, check=True)
    stages = json.loads((tmp_path / "out/run.json").read_text())["startup"]
    ended = read_metrics(tmp_path / "out")[0].time
    assert ended is not None and 0.9 < sum(stage["wall"] for stage in stages.values()) / (ended - before) <= 1
    assert {"imports", "configuration", "data", "weights", "loss head", "optimizer", "first step"} < set(stages)
    until_step, found, _ = done.stderr.partition("note: first step after ")
    assert found, done.stderr[-2000:]
    imported = {line.rpartition("|")[2].strip() for line in until_step.splitlines() if line.startswith("import time:")}
    assert "octavo.train.trainer" in imported and sorted(imported.intersection(LATER)) == []
