"""50 steps in FP8 by each tool: the losses and weights of a plain loop bit for bit, also after SIGKILL and a resume."""

import signal
from pathlib import Path

import pytest

from support.tool_loops import run_script

SCRIPT = Path(__file__).parent / "tool_run.py"
TOOLS = {"transformers": "accelerate", "trl": "trl", "accelerate": "accelerate", "lightning": "lightning"}
TOOLS["fabric"] = "lightning"

pytestmark = pytest.mark.slow


def run(tool, folder, recipe, kill_at=0):
    return run_script(SCRIPT, folder, tool, folder, recipe, kill_at)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    known = {}

    def losses_and_weights(tool, recipe):
        key = ("plain_with_trl_loss" if tool == "trl" else "plain"), recipe
        if key not in known:
            known[key] = run(key[0], tmp_path_factory.mktemp(recipe), recipe)[1:]
        return known[key]

    return losses_and_weights


@pytest.mark.parametrize("tool", TOOLS)
def test_steps_are_those_of_a_plain_loop(tool, plain, tmp_path):
    pytest.importorskip(TOOLS[tool], reason=f"{TOOLS[tool]} is not installed")
    _, losses, weights = run(tool, tmp_path, "rowwise")
    expected, expected_weights = plain(tool, "rowwise")
    assert losses == expected and len(losses) == 50
    assert weights == expected_weights
    assert losses[50] < losses[1] / 2


@pytest.mark.parametrize("tool", TOOLS)
def test_a_killed_run_goes_on_from_the_checkpoint_of_its_tool(tool, plain, tmp_path):
    pytest.importorskip(TOOLS[tool], reason=f"{TOOLS[tool]} is not installed")
    code, before, weights = run(tool, tmp_path, "rowwise_equalized", kill_at=37)
    assert code == -signal.SIGKILL and len(before) == 37 and weights is None
    code, after, weights = run(tool, tmp_path, "rowwise_equalized")
    expected, expected_weights = plain(tool, "rowwise_equalized")
    assert code == 0 and sorted(after) == list(range(31, 51))  # the checkpoint of step 30 was the last
    assert before == {step: expected[step] for step in range(1, 38)} and before | after == expected
    assert weights == expected_weights
