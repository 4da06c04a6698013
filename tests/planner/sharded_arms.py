"""Whole models on meta, trained with FSDP2 by a rank of a world that is not there, with FP8 in more and more places."""

import copy
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.parallel import Parallel, parallelize
from octavo.runtime.blocks import find_blocks

ARMS = {
    "bf16": ("bf16", "off"),
    "fp8": ("fp8", "off"),
    "fp8, FP8 gather": ("fp8", "gather"),
    "fp8+activations+optimizer, all FP8": ("fp8+activations+optimizer", "on"),
}
"""Level of precision, and `fp8_comm`. The last one has bf16 shards and `octavo.AdamW`, the others fp32 shards."""


def compact(arm):
    """Whether `octavo.AdamW` holds the states, beside bf16 shards."""
    return octavo.Precision.level(ARMS[arm][0]).states == "fp8"


def build(kind, config, arm):
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        settings = AutoConfig.for_model(kind, **config)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16 if compact(arm) else torch.float32)
    return octavo.convert(model.train(), precision=octavo.Precision.level(ARMS[arm][0]), verbose=False)


def sharded(converted, arm, *, recompute=False):
    """A copy of a model on meta, sharded over the world there is."""
    model = copy.deepcopy(converted)
    chunked_loss(model)
    blocks = find_blocks(model)
    parallelize(model, Parallel(fp8_comm=ARMS[arm][1]), dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for block in blocks if recompute else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model
