"""Predict the memory of one rank of many that share a model (FSDP2), from that of one process with the whole model.

    held                 parameters, optimizer states and finished gradients: 1 / ranks of each
    gathered             parameters outside the blocks (embedding, head), throughout; the weights of the current block;
                         and those of the next block, prefetched, if there is one
    whole gradients      of parameters outside the blocks, until backward ends; of the current block
    in flight            gradients of the previous block, in the dtype of the reduction
    activations, …       as in one process with the same batch

These are the rules of torch 2.13's FSDP2. The tests compare them with FSDP2 steps recorded storage by storage
(docs/scaling.md). Padding of shards that do not divide evenly is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.planner.timeline import BLOCK_GRADIENTS, GATHERED, GRADIENTS, PARAMETERS, STATES, TEMPORARIES, MemorySeries


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """Parameters that FSDP2 gathers together, in bytes."""

    gathered: int  # Their weights, in the form in which they are gathered
    gradients: int  # Their whole gradients
    reduced: int  # Their gradients in the dtype of the reduction
    elements: int = 0  # Number of their trained elements


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How a model is sharded."""

    ranks: int  # Ranks that share one copy
    block: ShardGroup  # The largest block
    rest: ShardGroup  # Parameters outside the blocks
    blocks: int  # Number of blocks
    keeps_gathered: bool = False  # Whether gathered weights of blocks stay until backward has used them (ZeRO-2)
    accumulating: bool = False  # Whether gradients of earlier micro-batches exist already
    offloaded: bool = False  # Whether shards, with their gradients and states, are in host memory
    spread: float = 1.0  # Bytes of all parameters over those of the traced process, which has a part of the experts
    # Bytes of all whole gradients, if they stay until the end of the step (FSDP2 in a pipeline); else 0.
    accumulated: int = 0
    # Bytes of a sharded gradient's element over those of a whole gradient's: 2 for float32 shards of a model that
    # computes in bf16.
    widened: int = 1


def memory_per_rank(whole: MemorySeries, shards: Shards) -> MemorySeries:
    """Convert the memory series of one process into that of a rank with the same batch."""
    kinds = tuple(kind for kind in whole.kinds if kind != BLOCK_GRADIENTS)
    columns = {kind: whole.table[:, index] for index, kind in enumerate(whole.kinds)}
    zeros = torch.zeros(len(whole.phases), dtype=torch.int64, device="cpu")
    of_blocks = columns.pop(BLOCK_GRADIENTS, zeros)
    backward, computing = (
        torch.tensor([phase in names for phase in whole.phases], device="cpu") for names in _COMPUTING
    )
    result = {kind: _split(size, shards) if kind in (PARAMETERS, STATES) else size for kind, size in columns.items()}
    result[TEMPORARIES] = torch.where(computing, columns[TEMPORARIES], _split(columns[TEMPORARIES], shards))
    all_gradients = columns.get(GRADIENTS, zeros) + of_blocks
    finished = of_blocks >= shards.blocks * max(shards.block.gradients, 1)  # gradients of all blocks
    current = torch.where((of_blocks > 0) & ~finished, (of_blocks - 1) % max(shards.block.gradients, 1) + 1, 0)
    if shards.accumulated:
        gradients = torch.full_like(all_gradients, shards.accumulated) + backward * shards.block.gradients
        in_flight, finished = torch.zeros_like(backward), torch.zeros_like(computing)
        prefetching = finished
    elif shards.accumulating:
        gradients = _reduced(all_gradients, shards) + backward * (shards.rest.gradients + shards.block.gradients)
        in_flight, prefetching, finished = backward, computing, torch.zeros_like(computing)
    else:
        gradients = columns.get(GRADIENTS, zeros) + current + _reduced(of_blocks - current, shards)
        # The previous block's, until this block's are complete and scattered in their turn.
        in_flight = (of_blocks > shards.block.gradients) & (current < shards.block.gradients)
        prefetching = computing & (of_blocks < (shards.blocks - 1) * shards.block.gradients)
    keeps = shards.keeps_gathered or shards.accumulated > 0
    result[GRADIENTS] = torch.where(computing, gradients, _reduced(all_gradients, shards))
    result[GATHERED] = (
        computing * shards.rest.gathered
        + (computing & ~finished) * shards.block.gathered * (shards.blocks if keeps else 1)
        + (prefetching * shards.block.gathered if not keeps else 0)
        + (computing & in_flight) * shards.block.reduced
    )
    names = (*kinds, *(kind for kind in (TEMPORARIES, GRADIENTS, GATHERED) if kind not in kinds))
    table = torch.stack([result[kind] for kind in names], dim=1)
    return _add_last_scatter(MemorySeries(names, whole.phases, table), _reduced(all_gradients, shards)[-1], shards)


_COMPUTING = (("backward",), ("forward", "backward"))


def _split(size: Tensor, shards: Shards) -> Tensor:
    whole = (size * shards.spread).long() if shards.spread != 1 else size
    return torch.zeros_like(size) if shards.offloaded else -(-whole // shards.ranks)


def _reduced(gradients: Tensor, shards: Shards) -> Tensor:
    return _split(gradients * shards.widened, shards)


def _add_last_scatter(series: MemorySeries, gradients: Tensor, shards: Shards) -> MemorySeries:
    """Append the time after backward at which gradients outside the blocks are scattered."""
    column = {kind: index for index, kind in enumerate(series.kinds)}
    last = series.table[-1].clone()
    last[column[TEMPORARIES]] = 0
    last[column[GRADIENTS]] = gradients + shards.rest.gradients
    last[column[GATHERED]] = shards.rest.reduced
    return MemorySeries(series.kinds, [*series.phases, "end of backward"], torch.cat([series.table, last[None]]))
