"""Share one amax history, and one set of channel scales, among all ranks, for recipes with delayed scaling
(`octavo.nn.delayed`) and with equalization (`octavo.nn.equalized`).

When the model's forward begins in training, the ranks combine the amax values of X and G from the previous pass, for
all layers in one exchange, as Transformer Engine does. All ranks then have the same scales, and one rank's history is
valid for all ranks in a checkpoint. The same holds for channel scales, which are exchanged after passes that measured.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from octavo.nn.delayed import histories, reduce_amaxes
from octavo.nn.equalized import reduce_scales


def sync_scaling_state(model: nn.Module, mesh: DeviceMesh) -> None:
    """Synchronize the amax histories and channel scales of a model's layers over the ranks of a mesh."""
    # Each forward looks for them, because `octavo.nn.change_recipe` can give a layer one.
    list(histories(model))  # creates them: torch.compile loses what the hook creates
    groups = [group for group in mesh.get_all_groups() if dist.get_world_size(group) > 1]
    device = torch.device(mesh.device_type)

    def all_reduce_max(maxima: Tensor) -> None:
        for group in groups:
            dist.all_reduce(maxima, dist.ReduceOp.MAX, group)

    def before_forward(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            reduce_amaxes((history for _, history in histories(module)), all_reduce_max, device)
            reduce_scales(module, all_reduce_max, device)

    model.register_forward_pre_hook(before_forward, prepend=True)
