"""DDP with gradients in FP8."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import loss_of, make, share, train

import octavo
from collective_recorder import CollectiveRecorder
from octavo.numerics.error import sqnr
from octavo.parallel import Fp8AllReduce, Parallel, parallelize
from octavo.parallel.ddp import saved_buffers
from processes import on_ranks
from tensors import randn, same

pytestmark = pytest.mark.dist


def gradients(model):
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize(("world", "error_feedback"), [(2, False), (3, True)])
@on_ranks("world")
def test_the_hook_averages_in_fp8(world, error_feedback):
    """Two roundings of 32 dB each, the first of W parts: 29 dB; (1 + 1/W) · 1.03 bytes per element instead of 4."""
    exact = DistributedDataParallel(make(width=256, hidden=512))
    hooked = DistributedDataParallel(make(width=256, hidden=512))
    Fp8AllReduce(error_feedback=error_feedback).register(hooked)
    tokens = share(0, dist.get_rank(), 0)
    loss_of(exact, tokens).backward()
    with CollectiveRecorder() as tap:
        loss_of(hooked, tokens).backward()
    expected = gradients(exact)
    assert all(actual.dtype == expected[name].dtype for name, actual in gradients(hooked).items())
    flat = [torch.cat([g.flatten() for g in grads.values()]) for grads in (expected, gradients(hooked))]
    others = [torch.empty_like(flat[1]) for _ in range(world)]
    dist.all_gather(others, flat[1])
    assert same([flat[1]] * world, others)
    calls = {call.name for call in tap.calls if call.dtype == torch.uint8}
    assert calls == {"alltoall_base_", "_allgather_base_"} and len(tap.calls) == len(tap.named("alltoall_base_")) * 2
    assert 28 < sqnr(*flat) < 36
    assert sum(call.bytes for call in tap.calls) < 1.04 * (1 + 1 / world) * flat[0].numel()


class Fixed(nn.Module):
    """Gradients that are what they are given, in several buckets."""

    def __init__(self, sizes):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self, gradients):
        return sum((w * g).sum() for w, g in zip(self.weights, gradients, strict=True))


def bias_of(steps, error_feedback):
    """How far the sum of averages over some steps of equal gradients is from what it should be, per step."""
    sizes, rank, world = (700, 129, 1300, 64), dist.get_rank(), dist.get_world_size()
    gradients = [[randn(size, seed=10 * r + i) for i, size in enumerate(sizes)] for r in range(world)]
    model = DistributedDataParallel(Fixed(sizes), bucket_cap_mb=0.004)
    state = Fp8AllReduce(error_feedback=error_feedback)
    state.register(model)
    totals = [torch.zeros(size) for size in sizes]
    for _ in range(steps):
        model.zero_grad()
        model(gradients[rank]).backward()
        for total, parameter in zip(totals, model.module.weights, strict=True):
            total += parameter.grad
            parameter.data += 1e-3  # as a step does
    exact = [sum(g[i] for g in gradients) / world for i in range(len(sizes))]
    return max((t / steps - e).abs().max().item() for t, e in zip(totals, exact, strict=True))


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.slow
@on_ranks("world")
def test_with_error_feedback_nothing_is_lost(world):
    """Rounding the same gradient in the same way, again and again: a bias without it, and a bounded rest with it."""
    once, without = bias_of(1, False), bias_of(64, False)
    # DDP makes its buckets anew after the first backward: groups are others then, and what is remembered is forgotten.
    assert without == pytest.approx(once, rel=0.1)
    few, many = bias_of(16, True), bias_of(64, True)
    assert many < without / 12 and many < few / 2


@on_ranks(2)
def test_parallelize_makes_ddp():
    losses, named = [], dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    for mesh in (Parallel(dp_replicate=2, fp8_comm="on"), named):
        model = parallelize(make(), mesh, fp8_comm="on")
        assert isinstance(model, DistributedDataParallel)
        with CollectiveRecorder() as tap:
            losses.append(train(model, 3))
        assert not tap.named("allreduce_") and tap.named("alltoall_base_")
    assert losses[0] == losses[1]


@on_ranks(2)
def test_what_is_not_finite_stays_visible():
    model = DistributedDataParallel(Fixed((300,)))
    Fp8AllReduce().register(model)
    gradient = torch.ones(300)
    if dist.get_rank() == 1:
        gradient[7] = torch.inf
    model([gradient]).backward()
    finite = model.module.weights[0].grad.isfinite()
    assert not finite[:128].any() and finite[128:].all()


@on_ranks(2)
def test_a_step_that_is_skipped_leaves_no_errors():
    """Gradients of 8 steps, where step 2 is not finite or a spike, and no optimizer takes it."""
    rank, found = dist.get_rank(), {}
    for spoiled in (None, float("nan"), float("inf"), 1e10):
        model = DistributedDataParallel(Fixed((300, 700)), bucket_cap_mb=0.001)
        Fp8AllReduce(error_feedback=True).register(model)
        optimizer = octavo.AdamW(model.parameters(), nonfinite="skip")
        gradients = []
        for step in range(8):
            if step == 2 and spoiled is None:
                continue
            generator = torch.Generator().manual_seed(10 * step + rank)
            local = [torch.randn(size, generator=generator) for size in (300, 700)]
            if step == 2 and rank == 1:
                local[1][:200] *= spoiled
            optimizer.zero_grad()
            model(local).backward()
            gradients += [] if step == 2 else [torch.cat([p.grad for p in model.parameters()])]
            if step != 2 or spoiled != 1e10:
                optimizer.step()
        found[str(spoiled)] = torch.stack(gradients), optimizer.skipped
    assert [skipped for _, skipped in found.values()] == [0, 1, 1, 0]
    expected = found["None"][0]
    assert expected.isfinite().all()
    assert same([expected] * 4, [gradients for gradients, _ in found.values()])


@on_ranks(2)
def test_averages_over_the_ranks_that_ddp_averages_over():
    """Under `join`, where rank 0 has 2 inputs or none, rank 1 three more, and in a group of its own."""
    rank, averages = dist.get_rank(), {}
    for feedback in (False, True):
        for initial in (True, False):
            model = DistributedDataParallel(Fixed((64,)))
            Fp8AllReduce(error_feedback=feedback).register(model)
            averages[feedback, initial] = []
            with model.join(divide_by_initial_world_size=initial):
                for _ in range(3 * rank + 2 * initial):
                    model.zero_grad()
                    model([torch.full((64,), 1.0)]).backward()
                    averages[feedback, initial].append(model.module.weights[0].grad[0].item())
    alone = [dist.new_group([other]) for other in range(2)][rank]
    model = DistributedDataParallel(Fixed((64,)), process_group=alone)
    Fp8AllReduce().register(model)
    model([torch.full((64,), 1.0 + rank)]).backward()
    assert model.module.weights[0].grad[0] == 1.0 + rank
    expected = {True: [1.0] * 2 + [0.5] * 3 * rank, False: [1.0] * 3 * rank}
    assert averages == {(feedback, initial): expected[initial] for feedback in (0, 1) for initial in (0, 1)}


@on_ranks(2, timeout=20.0)
def test_what_would_wait_or_average_elsewhere_is_refused():
    """Inputs of unequal number where forwards exchange scales, and one hook for two models."""
    rank = dist.get_rank()
    model = parallelize(make("rowwise_equalized"), Parallel(dp_replicate=2))
    with model.join(enable=False):
        loss_of(model, share(0, rank, 0)).backward()
    with pytest.raises(ValueError, match="each forward exchanges scales with all ranks"), model.join():
        for step in range(1 + rank):
            loss_of(model, share(step, rank, 0)).backward()
    hook, models = Fp8AllReduce(), [DistributedDataParallel(make()) for _ in range(2)]
    hook.register(models[0])
    with pytest.raises(ValueError, match="create one for each model"):
        hook.register(models[1])


@on_ranks(2)
def test_a_resident_base_is_replicated_as_its_bytes():
    """Adapted layers on a frozen base in FP8; each rank starts with another base."""
    torch.manual_seed(0)
    expected = octavo.nn.ResidentWeight.quantized(nn.Linear(64, 96).weight, octavo.RECIPES["rowwise"].w)
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model[0].requires_grad_(False)
    octavo.convert(model, "rowwise", frozen="fp8", verbose=False)
    weight = model[0].weight
    replicated = parallelize(model, Parallel(dp_replicate=2, dp_shard=1), fp8_comm="on")
    assert model[0].weight is weight
    x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    replicated(x[dist.get_rank()]).square().mean().backward()
    gradients = [torch.empty(64, 96) for _ in range(2)]
    dist.all_gather(gradients, model[2].weight.grad)
    assert same(expected, weight) and torch.equal(*gradients)


def test_buffers_that_training_may_change():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].register_buffer("table", torch.ones(2), persistent=False)
    assert {id(buffer) for buffer in saved_buffers(model)} == {id(buffer) for buffer in model[1].buffers()}
    assert saved_buffers(model[0]) == []
