"""Targets that count: those of padding and of other text to ignore do not, so rows and ranks differ in their number.

The gradient of a step is that of the mean over all of its targets. A micro-batch of n counted targets therefore weighs
n over the mean count of a rank, because FSDP and DDP average gradients over ranks. Fake targets, of a plan, all count.
"""

from torch import Tensor

from octavo.nn.causal_head import IGNORE
from octavo.runtime.torch_compat import FakeTensor
from octavo.train.ranks import Ranks


def targets_per_rank(targets: Tensor, ranks: Ranks, *, uneven: bool) -> float:
    """How many targets of a step count, on the average of all ranks. `targets`: those of this rank."""
    if not uneven or isinstance(targets, FakeTensor):
        return targets.numel()
    (count,) = ranks.all_reduce((targets != IGNORE).sum())
    return count.item() / ranks.world_size


def counted(targets: Tensor, *, uneven: bool) -> tuple[int, Tensor]:
    """How many targets of a micro-batch count, and targets of which at least one does."""
    # The mean over no target is not a number, even with a weight of zero.
    if not uneven or isinstance(targets, FakeTensor):
        return targets.numel(), targets
    count = int((targets != IGNORE).sum())
    if not count:
        targets = targets.clone()
        targets.view(-1)[0] = 0
    return count, targets
