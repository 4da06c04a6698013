import os
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from octavo.train import model as model_module
from octavo.train.model import draw_once

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}


def language_model() -> Any:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("llama", vocab_size=500, **SHAPE), dtype=torch.bfloat16
    )


def vision_model() -> Any:  # draws a normal distribution that is cut off, in several steps
    return AutoModelForImageClassification.from_config(
        AutoConfig.for_model("vit", image_size=32, patch_size=8, **SHAPE)
    )


class Handmade(nn.Module):
    """Reads, cuts and overwrites what it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32, padding_idx=3)
        self.copy = nn.Parameter(self.embedding.weight.detach().clone())
        self.partly = nn.Linear(32, 64, bias=False)
        nn.init.normal_(self.partly.weight[:32])
        self.rotation = nn.Linear(32, 32)
        nn.init.orthogonal_(self.rotation.weight)
        nn.init.constant_(self.rotation.bias, 7)
        self.scale = nn.Parameter(torch.randn(10))
        self.joined = nn.Parameter(torch.cat([nn.Linear(32, 8).weight, nn.Linear(32, 8).weight]).detach())
        self.replaced = nn.Linear(32, 32)
        self.replaced.weight.data = torch.zeros(32, 32)


def weights(build: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    return draw_once(build, seed).state_dict()


@pytest.mark.parametrize("build", [language_model, vision_model, Handmade])
def test_weights_depend_on_the_seed_and_not_on_threads(monkeypatch, build):
    monkeypatch.setattr(model_module, "CHUNK", 1000)
    first = weights(build)
    torch.randn(100)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    again, other = weights(build), weights(build, 2)
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert [name for name, value in first.items() if value.std() > 0 and torch.equal(value, other[name])] == []


@pytest.mark.parametrize("build", [language_model, vision_model])
def test_they_are_distributed_as_those_of_transformers(build):
    torch.manual_seed(1)
    for name, plain in build().state_dict().items():
        drawn = weights(build)[name].double()
        assert drawn.mean().item() == pytest.approx(plain.double().mean().item(), abs=0.1 / plain.numel() ** 0.5), name
        if plain.numel() > 1000:
            assert drawn.std().item() == pytest.approx(plain.double().std().item(), rel=0.1), name
            assert drawn.abs().max().item() == pytest.approx(plain.double().abs().max().item(), rel=0.5), name


def test_each_weight_is_drawn_once(monkeypatch):
    drawn = []
    draw = model_module._draw
    monkeypatch.setattr(model_module, "_draw", lambda chunk: drawn.append(chunk[1].numel()) or draw(chunk))
    model = draw_once(language_model, 1)
    assert sum(drawn) == sum(weight.numel() for weight in model.parameters() if weight.dim() == 2)


def test_chunks_have_different_numbers(monkeypatch):
    monkeypatch.setattr(model_module, "CHUNK", 64)
    chunks = [row for value in weights(language_model).values() if value.dim() == 2 for row in value.view(-1).split(64)]
    assert len({tuple(chunk.tolist()) for chunk in chunks}) == len(chunks)


def test_a_tensor_is_drawn_before_something_else_touches_it():
    model = draw_once(Handmade, 1)
    assert torch.equal(model.copy, model.embedding.weight) and not model.embedding.weight[3].any()
    assert 0.9 < model.embedding.weight.std() < 1.1
    assert model.partly.weight[:32].std() > 0.8 and model.partly.weight[32:].abs().max() <= 32**-0.5
    assert torch.allclose(model.rotation.weight @ model.rotation.weight.T, torch.eye(32), atol=1e-5)
    assert (model.rotation.bias == 7).all() and model.scale.std() > 0.3
    assert model.joined.abs().max() <= 32**-0.5 and all(part.std() > 0.05 for part in model.joined.split(8))
    assert not model.replaced.weight.any()
