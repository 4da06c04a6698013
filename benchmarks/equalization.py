"""Channel equalization: what it saves on synthetic operands, and how often s has to be refreshed; docs/numerics.md.

The operands are normal, but for channels of X, W or both. The models train for 300 steps, in bf16, in `rowwise`, and
with s refreshed every 1, 10, 50 and 200 passes: a small Llama on the demonstration's corpus, and two cases of
`benchmarks.adversarial_cases`, whose channels have outliers, and grow. Arms of one seed start from the same weights and
see the same batches; gaps are to bf16 on the same seed.

  python -m benchmarks equalization
  python -m benchmarks equalization --operands        # the first table only, half a minute
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import octavo
from benchmarks.adversarial_cases import CASES
from benchmarks.adversarial_task import Unwatched, losses
from benchmarks.environment import RESULTS, device_name, environment, write_json
from octavo.nn.equalized import Equalizer
from octavo.numerics import Recipe, equalized, get_recipe, sqnr

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
M, K, N = 1024, 512, 768
STEPS, EVERY = 300, (1, 10, 50, 200)
MEASURED_BYTES = 12
"""Bytes per element of X in bf16 that a measuring pass moves: two reads, and float32 products written and read."""
LLAMA = (
    "model.config.hidden_size=64", "model.config.intermediate_size=192", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2", "model.config.max_position_embeddings=64", "data.sequence_length=64",
    "data.vocab_size=512", "optim.batch=4",
)  # fmt: skip
"""What makes the demonstration's model small."""
MODELS = ("llama", "outlier_channels", "swiglu_growth")


def _two(size: float) -> Tensor:
    return torch.where(torch.arange(K) < 2, size, 1.0)


def _few() -> Tensor:
    return torch.where(torch.arange(K) % 97 == 0, 300.0, 1.0)


OPERANDS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "normal": lambda: (torch.randn(M, K), torch.randn(N, K) * 0.03),
    "2 channels x 3e4": lambda: (torch.randn(M, K) * _two(3e4), torch.randn(N, K) * 0.03 / _two(3e4)),
    "2 channels x 3e5": lambda: (torch.randn(M, K) * _two(3e5), torch.randn(N, K) * 0.03 / _two(3e5)),
    "1 in 97 x 300": lambda: (torch.randn(M, K) * _few(), torch.randn(N, K) * 0.03),
    "log-normal": lambda: (
        torch.randn(M, K) * torch.exp(2 * torch.randn(K)), torch.randn(N, K) * 0.03 * torch.exp(-1.5 * torch.randn(K))
    ),
}  # fmt: skip
"""X [M,K] and W [N,K]; in two of them W makes up for X's channels, in the last one its own are log-normal."""


def operands(name: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """X, W and G of a seed, float32; G is normal with log-normal tokens."""
    torch.manual_seed(seed)
    x, w = OPERANDS[name]()
    return x, w, torch.randn(M, N) * 1e-4 * torch.exp(torch.randn(M, 1))


def products(x: Tensor, g: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
    """Y, ∂X and ∂W of a layer."""
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(g)
    assert leaf.grad is not None and layer.weight.grad is not None
    return y.detach(), leaf.grad, layer.weight.grad


def accuracy(x: Tensor, w: Tensor, g: Tensor, of: Sequence[Tensor]) -> list[float]:
    """SQNR in dB of Y, and of the worst channel of ∂X and of ∂W, against float64."""
    x, w, g = x.double(), w.double(), g.double()
    worst = [
        (20 * torch.log10(exact.norm(dim=0) / (exact - rounded).norm(dim=0))).min().item()
        for exact, rounded in ((g @ w, of[1]), (g.T @ x, of[2]))
    ]
    return [sqnr(x @ w.T, of[0]), *worst]


def operand_row(name: str, recipe: str, seeds: int) -> Row:
    """A row of the result file: mean over seeds of `accuracy`, of a layer's first pass."""
    figures = []
    for seed in range(1, seeds + 1):
        x, w, g = operands(name, seed)
        layer = nn.Linear(K, N, bias=False)
        layer.weight.data = w.clone()
        figures.append(accuracy(x, w, g, products(x, g, octavo.convert(layer, recipe, verbose=False))))
    means = [round(statistics.mean(column), 1) for column in zip(*figures, strict=True)]
    return {"operands": name, "recipe": recipe, "seeds": seeds, **dict(zip(("y", "dx", "dw"), means, strict=True))}


def trained(model: str, recipe: Recipe | None, seed: int, steps: int) -> float:
    """Mean loss of the last tenth of the steps of a model, with all linears but the head in a recipe, or in bf16."""
    if model == "llama":
        from benchmarks.convergence import configuration
        from octavo.train.data.load import load_corpus
        from octavo.train.record.progress import NullProgress
        from octavo.train.trainer import Trainer

        config = configuration("bf16", seed, steps, LLAMA)
        trainer = Trainer(config, load_corpus(config.data, config.model, NullProgress()), torch.device("cpu"))
        if recipe is not None:
            octavo.convert(trainer.model, recipe, verbose=False)
        curve = [trainer.train_step().loss for _ in range(steps)]
    else:
        case = replace(CASES[model], steps=steps)
        network = case.build(seed, case.strength)
        if recipe is not None:
            octavo.convert(network, recipe, skip=["head"], verbose=False)
        curve = losses(case, network, seed, Unwatched())
    return statistics.mean(loss for loss in curve[-max(steps // 10, 1) :] if loss is not None)


ARMS: dict[str, Recipe | None] = {
    "bf16": None,
    "rowwise": get_recipe("rowwise"),
    **{f"every {every}": equalized("rowwise", every) for every in EVERY},
}


def measuring_passes(every: int, passes: int) -> int:
    """How many passes of a run measure."""
    equalizer, count = Equalizer(every, False), 0
    for number in range(passes):
        equalizer.advance(number)
        count += equalizer.pass_measures
    return count


def operand_table(rows: Sequence[Row]) -> str:
    """Markdown of the operands' rows."""
    lines = [
        "| operands | Y, rowwise | equalized | worst channel of ∂X, rowwise | equalized | of ∂W, rowwise | equalized |",
        f"|---|{'---:|' * 6}",
    ]
    for name in dict.fromkeys(row["operands"] for row in rows):
        plain, new = (
            next(row for row in rows if (row["operands"], row["recipe"]) == (name, recipe))
            for recipe in ("rowwise", "rowwise_equalized")
        )
        lines.append(
            f"| {name} | " + " | ".join(f"{row[key]:.1f}" for key in ("y", "dx", "dw") for row in (plain, new)) + " |"
        )
    return "\n".join(lines) + "\n"


def refresh_table(rows: Sequence[Row]) -> str:
    """Markdown of the models' rows: gaps to bf16 of each seed, and what measuring costs."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    steps = rows[0]["steps"]
    lines = [
        f"| s refreshed | {' | '.join(models)} | passes of {steps} that measure | bytes per element of X and step |",
        f"|---|{'---|' * len(models)}---:|---:|",
    ]
    for arm in dict.fromkeys(row["arm"] for row in rows):
        if arm == "bf16":
            continue
        cells = []
        for model in models:
            of_model = [row for row in rows if row["model"] == model]
            base = {row["seed"]: row["loss"] for row in of_model if row["arm"] == "bf16"}
            gaps = [100 * (row["loss"] / base[row["seed"]] - 1) for row in of_model if row["arm"] == arm]
            cells.append(", ".join(f"{gap:+.2f}" for gap in gaps) + " %")
        every = arm.removeprefix("every ")
        count, name = (0, "never: `rowwise`") if arm == "rowwise" else (measuring_passes(int(every), steps), arm)
        lines.append(f"| {name} | {' | '.join(cells)} | {count} | {MEASURED_BYTES * count / steps:.2f} |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    """Measure the operands, train the models, write `results/<device>/equalization.json` and print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks equalization", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=2, help="seeds of each model and arm (2)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of a run ({STEPS})")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="some of the models only")
    parser.add_argument(
        "--operands", action="store_true", help="the operands only; models stay as they are in the file"
    )
    parser.add_argument("--out", type=Path, help="folder of the results, other than benchmarks/results/<device>")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    path = (options.out or RESULTS / device_name(cpu)) / "equalization.json"
    before: Mapping[str, Any] = json.loads(path.read_text()) if path.exists() else {"models": []}
    operand_rows = [operand_row(name, recipe, 4) for name in OPERANDS for recipe in ("rowwise", "rowwise_equalized")]
    print(operand_table(operand_rows))
    models = [] if options.operands else options.models
    rows = [row for row in before["models"] if row["model"] not in models]
    for model in models:
        for seed in range(1, options.seeds + 1):
            for arm, recipe in ARMS.items():
                loss = trained(model, recipe, seed, options.steps)
                rows.append({"model": model, "arm": arm, "seed": seed, "steps": options.steps, "loss": round(loss, 5)})
                print(f"{model:<18} seed {seed}  {arm:<10} {loss:.4f}", flush=True)
        write_json(path, {"environment": environment(cpu), "operands": operand_rows, "models": rows})
    write_json(path, {"environment": environment(cpu), "operands": operand_rows, "models": rows})
    if rows:
        print(refresh_table(rows))
