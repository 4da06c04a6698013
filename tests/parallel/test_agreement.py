"""Ranks that would step AdamW on different backends."""

import warnings
from unittest.mock import patch

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
    reason = None if dist.get_rank() in ranks_with_triton else "no Triton on this rank"
    triton = Backend(name="triton", run=other_bits, unsupported_reason=lambda *_: reason)
    with (
        patch.dict(ADAMW.backends, triton=triton),
        patch.dict(ADAMW._chosen, clear=True),
        patch.dict(ADAMW._probe_results, clear=True),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        model = parallelize(make(), Parallel(dp_replicate=2), fp8_comm="off")
        optimizer = AdamW(model.parameters(), lr=1e-2)
        model(torch.arange(8).view(1, 8)).float().square().mean().backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        texts = [str(warning.message) for warning in caught if "AdamW" in str(warning.message)]
        return texts, ADAMW.choose(torch.device("cpu"), CASE).name, flat


def test_replicas_step_on_one_backend(gloo):
    (first, name, params), (second, other, others) = gloo.run(job, 2, (0,))
    assert name == other == "reference" and torch.equal(params, others)
    for text in (*first, *second):
        assert "rank 0 triton, rank 1 reference (triton: no Triton on this rank)" in text
    assert len(first) == len(second) == 1
    for warned, name, _ in gloo.run(job, 2, (0, 1)):
        assert not warned and name == "triton"
