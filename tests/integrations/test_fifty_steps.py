"""50 steps in FP8 by each tool: the losses and weights of a plain loop bit for bit, also after SIGKILL and a resume."""

import signal
from functools import cache
from pathlib import Path

import pytest

from support.tool_loops import run_script

SCRIPT = Path(__file__).parent / "tool_run.py"
TOOLS = {"transformers": "accelerate", "trl": "trl", "accelerate": "accelerate", "lightning": "lightning"}
TOOLS["fabric"] = "lightning"

pytestmark = pytest.mark.slow


def run(tool, folder, kill_at=0):
    return run_script(SCRIPT, folder, tool, folder, kill_at)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses and weights of the plain loop that a tool is compared with."""
    return cache(lambda loop: run(loop, tmp_path_factory.mktemp(loop))[1:])


@pytest.mark.parametrize("tool", TOOLS)
def test_steps_are_those_of_a_plain_loop_also_after_sigkill(tool, plain, tmp_path):
    pytest.importorskip(TOOLS[tool], reason=f"{TOOLS[tool]} is not installed")
    code, before, weights = run(tool, tmp_path, kill_at=37)
    assert code == -signal.SIGKILL and len(before) == 37 and weights is None
    code, after, weights = run(tool, tmp_path)
    expected, expected_weights = plain("plain_with_trl_loss" if tool == "trl" else "plain")
    assert code == 0 and sorted(after) == list(range(31, 51))  # the checkpoint of step 30 was the last
    assert before == {step: expected[step] for step in range(1, 38)} and before | after == expected
    assert weights == expected_weights and len(expected) == 50 and expected[50] < expected[1] / 2
