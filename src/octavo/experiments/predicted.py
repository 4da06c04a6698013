"""The predicted speed of a model of real size at the precision of a small run.

A CPU emulates FP8, and a model of a few million parameters is too small to gain from it on any GPU. What a run of the
demo can state about speed is what the planner predicts for a larger model with the same switches.
"""

from dataclasses import dataclass
from typing import Any

import torch

from octavo.numerics import Precision
from octavo.planner.model_plan import plan

MODEL = "Llama 3 8B"
GPUS, BATCH, SEQUENCE = 8, 1, 8192


@dataclass(frozen=True, kw_only=True)
class PredictedSpeed:
    """A prediction of the planner."""

    gain: float  # Speed-up over bf16
    where: str  # Model, GPUs and tokens


def predict_speed(precision: Precision) -> PredictedSpeed:
    """Predict the speed-up over bf16 of a training step of Llama 3 8B on 8 H100. Takes two seconds; needs no GPU."""
    # Linear layers that would lose stay in bf16, as `octavo.convert` decides on such a GPU.
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=SEQUENCE,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    planned = plan(model.to(torch.bfloat16), BATCH, SEQUENCE, device="h100", world_size=GPUS, precision=precision)
    gpu = planned.gpu.name
    return PredictedSpeed(
        gain=planned.gain, where=f"{MODEL} on {GPUS} × {gpu}, {BATCH * SEQUENCE:,} tokens each, not compiled"
    )
