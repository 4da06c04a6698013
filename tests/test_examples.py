"""The examples run as their first lines say."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
def test_lora_on_a_resident_base(capsys):
    pytest.importorskip("peft")
    runpy.run_path(str(EXAMPLES / "lora_resident.py"))
    output = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert "resident in FP8: 1.031 bytes per parameter" in output and "adapter added after octavo.convert" in output
    assert len(losses) == 4 and losses[-1] < losses[0] and "MiB in torch.bfloat16" in output


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
