"""The progress bar and the log lines of a run: what they show, and that a model cannot steer the terminal."""

import time
from io import StringIO

from fake_runs import result
from rich.console import Console

from octavo.experiments.progress_bars import ProgressBars
from octavo.train.config.run_config import parse_config
from octavo.train.record.metrics import ExpectedStep, RunSetup, StepMetrics

CONFIG = parse_config(
    {
        "run": {"steps": 40}, "model": {"type": "llama"}, "data": {"source": "x", "sequence_length": 8},
        "optim": {"lr": 1.0},
    }
)  # fmt: skip
EXPECTED = ExpectedStep(gpu="H100 SXM", flops=1.0, bf16_flops=1.0, fp8_flops=1.0, memory=45 * 2**30)


def lines(*, terminal=False, width=200, **values):
    """What is written for a tenth of a run, whose losses are the numbers of its steps; `values`: of its last step."""
    console = Console(file=StringIO(), force_terminal=terminal, width=width, color_system=None)
    setup = RunSetup(started=time.time(), steps=40, summary=result(), data=None, expected=EXPECTED)
    fields = {"lr": 1e-3, "grad_norm": 1.25, "loss_scale": None, "skipped": False, "step_s": 0.1, "tokens_per_s": 80.0}
    with ProgressBars(console) as bars:
        bars.start(CONFIG, 0, setup)
        for step in range(1, 5):
            last = values if step == 4 else {}
            bars.step(StepMetrics(**{"step": step, "tokens": 8 * step, "loss": float(step)} | fields | last))
    return console.file.getvalue().splitlines()


def test_a_log_line_has_everything():
    (line,) = lines(mfu=0.412, peak_memory=44 * 2**30, epoch=0.5)
    assert line == (
        "BF16  step 4/40  loss 3.0000  80 tokens/s  MFU 41.2%  |grad| 1.25  lr 1.0e-03  "
        "peak 44.0 GiB (45.0 predicted)  epoch 0.50"
    )
    assert "MFU" not in lines()[0] and "peak" not in lines()[0]  # a CPU
    assert "loss not finite" in lines(loss=None)[0] and "|grad| not finite" in lines(grad_norm=None)[0]


def test_the_bar_takes_the_width_it_has():
    for width, shown in ((200, ["loss", "MFU", "peak", "epoch"]), (110, ["loss"]), (80, ["loss"])):
        drawn = lines(terminal=True, width=width, mfu=0.412, peak_memory=44 * 2**30, epoch=0.5)
        last = [line for line in drawn if "4/40" in line][-1]
        assert all(name in last for name in shown) and ("epoch" in last) == (width == 200)
        assert "left" in last and len(last.rpartition("\x1b")[2]) < width + 8


def test_samples_are_printed_and_steer_no_terminal():
    written = lines(samples=[{"prompt": "def ", "text": "f(x):\n\x1b[2Jreturn\r\x07"}])
    assert written[1:] == ["BF16  step 4  sample of 'def ':", "    f(x):", "    \ufffd[2Jreturn\ufffd\ufffd"]
