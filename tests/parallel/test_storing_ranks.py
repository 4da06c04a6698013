"""Stored activations and fused kernels under FSDP and DDP: gradients are those of one process, however sharded."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import full
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

import octavo
from octavo.numerics import sqnr
from octavo.parallel import Parallel, parallelize
from processes import on_ranks
from support.llamas import small_llama

pytestmark = pytest.mark.dist
WIDTH = 64


def blocks_of_a_llama(checkpointing):
    """Its blocks and last norm, with biases, and a LayerNorm in each block."""
    model = small_llama(mlp_bias=True, attention_bias=True).model
    model.embed_tokens = None
    for block in model.layers:
        block.post_attention_layernorm = nn.LayerNorm(WIDTH)
        block.mlp.gate_proj.bias = None  # a bias is stored apart, but where FSDP has freed it
        if checkpointing:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def shard(model, *parts):
    for part in parts:
        fully_shard(part, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def modules(model, *kinds):
    return [module for module in model.modules() if isinstance(module, kinds)]


KINDS = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda m: FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu")),
    "blocks": lambda m: shard(m, *m.layers),
    "whole": shard,
    "norms apart": lambda m: shard(m, *modules(m, LlamaRMSNorm, nn.LayerNorm), *m.layers),
    "readers apart": lambda m: shard(m, *modules(m, nn.Linear), *m.layers),
    "mlps apart": lambda m: shard(m, *modules(m, LlamaMLP), *m.layers),
    "all apart": lambda m: shard(m, *modules(m, LlamaRMSNorm, nn.LayerNorm, nn.Linear), *m.layers),
    "ours": lambda m: parallelize(m, Parallel()),
    "ours, everything": lambda m: parallelize(m, Parallel(fp8_comm="gather")),
}


def step(model, x):
    for _ in range(2):  # the second one meets parameters that were gathered and freed before
        model.zero_grad()
        y = model(inputs_embeds=x).last_hidden_state
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    names = [name.replace("module.", "").replace("_fsdp_wrapped_", "") for name, _ in model.named_parameters()]
    return y.detach(), dict(zip(names, (full(p.grad) for p in model.parameters()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("level", ["activations", "both", "fused"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_gradients_are_those_of_one_process(kind, level, checkpointing):
    warnings.simplefilter("ignore")
    plain = blocks_of_a_llama(checkpointing)
    matmul = {"matmul": "bf16"} if level != "both" else {}
    precision = octavo.Precision(activations="fused" if level == "fused" else "fp8", **matmul)
    if level == "fused":
        plain.bfloat16()
    alone, sharded = (octavo.convert(copy.deepcopy(plain), precision=precision, verbose=False) for _ in range(2))
    assert level != "fused" or all(part in octavo.report(alone).summary for part in ("glu 2", "norm 3"))
    x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1)).to(plain.norm.weight)
    y, expected = step(alone, x)
    sharded_y, actual = step(KINDS[kind](sharded), x)
    assert torch.equal(y, sharded_y)
    if kind != "fsdp1":  # whose gradients are views of one flat shard
        assert expected.keys() == actual.keys()
        for name in expected:
            assert sqnr(expected[name], actual[name]) > 100, name
