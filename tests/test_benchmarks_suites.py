"""Suites of other projects: what Octavo is put into, and what counts as passed."""

import types

import pytest
import torch
from benchmarks import suites
from torch import nn

import octavo


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A project whose tests look at the model that PEFT's tests would build."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_custom_models.py").write_text(
        "import pytest\nfrom torch import nn\n"
        "class MockTransformerWrapper:\n"
        "    from_pretrained = staticmethod(lambda name: nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 2)))\n"
        "@pytest.mark.parametrize('layer', [0, 1])\n"
        "def test_is_plain(layer):\n"
        "    assert type(MockTransformerWrapper.from_pretrained('MLP')[layer]) is nn.Linear, 'converted'\n"
        "def test_passes(): pass\n"
        "def test_skipped(): pytest.skip('no GPU')\n"
    )
    return tmp_path


@pytest.mark.thorough
def test_a_suite_runs_plain_and_with_octavo(checkout, capsys):
    with pytest.raises(SystemExit, match="0"):
        suites.main(["peft", "--source", str(checkout)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["plain   3 passed, 0 failed, 1 skipped", "Octavo  1 passed, 2 failed, 1 skipped"]
    assert lines[0].startswith("failed: ") and "test_is_plain[0]" in lines[0] and "converted" in lines[0]


def test_a_suite_needs_its_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        suites.main(["torchao", "--source", str(tmp_path)])
    assert "needs test/float8/test_base.py" in capsys.readouterr().err


def entry(*arguments, **options):
    return types.SimpleNamespace(args=arguments, kwargs=options)


def test_modules_and_optimizers_of_pytorch(monkeypatch):
    given = types.SimpleNamespace(constructor_input=entry(64, 32), forward_input=entry(torch.randn(8, 64)))
    assert suites._module(nn.Linear, given, True)
    assert not suites._module(nn.Unflatten, types.SimpleNamespace(constructor_input=entry(1, (2, 2))), True)
    monkeypatch.setattr(suites, "_converted", lambda module: octavo.convert(nn.Linear(64, 32), verbose=False))
    with pytest.raises(AssertionError, match="dB"):
        suites._module(nn.Linear, given, True)
    both = torch.optim.AdamW, octavo.AdamW
    assert suites._optimizer(both, {"lr": 1e-2}, True)
    with pytest.raises(AssertionError, match="otherwise"):
        suites._optimizer((torch.optim.AdamW, torch.optim.SGD), {"lr": 1e-2}, True)
    wrong = types.SimpleNamespace(optimizer_error_input=types.SimpleNamespace(params=None, kwargs={"lr": -1.0}))
    assert suites._error(both, wrong, True)
    wrong.optimizer_error_input.kwargs, wrong.error_type, wrong.error_regex = {"lr": 1.0}, ValueError, "lr"
    with pytest.raises(AssertionError, match="accepted"):
        suites._error(both, wrong, True)
