"""Test suites of other projects, as they are and with Octavo in the place of what they test.

  torch         PyTorch's inputs of modules and optimizers (`torch.testing._internal`): converted modules, AdamW, Muon
  torchao       its tests of float8 training, with `octavo.compat.torchao`
  peft          its tests of custom models, whose linears are converted before an adapter goes on
  accelerate    its test of gradient synchronization on two processes, with `octavo.AdamW`
  transformers  its tests of the Trainer, with `octavo.integrations.transformers`: FP8 products, and every switch

All but `torch` need --source, a checkout of the project at the version that is installed, and what its tests import. A
test that passes only without Octavo is listed with the first line of its error.
"""

import copy
import importlib
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

import octavo
from benchmarks import command
from octavo.numerics import sqnr

Results = dict[str, tuple[str, str]]  # Of each test: "passed", "failed" or "skipped", and a message
_VARIABLE = "OCTAVO_SUITE"
_PYTEST = "-q -o addopts= -o junit_family=xunit1 -p no:cacheprovider -p benchmarks.suites".split()
_LEAST_DB, _MARGIN_DB, _DRAWS, _STEPS = 15.0, 6.0, 8, 5


def main(arguments: list[str]) -> None:
    parser = command("suites", __doc__, "suites torch\nsuites peft --source ../peft -k MLP")
    parser.add_argument("name", choices=("torch", *SUITES), help="the suite")
    parser.add_argument("--source", type=Path, help="a checkout of the project")
    parser.add_argument("-k", default="", help="tests to run, as for pytest")
    options = parser.parse_args(arguments)
    if options.name == "torch":
        arms = dict(zip(("plain", "Octavo"), _torch(), strict=True))
    else:
        files, octavo_arms = SUITES[options.name]
        if options.source is None or not (options.source / files[0]).exists():
            parser.error(f"--source is a checkout of {options.name}; it needs {files[0]}")
        arms = {arm: _pytest(options.name, options.source, options.k, arm) for arm in ("plain", *octavo_arms)}
    for arm, results in arms.items():
        for name, (status, message) in results.items():
            if arms["plain"].get(name, ("passed",))[0] == "passed" and status == "failed":
                print(f"{status}: {name}: {message}" if len(arms) == 2 else f"{arm} {status}: {name}: {message}")
    width, states = max(map(len, arms)), ("passed", "failed", "skipped")
    for arm, results in arms.items():
        counts = Counter(status for status, _ in results.values())
        print(f"{arm:<{width}}  " + ", ".join(f"{counts[status]} {status}" for status in states))
    sys.exit(int(not all(arms.values())))


# Suites of pytest. This module is a plugin of it, which puts Octavo into the modules of tests.


def _torchao(tests: Any) -> None:
    compat = importlib.import_module("octavo.compat.torchao")
    vars(tests).update(convert_to_float8_training=compat.convert_to_float8_training, Float8Linear=octavo.nn.Linear)


def _peft(tests: Any) -> None:
    if (wrapper := getattr(tests, "MockTransformerWrapper", None)) is not None:
        original = wrapper.from_pretrained
        wrapper.from_pretrained = lambda *args, **options: _converted(original(*args, **options))


def _accelerate(tests: Any) -> None:
    importlib.import_module("accelerate.test_utils.scripts.test_sync").AdamW = octavo.AdamW


def _transformers(level: str, tests: Any) -> None:
    own = importlib.import_module("octavo.integrations.transformers")
    for names in (vars(importlib.import_module("transformers")), vars(tests)):  # functions of tests import it again
        for name, value in list(names.items()):
            if isinstance(value, type) and issubclass(value, own.Trainer) and not hasattr(value, "precision_of_tests"):
                names[name] = _fp8_trainer(own.with_fp8(value), level)


@cache
def _fp8_trainer(base: Any, level: str) -> Any:
    """The Trainer in FP8 of any test: with its optimizer if it names one, of models with narrow layers or none."""

    class Own(base):  # type: ignore[misc]
        precision_of_tests = level

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, precision=self.precision_of_tests, **options)

        def _check_settings(self) -> None:
            try:
                super()._check_settings()
            except ValueError:
                self.precision = replace(self.precision, states="fp32", master="fp32")
                super()._check_settings()

        def _convert(self, model: nn.Module) -> None:
            try:
                super()._convert(model)
            except ValueError as error:
                if "no layer would be converted" not in str(error):
                    raise
                if not any(type(module) is nn.Linear for module in model.modules()):
                    self.precision = replace(self.precision, matmul="bf16", activations="bf16")
                _converted(model, activations=self.precision.activations)
                super()._convert(model)
            _converted(model)

    return Own


SUITES: dict[str, tuple[tuple[str, ...], dict[str, Callable[[Any], None]]]] = {
    "torchao": (("test/float8/test_base.py", "test/float8/test_float8_utils.py"), {"Octavo": _torchao}),
    "peft": (("tests/test_custom_models.py",), {"Octavo": _peft}),
    "accelerate": (("tests/test_grad_sync.py",), {"Octavo": _accelerate}),
    "transformers": (tuple(f"tests/trainer/test_trainer{end}.py" for end in ("", "_callback", "_jit_checkpoint")),
                     {level: partial(_transformers, level) for level in ("fp8", "fp8+activations+optimizer")}),
}  # fmt: skip
"""Of each suite: its files, and by arm what puts Octavo into a module of tests."""


def _converted(model: nn.Module, **options: Any) -> nn.Module:
    """Convert each linear by itself: of a model, those that are narrow would be left out."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            octavo.convert(module, verbose=False, **options)
    return model


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Called by pytest once the modules of tests are imported."""
    name, _, arm = os.environ.get(_VARIABLE, "").partition(" ")
    if name in SUITES and arm in SUITES[name][1]:
        for tests in {item.module for item in items}:
            SUITES[name][1][arm](tests)


def _pytest(name: str, source: Path, chosen: str, arm: str) -> Results:
    root = Path(__file__).parent.parent
    paths = (root, root / "src", source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "CUDA_VISIBLE_DEVICES": ""}
    environment[_VARIABLE] = f"{name} {arm}"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [sys.executable, "-m", "pytest", *_PYTEST, f"--junit-xml={report}", "-k", chosen, *SUITES[name][0]],
            cwd=source, env=environment, stdout=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        return dict(_read(report)) if report.exists() else {}


def _read(report: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    for case in ElementTree.parse(report).iter("testcase"):
        problem = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        status = "passed" if problem is None else "skipped" if problem.tag == "skipped" else "failed"
        message = "" if problem is None else str(problem.get("message", "")).splitlines()[0][:200]
        yield f"{case.get('classname')}.{case.get('name')}", (status, message)


# PyTorch's inputs of modules and optimizers


def _torch() -> tuple[Results, Results]:
    """Of what Octavo converts and plain PyTorch runs as it is called here."""
    plain: Results = {}
    own: Results = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, run in (*_modules(), *_optimizers()):
            try:
                if run(False):
                    plain[name] = own[name] = "passed", ""
                    run(True)
            except Exception as error:
                if name in plain:
                    own[name] = "failed", f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return plain, own


def _modules() -> Iterator[tuple[str, Callable[[bool], bool]]]:
    for info in importlib.import_module("torch.testing._internal.common_modules").module_db:
        torch.manual_seed(0)
        made = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
        for i, each in enumerate(made):
            yield f"{info.name} {i} {each.desc}", partial(_module, info.module_cls, each)


def _module(cls: Any, given: Any, converted: bool) -> bool:
    """Compare a converted module with the plain one; False if there is nothing to convert."""
    torch.manual_seed(0)
    module = cls(*given.constructor_input.args, **given.constructor_input.kwargs).float()
    twin = _converted(copy.deepcopy(module))
    with suppress(ValueError):  # nothing else to convert
        octavo.convert(twin, activations="fp8", verbose=False)
    if all(type(each) is type(other) for each, other in zip(module.modules(), twin.modules(), strict=True)):
        return False
    expected = _run(module, copy.deepcopy(given.forward_input))
    if converted:
        actual = _run(twin, copy.deepcopy(given.forward_input))
        if expected.keys() != actual.keys():
            raise AssertionError(f"gradients of {sorted(actual)}, plain {sorted(expected)}")
        moved: list[dict[str, Tensor]] = []
        for name, value in expected.items():
            if actual[name].shape == value.shape and sqnr(value, actual[name]) >= _LEAST_DB:
                continue
            moved = moved or [_run(_moved(module, seed), copy.deepcopy(given.forward_input)) for seed in range(_DRAWS)]
            if not sqnr(value, actual[name]) >= (least := min(sqnr(value, each[name]) for each in moved) - _MARGIN_DB):
                raise AssertionError(f"{name} has {sqnr(value, actual[name]):.1f} dB, at least {least:.1f} dB expected")
    return True


def _moved(module: nn.Module, seed: int) -> nn.Module:
    """The plain module with weights off by FP8's rounding: how well its gradients are conditioned (zeros of ReLU)."""
    torch.manual_seed(seed)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1 + 2.0**-5 * torch.randn_like(parameter))
    return twin


def _run(module: nn.Module, given: Any) -> dict[str, Tensor]:
    torch.manual_seed(1)
    outputs = module(*given.args, **given.kwargs)
    tensors = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(y, Tensor)]
    torch.autograd.backward(ys := [y for y in tensors if y.requires_grad], [torch.randn_like(y) for y in ys])
    leaves = {name: p.grad for name, p in module.named_parameters()}
    leaves |= {f"input {i}": x.grad for i, x in enumerate(given.args) if isinstance(x, Tensor) and x.is_leaf}
    values = {f"output {i}": y.detach() for i, y in enumerate(tensors)}
    return values | {name: grad for name, grad in leaves.items() if grad is not None}


def _optimizers() -> Iterator[tuple[str, Callable[[bool], bool]]]:
    classes = {torch.optim.AdamW: octavo.AdamW, torch.optim.Muon: octavo.optim.Muon}
    for info in importlib.import_module("torch.testing._internal.common_optimizers").optim_db:
        if info.optim_cls in classes:
            both = info.optim_cls, classes[info.optim_cls]
            for i, each in enumerate(info.optim_inputs_func("cpu")):
                yield f"{info.name} {i} {each.desc}", partial(_optimizer, both, each.kwargs)
            for i, each in enumerate(info.optim_error_inputs_func("cpu", torch.float32)):
                yield f"{info.name} error {i} {each.optimizer_error_input.desc}", partial(_error, both, each)


def _optimizer(both: tuple[Any, Any], settings: dict[str, Any], own: bool) -> bool:
    values = []
    for cls in (both[0], both[own]):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(32, 128))
        start, optimizer = p.detach().clone(), cls([p], **copy.deepcopy(settings))
        for _ in range(_STEPS):
            p.grad = torch.randn(32, 128)
            optimizer.step()
        values.append(p.detach() - start)
    if not (db := sqnr(*values)) >= _LEAST_DB:
        raise AssertionError(f"the steps moved it otherwise: {db:.1f} dB")
    return True


def _error(both: tuple[Any, Any], given: Any, own: bool) -> bool:
    wrong = given.optimizer_error_input
    try:
        both[own](wrong.params or [nn.Parameter(torch.randn(4, 8))], **wrong.kwargs).step()
    except (TypeError, ValueError):
        return True
    raise AssertionError(f"accepted; PyTorch raises {given.error_type.__name__}: {given.error_regex}")
