"""Frameworks read the class names and signatures of modules: those of a converted module are the original's."""

import copy
import inspect
import pickle
import typing

import pytest
import torch
from accelerate.utils.dataclasses import get_module_class_from_name
from models import MLP, llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import octavo
from octavo.numerics.recipe import equalized
from support.moe_models import mixture

ACTIVATIONS = octavo.Precision(matmul="fp8", activations="fp8")


class Named(nn.Linear):
    """A linear whose argument has another name."""

    scale: "Unwritten"  # noqa: F821  an annotation that nothing resolves

    def forward(self, hidden: torch.Tensor) -> "torch.Tensor":
        """Multiply."""
        return nn.functional.linear(hidden, self.weight, self.bias)


class Block(nn.Module):
    """Owns linears, and stores what its operations save."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), Named(128, 64)

    def forward(self, x: torch.Tensor, residual: typing.Optional["torch.Tensor"] = None, *, scale: float = 1.0):
        """Add the MLP."""
        y = self.down(self.act(self.up(self.norm(x)))) * scale
        return y if residual is None else y + residual


KINDS = {
    "linear": (nn.Linear, lambda: nn.Linear(64, 64), {}),
    "equalized linear": (nn.Linear, lambda: nn.Linear(64, 64), {"recipe": equalized("rowwise")}),
    "resident linear": (nn.Linear, lambda: nn.Linear(64, 64).requires_grad_(False), {"frozen": "fp8"}),
    "subclass of a linear": (Named, lambda: nn.Sequential(Named(64, 64)), {}),
    "Conv1D": (Conv1D, lambda: nn.Sequential(Conv1D(64, 64)), {}),
    "experts": (None, lambda: mixture("mixtral"), {}),
    "storing experts": (None, lambda: mixture("mixtral"), {"precision": ACTIVATIONS}),
    "storing norm, gated MLP and activation": (LlamaRMSNorm, llama, {"precision": ACTIVATIONS}),
    "storing block and root": (Block, Block, {"precision": ACTIVATIONS}),
    "storing blocks": (nn.LayerNorm, lambda: nn.Sequential(Block(), MLP(), Block()), {"precision": ACTIVATIONS}),
}


def described(module: nn.Module) -> dict[str, typing.Any]:
    """What frameworks read of a module."""
    owner, forward = type(module), type(module).forward
    facts = {name: getattr(owner, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")}
    facts |= {
        f"forward.{name}": getattr(forward, name) for name in ("__name__", "__qualname__", "__module__", "__doc__")
    }
    facts |= {"annotations": inspect.get_annotations(owner), "hints": typing.get_type_hints(forward)}
    facts |= {"signature": inspect.signature(forward), "bound": inspect.signature(module.forward)}
    return facts | {
        "source": inspect.getsource(forward),
        "forward": inspect.unwrap(forward),
        "repr": module._get_name(),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_module_is_described_as_before(kind):
    owner, make, arguments = KINDS[kind]
    model = make()
    before = [(described(module), type(module)) for module in model.modules()]
    octavo.convert(model, verbose=False, **arguments)
    changed = [module for module, (_, plain) in zip(model.modules(), before, strict=True) if type(module) is not plain]
    assert changed and (owner is None or any(isinstance(module, owner) for module in changed))
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for module, twin, (facts, plain) in zip(again.modules(), model.modules(), before, strict=True):
            assert described(module) == facts and isinstance(module, plain) and type(module) is type(twin)
            assert get_module_class_from_name(again, plain.__name__).__name__ == plain.__name__


def test_an_argument_passes_by_the_name_that_the_signature_shows():
    x = torch.randn(16, 64)
    model = octavo.convert(nn.Sequential(Named(64, 64)), verbose=False)
    assert torch.equal(model[0](hidden=x), model[0](x))
    with pytest.raises(TypeError, match="positional arguments"):
        model[0](x, hidden=x)
    with pytest.raises(TypeError, match=r"Named.forward\(\) has no argument 'input'; it has \['hidden'\]"):
        model[0](input=x)
