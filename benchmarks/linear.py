"""One linear layer, forward and backward, quantization included: wall time against bf16 and, where installed, torchao.

Every arm is timed in turn, round after round, and the best round counts: arms of one run meet the same machine.
torchao is imported from `--peers` (a folder made by `pip install --target`) and runs `emulate=True` without a GPU.
"""

import argparse
import copy
import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.environment import write

TORCHAO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def arms(layer: nn.Linear, device: torch.device) -> dict[str, nn.Module]:
    """The models to time, by name."""
    models: dict[str, nn.Module] = {"bf16": copy.deepcopy(layer)}
    for name in octavo.RECIPES:
        models[f"octavo {name}"] = octavo.convert(copy.deepcopy(layer), name, verbose=False)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        print("torchao is not importable: its arms are left out (see --peers)")
        return models
    for name in TORCHAO_RECIPES:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=device.type != "cuda")
        models[f"torchao {name}"] = convert_to_float8_training(nn.Sequential(copy.deepcopy(layer)), config=config)
    return models


def step(model: nn.Module, x: Tensor, g: Tensor) -> Callable[[], None]:
    """One forward and backward, gradients thrown away."""

    def run() -> None:
        x.grad = None
        model.zero_grad()
        model(x).backward(g)

    return run


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """Wall time of one call, the device's work included."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def measure(m: int, k: int, n: int, rounds: int, device: torch.device) -> list[dict[str, Any]]:
    """Best time of each arm at one shape."""
    torch.manual_seed(0)
    layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    steps = {name: step(model, x, g) for name, model in arms(layer, device).items()}
    for run in steps.values():
        run()
    best = {name: min(times) for name, times in _rounds(steps, rounds, device).items()}
    return [
        {"m": m, "k": k, "n": n, "arm": name, "ms": round(1e3 * t, 3), "times_bf16": round(t / best["bf16"], 3)}
        for name, t in best.items()
    ]


def _rounds(steps: dict[str, Callable[[], None]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, run in steps.items():
            times[name].append(seconds(run, device))
    return times


def main(arguments: list[str]) -> None:
    """Measure, print a table, write `results/<device>/linear.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks linear", description=__doc__)
    parser.add_argument("--shape", default="2048,1024,1024", help="M,K,N: tokens, in_features, out_features")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder that holds torchao")
    options = parser.parse_args(arguments)
    sys.path.append(str(options.peers))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    m, k, n = (int(size) for size in options.shape.split(","))
    rows = measure(m, k, n, options.rounds, device)
    for row in rows:
        print(f"{row['arm']:<28} {row['ms']:>9.2f} ms   {row['times_bf16']:>5.2f} × bf16")
    print(f"written to {write('linear', device, rows)}")
