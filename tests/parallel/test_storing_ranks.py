"""Stored activations and fused kernels under FSDP and DDP: gradients are those of one process, however sharded."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import octavo
from octavo.numerics import sqnr
from octavo.parallel import Parallel, parallelize

pytestmark = pytest.mark.dist
WIDTH, HIDDEN = 64, 96


class Norm(nn.RMSNorm):
    """As Transformers writes it, in several operations."""

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)

    variance_epsilon = 1e-6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = Norm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.checkpointing = MLP(), False

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False) if self.checkpointing else self.run(x)

    def run(self, x):
        q, k, v = (h.unflatten(-1, (4, -1)).transpose(1, 2) for h in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)  # a bias is stored apart, but where FSDP has freed it
        self.up_proj = nn.Linear(WIDTH, HIDDEN)
        self.down_proj, self.act_fn = nn.Linear(HIDDEN, WIDTH), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def shard(model, *parts):
    for part in parts:
        fully_shard(part, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


def modules(model, *kinds):
    return [module for module in model.modules() if isinstance(module, kinds)]


KINDS = {
    "ddp": DistributedDataParallel,
    "fsdp1": lambda m: FullyShardedDataParallel(m, use_orig_params=True, device_id=torch.device("cpu")),
    "blocks": lambda m: shard(m, *m.blocks),
    "whole": shard,
    "norms apart": lambda m: shard(m, *modules(m, Norm, nn.LayerNorm), *m.blocks),
    "readers apart": lambda m: shard(m, *modules(m, nn.Linear), *m.blocks),
    "mlps apart": lambda m: shard(m, *modules(m, MLP), *m.blocks),
    "all apart": lambda m: shard(m, *modules(m, Norm, nn.LayerNorm, nn.Linear), *m.blocks),
    "ours": lambda m: parallelize(m, Parallel()),
    "ours, everything": lambda m: parallelize(m, Parallel(fp8_comm="gather")),
}


def step(model, x):
    for _ in range(2):  # the second one meets parameters that were gathered and freed before
        model.zero_grad()
        y = model(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    whole = {name: p.grad for name, p in model.named_parameters()}
    return y.detach(), {
        name.replace("module.", "").replace("_fsdp_wrapped_", ""): getattr(g, "full_tensor", lambda g=g: g)()
        for name, g in whole.items()
    }


def same_gradients_job(kind, level, checkpointing):
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    plain = Model()
    for block in plain.blocks:
        block.checkpointing = checkpointing
    matmul = {"matmul": "bf16"} if level != "both" else {}
    precision = octavo.Precision(activations="fused" if level == "fused" else "fp8", **matmul)
    if level == "fused":
        plain.bfloat16()
    alone, sharded = (octavo.convert(copy.deepcopy(plain), precision=precision, verbose=False) for _ in range(2))
    assert level != "fused" or "(glu 2, norm 2)" in octavo.report(alone).summary.replace(
        "norm 2, glu 2", "glu 2, norm 2"
    )
    x = torch.randn(2, 32, WIDTH, generator=torch.Generator().manual_seed(1)).to(plain.norm.weight)
    y, expected = step(alone, x)
    sharded_y, actual = step(KINDS[kind](sharded), x)
    assert torch.equal(y, sharded_y)
    if kind != "fsdp1":  # whose gradients are views of one flat shard
        assert expected.keys() == actual.keys()
        for name in expected:
            assert sqnr(expected[name], actual[name]) > 100, name


@pytest.mark.slow
@pytest.mark.parametrize("level", ["activations", "both", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_one_process(gloo, kind, level):
    for checkpointing in (False, True):
        gloo.run(same_gradients_job, 2, kind, level, checkpointing)
