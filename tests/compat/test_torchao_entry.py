"""torchao's entry point: names and configurations of its recipes, its filters, what cannot be followed."""

import enum
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import octavo
from octavo.compat.torchao import RECIPE_NAMES, convert_to_float8_training

PEERS = Path(sys.prefix) / "peers"


class Float8LinearRecipeName(enum.Enum):
    """As torchao's."""

    ROWWISE = "rowwise"


def model():
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def recipes(module):
    return [row.recipe for row in octavo.report(module)]


@pytest.fixture
def torchao_config(monkeypatch):
    monkeypatch.syspath_prepend(PEERS)
    return pytest.importorskip("torchao.float8", reason="torchao is not installed").Float8LinearConfig


@pytest.mark.parametrize(
    ("config", "recipe"),
    [
        (None, "tensorwise"), ("tensorwise", "tensorwise"), ("rowwise", "rowwise"),
        ("rowwise_with_gw_hp", "rowwise_hp_wgrad"), (Float8LinearRecipeName.ROWWISE, "rowwise"),
    ],
)  # fmt: skip
def test_names(config, recipe):
    module = model()
    assert convert_to_float8_training(module, config=config) is module
    assert recipes(module) == [recipe] * 2


@pytest.mark.thorough
def test_configurations(torchao_config):
    for name, recipe in RECIPE_NAMES.items():
        config = torchao_config.from_recipe_name(name)
        assert recipes(convert_to_float8_training(model(), config=config)) == [recipe] * 2
    assert recipes(convert_to_float8_training(model(), config=torchao_config(pad_inner_dim=True))) == ["tensorwise"] * 2
    with pytest.warns(UserWarning, match=r"octavo\.parallelize\(model, fp8_comm='gather'\)"):
        convert_to_float8_training(model(), config=torchao_config(enable_fsdp_float8_all_gather=True))
    with pytest.raises(ValueError, match="none of torchao's recipes"):
        convert_to_float8_training(model(), config=torchao_config(round_scales_to_power_of_2=True))


def test_filters():
    module = convert_to_float8_training(model(), module_filter_fn=lambda layer, name: name == "1", config="rowwise")
    assert recipes(module) == [None, "rowwise"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [("rowwize", ValueError, "no recipe 'rowwize'.*rowwise"), (3, TypeError, "Float8LinearConfig; got 3")],
)
def test_unknown_configurations(config, error, message):
    module = model()
    with pytest.raises(error, match=message):
        convert_to_float8_training(module, config=config)
    assert type(module[0]) is nn.Linear


@pytest.mark.thorough
def test_it_is_an_attribute():
    code = "import octavo; print(octavo.compat.torchao.convert_to_float8_training.__name__, dir(octavo.integrations))"
    text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert text == "convert_to_float8_training ['accelerate', 'lightning', 'torchtitan', 'transformers']\n"
