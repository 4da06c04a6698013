"""Settings that all tests share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # of which there is one for each core: threads of theirs would only meet
    os.environ["OMP_NUM_THREADS"] = "1"

# Products of FP8 operands as `reference` computes them, also where the CPU has bf16 instructions.
os.environ.setdefault("OCTAVO_CPU_PRODUCTS", "exact")

from importlib.util import find_spec

import pytest
import torch

if find_spec("hypothesis"):  # `tests/test_gpu.py` runs without it, where a GPU has few packages beside it
    from hypothesis import settings

    # The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.register_profile("explore", deadline=None)
    settings.load_profile("repeatable")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def no_gpu_decides(monkeypatch):
    """Has `octavo.convert` convert every layer on machines with a GPU too, where small ones would stay in bf16."""
    if torch.cuda.is_available():
        monkeypatch.setattr("octavo.planner.auto_convert.local_gpu_name", lambda: None)
