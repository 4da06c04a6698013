"""Watching on several ranks: the same rows on all, those of one process that sees all tokens."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models import MLP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import octavo
from octavo.inspect import Autopilot, Thresholds, Watch
from octavo.parallel import Fp8ColwiseParallel, Fp8RowwiseParallel, Parallel, parallelize
from processes import on_ranks
from tensors import same

pytestmark = pytest.mark.dist

WIDTH, TOKENS = 64, 6
FSDP, DDP, HSDP = {}, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}


def model_of(recipe):
    torch.manual_seed(0)
    blocks = nn.ModuleList(MLP(WIDTH, 90) for _ in range(2))  # 90 rows: uneven shards
    with torch.no_grad():
        for number, weight in enumerate(p for p in blocks.parameters() if p.ndim == 2):
            weight.mul_(torch.rand(weight.shape[0], 1, generator=torch.Generator().manual_seed(number)) + 0.01)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
    return octavo.convert(model, recipe, skip=["0"], verbose=False)


def tokens(rank):
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(100 + rank))


def watched(settings, fp8_comm, recipe, what_if=(), every=1):
    """A rank's rows of the second of two steps, and its gradients."""
    model = model_of(recipe)
    called = parallelize(model, Parallel(**settings, fp8_comm=fp8_comm))
    watch = Watch(model, every=every, what_if=what_if)
    for _ in range(2):
        called.zero_grad()
        with watch.step():
            called(tokens(dist.get_rank())).square().sum().backward()
    return watch.rows, [plain(p.grad) for p in model.parameters()]


def plain(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def alone(recipe, world, what_if=()):
    """Rows of one process, to which each rank's tokens are a micro-batch."""
    model = model_of(recipe)
    watch = Watch(model, every=1, what_if=what_if)
    for _ in range(2):
        with watch.step():
            for rank in range(world):
                (model(tokens(rank)).square().sum() / world).backward()
    return watch.rows


def named(row):
    return row.layer, row.operand


SLOW = pytest.mark.slow
CASES = [
    *((FSDP, 2, *case) for case in (("gather", "rowwise"), ("gather", "tensorwise"), ("off", "blockwise"))),
    (DDP, 2, "off", "rowwise"),
    pytest.param(FSDP, 2, "off", "rowwise", marks=SLOW),
    pytest.param({"reshard_after_forward": False}, 2, "gather", "rowwise", marks=SLOW),
    pytest.param({"cpu_offload": True}, 2, "gather", "rowwise", marks=SLOW),
    pytest.param(HSDP, 4, "gather", "tensorwise", marks=SLOW),
]


@pytest.mark.parametrize(("settings", "world", "fp8_comm", "recipe"), CASES)
@pytest.mark.thorough
def test_rows_are_those_of_one_process(gloo, settings, world, fp8_comm, recipe):
    ranks = gloo.run(watched, world, settings, fp8_comm, recipe)
    rows = ranks[0][0]
    assert all(other == rows for other, _ in ranks)
    reference = {named(row): row for row in alone(recipe, world)}
    assert {named(row) for row in rows} == set(reference)
    for row in rows:
        expected = reference[named(row)]
        scaled = world if "_g" in row.operand else 1  # one process divides the loss where ranks average gradients
        assert row.amax == pytest.approx(expected.amax * scaled, rel=1e-5), named(row)
        rounding = 2.0**-20 * expected.amax * scaled  # of the tensor: the smallest element may be a near cancellation
        assert row.smallest == pytest.approx(expected.smallest * scaled, rel=1e-5, abs=rounding), named(row)
        assert row.sqnr == pytest.approx(expected.sqnr, abs=1e-3), named(row)
        assert row.scale_spread == pytest.approx(expected.scale_spread, rel=1e-5), named(row)
        same = replace(expected, amax=row.amax, smallest=row.smallest, sqnr=row.sqnr, scale_spread=row.scale_spread)
        assert row == same


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "fp8_comm"), [(FSDP, "gather"), (FSDP, "on"), (DDP, "off")])
def test_a_sampled_step_computes_what_an_unsampled_one_does(gloo, settings, fp8_comm):
    for recipe in ("rowwise", "tensorwise"):
        ours, theirs = (gloo.run(watched, 2, settings, fp8_comm, recipe, ("blockwise",), every) for every in (2, 0))
        for (rows, actual), (nothing, expected) in zip(ours, theirs, strict=True):
            assert rows and not nothing
            assert same(expected, actual)


def test_what_if_of_weights_gathered_in_fp8(gloo):
    """By tensor with the scale of the whole, though no rank has the whole in high precision."""
    rows = gloo.run(watched, 2, FSDP, "gather", "rowwise", ("tensorwise", "rowwise"))[0][0]
    reference = {named(row): row for row in alone("rowwise", 2, ("tensorwise", "rowwise"))}
    for row in rows:
        for name, level in row.what_if.items():
            assert level == pytest.approx(reference[named(row)].what_if[name], abs=0.02), (named(row), name)


@pytest.mark.parametrize("operand", ["x", "dgrad_g"])
@pytest.mark.parametrize("settings", [FSDP, DDP])
@on_ranks(2)
def test_a_nan_on_one_rank_is_named_on_all(settings, operand):
    """Findings of a step in which a value on rank 1 alone is no number."""
    model = model_of("rowwise")
    called = parallelize(model, Parallel(**settings, fp8_comm="gather" if settings == FSDP else "off"))
    layer = model[2].down_proj

    def broken(value):
        value = value.clone()
        value.view(-1)[3] = torch.nan
        return value

    if dist.get_rank() == 1:
        if operand == "x":
            layer.register_forward_pre_hook(lambda _, args: broken(args[0]))
        else:
            layer.register_forward_hook(lambda _, __, y: y.register_hook(broken) and None)
    watch = Watch(model, every=1)
    with watch.step():
        called(tokens(dist.get_rank())).square().sum().backward()
    crossings = [(finding.layer, finding.operand, finding.what) for finding in watch.findings()]
    assert crossings[0] == ("2.down_proj", operand, "nonfinite")
    assert [what for *_, what in crossings].count("nonfinite") == 1


@on_ranks(2)
def test_layers_that_some_ranks_do_not_run():
    """Rank 1 leaves a layer out, rank 0 another one."""
    model, rank = nn.ModuleList(octavo.nn.Linear(32, 32) for _ in range(3)), dist.get_rank()
    watch, idle = Watch(model, every=1), Watch(nn.ModuleList([model[0]]), every=1)
    with watch.step():
        model[rank](torch.ones(2 + rank, 32)).sum().backward()
    with idle.step():
        if rank == 0:
            model[0](torch.ones(2, 32))
    elements = {("0", "x"): 64, ("0", "w"): 1024, ("1", "x"): 96, ("1", "w"): 1024}
    assert {named(row): row.elements for row in watch.rows if row.operand in "xw"} == elements
    assert {named(row) for row in idle.rows} == {("0", "x"), ("0", "w")}


@on_ranks(2)
def test_ranks_with_other_layers_are_told_so():
    count = 1 + dist.get_rank()
    watch = Watch(nn.ModuleList([octavo.nn.Linear(32, 32) for _ in range(count)]), every=1)
    message = rf"ranks watch different layers \(here {count}.*group="
    with pytest.raises(RuntimeError, match=message), watch.step():
        pass


# --- tensor parallelism: rows like those of one process, gradients as without a watch ---


PLANS = {
    "fp8": lambda: {"0": Fp8ColwiseParallel(), "1": Fp8RowwiseParallel()},
    "torch": lambda: {
        "0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))
    },
}  # fmt: skip
MEASURED = {"0": ["rowwise", "tensorwise"], "1": ["rowwise", "tensorwise"]}


def pair_of(recipe):
    torch.manual_seed(1)
    return octavo.convert(nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128)), recipe, verbose=False)


def distributed(recipe, plan, fsdp):
    mesh = init_device_mesh("cpu", (-(-dist.get_world_size() // 2), 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize_module(pair_of(recipe), mesh["tp"], PLANS[plan]())
    return (parallelize(model, mesh["dp_shard"], fp8_comm="gather") if fsdp else model), mesh["tp"].get_local_rank()


def watched_job(recipe, plan, fsdp):
    """Rows and product errors of the ranks, and of one process; and whether watching changed a gradient."""
    x, g = torch.randn(2, 8, 128), torch.randn(2, 8, 128)
    alone = pair_of(recipe)
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


PLANNED = [("rowwise", "fp8", False), ("rowwise", "torch", False), ("rowwise", "fp8", True), ("mxfp8", "fp8", False)]


@pytest.mark.thorough
@pytest.mark.parametrize(("recipe", "plan", "fsdp"), [*PLANNED, ("rowwise_equalized", "fp8", False)])
def test_rows_are_close_to_those_of_one_process(gloo, recipe, plan, fsdp):
    alone, ours, errors_alone, errors, unchanged = gloo.run(watched_job, 4 if fsdp else 2, recipe, plan, fsdp)[0]
    assert unchanged
    ours = {named(row): row for row in ours}
    assert {named(row) for row in alone} == ours.keys()
    for row in alone:
        other = ours[named(row)]
        gathered = row.layer == "1" and row.operand.endswith("_g")  # rounded to FP8 in its message already
        for one, many in ((row.sqnr, other.sqnr), (row.what_if["mxfp8"], other.what_if["mxfp8"])):
            assert one - 1.0 < many < (60.0 if gathered and plan == "fp8" else one + 1.0)
        in_bf16 = (plan, recipe) != ("fp8", "rowwise") and named(row) == ("0", "x")
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


@pytest.mark.thorough
def test_the_autopilot_steps_on_a_distributed_model(gloo):
    results = gloo.run(autopilot_job, 2)
    assert results[0] == results[1] and "tensorwise" not in results[0][0] and results[0][1] > 0
