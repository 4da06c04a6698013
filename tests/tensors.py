"""Tensors that tests of several folders share."""

import io
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from octavo.nn import ResidentWeight

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


@contextmanager
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def same(expected, actual, name=""):
    """Whether tensors are equal to the bit, also those in mappings and sequences; prints which is not."""
    if isinstance(expected, Mapping):
        if others := expected.keys() ^ actual.keys():
            print(f"only one has {others}")
        return not others and all(same(expected[key], actual[key], key) for key in expected)
    if isinstance(expected, ResidentWeight):
        return same(*([w.data_, w.scale, w.spec] for w in (expected, actual)), name)
    if isinstance(expected, torch.Tensor):
        fp8 = expected.is_floating_point() and expected.itemsize == 1
        pair = [t.view(torch.uint8) if fp8 else t for t in (expected, actual)]
        equal = expected.dtype == actual.dtype and torch.equal(*pair)
        if not equal:
            print(f"{name} differs")
        return equal
    if isinstance(expected, Iterable) and not isinstance(expected, str):
        return all(same(*pair, name) for pair in zip(expected, actual, strict=True))
    return expected == actual
