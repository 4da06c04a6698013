"""Watching a model under tensor parallelism: rows like those of one process, and gradients as without a watch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import octavo
from octavo.inspect import Autopilot, Thresholds, Watch
from octavo.parallel import Fp8ColwiseParallel, Fp8RowwiseParallel, parallelize

pytestmark = [pytest.mark.dist, pytest.mark.thorough]
PLANS = {
    "fp8": lambda: {"0": Fp8ColwiseParallel(), "1": Fp8RowwiseParallel()},
    "torch": lambda: {
        "0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))
    },
}  # fmt: skip
MEASURED = {"0": ["rowwise", "tensorwise"], "1": ["rowwise", "tensorwise"]}


def model_of(recipe):
    torch.manual_seed(1)
    return octavo.convert(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)), recipe, verbose=False)


def distributed(recipe, plan, fsdp):
    mesh = init_device_mesh("cpu", (-(-dist.get_world_size() // 2), 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize_module(model_of(recipe), mesh["tp"], PLANS[plan]())
    return (parallelize(model, mesh["dp_shard"], fp8_comm="gather") if fsdp else model), mesh["tp"].get_local_rank()


def watched_job(recipe, plan, fsdp):
    """Rows and product errors of the ranks, and of one process; and whether watching changed a gradient."""
    x, g = torch.randn(2, 8, 128), torch.randn(2, 8, 128)
    alone = model_of(recipe)
    watch = Watch(alone, every=1, what_if=("mxfp8",), group=dist.new_subgroups(1)[0])
    with watch.step(measure=MEASURED):
        alone(x.clone().requires_grad_()).backward(g)
    model, rank = distributed(recipe, plan, fsdp)
    grads, ours = [], Watch(model, every=2, what_if=("mxfp8",))
    for _ in range(2):
        model.zero_grad()
        with ours.step(measure=MEASURED):
            model(x.chunk(2, 1)[rank].clone().requires_grad_()).backward(g.chunk(2, 1)[rank])
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    return watch.rows, ours.rows, watch.errors, ours.errors, all(map(torch.equal, *grads))


CASES = [("rowwise", "fp8", False), ("rowwise", "torch", False), ("rowwise", "fp8", True), ("mxfp8", "fp8", False)]


@pytest.mark.parametrize(("recipe", "plan", "fsdp"), [*CASES, ("rowwise_equalized", "fp8", False)])
def test_rows_are_close_to_those_of_one_process(gloo, recipe, plan, fsdp):
    alone, ours, errors_alone, errors, unchanged = gloo.run(watched_job, 4 if fsdp else 2, recipe, plan, fsdp)[0]
    assert unchanged
    ours = {(row.layer, row.operand): row for row in ours}
    assert {(row.layer, row.operand) for row in alone} == ours.keys()
    for row in alone:
        other = ours[row.layer, row.operand]
        gathered = row.layer == "1" and row.operand.endswith("_g")  # rounded to FP8 in its message already
        for one, many in ((row.sqnr, other.sqnr), (row.what_if["mxfp8"], other.what_if["mxfp8"])):
            assert one - 1.0 < many < (60.0 if gathered and plan == "fp8" else one + 1.0)
        in_bf16 = (plan, recipe) != ("fp8", "rowwise") and (row.layer, row.operand) == ("0", "x")
        copied = gathered or in_bf16  # both ranks have it
        batches = 2 if fsdp and row.operand != "w" else 1  # both of FSDP's ranks have this batch
        assert other.elements == row.elements * (2 if copied else 1) * batches
    for layer, by_recipe in errors.items():
        assert by_recipe.keys() == {"rowwise"}  # tensor parallelism has no recipe with a scale per tensor
        if not fsdp:  # which gathers W in FP8: that counts as high precision
            assert by_recipe["rowwise"] == pytest.approx(errors_alone[layer]["rowwise"], rel=0.1)


def autopilot_job():
    """Recipes after a step in which nothing is good enough for the limits."""
    model, rank = distributed("blockwise", "fp8", fsdp=False)
    pilot = Autopilot(model, every=1, thresholds=Thresholds(sqnr=60.0, product_error=0.05))
    x = torch.randn(2, 8, 128)
    x[..., 0] *= 1e6
    for _ in range(4):
        with pilot.step():
            model(x.chunk(2, 1)[rank].clone().requires_grad_()).sum().backward()
    return [layer.recipe.name for layer in model if isinstance(layer, octavo.nn.Linear)], len(pilot.changes)


def test_the_autopilot_steps_on_a_distributed_model(gloo):
    results = gloo.run(autopilot_job, 2)
    assert results[0] == results[1] and "tensorwise" not in results[0][0] and results[0][1] > 0
