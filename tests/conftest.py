"""Settings that all tests share."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # of which there is one for each core: threads of theirs would only meet
    os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
