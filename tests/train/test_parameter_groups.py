"""`[[optim.groups]]`: learning rate and weight decay of parameters by pattern."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import LLAMA, MakeConfig, Recorder, assert_same
from torch import nn

from octavo.train import run
from octavo.train.checkpoint.pretrained import LANGUAGE
from octavo.train.config.run_config import ConfigError, parse_config
from octavo.train.config.sections import Optim
from octavo.train.model import build_of_kind
from octavo.train.optimizer import (
    Fp8StateOptimizer,
    MasterWeightOptimizer,
    ParameterSettings,
    TrainerOptimizer,
    matches,
    parameter_settings,
)
from octavo.train.run_plan import plan_memory


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.norm = nn.LayerNorm(64)


def optim(*groups: dict[str, Any], **keys: Any) -> Optim:
    return Optim.model_validate({"lr": 1e-2, "weight_decay": 0.1, "groups": groups} | keys)


def test_the_first_match_counts() -> None:
    groups = (
        {"match": "layers.1.weight", "lr": 1e-4},
        {"match": "layers.*", "weight_decay": 0.5},
        {"match": "norm", "lr": 3e-3},
    )
    settings = parameter_settings(Model(), optim(*groups))
    rows = {name: (row.group, row.lr, row.weight_decay) for name, row in settings.items()}
    assert rows == {
        "embed.weight": (-1, 1e-2, 0.1),
        "layers.0.weight": (1, 1e-2, 0.5),
        "layers.0.bias": (1, 1e-2, 0.5),
        "layers.1.weight": (0, 1e-4, 0.1),
        "layers.1.bias": (1, 1e-2, 0.5),
        "norm.weight": (2, 3e-3, 0.0),
        "norm.bias": (2, 3e-3, 0.0),
    }


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0.norm.weight", "*.norm.*", True),
        ("model.layers.0.norm.weight", "model.layers.0", True),
        ("model.layers.0.norm.weight", "*.bias", False),
        ("model.layers.10.norm.weight", "model.layers.1", False),
    ],
)
def test_patterns(name: str, pattern: str, expected: bool) -> None:
    assert matches(name, pattern) == expected


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "layer.*"}], r'optim.groups: "layer.\*" matches no trained parameter'),
        ([{"match": "norm.wieght"}], r"matches no trained parameter \(did you mean 'norm.weight'\?\)"),
        ([{"match": "*"}, {"match": "norm"}], r'"norm" matches only parameters that "\*" before it matches'),
        ([{"match": "frozen"}], r"matches no trained parameter"),
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing(groups: list[dict[str, Any]], message: str) -> None:
    model = Model()
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ConfigError, match=message):
        parameter_settings(model, optim(*groups))
    parameter_settings(model, optim(*groups), part=True)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"lr": 1.0}], r"missing key optim.groups.match"),
        (
            [{"match": "a", "weight_decy": 1.0}],
            r"unknown key optim.groups.weight_decy .*.weight_decay.",
        ),
        ([{"match": "a", "lr": 0.0}], r"optim.groups.lr: should be greater than 0, got 0.0"),
    ],
    ids=str,
)
def test_mistakes(groups: list[dict[str, Any]], message: str) -> None:
    tables = {"run": {"steps": 1}, "model": {"type": "llama"}, "data": {"source": "x", "sequence_length": 8}}
    with pytest.raises(ConfigError, match=message):
        parse_config(tables | {"optim": {"lr": 1.0, "groups": groups}})


@pytest.mark.parametrize("states", ["fp32", "fp8"])
def test_a_step_equals_that_of_an_optimizer_with_these_settings(states: str) -> None:
    def make(model: nn.Module, section: Optim) -> TrainerOptimizer:
        if states == "fp32":
            return MasterWeightOptimizer(model, section, master=False)
        return Fp8StateOptimizer(model, section, states="fp8", master=None)

    own = {"lr": 1e-3, "weight_decay": 0.3}
    grouped, slow, fast = Model(), Model(), Model()
    optimizers = (
        make(grouped, optim({"match": "layers.1.weight"} | own, clip=0.0)),
        make(slow, optim(**own, clip=0.0)),
        make(fast, optim(clip=0.0)),
    )
    for number in range(3):
        for model, optimizer, lr in zip((grouped, slow, fast), optimizers, (1e-2, 1e-3, 1e-2), strict=True):
            torch.manual_seed(number)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            optimizer.step(lr / (number + 1), torch.ones(()))  # as a schedule does
    weights = [dict(model.named_parameters()) for model in (grouped, slow, fast)]
    for name, param in weights[0].items():
        if name != "layers.1.weight":
            assert torch.equal(param, weights[2][name]), name
        elif states == "fp32":
            assert torch.equal(param, weights[1][name])
        else:  # the random bits of FP8 moments depend on the number of the parameter
            torch.testing.assert_close(param, weights[1][name], rtol=0, atol=2e-4)
            assert (param - weights[2][name]).abs().max() > 5e-3


def test_without_groups_states_are_numbered_as_before() -> None:
    """Checkpoints of one process number parameters with weight decay first, then the others, each in their order."""
    settings = parameter_settings(Model(), optim())
    names = sorted(settings, key=settings.__getitem__)
    assert names[:3] == ["embed.weight", "layers.0.weight", "layers.1.weight"]
    assert names[3:] == ["layers.0.bias", "layers.1.bias", "norm.weight", "norm.bias"]
    assert settings["norm.bias"] == ParameterSettings(undecayed=True, lr=1e-2, weight_decay=0.0)


def test_a_run_with_groups_resumes_bitwise(make_config: MakeConfig, tmp_path: Path) -> None:
    groups = [{"match": "*norm*", "lr": 1e-3}, {"match": "model.layers.0", "weight_decay": 0.0}]
    sections: dict[str, Any] = {"optim": {"groups": groups}, "run": {"steps": 6, "save_every": 3}}
    sections["precision"] = {"level": "fp8+activations+optimizer"}
    seen = Recorder()
    run(make_config(**sections), out=tmp_path / "whole", progress=seen)
    rows = [note.split("  ") for note in seen.notes if " elements)" in note]
    assert [row[0] for row in rows] == ["others", "*norm*", "model.layers.0"]
    assert [row[-2].strip() for row in rows] == ["lr 0.01", "lr 0.001", "lr 0.01"]
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    run(make_config(**sections), out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    with pytest.raises(ConfigError, match=r"another run: there optim.groups = "):
        run(make_config(**sections | {"optim": {"groups": groups[:1]}}), out=tmp_path / "cut", resume=True)


def test_which_parameters_muon_optimizes(make_config: MakeConfig) -> None:
    config = make_config(optim={"name": "muon", "groups": [{"match": "*.o_proj", "muon": False}]})
    model = build_of_kind(config, LANGUAGE, {"vocab_size": 300})
    settings = parameter_settings(model, config.optim)
    own = {name.split(".")[-2] for name, setting in settings.items() if not setting.adamw}
    assert own == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}
    with pytest.raises(ConfigError, match=r'"\*embed\*" matches .*embed_tokens.weight, which muon = true does not fit'):
        parameter_settings(model, optim({"match": "*embed*", "muon": True}, name="muon"))
    with pytest.raises(ConfigError, match=r'optim.groups: muon is for optim.name = "muon"'):
        make_config(optim={"groups": [{"match": "*.o_proj", "muon": False}]})
    with pytest.raises(ConfigError, match=r'optim.name = "muon" with parallel.tp = 2: Muon needs whole matrices'):
        make_config(optim={"name": "muon"}, parallel={"tp": 2})


@pytest.mark.parametrize(
    "precision", [pytest.param({}, marks=pytest.mark.slow), {"level": "fp8+activations+optimizer"}], ids=str
)
def test_a_run_with_muon_resumes_bitwise(precision: dict[str, Any], make_config: MakeConfig, tmp_path: Path) -> None:
    sections: dict[str, Any] = {"optim": {"name": "muon"}, "run": {"save_every": 3}, "precision": precision}
    seen = Recorder()
    result = run(make_config(**sections), out=tmp_path / "whole", progress=seen)
    assert [note.split("  ")[0] for note in seen.notes if "  muon  " in note] == ["others"]
    assert result.losses is not None and result.losses.final < result.losses.first
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-000006")
    run(make_config(**sections), out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_plan_counts_the_states_of_muon(make_config: MakeConfig) -> None:
    sections: dict[str, Any] = {"precision": {"level": "fp8+activations+optimizer"}}
    sections["model"] = {"type": "llama", "config": LLAMA | {"hidden_size": 128, "num_attention_heads": 2}}
    states = {
        name: plan_memory(make_config(optim={"name": name}, **sections)).at_peak["optimizer states"]
        for name in ("adamw", "muon")
    }
    attention, mlp = 128 * 128 * 2 + 128 * 64 * 2, 3 * 128 * 64
    matrices = 3 * (attention + mlp)
    saved = states["adamw"] - states["muon"]
    assert saved == pytest.approx(matrices * (1 + 5 / 128), rel=0.15)  # groups of 64 columns; granularity
