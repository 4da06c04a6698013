"""Healthy runs that look odd: the inspector finds nothing in them, the autopilot moves nothing. docs/autopilot.md.

Each kind is something that people train: layers that begin as zeros, adapters, padding, masks, pruned rows, sparse
experts, tiny and large batches, a learning rate that makes a hump. All operands are sampled in every step. In each run
the worst figures are noted, so that the limits can be compared with them.

  python -m benchmarks healthy_runs
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import octavo
from benchmarks.environment import RESULTS, device_name, environment, write_json
from octavo.inspect import Autopilot

Row = dict[str, Any]
WIDTH, VOCABULARY, HIDDEN = 64, 64, 128
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
STEPS = 30


class Block(nn.Module):
    """A residual MLP behind a norm."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] → the same."""
        return x + self.down(self.activation(self.up(self.norm(x))))


class Adapted(nn.Module):
    """A frozen linear beside a trained product of two, the second of zeros: LoRA (Hu et al., arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.a = base.requires_grad_(False), nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """As the base, and the product."""
        return self.base(x) + self.b(self.a(x))


class Experts(nn.Module):
    """Each token goes through one of eight linears; some get a token or none in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        """[T, WIDTH] → the same."""
        weights = self.router(x).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            at = (chosen == number).nonzero().flatten()
            y = y.index_add(0, at, expert(x[at]).to(y.dtype) * weights[at, number, None])
        return x + y


class Model(nn.Module):
    """Embedding of the last bytes → blocks → head."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), nn.Sequential(*blocks)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [T] → logits [T, VOCABULARY]."""
        return self.head(self.norm(self.blocks(self.embed(tokens))))


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run."""

    activation: Callable[[Tensor], Tensor] = F.silu
    change: Callable[[Model], None] = lambda model: None
    """What is done to the model before it is converted."""
    tokens: int = 128
    padding: float = 0.0
    """Share of tokens that are padding: embedded as zeros, without a loss."""
    masked: float = 0.0
    """Share of tokens without a loss."""
    hump: bool = False
    """Whether the learning rate rises 20-fold for some steps."""
    rate: float = 1e-3
    after_step: Callable[[Model], None] = lambda model: None


def _zero_outputs(model: Model) -> None:
    for block in model.blocks:
        nn.init.zeros_(block.down.weight)


def _zero_all_outputs(model: Model) -> None:
    _zero_outputs(model)
    nn.init.zeros_(model.head.weight)


def _adapters(model: Model) -> None:
    for param in model.parameters():
        param.requires_grad_(False)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)


def _prune(model: Model) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.up.weight[::2] = 0
            block.up.bias[::2] = 0
            block.down.weight[:, ::3] = 0


def _prune_most(model: Model) -> None:
    with torch.no_grad():
        for block in model.blocks:
            for layer in (block.up, block.down):
                layer.weight[torch.arange(layer.weight.shape[0]) % 8 != 0] = 0


def _experts(model: Model) -> None:
    model.blocks = nn.Sequential(model.blocks[0], Experts(), Experts())


KINDS = {
    "plain": Kind(),
    "zero_outputs": Kind(change=_zero_outputs),
    "zero_head": Kind(change=_zero_all_outputs),
    "lora": Kind(change=_adapters, rate=1e-2),
    "padding": Kind(padding=0.8),
    "sft_masks": Kind(masked=0.95),
    "relu": Kind(activation=F.relu),
    "squared_relu": Kind(activation=lambda x: F.relu(x).square()),
    "pruned_rows": Kind(change=_prune, after_step=_prune),
    "most_rows_pruned": Kind(change=_prune_most, after_step=_prune_most),
    "sparse_experts": Kind(change=_experts),
    "tiny_batches": Kind(tokens=4),
    "large_batches": Kind(tokens=2048),
    "rate_hump": Kind(hump=True),
}
"""The kinds; each with every recipe, 56 runs."""


def batch(kind: Kind, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Tokens and what follows them, of seed and step alone; -100 where there is no loss."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    tokens = torch.randint(1, VOCABULARY, (kind.tokens,), generator=generator)
    targets = tokens * 7 % VOCABULARY
    draw = torch.rand(kind.tokens, generator=generator)
    tokens = torch.where(draw < kind.padding, 0, tokens)
    targets = torch.where(draw < max(kind.padding, kind.masked), -100, targets)
    targets[0], tokens[0] = 7, 1  # one has a loss
    return tokens, targets


def healthy_run(name: str, recipe: str, seed: int = 1, steps: int = STEPS) -> Row:
    """Train a kind under the autopilot, all steps sampled; a row of the result file."""
    kind = KINDS[name]
    torch.manual_seed(seed)
    model = Model([Block(kind.activation) for _ in range(2)])
    kind.change(model)
    octavo.convert(model, recipe, skip=["head"], verbose=False)
    pilot = Autopilot(model, every=1)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=kind.rate)
    findings, worst, errors, losses = [], {"underflow_xw": 0.0, "underflow_g": 0.0, "sqnr": math.inf}, 0.0, []
    for step in range(1, steps + 1):
        tokens, targets = batch(kind, seed, step)
        for group in optimizer.param_groups:
            group["lr"] = kind.rate * (20 if kind.hump and steps // 3 < step <= steps // 2 else 1)
        measure = {layer.name: [recipe] for layer in octavo.report(model) if layer.recipe} if step % 5 == 1 else {}
        with pilot.watch.step(step, force=True, measure=measure):
            loss = F.cross_entropy(model(tokens).float(), targets)
            loss.backward()
        findings += [str(finding) for finding in pilot.watch.findings()]
        for row in pilot.watch.rows:
            key = "underflow_xw" if row.operand in ("x", "w") else "underflow_g"
            worst[key] = max(worst[key], row.underflow)
            worst["sqnr"] = min(worst["sqnr"], row.sqnr)
        errors = max([errors, *(error[recipe] for error in pilot.watch.errors.values())])
        pilot.act()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        kind.after_step(model)
    return {
        "kind": name, "recipe": recipe, "seed": seed, "steps": steps, "findings": findings,
        "moves": [str(move) for move in pilot.changes], "first_loss": losses[0], "last_loss": losses[-1],
        "worst_product_error": round(errors, 4), **{key: round(value, 4) for key, value in worst.items()},
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    """Train every kind in every recipe; write `results/<device>/healthy_runs.json`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks healthy_runs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each kind and recipe (1)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of each run ({STEPS})")
    parser.add_argument("--out", type=Path, help="folder of the results, other than benchmarks/results/cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    for name in KINDS:
        for recipe in RECIPES:
            for seed in range(1, options.seeds + 1):
                rows.append(healthy_run(name, recipe, seed, options.steps))
                row = rows[-1]
                print(
                    f"{name:<18} {recipe:<12} {len(row['findings'])} findings, {len(row['moves'])} moves; "
                    f"product error {row['worst_product_error']:.3f}, underflow {row['underflow_xw']:.3f} of X and W, "
                    f"{row['underflow_g']:.3f} of G",
                    flush=True,
                )
    cpu = torch.device("cpu")
    path = (options.out or RESULTS / device_name(cpu)) / "healthy_runs.json"
    write_json(path, {"environment": environment(cpu), "rows": rows})
