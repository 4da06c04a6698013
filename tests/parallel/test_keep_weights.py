"""keep_weights changes no loss, whatever shards or copies the model."""

import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from training import Block, Tiny, loss_of, make, share

import octavo
from octavo.nn import accumulating, weights
from octavo.numerics import RECIPES
from octavo.parallel import Parallel, parallelize
from processes import on_ranks

pytestmark = pytest.mark.dist


def fsdp1(model, use_orig_params):
    return FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, device_id=torch.device("cpu"),
        auto_wrap_policy=ModuleWrapPolicy([Block]),
    )  # fmt: skip


def fsdp2(model, dtype=None, **options):
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **options)
    return fully_shard(model, mp_policy=policy, **options)


def ours(model, **options):
    return parallelize(model, Parallel(**options))


KINDS = {
    "one process": lambda model: model,
    "ddp": DistributedDataParallel,
    "our ddp": lambda model: ours(model, dp_replicate=2, fp8_comm="on"),
    "fsdp1": lambda model: fsdp1(model, False),
    "fsdp1 orig": lambda model: fsdp1(model, True),
    "fsdp2 reshard": lambda model: fsdp2(model, reshard_after_forward=True),
    "fsdp2 stay": lambda model: fsdp2(model, reshard_after_forward=False),
    "fsdp2 bf16": lambda model: fsdp2(model, torch.bfloat16),
    "ours off reshard": lambda model: ours(model, fp8_comm="off", reshard_after_forward=True),
    "ours off stay": lambda model: ours(model, fp8_comm="off", reshard_after_forward=False),
    "ours gather reshard": lambda model: ours(model, fp8_comm="gather", reshard_after_forward=True),
    "ours gather stay": lambda model: ours(model, fp8_comm="gather", reshard_after_forward=False),
}
UNSHARDED = ("one process", "ddp", "our ddp")


def synchronizing(model, last):
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif not last and isinstance(model, DistributedDataParallel | FullyShardedDataParallel):
        return model.no_sync()
    return nullcontext()


def train(kind, recipe, keep, accumulate, steps, micros, checkpointing):
    """Losses [step · micro-batch] and how often weights were cast for more than one use."""
    model = make(None)
    octavo.convert(model, recipe, keep_weights=keep, verbose=False)
    for block in model.blocks:
        block.checkpointing = checkpointing
    model = KINDS[kind](model)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, casts, original = [], [], weights._cast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_cast", lambda *arguments: casts.append(1) or original(*arguments))
        for step in range(steps):
            with accumulating(model) if accumulate else nullcontext():
                for micro in range(micros):
                    with synchronizing(model, micro == micros - 1):
                        loss = loss_of(model, share(step, dist.get_rank(), micro), micros)
                        loss.backward()
                    losses.append(loss.item())
            stepper.step()
            stepper.zero_grad()
    return losses, len(casts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, timeout=500.0)
def test_losses_are_equal(kind):
    warnings.simplefilter("ignore")  # FSDP1's own, of CPUs and of its state
    recipes = [name for name in RECIPES if "gather" not in kind or RECIPES[name].supports_fp8_gather]
    cases = [(recipe, 4, 2, False) for recipe in recipes] + [("rowwise", 8, 1, False), ("rowwise", 8, 2, True)]
    for recipe, steps, micros, checkpointing in cases:
        without, none = train(kind, recipe, False, False, steps, micros, checkpointing)
        assert none == 0 and len(set(without)) == len(without)
        for accumulate in (False, True):
            result, casts = train(kind, recipe, True, accumulate, steps, micros, checkpointing)
            assert result == without, (kind, recipe, accumulate, micros)
            assert (casts > 0) == (kind in UNSHARDED), (kind, recipe, casts)


@pytest.mark.thorough
@on_ranks(2)
def test_only_what_is_sharded_is_left_out():
    """Only a part of the model is sharded: its weights are quantized at each use, and others are kept."""
    model = octavo.convert(Tiny(), keep_weights=True, verbose=False)
    fully_shard(model.blocks[0])
    inside = [*model.blocks[0].modules()]
    for name, module in model.named_modules():
        if isinstance(module, octavo.nn.Linear):
            assert module.octavo_keep_weights() == (module not in inside), name
    fully_shard(model.blocks[1].up)  # later than the first look
    assert [layer.octavo_keep_weights() for layer in (model.blocks[1].up, model.blocks[1].down)] == [False, True]


@on_ranks(2)
def test_values_that_were_broadcast_are_used():
    """Values that another rank sends into `.data`, between two passes and while accumulating."""
    torch.manual_seed(dist.get_rank())
    layer = octavo.convert(nn.Linear(64, 32), keep_weights=True, verbose=False)
    x = torch.ones(4, 64)
    mine = layer(x)
    dist.broadcast(layer.weight.data, 0)
    dist.broadcast(layer.bias.data, 0)
    received = layer(x)
    plain = octavo.nn.linear(x, layer.weight, layer.bias, layer.recipe)
    assert torch.equal(received, plain)
    assert torch.equal(received, mine) == (dist.get_rank() == 0)
    with pytest.raises(RuntimeError, match="PyTorch did not report it"), accumulating(layer):
        layer(x)
        layer.weight.data.mul_(dist.get_rank() + 1)
        dist.broadcast(layer.weight.data, 1)
