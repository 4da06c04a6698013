"""exchange_rows: the all-to-all of expert and sequence parallelism, in FP8 or exact, differentiable."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from octavo.comm import ADAPTIVE_SPEC, all_to_all_single
from octavo.comm.checks import compare_calls
from octavo.runtime.switch import SWITCH


def exchange_rows(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: Any, *, fp8: bool, spec: str = ADAPTIVE_SPEC
) -> Tensor:
    """Send rows to every rank and receive rows from every rank; gradients travel the same way back."""
    if len(sent) == 1:
        return rows
    if fp8 and not SWITCH.off:
        result: Tensor = all_to_all_single(rows, received, sent, group, spec=spec, backward_spec=ADAPTIVE_SPEC)
        return result
    exact: Tensor = _Exact.apply(rows, list(sent), list(received), group)
    return exact


class _Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.saved_args = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group = ctx.saved_args
        return _Exact.apply(g, received, sent, group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    compare_calls("all_to_all_single", group, (list(rows.shape[1:]), rows.dtype), sent, received)
    arriving = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group)
    return arriving
