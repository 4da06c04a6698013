"""The examples run as their first lines say."""

import importlib.util
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


def output_of(name, capsys, run_name="<run_path>"):
    """What an example prints, and the numbers at the ends of lines that begin with a step or an epoch."""
    state = sys.modules.get("accelerate.state")
    for shared in () if state is None else (state.AcceleratorState, state.GradientState, state.PartialState):
        shared._reset_state()  # of other tests in this process
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=run_name)
    output = capsys.readouterr().out
    return output, [float(number) for number in re.findall(r"^(?:step|epoch|FP8 ).* ([\d.]+)$", output, re.M)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # PEFT asks Transformers for it
def test_lora_on_a_resident_base(capsys):
    pytest.importorskip("peft")
    output, losses = output_of("lora_resident", capsys)
    assert "resident in FP8: 1.031 bytes per parameter" in output and "adapter added after octavo.convert" in output
    assert len(losses) == 4 and losses[-1] < losses[0] and "MiB in torch.bfloat16" in output


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param("one_line", marks=pytest.mark.thorough), pytest.param("llama_own_loop", marks=pytest.mark.slow)],
)
def test_a_plain_loop(name, capsys):
    output, losses = output_of(name, capsys)
    assert "to rowwise" in output and len(losses) >= 4 and losses[-1] < losses[0] / 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "needs", "converted"),
    [("accelerate_loop", "accelerate.state", "layers"), ("lightning_fabric", "lightning", "activations in FP8 in 3")],
)
def test_a_loop_of_another_tool(name, needs, converted, capsys):
    pytest.importorskip(needs)
    output, losses = output_of(name, capsys, "__main__")
    assert "converted 2 of 3 linear layers" in output and converted in output
    assert float(re.search(r"did not see: ([\d.]+)%", output)[1]) > 60
    if needs != "lightning":
        assert len(losses) == 4 and losses[2] < losses[0] / 2  # the second half goes on where the first ended


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
    output, _ = output_of("timm_vit", capsys, "__main__")
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
    output, losses = output_of(name, capsys, "__main__")
    assert expected in output
    assert not losses or losses[-1] < losses[0]


def test_examples_are_short():
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path
