"""exchange_rows: the all-to-all of expert and sequence parallelism, in FP8 or exact, differentiable."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from octavo.comm import ADAPTIVE_SPEC, all_to_all_single
from octavo.comm.checks import compare_calls
from octavo.comm.collectives import AsyncResult, differentiable
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
    return _exact(rows, list(sent), list(received), group)


def _exact(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    def start(rows: Tensor) -> AsyncResult[Tensor]:
        compare_calls("all_to_all_single", group, (list(rows.shape[1:]), rows.dtype), sent, received)
        arriving = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arriving, rows.contiguous(), received, sent, group=group)
        return AsyncResult(None, lambda: arriving)

    arrived: Tensor = differentiable(rows, start, lambda g: _exact(g, received, sent, group))
    return arrived
