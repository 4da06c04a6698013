"""Blocks of model families, compiled as in `octavo train`, against eager ones: graphs, gradients, saved bytes.

Real models of Transformers, shrunk, in float32, on a CPU with `backend="aot_eager"`, which rounds nothing by itself.
"""

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

import octavo
from benchmarks import pages
from octavo.nn.memory_audit import saved_for_backward
from octavo.numerics import sqnr
from octavo.numerics.recipe import get_recipe
from octavo.train import compiled_blocks

Row = dict[str, Any]
SIZES = {
    "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", SIZES),
    "Qwen3": ("qwen3", SIZES | {"head_dim": 64}),
    "Gemma 3": ("gemma3_text", SIZES | {"head_dim": 64}),
    "GPT-2": ("gpt2", {"n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 512}),
    "Mixtral": ("mixtral", SIZES | EXPERTS),
    "Qwen3 MoE": (
        "qwen3_moe",
        SIZES | {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256},
    ),
}
RECIPES = {"Llama": ("rowwise", "tensorwise", "blockwise", "rowwise_equalized")}
FEW_RECIPES = ("rowwise", "rowwise_equalized")
HEADER = f"{'family':<10}{'recipe':<20}{'stored':<8}{'graphs':<8}{'gradient':<10}{'truth':<8}{'saved':<8}"


def measure(family: str, recipe: str, activations: str) -> Row:
    """Forward and backward of one model, eager and compiled: graphs, gradients, saved bytes.

    The gradients of a recipe with channel scales are those of the fourth pass, the first one that does not measure.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, fields = FAMILIES[family]
    dropout = {name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop") if kind == "gpt2"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields | dropout))
    plain = copy.deepcopy(model)
    octavo.convert(model, recipe, activations=activations, verbose=False)
    again = copy.deepcopy(model)
    blocks = compiled_blocks.CompiledBlocks(again, "blocks", torch.device("cpu"))
    compiled_blocks.BACKEND, before = "aot_eager", compiled_blocks.BACKEND
    blocks.compile()
    compiled_blocks.BACKEND = before
    for _ in range(4 if get_recipe(recipe).equalization else 1):
        (eager, eager_bytes), (gradients, saved) = (
            _gradients(model, nullcontext()),
            _gradients(again, blocks.one_pass()),
        )
    truth, _ = _gradients(plain, nullcontext())
    worst = min(sqnr(gradient, gradients[name]) for name, gradient in eager.items())
    return {
        "family": family, "recipe": recipe, "activations": activations, "graphs": blocks.graphs,
        "reason": blocks.reason,
        "worst_gradient_db": worst if math.isfinite(worst) else None,
        "from_truth_db": min(sqnr(t, gradients[n]) - sqnr(t, eager[n]) for n, t in truth.items()),
        "saved_over_eager": saved / eager_bytes,
    }  # fmt: skip


def _gradients(model: nn.Module, context: AbstractContextManager[None]) -> tuple[dict[str, torch.Tensor], int]:
    ids = torch.arange(512).mul(7).remainder(512).view(4, 128)
    model.zero_grad()
    with context, saved_for_backward(model) as saved:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, saved.bytes


def measured(families: list[str]) -> list[Row]:
    """Measure these families, or all, a line for each recipe and storage."""
    print(HEADER)
    rows = []
    for family in families or FAMILIES:
        for recipe in RECIPES.get(family, FEW_RECIPES):
            for activations in ("bf16", "fp8"):
                rows.append(measure(family, recipe, activations))
                widths = zip(cells(rows[-1]), (10, 20, 8, 8, 10, 8, 8), strict=True)
                print("".join(f"{text:<{width}}" for text, width in widths), flush=True)
    return rows


def cells(row: Row) -> list[str]:
    """The texts of a row."""
    db = row["worst_gradient_db"]
    gradient = "bitwise" if db is None else f"{db:.1f}"
    graphs = "–" if row["reason"] else str(row["graphs"])
    cells = [row["family"], row["recipe"], row["activations"], graphs, gradient, f"{row['from_truth_db']:+.1f}"]
    return [*cells, f"{row['saved_over_eager']:.2f}"]


def table(rows: list[Row]) -> str:
    """The table of docs/compile.md."""
    titles = [
        "family",
        "recipe",
        "stored",
        "graphs",
        "worst gradient, dB",
        "nearer to the truth, dB",
        "saved, over eager",
    ]
    return pages.table(titles, map(cells, rows), "lllr")
