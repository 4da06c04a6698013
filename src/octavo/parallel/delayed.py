"""One history of maxima for all ranks, for recipes with delayed scaling (`octavo.nn.delayed`).

When the model's forward begins in training, the maxima that ranks have seen of X and G in the pass before are put
together, of all layers in one exchange, as Transformer Engine does. All ranks then have the same scales, and one rank's
history is that of the run in a checkpoint, whoever reads it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.nn.delayed import histories, reduced


def share_histories(model: nn.Module, mesh: DeviceMesh) -> None:
    """Keep the histories of a model's layers the same over the ranks of a mesh, if any has one.

    Args:
        model: What every rank calls, alike often, in training.
        mesh: The ranks that share its data.
    """
    if next(histories(model), None) is None:
        return
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    device = torch.device(mesh.device_type)

    def over_ranks(maxima: Tensor) -> None:
        for group in groups:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            reduced((history for _, history in histories(module)), over_ranks, device)

    model.register_forward_pre_hook(before_forward, prepend=True)
