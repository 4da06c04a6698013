"""Memory of a rank of many: within 5 % of FSDP2 steps recorded storage by storage."""

import copy
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.nn.causal import chunked_loss
from octavo.parallel import Parallel, parallelize
from octavo.planner.fake import fake_batch, fake_tensors
from octavo.planner.model_plan import default_loss, trace_step
from octavo.planner.step import StepConfig
from octavo.planner.step_memory import (
    ACTIVATIONS,
    BLOCK_GRADIENTS,
    GATHERED,
    GRADIENTS,
    PARAMETERS,
    STATES,
    TEMPORARIES,
    MemorySeries,
    ShardGroup,
    memory_per_rank,
    trace_blocks,
)
from octavo.planner.trace import Stack, copy_with_blocks
from octavo.runtime.blocks import find_blocks

TRACED = json.loads((Path(__file__).parents[2] / "benchmarks/results/simulated/scaling.json").read_text())
CPU = torch.device("cpu")
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


def predicted(name, arm, recompute):
    """Memory series of a whole step in bf16, groups, and blocks, of a model of docs/scaling.md."""
    entry = TRACED["models"][name]
    blocks = entry["config"]["num_hidden_layers"]
    model = build(entry["kind"], entry["config"] | {"num_hidden_layers": 3}, arm).bfloat16()
    chunked_loss(model)
    fp8 = {"gather": {"fp8_gather": True}, "on": {"fp8_gather": True, "fp8_reduce": True}, "off": {}}[ARMS[arm][1]]

    def trace(counts):
        with fake_tensors() as mode:
            copy = copy_with_blocks(model, counts, mode, CPU)
            for block in find_blocks(copy) if recompute else ():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            stepper = octavo.AdamW(copy.parameters()) if compact(arm) else None
            batch = fake_batch({"input_ids": (1, 8192), "labels": (1, 8192), "use_cache": False}, None, None, CPU)
            return trace_step(copy, batch, stepper, default_loss, StepConfig(reduce_bytes=2, **fp8), 512)

    whole = trace_blocks(trace, [Stack("model.layers", [f"model.layers.{i}" for i in range(blocks)], 2)])
    return whole.series, whole.traced, blocks


@pytest.mark.parametrize("recompute", [False, True], ids=["accumulated", "recomputed"])
@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name != "Llama-3-8B" else []) for name in TRACED["models"]]
)
@pytest.mark.slow
def test_a_rank_of_fsdp2(name, arm, recompute):
    whole, groups, blocks = predicted(name, arm, recompute)
    if not compact(arm):  # shards and both memory_series in float32
        whole.table[:, whole.kinds.index(PARAMETERS)] *= 6
    rows = [r for r in TRACED["rows"] if (r["model"], r["arm"], r["recompute"]) == (name, arm, recompute)]
    assert len(rows) > 2
    for row in (r for r in rows if r["replicas"] == 1 and r["peak"] is not None):  # recorded to the end
        config, widened = StepConfig(gpus=row["world"]), 1 if compact(arm) else 2
        worst = memory_per_rank(whole, config, blocks, groups.block, groups.rest, widened=widened).peak
        assert worst.total == pytest.approx(row["peak"], rel=0.05), (row["world"], worst)


def test_by_hand():
    block, rest = (ShardGroup(gathered=n, gradients=2 * n, reduced=4 * n) for n in (10, 100))
    kinds = (PARAMETERS, STATES, ACTIVATIONS, TEMPORARIES, GRADIENTS, BLOCK_GRADIENTS)
    rows = {
        "forward": (800, 1600, 5, 6, 0, 0),
        "backward": (800, 1600, 3, 6, 200, 5),  # the last block
        "backward ": (800, 1600, 3, 6, 200, 25),  # the one before
        "backward  ": (800, 1600, 1, 6, 200, 79),  # the first
        "backward   ": (800, 1600, 1, 6, 200, 80),  # it is through
        "optimizer step": (800, 1600, 0, 16, 200, 80),
    }
    whole = MemorySeries(kinds, [phase.strip() for phase in rows], torch.tensor(list(rows.values())))
    samples = [m.bytes for m in memory_per_rank(whole, StepConfig(gpus=8), 4, block, rest)]
    assert [m[PARAMETERS] + m[STATES] for m in samples] == [300] * 7
    assert [m[GATHERED] for m in samples] == [120, 120, 160, 150, 140, 0, 400]
    assert [m[GRADIENTS] for m in samples] == [0, 205, 200 + 5 + 3, 200 + 19 + 8, 200 + 10, 35, 235]
    assert [m[TEMPORARIES] for m in samples] == [6, 6, 6, 6, 6, 2, 0]
    config = StepConfig(gpus=8, keeps_gathered=True, micro_batches=2)
    accumulated = memory_per_rank(whole, config, 4, block, rest)
    assert [m.bytes[GATHERED] for m in accumulated][:2] == [140, 140 + 40]
    assert [m.bytes[GRADIENTS] for m in accumulated][:3] == [0, 220 + 26, 220 + 29]
    away = memory_per_rank(whole, StepConfig(gpus=8), 4, block, rest, offloaded=True)
    assert all(m.bytes[PARAMETERS] == m.bytes[STATES] == 0 for m in away)
    assert [m.bytes[GRADIENTS] for m in away] == [0, 205, 205, 219, 200, 0, 200]
