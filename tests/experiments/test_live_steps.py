"""What the live page keeps of a run's steps: as much as it shows of them, in little memory."""

import subprocess
import sys
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.experiments.curves import Curves
from octavo.experiments.live_run import LiveSteps
from octavo.experiments.logged_run import Samples
from octavo.train.record.metrics import StepMetrics, StepTotals

VALUES = st.none() | st.floats(1e-3, 1e3)
ROWS = st.lists(
    st.builds(
        StepMetrics, step=st.just(0), tokens=st.just(0), loss=VALUES, lr=st.floats(0, 1), grad_norm=VALUES,
        loss_scale=st.none(), skipped=st.booleans(), step_s=st.floats(0, 10), tokens_per_s=st.floats(1, 1e6),
        held_out=st.none() | st.builds(lambda loss: {"loss": loss}, VALUES),
        samples=st.none() | st.just([{"prompt": "a", "text": "b"}]), mfu=VALUES,
        peak_memory=st.none() | st.integers(1, 2**38),
    ),
    max_size=12,
)  # fmt: skip


def step(number, row):
    return StepMetrics(**row.__dict__ | {"step": number, "tokens": 10 * number})


@settings(max_examples=30, deadline=None)
@given(ROWS, st.data())
def test_columns_have_what_the_rows_have(rows, data):
    """Also of a step that is read again, as one is that a run completes."""
    steps, rows = LiveSteps(), [step(number, row) for number, row in enumerate(rows, 1)]
    for row in rows:
        if data.draw(st.booleans()):
            steps.append(step(row.step, data.draw(st.sampled_from(rows))))
            steps.pop()
        steps.append(row)
    totals = asdict_of(StepTotals(rows).fields())
    assert asdict_of(steps.totals()) == {
        name: pytest.approx(value, rel=1e-6) if isinstance(value, int | float) else value
        for name, value in totals.items()
    }
    assert steps.samples == [Samples(step=row.step, texts=row.samples) for row in reversed(rows) if row.samples]
    assert steps.recent == rows[-50:] and len(steps) == len(rows)
    for own, expected in zip(asdict(steps.curves).values(), asdict(Curves.of(rows)).values(), strict=True):
        assert own == pytest.approx(expected, rel=1e-6, nan_ok=True)


def asdict_of(fields):
    """The totals with the losses among them."""
    return fields | (asdict(losses) if (losses := fields.pop("losses")) is not None else {})


def test_a_page_needs_no_torch():
    """PyTorch alone takes 180 MB."""
    code = (
        "import sys; from octavo.experiments.live_run import LiveRun; from octavo.experiments.live_server import "
        "LiveServer; from pathlib import Path; LiveServer(LiveRun(Path('.')), port=0).server_close(); "
        "print(sorted({'torch', 'transformers', 'triton', 'tokenizers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr
