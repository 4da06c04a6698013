"""The products of torchao's float8 linear (emulated) and of ours on the same operands, as JSON on stdout.

Run by test_torchao.py in a process of its own: Transformers imports torchao wherever it is importable, so it is kept
out of the main environment and put on this process's path alone.
"""

import copy
import dataclasses
import json
import sys

import torch
from torch import nn

import octavo
from octavo.numerics import sqnr

RECIPES = {"tensorwise": "tensorwise", "rowwise": "rowwise", "rowwise_with_gw_hp": "rowwise_hp_wgrad"}
"""torchao's name → ours."""


def torchao_linear(layer: nn.Linear, name: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(name)
    # torchao rounds row scales to powers of two by default; without that both libraries define the same numbers.
    config = dataclasses.replace(config, emulate=True, round_scales_to_power_of_2=False)
    return convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)


def products(model: nn.Module, x: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.backward(g)
    return [y.detach(), x.grad, model[0].weight.grad]


def main() -> None:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        layer = nn.Linear(512, 768, bias=False, dtype=dtype)
        x, g = torch.randn(1024, 512).to(dtype), torch.randn(1024, 768).to(dtype)
        w = layer.weight.detach()
        exact = [x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double()]
        for theirs, ours in RECIPES.items():
            peer = products(torchao_linear(layer, theirs), x, g)
            mine = products(octavo.convert(nn.Sequential(copy.deepcopy(layer)), ours, verbose=False), x, g)
            for product, e, p, m in zip(("y", "dx", "dw"), exact, peer, mine, strict=True):
                agreement = min(sqnr(p, m), 999.0)
                row = {"recipe": ours, "dtype": str(dtype), "product": product, "agreement": agreement}
                rows.append({**row, "torchao": sqnr(e, p), "octavo": sqnr(e, m)})
    json.dump(rows, sys.stdout)


main()
