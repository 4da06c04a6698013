"""cross_entropy on a GPU: one program for each row of logits."""

from functools import lru_cache

import torch
import triton
from torch import Tensor

from octavo.kernels.cross_entropy.device import cross_entropy_kernel
from octavo.kernels.launch import INTERPRETED, Launch

WIDEST = 4096  # Logits of a row that a program holds at a time


@lru_cache(maxsize=64)
def launch(columns: int, capped: bool) -> Launch:
    """Return the kernel for rows of a length, which keeps what it has prepared."""
    tile = min(triton.next_power_of_2(max(columns, 128)), WIDEST)
    constants = {"CAPPED": capped, "TILE_C": tile, "INTERPRETED": INTERPRETED}
    return Launch(kernel=cross_entropy_kernel, constants=constants, num_warps=max(tile // 512, 1))


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, scale: float, softcap: float | None
) -> Tensor:  # fmt: skip
    rows, columns = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return loss
    arguments = {
        "z": logits, "target": target.contiguous(), "loss": loss, "columns": columns, "stride": logits.stride(0),
        "ignore_index": ignore_index, "scale": float(scale), "softcap": float(softcap or 1.0),
    }  # fmt: skip
    launch(columns, softcap is not None).run((rows,), arguments)
    return loss
