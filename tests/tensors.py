"""Tensors that tests of several folders share."""

import torch


def randn(*shape, seed=0, dtype=torch.float32):
    """Normal values of a seed; a scalar without a shape."""
    return torch.randn(*(shape or [()]), generator=torch.Generator().manual_seed(seed)).to(dtype)
