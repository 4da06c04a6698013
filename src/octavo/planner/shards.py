"""Shards: the memory of one rank of many that share a model (FSDP2), from that of one process that has it all.

    held                 parameters, optimizer states and gradients that are done: 1 / ranks of each
    gathered             what belongs to no block (embedding, head), all the time; of the block that computes, its
                         weights; and the next block's, on their way, unless there is none
    whole gradients      of what belongs to no block, until backward ends; of the block that computes
    on their way         gradients of the block before, in the dtype they are added up in
    activations, …       as of one process with the same batch

The rules are those of torch 2.13's FSDP2, and the tests hold them to steps of it that were followed storage by storage
(docs/scaling.md). Padding of shards that do not divide evenly is left out.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.planner.memory import PARAMETERS, STATES
from octavo.planner.moments import Moments
from octavo.planner.timeline import GRADIENTS, OF_BLOCKS, TEMPORARIES

GATHERED = "gathered"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are gathered together, in bytes.

    Attributes:
        gathered: Their weights, in the form in which they are gathered.
        gradients: Their whole gradients.
        reduced: The same in the dtype in which gradients are added up.
    """

    gathered: int
    gradients: int
    reduced: int


@dataclass(frozen=True, kw_only=True)
class Shards:
    """How a model is spread.

    Attributes:
        ranks: That share one copy.
        block: The largest block.
        rest: What belongs to no block.
        blocks: Their number.
        keeps: Whether gathered weights of blocks stay until backward is through with them (ZeRO-2).
        accumulating: Whether the gradients of micro-batches before are there already.
        offloaded: Whether shards, with their gradients and states, are in host memory.
        widened: How many times the bytes of a whole gradient's element those of a shard's have: 2 for float32 shards of
            a model that computes in bf16.
    """

    ranks: int
    block: Group
    rest: Group
    blocks: int
    keeps: bool = False
    accumulating: bool = False
    offloaded: bool = False
    widened: int = 1


def per_rank(whole: Moments, shards: Shards) -> Moments:
    """The moments of a rank, from those of one process with the same batch."""
    kinds = tuple(kind for kind in whole.kinds if kind != OF_BLOCKS)
    given = {kind: whole.table[:, at] for at, kind in enumerate(whole.kinds)}
    zeros = torch.zeros(len(whole.phases), dtype=torch.int64)
    of_blocks = given.pop(OF_BLOCKS, zeros)
    backward, during = (torch.tensor([phase in names for phase in whole.phases]) for names in _DURING)
    found = {kind: _split(size, shards) if kind in (PARAMETERS, STATES) else size for kind, size in given.items()}
    found[TEMPORARIES] = torch.where(during, given[TEMPORARIES], _split(given[TEMPORARIES], shards))
    all_gradients = given.get(GRADIENTS, zeros) + of_blocks
    through = of_blocks >= shards.blocks * max(shards.block.gradients, 1)  # with all blocks
    computing = torch.where((of_blocks > 0) & ~through, (of_blocks - 1) % max(shards.block.gradients, 1) + 1, 0)
    if shards.accumulating:
        now = _done(all_gradients, shards) + backward * (shards.rest.gradients + shards.block.gradients)
        on_their_way, coming, through = backward, during, torch.zeros_like(during)
    else:
        now = given.get(GRADIENTS, zeros) + computing + _done(of_blocks - computing, shards)
        on_their_way = of_blocks > shards.block.gradients
        coming = during & (of_blocks < (shards.blocks - 1) * shards.block.gradients)
    found[GRADIENTS] = torch.where(during, now, _done(all_gradients, shards))
    found[GATHERED] = (
        during * shards.rest.gathered
        + (during & ~through) * shards.block.gathered * (shards.blocks if shards.keeps else 1)
        + (coming * shards.block.gathered if not shards.keeps else 0)
        + (during & on_their_way) * shards.block.reduced
    )
    names = (*kinds, *(kind for kind in (TEMPORARIES, GRADIENTS, GATHERED) if kind not in kinds))
    table = torch.stack([found[kind] for kind in names], dim=1)
    return _with_last_scatter(Moments(names, whole.phases, table), _done(all_gradients, shards)[-1], shards)


_DURING = (("backward",), ("forward", "backward"))


def _split(size: Tensor, shards: Shards) -> Tensor:
    return torch.zeros_like(size) if shards.offloaded else -(-size // shards.ranks)


def _done(gradients: Tensor, shards: Shards) -> Tensor:
    return _split(gradients * shards.widened, shards)


def _with_last_scatter(found: Moments, gradients: Tensor, shards: Shards) -> Moments:
    """And the moment at which backward is over and the gradients of the rest leave."""
    at = {kind: index for index, kind in enumerate(found.kinds)}
    last = found.table[-1].clone()
    last[at[TEMPORARIES]] = 0
    last[at[GRADIENTS]] = gradients + shards.rest.gradients
    last[at[GATHERED]] = shards.rest.reduced
    return Moments(found.kinds, [*found.phases, "end of backward"], torch.cat([found.table, last[None]]))
