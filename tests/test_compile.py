"""torch.compile makes one graph without a break where tensors take the path of a GPU: it asks the device nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.compiled import pretend
from torch import nn

import octavo
from octavo.kernels import registry
from octavo.runtime import execution_context

ROOT = Path(__file__).parents[1]
ONE_GRAPH = {"graphs": 1, "breaks": 0}
RECIPES = list(octavo.RECIPES)


@pytest.fixture
def untraceable_device(monkeypatch):
    """Take CPU tensors for those of a GPU, and let Dynamo refuse each question to the device, as it does there."""
    questions = {execution_context.is_capturing: False, execution_context.stream_of: 0}
    refused = {ask: torch._dynamo.disable(lambda device, answer=answer: answer) for ask, answer in questions.items()}
    for module in [module for name, module in sys.modules.items() if name.startswith("octavo.")]:
        for ask in questions:
            if vars(module).get(ask.__name__) is ask:
                monkeypatch.setattr(module, ask.__name__, refused[ask])
    registry.GPU_TYPES.add("cpu")
    yield
    registry.GPU_TYPES.discard("cpu")


@pytest.mark.thorough
def test_compiled_layers_ask_the_device_nothing(untraceable_device):
    """On each supported torch, which `pretend` is not: it needs a build without CUDA."""
    torch._dynamo.reset()
    layers = nn.Sequential()
    for recipe in RECIPES:
        layers.append(octavo.convert(nn.Linear(64, 64), recipe, verbose=False))
    stored = nn.Sequential(nn.RMSNorm(64), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    layers.append(octavo.convert(stored, activations="fp8", verbose=False))
    x = torch.randn(32, 64, requires_grad=True)
    torch.compile(layers, fullgraph=True, backend="eager")(x).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def compiled_on_device(backend, *cases):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(octavo.__file__).parents[1]), str(ROOT)])}
    command = [sys.executable, "-W", "ignore", "tests/compiled_on_device.py", backend, *cases]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


pretends = pytest.mark.skipif(pretend.missing() is not None, reason=str(pretend.missing()))


@pretends
@pytest.mark.thorough
def test_dynamo_traces_recipes_on_a_pretended_device():
    cases = ["linear tensorwise", "linear rowwise_equalized", "linear blockwise", "layers rowwise stored"]
    assert compiled_on_device("eager", *cases) == {case: ONE_GRAPH for case in cases}


@pretends
@pytest.mark.slow
def test_aotautograd_traces_layers_and_steps_of_every_recipe_on_a_pretended_device():
    cases = [f"{kind} {recipe}" for kind in ("layers", "step") for recipe in RECIPES]
    cases += [f"{case} stored" for case in cases]
    assert compiled_on_device("aot_eager", *cases) == {case: ONE_GRAPH for case in cases}
