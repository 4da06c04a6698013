"""Ranks that would step AdamW on different backends."""

import warnings

import pytest
import torch
import torch.distributed as dist
from training import make

from octavo.kernels.adamw import ADAMW, CASE
from octavo.kernels.adamw.reference import step_all
from octavo.kernels.registry import Backend
from octavo.optim import AdamW
from octavo.parallel import Parallel, parallelize

pytestmark = pytest.mark.dist


def other_bits(work):
    """A step that is right to a few bits, as that of Triton's kernel."""
    step_all(work)
    for state, _ in work:
        state.param.mul_(1 + 2**-20)


def job(ranks_with_triton):
    """Train replicas where only some ranks have the kernel; return the warnings, the backend and the parameters."""
    rank, cpu, real = dist.get_rank(), torch.device("cpu"), dict(ADAMW.backends)
    has_it = rank in ranks_with_triton
    ADAMW.backends["triton"] = Backend(
        name="triton", run=other_bits, unsupported_reason=lambda *_: None if has_it else "no Triton on this rank"
    )
    ADAMW._chosen.clear()
    ADAMW._probe_results.clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = parallelize(make(), Parallel(dp_replicate=2), fp8_comm="off")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model(torch.arange(8).view(1, 8)).float().square().mean().backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        return [str(w.message) for w in caught], ADAMW.choose(cpu, CASE).name, flat
    finally:
        ADAMW.backends.clear()
        ADAMW.backends.update(real)
        ADAMW._chosen.clear()
        ADAMW._probe_results.clear()


def test_replicas_step_on_one_backend(gloo):
    (first, name, params), (second, other, others) = gloo.run(job, 2, (0,))
    assert name == other == "reference" and torch.equal(params, others)
    for text in (*first, *second):
        assert "rank 0 triton, rank 1 reference (triton: no Triton on this rank)" in text
    assert len(first) == len(second) == 1
    for warned, name, _ in gloo.run(job, 2, (0, 1)):
        assert not warned and name == "triton"
