"""Settings that all tests share."""

import os

import torch
from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=explore` draws new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
