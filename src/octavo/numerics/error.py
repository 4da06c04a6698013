"""Comparison of tensors: SQNR, and the first byte that differs."""

import torch
from torch import Tensor


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Compute the signal to quantization noise ratio in dB: 20·log10(‖reference‖ / ‖reference − approximation‖).

    Computed in float64 over all elements. Equal tensors give `inf`; any NaN or Inf gives `nan`.

    Args:
        reference: Exact values, any shape and floating dtype.
        approximation: Same shape, any floating dtype.

    Raises:
        ValueError: The shapes differ.

    Examples:
        >>> octavo.numerics.sqnr(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        20.0
    """
    if reference.shape != approximation.shape:
        raise ValueError(f"sqnr needs equal shapes; got {tuple(reference.shape)} and {tuple(approximation.shape)}")
    exact = reference.detach().double()
    noise = torch.linalg.vector_norm(exact - approximation.detach().double())
    return (20 * torch.log10(torch.linalg.vector_norm(exact) / noise)).item() if noise != 0 else float("inf")


def first_mismatch(expected: Tensor, actual: Tensor) -> str | None:
    """Compare raw bytes and describe the first element that differs, or return None.

    NaNs with the same bits are equal; -0.0 and 0.0 are not.

    Examples:
        >>> octavo.numerics.first_mismatch(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]))
        '1 of 2 elements differ, first at (1,): expected 2.0, got 2.5'
    """
    if expected.dtype != actual.dtype or expected.shape != actual.shape:
        return f"expected {expected.dtype} {tuple(expected.shape)}, got {actual.dtype} {tuple(actual.shape)}"
    width = expected.element_size()
    different = _bytes(expected).ne(_bytes(actual)).reshape(-1, width).any(dim=1)
    if not different.any():
        return None
    flat = int(different.nonzero()[0])
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat, device="cpu"), expected.shape))
    return (
        f"{int(different.sum())} of {expected.numel()} elements differ, first at {index}: "
        f"expected {expected[index].float().item()!r}, got {actual[index].float().item()!r}"
    )


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
