"""Tensors that tests of several folders share."""

import io
from importlib.util import find_spec

import pytest
import torch

needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (macOS, Windows)")
ADAMW_BACKENDS = ["reference", *(["triton"] if find_spec("triton") else [])]


def randn(*shape, seed=0, dtype=torch.float32):
    """Normal values of a seed; a scalar without a shape."""
    return torch.randn(*(shape or [()]), generator=torch.Generator().manual_seed(seed)).to(dtype)


def saved_and_loaded(value, weights_only=True):
    """What `torch.load` reads of what `torch.save` wrote."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
