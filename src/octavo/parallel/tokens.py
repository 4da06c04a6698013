"""What ranks of tensor parallelism exchange: tokens of a sequence of which each rank has an equal part.

    gather      parts of X or G to the whole, on every rank        [..., S/t, ..., K] → [..., S, ..., K]
    reduce      summands of Y or ∂X, and each rank's part of the sum    [..., S, ..., K] → [..., S/t, ..., K]

`gather_input` and `reduce_output` are the two ends of a layer; each is the other's backward.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from octavo.comm import ADAPTIVE_SPEC, all_gather, reduce_scatter
from octavo.comm.collectives import gather_single, reduce_scatter_single
from octavo.comm.encoding import parse_spec
from octavo.kernels import quantize
from octavo.nn.gathered import GatheredInput, Rows
from octavo.numerics.spec import QuantSpec
from octavo.tensor import ScaledTensor

_GROUP = parse_spec(ADAPTIVE_SPEC).granularity.columns  # Elements that share a scale in messages of G and of summands


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    mesh: DeviceMesh  # The ranks, one dimension
    sequence_dim: int | None  # The dimension of tokens, negative from the end; None if every rank has all of them
    fp8_gather: bool  # Gather in FP8
    fp8_reduce: bool  # Send summands in FP8; only with tokens to share

    def __deepcopy__(self, memo: object) -> "TokenExchange":
        return self  # meshes do not copy

    def dim(self, x: Tensor) -> int:
        assert self.sequence_dim is not None
        dim = self.sequence_dim + x.ndim if self.sequence_dim < 0 else self.sequence_dim
        if not 0 <= dim < x.ndim - 1:
            raise ValueError(
                f"sequence_dim={self.sequence_dim} is no dimension of tokens of an input of shape {list(x.shape)}, "
                "whose last dimension is that of features: use -2, the last but one"
            )
        return dim

    def placement(self, x: Tensor) -> Placement:
        """Return where each rank's tokens of [..., K] are in those of all."""
        return Replicate() if self.sequence_dim is None else Shard(self.dim(x))

    def gather(self, x: Tensor, fp8: bool) -> Tensor:
        """Return all tokens, of this rank's: in groups in FP8, or in two bytes."""
        if self.sequence_dim is None:
            return x.view_as(x)
        if fp8:
            parts = all_gather(_in_groups(x.detach()), self.mesh.get_group(), spec=ADAPTIVE_SPEC)
        else:
            sent = x.detach().to(_two_bytes(x.dtype)).contiguous().view(-1)
            parts = sent.new_empty(self.mesh.size() * sent.numel())
            gather_single(parts, sent, group=self.mesh.get_group())
        return self._joined(parts.view(self.mesh.size(), *x.shape)).to(x.dtype)

    def gather_quantized(self, x: Tensor, spec: QuantSpec) -> Tensor:
        """Return all tokens, of this rank's, as rows that were quantized where they are."""
        x_MK = x.detach().reshape(-1, x.shape[-1])
        quantized = quantize(x_MK, spec)
        assert quantized.scale is not None
        if self.sequence_dim is None:
            return GatheredInput(Rows(quantized, x, partial(self.gather, fp8=False)), x.shape, x.dtype)
        sent = torch.cat([part.reshape(-1).view(torch.uint8) for part in (quantized.data, quantized.scale)])
        received = sent.new_empty(self.mesh.size(), sent.numel())
        gather_single(received.view(-1), sent, group=self.mesh.get_group())
        size = x_MK.numel()
        data = self._joined(received[:, :size].unflatten(1, x.shape))
        scale = self._joined(received[:, size:].unflatten(1, (*x.shape[:-1], quantized.scale.element_size())))
        rows = ScaledTensor(
            data.flatten(0, -2).view(spec.format.dtype),
            scale.flatten(0, -2).clone().view(spec.scale_dtype),  # a copy begins at whole scales
            spec,
        )
        return GatheredInput(Rows(rows, x, partial(self.gather, fp8=False)), data.shape, x.dtype)

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' summands, for this rank's tokens."""
        total: Tensor
        group, summand = self.mesh.get_group(), x.detach()
        if self.sequence_dim is None:
            total = summand.to(_two_bytes(x.dtype), copy=True)
            dist.all_reduce(total, group=group)
            return total.to(x.dtype)
        dim, ranks = self.dim(x), self.mesh.size()
        check_equal_parts(x, dim, ranks)
        parts = summand.unflatten(dim, (ranks, x.shape[dim] // ranks)).movedim(dim, 0)
        shape = parts.shape[1:]
        if self.fp8_reduce:
            total = reduce_scatter(_in_groups(parts), group, spec=ADAPTIVE_SPEC)
        else:
            sent = parts.to(_two_bytes(x.dtype)).contiguous().view(-1)
            total = sent.new_empty(sent.numel() // ranks)
            reduce_scatter_single(total, sent, group=group)
        return total.view(shape).to(x.dtype)

    def _joined(self, parts: Tensor) -> Tensor:
        dim = self.dim(parts[0])
        return parts.movedim(0, dim).flatten(dim, dim + 1)


def check_equal_parts(x: Tensor, dim: int, ranks: int) -> None:
    if (size := x.shape[dim]) % ranks:
        what, whole = ("tokens", "the sequence") if dim < x.ndim - 1 else ("features", "it")
        raise ValueError(
            f"{size} {what} are not an equal part for each of {ranks} ranks of tensor parallelism, in dimension {dim} "
            f"of {list(x.shape)}: pad {whole} to {size + -size % ranks}"
        )


def gather_input(x: Tensor, exchange: TokenExchange, spec: QuantSpec | None) -> Tensor:
    """Return all tokens of this rank's x as a DTensor of each rank; summands of their gradient are reduced."""
    return _GatherInput.apply(x, exchange, spec, False)  # type: ignore[no-any-return]


def reduce_output(y: Tensor, exchange: TokenExchange) -> Tensor:
    """Return this rank's tokens of the sum of summands y, a DTensor; their gradient is gathered."""
    return _ReduceOutput.apply(y, exchange)  # type: ignore[no-any-return]


class _GatherInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: TokenExchange, spec: QuantSpec | None, fp8: bool) -> Tensor:
        ctx.exchange, ctx.placement = exchange, exchange.placement(x)
        whole = exchange.gather(x, fp8) if spec is None else exchange.gather_quantized(x, spec)
        return DTensor.from_local(whole, exchange.mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor | None, ...]:
        if grad.placements == (Partial(),):
            return _ReduceOutput.apply(grad, ctx.exchange), None, None, None
        return grad.redistribute(placements=[ctx.placement]).to_local(), None, None, None


class _ReduceOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: DTensor, exchange: TokenExchange) -> Tensor:
        ctx.exchange = exchange
        if y.placements == (Partial(),):
            return exchange.reduce(y.to_local())
        return y.redistribute(placements=[exchange.placement(y)]).to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange: TokenExchange = ctx.exchange
        return _GatherInput.apply(grad, exchange, None, exchange.fp8_gather), None


def _two_bytes(dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if dtype == torch.float32 else dtype


def _in_groups(x: Tensor) -> Tensor:
    """Return the elements in an order and shape whose messages have no padding, in the same groups of a row of x."""
    return x.contiguous().view(-1) if x.shape[-1] % _GROUP == 0 else x.reshape(-1, x.shape[-1])
