"""Collectives in FP8 against the same in float64. A job runs on every rank and asserts there."""

import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, SHAPES, SPECS, arrived, assert_equal_on_all_ranks, assert_within, bound, same_bits, values

from collective_recorder import CollectiveRecorder
from octavo import comm
from octavo.comm.checks import gather_objects
from octavo.comm.collectives import exchange_rows
from processes import on_ranks

pytestmark = pytest.mark.dist


FORMS = [(spec, DTYPES[index % 3]) for index, spec in enumerate(SPECS)]
"""Every spec and every dtype, not all pairs of them: a message is packed from float32."""


def cases(shapes):
    """Every spec with some shapes, every shape with the default spec."""
    cases = [(*form, shape) for form in FORMS for shape in shapes[:3]]
    return cases + [(comm.DEFAULT_SPEC, torch.float32, shape) for shape in shapes]


def place(group):
    """The ranks of a group, and this rank's number among them."""
    return dist.get_process_group_ranks(group or dist.group.WORLD), dist.get_rank(group)


def everyones(shape, dtype, ranks):
    return [values(shape, rank, dtype=dtype) for rank in ranks]


def gather_job(group=None):
    ranks, _ = place(group)
    for spec, dtype, shape in cases((*SHAPES, ())):
        what = f"all_gather {spec} {dtype} {shape}"
        mine, all_ = values(shape, dtype=dtype), everyones(shape, dtype, ranks)
        before = mine.clone()
        result = comm.all_gather(mine, group, spec=spec)
        parts = [x.view(1) if x.ndim == 0 else x for x in all_]
        limit = torch.cat([bound(x, spec).view(p.shape) for x, p in zip(all_, parts, strict=True)])
        assert result.dtype == dtype
        assert_within(result, torch.cat(parts), limit, what)
        assert_equal_on_all_ranks(result, what, group)
        assert same_bits(mine, before)
        assert same_bits(comm.all_gather(mine, group, spec=spec, async_op=True).wait(), result), what


def reduce_scatter_job(group=None):
    ranks, rank = place(group)
    world = len(ranks)
    for spec, dtype, shape in cases(SHAPES):
        shape = (world * shape[0], *shape[1:])
        all_ = everyones(shape, dtype, ranks)
        limits = sum(bound(x, spec, parts=world) for x in all_)
        exact = sum(x.double() for x in all_)
        for op, share in (("sum", 1), ("avg", world)):
            what = f"reduce_scatter {op} {spec} {dtype} {shape}"
            result = comm.reduce_scatter(all_[rank], group, op=op, spec=spec)
            mine = (exact / share).chunk(world)[rank] if shape[0] else exact
            limit = (limits / share).chunk(world)[rank] if shape[0] else limits
            assert result.dtype == dtype
            assert_within(result, mine, limit + rounding(mine, limit, dtype, world), what)
            later = comm.reduce_scatter(all_[rank], group, op=op, spec=spec, async_op=True)
            assert same_bits(later.wait(), result), what


def rounding(exact, limit, dtype, world):
    info = torch.finfo(dtype)
    return (exact.abs() + limit) * (info.eps / 2 + world * 2.0**-24) + info.smallest_normal * info.eps


def all_reduce_job(group=None):
    ranks, _ = place(group)
    world = len(ranks)
    for spec, dtype, shape in cases((*SHAPES, ())):
        flat = [flattened(x, world, spec) for x in everyones(shape, dtype, ranks)]
        for op, share in (("sum", 1), ("avg", world)):
            what = f"all_reduce {op} {spec} {dtype} {shape}"
            result = comm.all_reduce(values(shape, dtype=dtype), group, op=op, spec=spec)
            exact = sum(x.double() for x in flat) / share
            first = sum(bound(x.float(), spec) for x in flat) / share
            second = bound(sum(arrived(x.float(), spec) for x in flat) / share, spec)  # of the sum that is sent
            limit = (first + second).view(-1)[: result.numel()].view(shape)
            exact = exact.view(-1)[: result.numel()].view(shape)
            assert result.dtype == dtype
            assert_within(result, exact, limit + rounding(exact, limit, dtype, world), what)
            assert_equal_on_all_ranks(result, what, group)
            later = comm.all_reduce(values(shape, dtype=dtype), group, op=op, spec=spec, async_op=True)
            assert same_bits(later.wait(), result), what


def flattened(x, world, spec):
    """A tensor as all_reduce cuts it up: one row for each rank, whole groups."""
    group = 1 if spec.split("/")[1] in ("row", "tensor") else int(spec.split("/")[1][2:])
    return torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % (world * group))).view(world, -1)


def all_to_all_job(group=None):
    """Rows, and elements of vectors, as torch's takes them: any splits, each rank's part of a vector one row."""
    ranks, rank = place(group)
    world = len(ranks)
    rows, vectors = ((4, (200,)), (300, ()))
    forms = [(*kind, *form) for kind in (rows, vectors) for form in FORMS]
    for most, rest, spec, dtype in (*forms, (4, (3, 7), comm.DEFAULT_SPEC, DTYPES[1])):
        tables = {
            "equal": [[most // 2] * world] * world,
            "uneven": [[(37 * a + 91 * b) % most for b in range(world)] for a in range(world)],
            "single": [[(a + b) % 2 for b in range(world)] for a in range(world)],
            "one to all": [[most // 2 * (a == 0)] * world for a in range(world)],
            "all to one": [[most // 2 * (b == 1) for b in range(world)]] * world,
            "nothing": [[0] * world] * world,
        }
        for name, table in tables.items():
            what = f"all_to_all_single {name} {spec} {dtype} {rest}"
            sent, received = table[rank], [row[rank] for row in table]
            exchange = partial(comm.all_to_all_single, group=group)
            all_ = [values((sum(row), *rest), r, dtype=dtype) for r, row in zip(ranks, table, strict=True)]
            x, parts = all_[rank], [a.split(t)[rank] for a, t in zip(all_, table, strict=True)]
            limits = [bound(a, spec).split(t)[rank] for a, t in zip(all_, table, strict=True)] if rest else [
                bound(part, spec) for part in parts
            ]  # fmt: skip
            result = exchange(x, received, sent, spec=spec)
            assert result.dtype == dtype
            assert_within(result, torch.cat(parts), torch.cat(limits), what)
            strided = torch.stack([x, x], -1)[..., 0]
            later = exchange(strided, received, sent, spec=spec, async_op=True)
            strided.zero_()
            assert same_bits(later.wait(), result), what
            if name in ("equal", "nothing"):
                assert same_bits(exchange(x, spec=spec), result), what
                assert same_bits(exchange(x, [], [], spec=spec), result), what
            leaf = x.clone().requires_grad_()
            y = exchange(leaf, received, sent, spec=spec, backward_spec="e5m2/row")
            weights = values(y.shape, seed=7, dtype=dtype)
            (y * weights).sum().backward()
            assert same_bits(y, result), what
            assert same_bits(leaf.grad, exchange(weights, sent, received, spec="e5m2/row")), what


def all_to_all_list_job():
    """Tensors of other shapes and dtypes for every pair, empty ones and numbers among them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    shapes = [(5, 130), (0, 7), (), (3, 2, 9), (64,)]

    def thing(source, target):
        kind = (2 * source + target) % len(shapes)
        return values(shapes[kind], rank=10 * source + target, dtype=DTYPES[(source + target) % 3])

    for spec in SPECS:
        inputs = [thing(rank, other) for other in range(world)]
        outputs = [torch.full_like(thing(other, rank), 7.0) for other in range(world)]
        comm.all_to_all(outputs, inputs, spec=spec)
        for other, output in enumerate(outputs):
            exact = thing(other, rank)
            assert_within(output, exact, bound(exact, spec), f"all_to_all {spec} from {other}")


def strides_job():
    dense = values((6, 96), seed=3)
    world = dist.get_world_size()
    base = torch.zeros(6, 192)
    base[:, ::2] = dense
    for strided in (dense.t().contiguous().t(), base[:, ::2]):
        assert not strided.is_contiguous()
        assert same_bits(comm.all_gather(strided), comm.all_gather(dense))
        assert same_bits(comm.all_reduce(strided), comm.all_reduce(dense))
        tall, dense_tall = strided.repeat(world, 1).t().contiguous().t(), dense.repeat(world, 1)
        assert same_bits(comm.reduce_scatter(tall), comm.reduce_scatter(dense_tall))
        assert same_bits(comm.all_to_all_single(tall), comm.all_to_all_single(dense_tall))
    changing, expected = dense.clone(), comm.all_gather(dense)
    first, second = comm.all_gather(changing, async_op=True), comm.all_gather(2 * dense, async_op=True)
    changing.zero_()
    assert same_bits(first.wait(), expected) and same_bits(second.wait(), comm.all_gather(2 * dense))


def nonfinite_job():
    """On one rank only: every rank sees it, where it is and nowhere else."""
    world, rank = dist.get_world_size(), dist.get_rank()
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.ones(world, 256)
        if rank == 1:
            x[0, 130] = bad
        gathered = comm.all_gather(x)
        assert gathered[world, 128:].isnan().all() and gathered.isnan().sum() == 128
        total = comm.all_reduce(x)
        assert total[0, 128:].isnan().all() and total[1:].isfinite().all() and total[0, :128].isfinite().all()
        mine = comm.reduce_scatter(x)
        assert mine.isnan().sum() == (128 if rank == 0 else 0)
        moved = comm.all_to_all_single(x)
        assert moved.isnan().sum() == (128 if rank == 0 else 0)


OF_GROUPS = (gather_job, reduce_scatter_job, all_reduce_job, all_to_all_job)
JOBS = (*OF_GROUPS, all_to_all_list_job, strides_job, nonfinite_job)


@pytest.mark.thorough
@on_ranks(4)
def test_groups_that_are_not_the_world():
    """Two groups of two at once; a process outside of a group is told so."""
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    rank = dist.get_rank()
    for job in OF_GROUPS:
        job(groups[rank % 2])
    with pytest.raises(ValueError, match="not a member of the given group"):
        comm.all_gather(torch.ones(1), groups[1 - rank % 2])


@pytest.mark.thorough
@on_ranks(1)
def test_a_world_of_one_rank():
    for job in OF_GROUPS:
        job()


@pytest.mark.thorough
@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__.removesuffix("_job"))
def test_against_exact_sums_and_moves(gloo, job, world):
    gloo.run(job, world)


@pytest.mark.thorough
@on_ranks(3)
def test_gradients_are_those_of_the_transposed_collective():
    """In `backward_spec`: bitwise what that collective gives."""
    world, rank = dist.get_world_size(), dist.get_rank()
    x = values((2 * world, 130), dtype=torch.bfloat16)
    splits = [[(a + 2 * b) % 3 for b in range(world)] for a in range(world)]
    sent, received = splits[rank], [row[rank] for row in splits]
    rows = x[:1].expand(sum(sent), -1).clone()
    for back in (None, "e5m2/row"):
        used = back or comm.DEFAULT_SPEC
        for what, forward, backward, settings in (
            ("all_gather", comm.all_gather, comm.reduce_scatter, {}),
            ("reduce_scatter", comm.reduce_scatter, comm.all_gather, {}),
            ("reduce_scatter avg", comm.reduce_scatter, comm.all_gather, {"op": "avg"}),
            ("all_reduce", comm.all_reduce, comm.all_reduce, {}),
            ("all_reduce avg", comm.all_reduce, comm.all_reduce, {"op": "avg"}),
            ("all_to_all_single", partial(comm.all_to_all_single, output_split_sizes=received, input_split_sizes=sent),
             partial(comm.all_to_all_single, output_split_sizes=sent, input_split_sizes=received), {}),
        ):  # fmt: skip
            x_ = rows if what == "all_to_all_single" else x
            leaf = x_.clone().requires_grad_()
            with CollectiveRecorder() as tap:
                y = forward(leaf, backward_spec=back, **settings)
                count = len(tap.calls)
                weights = values(y.shape, seed=7, dtype=y.dtype)
                (y * weights).sum().backward()
            assert count and len(tap.calls) == 2 * count, f"{what}: {tap.calls}"
            assert {call.dtype for call in tap.calls} == {torch.uint8}, what
            with torch.no_grad():
                assert same_bits(forward(x_, **settings), y), what
                if what == "reduce_scatter avg":
                    expected = backward(weights, spec=used) / world
                else:
                    expected = backward(weights, spec=used, **settings)
            assert same_bits(leaf.grad, expected), f"{what}, backward in {used}"


@pytest.mark.thorough
@on_ranks(4)
def test_bytes_on_the_wire():
    """All-gather at most 0.52, reduce-scatter at most 0.55 of bf16: 1 + 4/128 bytes to 2."""
    x = values((512, 512), dtype=torch.bfloat16)
    world = dist.get_world_size()
    with CollectiveRecorder() as fp8:
        comm.all_gather(x)
    with CollectiveRecorder() as bf16:
        dist.all_gather([torch.empty_like(x) for _ in range(world)], x)
    gather = [fp8.bytes("_allgather_base_"), bf16.bytes("allgather_")]
    assert len(fp8.calls) == 1
    with CollectiveRecorder() as fp8:
        comm.reduce_scatter(x)
    with CollectiveRecorder() as bf16:
        dist.reduce_scatter(torch.empty(512 // world, 512, dtype=x.dtype), list(x.chunk(world)))
    scatter = [fp8.bytes("alltoall_base_"), bf16.bytes("reduce_scatter_")]
    assert len(fp8.calls) == 1
    with CollectiveRecorder() as fp8:
        comm.all_reduce(x)
    assert [call.name for call in fp8.calls] == ["alltoall_base_", "_allgather_base_"]
    reduce = [sum(call.bytes for call in fp8.calls), x.nbytes + x.nbytes // world]
    with CollectiveRecorder() as fp8:
        comm.all_to_all_single(x)
    moved = [fp8.bytes("alltoall_base_"), x.nbytes]
    with CollectiveRecorder() as fp8:
        comm.all_to_all_single(torch.ones(256 * world, dtype=torch.bfloat16))  # a row for each rank
    assert len(fp8.calls) == 1 and fp8.bytes("alltoall_base_") == world * (256 + 16)
    with CollectiveRecorder() as fp8:
        comm.all_to_all([torch.empty_like(part) for part in x.chunk(world)], list(x.chunk(world)))
    assert fp8.bytes("alltoall_base_") == moved[0] and len(fp8.calls) == 1
    counted = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce, "all_to_all": moved}
    for name, (fp8, bf16) in counted.items():
        assert fp8 / bf16 == pytest.approx((1 + 4 / 128) / 2), name


@pytest.mark.thorough
@on_ranks(2)
def test_mistakes_are_named():
    world = dist.get_world_size()
    x = torch.ones(2 * world, 8)
    recorded = x.clone().requires_grad_()
    for call, message in (
        (lambda: comm.all_gather(x.double()), "all_gather takes float32, bfloat16 or float16; got torch.float64"),
        (lambda: comm.all_reduce(x.int()), "use torch.distributed for others"),
        (lambda: comm.all_gather(x, spec="e4m3/8x8"), "by row, 1xN or tensor"),
        (lambda: comm.all_gather(x, spec="e4m3/rows"), "unknown granularity 'rows'"),
        (lambda: comm.all_gather(x, backward_spec="e4m3/column"), "by row, 1xN or tensor"),
        (lambda: comm.all_gather(recorded, async_op=True), "async_op does not support autograd"),
        (lambda: comm.reduce_scatter(x[1:]), "into 2 equal pieces, one per rank; got shape [3, 8]: pad it"),
        (lambda: comm.reduce_scatter(torch.ones(())), "got shape []"),
        (lambda: comm.reduce_scatter(x, op="mean"), "op is 'sum' or 'avg'; got 'mean'"),
        (lambda: comm.all_reduce(x, op="sums"), "did you mean 'sum'"),
        (lambda: comm.all_to_all_single(torch.ones(())), "got a tensor without dimensions: use x.view(1)"),
        (lambda: comm.all_to_all_single(torch.ones(3)), "3 rows are not 2 equal parts"),
        (lambda: comm.all_to_all_single(torch.ones(4), [2, 2], [3, 2]), "that add up to 4; got [3, 2]"),
        (lambda: comm.all_to_all_single(x[1:]), "3 rows are not 2 equal parts"),
        (lambda: comm.all_to_all_single(x, input_split_sizes=[1, 3]), "input_split_sizes needs output_split_sizes"),
        (lambda: comm.all_to_all_single(x, [2, 2], [1, 2]), "2 numbers of rows that add up to 4; got [1, 2]"),
        (lambda: comm.all_to_all_single(x, [2, -2], [2, 2]), "output_split_sizes is 2 numbers of rows; got [2, -2]"),
        (lambda: comm.all_to_all_single(x, [4], [2, 2]), "output_split_sizes is 2 numbers of rows; got [4]"),
        (lambda: comm.all_to_all([x], [x, x]), "outputs must hold one tensor per rank, 2; got 1"),
        (lambda: comm.all_to_all([x, x], [x] * 3), "inputs must hold one tensor per rank, 2; got 3"),
        (lambda: comm.all_to_all([x, x], [x, x.long()]), "all_to_all takes float32"),
        (lambda: comm.send(x.long(), 1), "send takes float32"),
        (lambda: comm.recv((2, 2), 0, dtype=torch.int32), "recv returns float32, bfloat16 or float16; got torch.int32"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_without_a_process_group():
    for call in (lambda: comm.all_gather(torch.ones(2)), lambda: comm.send(torch.ones(2), 1)):
        with pytest.raises(ValueError, match="call torch.distributed.init_process_group"):
            call()


@pytest.mark.thorough
@on_ranks(2)
def test_detailed_checks_compare_calls():
    """Without them Gloo ends a process, or bytes of one format are read as those of another. Calls that fit go on."""
    rank, before, errors = dist.get_rank(), dist.get_debug_level(), []
    x, spec = torch.randn(4 + 2 * rank, 64), ("e4m3/row", "fp8/1x128")[rank]
    parts = [torch.randn(2 + rank, 64) for _ in range(2)]
    calls = [
        partial(comm.all_gather, x), partial(comm.reduce_scatter, x), partial(comm.all_reduce, x),
        partial(comm.all_to_all_single, x), partial(comm.all_to_all_single, x[:4], [1, 3], [2, 2]),
        partial(comm.all_gather, x[:4], spec=spec), partial(comm.all_to_all_single, x[:4], spec=spec),
        partial(comm.all_to_all, [torch.empty_like(part) for part in parts], parts),
        partial(exchange_rows, x, [2 + rank] * 2, [2 + rank] * 2, None, fp8=False),
    ]  # fmt: skip
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for call in calls:
            with pytest.raises(ValueError, match="the calls of the ranks of the group do not fit") as error:
                call()
            errors.append(str(error.value))
        for job in (*OF_GROUPS, all_to_all_list_job):
            job()
        assert exchange_rows(x[:4], [2, 2], [2, 2], None, fp8=False).shape == (4, 64)
    finally:
        dist.set_debug_level(before)
    assert gather_objects(errors, None) == [errors, errors]
    assert "all_gather: " in errors[0] and "rank 0 ([4, 64], 'e4m3/1x128'); rank 1 ([6, 64], 'e4m3/1x128')" in errors[0]
    assert "rank 0 ([64], 'e4m3/1x128'), sends [2, 2], receives [1, 3]" in errors[4]
    assert "'e4m3/row'); rank 1" in errors[5]


@on_ranks(3)
def test_ring():
    world, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % world, (rank - 1) % world
    for spec, dtype, shape in [
        *((spec, DTYPES[index % 3], (6, 130)) for index, spec in enumerate(SPECS)),
        *((comm.DEFAULT_SPEC, torch.bfloat16, shape) for shape in (*SHAPES, ())),
    ]:
        exact = values(shape, before, dtype=dtype)
        sending = comm.isend(values(shape, dtype=dtype), after, spec=spec)
        result = comm.recv(shape, before, dtype=dtype, spec=spec)
        sending.wait()
        assert result.dtype == dtype
        assert_within(result, exact, bound(exact, spec), f"{spec} {dtype} {shape}")


@on_ranks(2)
def test_several_under_way():
    """Several at once, told apart by tags; what was sent may change; another dtype than the sender's."""
    rank = dist.get_rank()
    xs = [values((3, 200), 0, seed=seed) for seed in range(3)]
    if rank == 0:
        copies = [x.clone().requires_grad_() for x in xs]
        sending = [comm.isend(x, 1, tag=seed) for seed, x in enumerate(copies)]
        with torch.no_grad():
            for x in copies:
                x.zero_()
        for pending in sending:
            pending.wait()
        comm.send(xs[0], 1)
    else:
        coming = {seed: comm.irecv((3, 200), 0, dtype=torch.float32, tag=seed) for seed in (2, 0, 1)}
        for seed, pending in coming.items():
            result = pending.wait()
            assert not result.requires_grad
            assert_within(result, xs[seed], bound(xs[seed], comm.DEFAULT_SPEC), f"tag {seed}")
        half = comm.recv((3, 200), 0, dtype=torch.bfloat16)
        assert half.dtype == torch.bfloat16
        assert_within(half, xs[0], bound(xs[0], comm.DEFAULT_SPEC) + xs[0].abs() * 2**-8, "bf16")


@on_ranks(2)
def test_bytes():
    if dist.get_rank() == 0:
        with CollectiveRecorder() as tap:
            comm.send(torch.ones(64, 512, dtype=torch.bfloat16), 1)
        assert [(call.bytes, call.dtype) for call in tap.calls] == [(64 * (512 + 16), torch.uint8)]
    else:
        comm.recv((64, 512), 0, dtype=torch.bfloat16)
