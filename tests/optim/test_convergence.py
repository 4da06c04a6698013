"""Training with FP8 moments ends where training with float32 moments does."""

import pytest
import torch
from torch import nn

from octavo import AdamW

STEPS = 1000


def noisy_quadratic(make):
    """Mean loss of the last 100 steps on ½(x−t)ᵀA(x−t), curvatures over three decades, gradients with noise."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-2, 1, 4096).view(16, 256)
    target = torch.randn(16, 256, generator=generator)
    x = nn.Parameter(torch.zeros(16, 256))
    optimizer, losses = make([x]), []
    for _ in range(STEPS):
        error = x.detach() - target
        losses.append((curvature * error**2).sum().item() / 2)
        x.grad = curvature * error + 0.1 * curvature.sqrt() * torch.randn(16, 256, generator=generator)
        optimizer.step()
    return sum(losses[-100:]) / 100


@pytest.mark.parametrize("lr", [1e-2, 1e-3])
@pytest.mark.slow
def test_loss_is_within_1_percent_of_fp32_moments(lr):
    exact = noisy_quadratic(lambda params: torch.optim.AdamW(params, lr=lr))
    assert noisy_quadratic(lambda params: AdamW(params, lr=lr)) == pytest.approx(exact, rel=0.01)


@pytest.mark.slow
def test_rounding_to_nearest_stalls_averages():
    """Why moments are rounded at random by default."""
    exact = noisy_quadratic(lambda params: torch.optim.AdamW(params, lr=1e-2))
    assert noisy_quadratic(lambda params: AdamW(params, lr=1e-2, stochastic_rounding=False)) > 1.05 * exact
