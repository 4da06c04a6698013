"""Channel equalization: scales s [K] of the channels of X and W that move magnitude between them (docs/numerics.md).

    X' = X diag(1/s)    W' = W diag(s)    Y = X Wᵀ = X' W'ᵀ    ∂X = (G W') diag(1/s)    ∂W = (Gᵀ X') diag(s)

This holds for every s > 0, so a stale s is not wrong: it only equalizes less. Powers of two lose no bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SPLIT = 12  # Exponent of the largest channel of X' and of W' over the median one
LARGEST_EXPONENT = 40  # Scales lie between 2⁻⁴⁰ and 2⁴⁰, so that stale ones leave room in float32 for values up to 10²⁶
TOKENS_AT_ONCE = 1024  # Rows of X in a part of `channel_amax`, which bounds its memory


@dataclass(frozen=True, eq=False)
class ChannelScales:
    """The scales s of one X, shared by the layers that read it. Compared by identity."""

    factor: Tensor  # s, float32 [1,K], powers of two
    inverse: Tensor  # 1/s, float32 [1,K]

    @staticmethod
    def of(exponents: Tensor) -> "ChannelScales":
        """Return 2^exponents, for integral exponents [K] of any dtype and device."""
        exponents = exponents.float().unsqueeze(0)
        return ChannelScales(torch.exp2(exponents), torch.exp2(-exponents))

    def exponents(self) -> Tensor:
        """Return log2 s, float32 [K]."""
        return torch.log2(self.factor[0]).round()

    def to(self, device: torch.device) -> "ChannelScales":
        """Return the scales on a device: this object if they are there."""
        if self.factor.device == device:
            return self
        moved: ChannelScales | None = vars(self).get("_moved")  # so that layers go on sharing one object
        if moved is None or moved.factor.device != device:
            moved = ChannelScales(self.factor.to(device), self.inverse.to(device))
            vars(self)["_moved"] = moved
        return moved


def column_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each column of a matrix, float32 [C]; 0 for columns with a NaN or Inf.

    Examples:
        >>> octavo.numerics.column_amax(torch.tensor([[1.0, -3.0], [2.0, float("nan")]]))
        tensor([2., 0.])
    """
    if not x.shape[0]:
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    amax: Tensor = torch.linalg.vector_norm(x.detach(), torch.inf, 0)
    return amax.float().nan_to_num(0.0, 0.0, 0.0)


def channel_amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each channel of X, after division of each token by the root of its size.

        max_m |x_mk| / Σ_j √|x_mj|

    Args:
        x: [M,K].

    Returns:
        float32 [K]; 0 for channels with NaN or Inf, whose tokens count in no channel, as those above 3·10³⁸ / K².

    Examples:
        >>> octavo.numerics.channel_amax(torch.tensor([[1.0, 1.0], [0.0, 10000.0]]))
        tensor([  0.5000, 100.0000])
    """
    x = x.detach()
    if not x.numel():
        return x.new_zeros(x.shape[1], dtype=torch.float32)
    amax = x.new_zeros(x.shape[1], dtype=torch.float32)
    for tokens in (x,) if torch.compiler.is_compiling() else x.split(TOKENS_AT_ONCE):
        size = torch.linalg.vector_norm(tokens, 0.5, 1, keepdim=True, dtype=torch.float32)  # (Σ √|x|)²
        weight = size.rsqrt().nan_to_num(0.0, 0.0)  # 0 for tokens of zeros, and with a NaN or Inf
        amax = torch.maximum(amax, torch.linalg.vector_norm(tokens * weight, torch.inf, 0))
    return amax.nan_to_num(0.0, 0.0, 0.0)


def equalize(x_amax: Tensor, w_amax: Tensor, previous: ChannelScales | None = None) -> ChannelScales:
    """Return the channel scales for given maxima: of the median channel 1.

    Args:
        x_amax: Largest magnitude of each channel of X, [K], finite: of `channel_amax`, or plain maxima.
        w_amax: The same of W: of `column_amax`.
        previous: Scales to keep where a maximum is zero: of a channel that is dead, or that had a NaN. Without them a
            channel dead on one side gets the level of the others on the other side; one dead on both is not scaled.

    Examples:
        >>> octavo.numerics.equalize(torch.tensor([1.0, 1024.0]), torch.ones(2)).factor
        tensor([[ 1., 32.]])
    """
    if not x_amax.numel():
        return ChannelScales.of(x_amax)
    x, w = xw = torch.log2(torch.stack([x_amax, w_amax]).double())  # -inf for zero
    x_alive, w_alive = xw > -torch.inf
    alive = x_alive & w_alive
    exponents, amax = (x - w) / 2, (x + w) / 2  # amax of X' and of W'
    # Medians over the channels that are alive, or zero without any.
    rows = torch.where(alive, torch.stack([x, w, exponents, amax]), torch.nan)
    of_x, of_w, usual, level = rows.nanmedian(1).values.nan_to_num(0.0).unbind()
    largest = level + LARGEST_SPLIT
    outlier_in_x = x - of_x > w - of_w
    exponents = torch.where(amax > largest, torch.where(outlier_in_x, largest - w, x - largest), exponents) - usual
    if previous is None:
        one_sided = torch.where(x_alive, x - level, level - w) - usual
        dead = torch.where(x_alive | w_alive, one_sided, 0.0)
    else:
        dead = previous.exponents().double()
    exponents = torch.where(alive, exponents, dead)
    return ChannelScales.of(exponents.round().clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT))
