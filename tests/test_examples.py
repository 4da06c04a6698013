"""The examples run as their first lines say."""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
def test_lora_on_a_resident_base(capsys):
    pytest.importorskip("peft")
    runpy.run_path(str(EXAMPLES / "lora_resident.py"))
    output = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert "resident in FP8: 1.031 bytes per parameter" in output and "adapter added after octavo.convert" in output
    assert len(losses) == 4 and losses[-1] < losses[0] and "MiB in torch.bfloat16" in output


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param("one_line", marks=pytest.mark.thorough), pytest.param("llama_own_loop", marks=pytest.mark.slow)],
)
def test_a_plain_loop(name, capsys):
    runpy.run_path(str(EXAMPLES / f"{name}.py"))
    output = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("step")]
    assert "to rowwise" in output and len(losses) >= 4 and losses[-1] < losses[0] / 2


ACCURACY = re.compile(r"did not see: ([\d.]+)%")


@pytest.mark.thorough
def test_a_loop_with_accelerate(capsys):
    state = pytest.importorskip("accelerate.state")
    for shared in (state.AcceleratorState, state.GradientState, state.PartialState):
        shared._reset_state()  # of other tests in this process
    runpy.run_path(str(EXAMPLES / "accelerate_loop.py"), run_name="__main__")
    output = capsys.readouterr().out
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith("epoch")]
    assert len(losses) == 4 and losses[2] < losses[0] / 2  # the second half goes on where the first ended
    assert "converted 2 of 3 linear layers" in output and float(ACCURACY.search(output)[1]) > 60


@pytest.mark.thorough
def test_a_loop_with_fabric(capsys):
    pytest.importorskip("lightning")
    runpy.run_path(str(EXAMPLES / "lightning_fabric.py"))
    output = capsys.readouterr().out
    assert "converted 2 of 3 linear layers" in output and "activations in FP8 in 3 modules" in output
    assert float(ACCURACY.search(output)[1]) > 60


def declare_torchvision_ops():
    """Declare the two operations that torchvision registers fakes for, where its library does not load: the wheel of
    PyPI is for CUDA, and does not fit a torch for CPUs. `import timm` needs no more of them.
    """
    (library,) = Path(importlib.util.find_spec("torchvision").origin).parent.glob("_C.*")
    try:
        torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor boxes, Tensor scores, float limit) -> Tensor")


@pytest.mark.slow
def test_a_vision_transformer_of_timm(capsys):
    if any(importlib.util.find_spec(name) is None for name in ("timm", "torchvision")):
        pytest.skip("timm or torchvision is not installed")
    declare_torchvision_ops()
    runpy.run_path(str(EXAMPLES / "timm_vit.py"), run_name="__main__")
    output = capsys.readouterr().out
    bf16, fp8 = ([line for line in output.splitlines() if line.startswith(name)] for name in ("bf16", "FP8 "))
    assert len(bf16) == len(fp8) == 4 and "converted 9 of 9 linear layers" in output
    accuracies = [float(lines[-1].split()[-1].rstrip("%")) for lines in (bf16, fp8)]
    assert min(accuracies) > 30 and abs(accuracies[0] - accuracies[1]) < 15


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "needs", "expected"),
    [
        ("sft_trl", "trl", "after three comes four"),
        ("diffusers_dit", "diffusers", "FP8   step 60"),
        ("torchtitan_llama3", "torchtitan", "155 linears in FP8, from layers.0.attention"),
        ("accelerate_fsdp2", "accelerate", "converted 14 of 15 linear layers to rowwise"),
    ],
)
def test_examples_of_other_tools(name, needs, expected, capsys):
    pytest.importorskip(needs, reason=f"{needs} is not installed")
    state = pytest.importorskip("accelerate.state")
    for shared in (state.AcceleratorState, state.GradientState, state.PartialState):
        shared._reset_state()
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert expected in output
    losses = [float(line.split()[-1]) for line in output.splitlines() if line.startswith(("step", "FP8 "))]
    assert not losses or losses[-1] < losses[0]


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
