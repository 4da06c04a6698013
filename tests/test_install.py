"""What each set of dependencies is enough for: packages outside it cannot be imported in the processes here."""

import json
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALL = "pip install 'octavo[train]'"
BLOCK = """
import json, sys

class Installed:
    def __init__(self, finder, blocked):
        self.finder, self.blocked = finder, blocked

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in self.blocked else self.finder.find_spec(name, path, target)

blocked = json.loads(sys.argv.pop(1))
sys.meta_path[:] = [Installed(finder, blocked) for finder in sys.meta_path]
"""
LIBRARY = """
import torch, octavo
from octavo import comm, inspect, nn, numerics, optim, parallel, runtime

model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
batch = torch.randn(4, 32)
print(octavo.plan(model, batch, device="h100"))
print(inspect.memory(model, batch))
inspect.Watch, inspect.Autopilot, octavo.parallelize, comm.all_reduce
try:
    inspect.compare_losses([3.0, 3.1], {"fp8": [3.0, 3.1]})
except ModuleNotFoundError as error:
    print(error)
model = octavo.convert(model, activations="fp8")
optimizer = octavo.AdamW(model.parameters(), lr=1e-3)
model(batch).square().sum().backward()
optimizer.step()
print(octavo.report(model))
octavo.revert(model)
"""


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def with_dependencies(names):
    """The distributions, and those that they need without extras, as far as they are installed."""
    packages = set()
    left = [*names]
    while left:
        name = normal(left.pop())
        if name in packages:
            continue
        try:
            requirements = [Requirement(text) for text in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:
            continue
        packages.add(name)
        left += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return packages


def everything_but(distributions):
    """Top-level modules of this environment that neither the distributions nor their dependencies provide."""
    present = with_dependencies(distributions) | {"octavo"}
    modules = metadata.packages_distributions()
    return [module for module, owners in modules.items() if not {normal(name) for name in owners} & present]


def python(code, blocked, *arguments):
    command = [sys.executable, "-c", BLOCK + code, json.dumps(blocked), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.thorough
def test_the_library_needs_torch_and_numpy_alone():
    core = [Requirement(text).name for text in PROJECT["dependencies"]]
    assert core == ["torch", "numpy"]
    blocked = everything_but(core)
    assert {"rich", "pydantic", "typer", "transformers"} <= set(blocked)
    done = python(LIBRARY, blocked)
    assert done.returncode == 0, done.stderr
    needs_scipy = f"No module named 'scipy', which a comparison of losses needs: {INSTALL}"
    predicted = ("a step of 1 × H100 SXM", "saved for backward", "converted 2 of 2 linear layers to rowwise")
    for words in (needs_scipy, *predicted):
        assert words in done.stdout


RUN = 'import runpy; runpy.run_module("octavo", run_name="__main__")'
SCRIPT = f"from {PROJECT['scripts']['octavo'].replace(':', ' import ')} as main; main()"


@pytest.mark.parametrize("package", ["typer", "rich", "pydantic"])
@pytest.mark.parametrize("start", [RUN, SCRIPT], ids=["python -m octavo", "octavo"])
def test_the_command_names_what_installs_it(start, package):
    done = python(start, [package], "doctor")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: No module named {package!r}, which the command octavo needs: {INSTALL}\n"


@pytest.mark.slow
def test_the_trainer_names_what_installs_it():
    code = f"""
import octavo
try:
    octavo.train.run
except ModuleNotFoundError as error:
    print(error, error.name, sep="|", flush=True)
{SCRIPT}
"""
    done = python(code, ["tokenizers"], "train", "configs/demo.toml")
    line = "No module named 'tokenizers', which {} needs: " + INSTALL
    assert done.stdout == line.format("octavo.train") + "|tokenizers\n"
    assert (done.returncode, done.stderr) == (2, f"error: {line.format('this command')}\n")
