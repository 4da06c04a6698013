"""Integrations whose tool is not installed."""

import sys

import pytest

import octavo


@pytest.mark.parametrize("tool", ["accelerate", "lightning", "torchtitan"])
def test_a_missing_tool_is_named_with_what_installs_it(tool, monkeypatch):
    monkeypatch.delitem(sys.modules, f"octavo.integrations.{tool}", raising=False)
    monkeypatch.delitem(vars(octavo.integrations), tool, raising=False)
    for name in [name for name in sys.modules if name.split(".")[0] == tool]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, tool, None)
    with pytest.raises(ModuleNotFoundError, match=rf"octavo\.integrations\.{tool} needs: pip install {tool}$"):
        getattr(octavo.integrations, tool)


def test_other_attributes():
    assert dir(octavo.integrations) == ["accelerate", "lightning", "torchtitan", "transformers"]
    with pytest.raises(AttributeError, match="has no attribute 'megatron': it has accelerate, lightning, torchtitan, "):
        octavo.integrations.megatron  # noqa: B018
