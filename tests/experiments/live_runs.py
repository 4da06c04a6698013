"""A run that goes on line by line, for tests of the live page."""

import json
import time
from dataclasses import replace

import fake_runs

from octavo.inspect.findings import OPERANDS
from octavo.train.disk import LOCK, lock
from octavo.train.record.metrics import DataSize, ExpectedStep, RunResult, RunSetup, read_metrics

EXPECTED = ExpectedStep(
    gpu="H100 SXM", flops=1e15, bf16_flops=989e12, fp8_flops=1979e12, memory=45 * 2**30, tokens_per_s=1100.0
)


class ReplayedRun:
    """Writes the files of a run as it would: `begin`, then `step` by step, then `end`."""

    def __init__(self, folder, source, **changes):
        self.folder = folder
        self._source = fake_runs.folder(source, "fp8 rowwise", **changes)
        self._result = RunResult.read(self._source)
        self._rows = read_metrics(self._source)
        folder.mkdir(exist_ok=True)

    def lock(self):
        """Lock the folder as a process that trains; close the descriptor to be killed."""
        return lock(self.folder / LOCK)

    def begin(self, steps=0):
        """Write what a run writes before its first step, and some steps."""
        (self.folder / "config.toml").write_text((self._source / "config.toml").read_text())
        summary = replace(self._result, steps=0, tokens=0, losses=None, tokens_per_s=None)
        data, started = DataSize(rows=1000, documents=70, tokens=256_001), time.time() - 3700.0
        setup = RunSetup(started=started, steps=len(self._rows), summary=summary, data=data, expected=EXPECTED)
        setup.write(self.folder)
        self.step(*range(1, steps + 1))

    def step(self, *steps, **values):
        """Append some steps."""
        self.append("".join(self.line(step, **values) + "\n" for step in steps))

    def line(self, step, **values):
        """The line of a step."""
        row = self._rows[step - 1]
        times = {"time": time.time() - 1.5 * (len(self._rows) - step), "epoch": step * 4 / 1000}
        figures = {"mfu": 0.4, "peak_memory": 44 * 2**30}
        fields = row.__dict__ | times | figures | values
        return json.dumps({key: value for key, value in fields.items() if value is not None or key == "loss_scale"})

    def sample(self, *steps, layers=("layers.0.q_proj", "layers.1.q_proj"), **values):
        """Append the statistics of some steps."""
        for step in steps:
            rows = [fake_runs.operand(step, layer, operand, **values) for layer in layers for operand in OPERANDS]
            fake_runs.sample(self.folder, *rows)

    def append(self, text, name="metrics.jsonl"):
        """Append text to a file, as a write that is cut anywhere."""
        with (self.folder / name).open("a") as file:
            file.write(text)

    def end(self, stopped="done", steps=None):
        """Write the summary."""
        replace(self._result, stopped=stopped, steps=steps or self._result.steps).write(self.folder)
