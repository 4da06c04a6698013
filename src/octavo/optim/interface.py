"""Optimizer: the base class of Octavo's optimizers, and what the trainer and the planner ask of one."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor


class Optimizer(torch.optim.Optimizer, ABC):
    """A `torch.optim.Optimizer` with compact states, that may hold exact float32 masters of its parameters.

    The planner and the trainer treat any other `torch.optim.Optimizer` as PyTorch's own: its states exist after a step.

    Attributes:
        step_allocates: Whether a step needs memory besides the states and gradients. If so, the planner takes a step
            under FakeTensorMode to measure it, so the step must not read values of tensors.

    Examples:
        >>> optimizer = octavo.AdamW(torch.nn.Linear(64, 64).parameters())
        >>> isinstance(optimizer, octavo.optim.Optimizer), optimizer.step_allocates
        (True, False)
    """

    step_allocates: ClassVar[bool] = True

    @abstractmethod
    def make_states(self) -> None:
        """Allocate missing states of all parameters before the first step, to measure their memory."""

    @abstractmethod
    def set_masters(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Set exact float32 masters, by parameter, before training; parameters become the rounded values.

        Raises:
            ValueError: A parameter has no master, or a value has another shape or dtype.
        """
