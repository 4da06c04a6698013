import pytest
import torch
import torch.distributed as dist
from cases import DTYPES, SHAPES, SPECS, assert_within, bound, values

from collective_recorder import CollectiveRecorder
from octavo import comm
from processes import on_ranks

pytestmark = pytest.mark.dist


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
