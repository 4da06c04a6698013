"""Norms and gated MLPs that emit the FP8 form of their result change no bit, whatever shards or copies the model."""

import warnings

import pytest
import torch
import torch.distributed as dist
from test_tensor_parallel_plan import SHAPE, mesh_of, tokens_of
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import octavo
from octavo.nn import emitting
from octavo.parallel import Parallel, parallelize, sum_partial_gradients, tensor_parallel

pytestmark = pytest.mark.dist


def fsdp2(model, norms=False, **options):
    for layer in model.model.layers:
        for part in (layer.input_layernorm, layer.mlp) if norms else ():
            fully_shard(part, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


KINDS = {
    "ddp": DistributedDataParallel,
    "our ddp": lambda model: parallelize(model, Parallel(dp_replicate=2), fp8_comm="on"),
    "fsdp2": fsdp2,
    "fsdp2 each": lambda model: fsdp2(model, norms=True),
    "fsdp2 mixed": lambda model: fsdp2(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "ours": lambda model: parallelize(model, Parallel(), dtype=torch.bfloat16, fp8_comm="off"),
    "ours fp8": lambda model: parallelize(model, Parallel(), dtype=torch.bfloat16, fp8_comm="on"),
    "tp": lambda model: tensor_parallel(model, mesh_of(), sequence_parallel=False),
    "sp": lambda model: tensor_parallel(model, mesh_of(), sequence_parallel=True),
}


def train(kind, emit, checkpointing):
    """Losses and gradients of 3 steps of 2 micro-batches, and how many results were emitted."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.float32 if "mixed" in kind else torch.bfloat16).train()
    octavo.convert(model, emit=emit, verbose=False)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    divided, emitted = kind in ("tp", "sp"), []
    model = KINDS[kind](model)
    stepper = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    original, results = emitting.multiply, []
    emitting.multiply = lambda *arguments: emitted.append(1) or original(*arguments)
    try:
        for step in range(3):
            for micro in range(2):
                tokens = (tokens_of() + 2 * step + micro + (0 if divided else 7 * dist.get_rank())) % 97
                labels = tokens[:, 1:].chunk(2, 1)[dist.get_rank()] if kind == "sp" else tokens[:, 1:]
                if isinstance(model, DistributedDataParallel):
                    model.require_backward_grad_sync = micro == 1
                elif isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(micro == 1)
                loss = model(
                    input_ids=tokens[:, :-1], labels=labels.contiguous(), shift_labels=labels.contiguous()
                ).loss
                loss.backward()
                results.append(loss.detach())
            if divided:
                sum_partial_gradients(model, mesh_of())
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            results += [(g.full_tensor() if hasattr(g, "full_tensor") else g).clone() for g in grads]
            stepper.step()
            stepper.zero_grad()
    finally:
        emitting.multiply = original
    return results, len(emitted)


def same_bits_job(kind, checkpointing):
    warnings.simplefilter("ignore")
    plain, none = train(kind, "never", checkpointing)
    result, emitted = train(kind, "always", checkpointing)
    assert none == 0 and len(plain) == len(result) > 30
    differ = [i for i, (one, other) in enumerate(zip(plain, result, strict=True)) if not torch.equal(one, other)]
    assert not differ, (kind, differ)
    return emitted


@pytest.mark.thorough
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes(gloo, kind, checkpointing):
    """2 layers emit 6 results in all of 6 forwards, or under checkpointing recomputations, but the first.

    With shards of its own an MLP reads a view of the norm's result. On DTensors the modules run their own code.
    """
    forwards = {"tp": 0, "sp": 0, "fsdp2 each": 4}.get(kind, 6)
    assert gloo.run(same_bits_job, 2, kind, checkpointing)[0] >= 5 * forwards
