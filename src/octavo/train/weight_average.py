"""An exponential moving average (EMA) of the weights: `optim.ema`.

    average = β average + (1 − β) master,   β = min(ema, (1 + t) / (10 + t))

In fp32, of the exact fp32 masters. In bf16 a step of 1 − β = 0.001 is below half a unit in the last place, so it would
be lost; rounded stochastically the update survives, but adds noise, which the average exists to remove. fp32 costs 4
bytes per trained parameter, sharded like the parameter. Training never reads the average.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from octavo.optim.sharded import local_rows, shard_like
from octavo.tensor import local_tensor


class WeightAverage:
    """The average of some parameters."""

    def __init__(self, names: Sequence[str], params: Sequence[nn.Parameter], masters: Iterable[Tensor]) -> None:
        self._params = dict(zip(names, params, strict=True))
        # The average by name, fp32, sharded like the parameters.
        self.tensors = {
            name: shard_like(param, master.detach().clone(memory_format=torch.contiguous_format))
            for (name, param), master in zip(self._params.items(), masters, strict=True)
        }

    @torch.no_grad()
    def update(self, masters: Iterable[Tensor], decay: float) -> None:
        """Move the average towards the masters by 1 − `decay`."""
        for average, master in zip(self.tensors.values(), masters, strict=True):
            local_tensor(average).lerp_(master.detach(), 1 - decay)

    @torch.no_grad()
    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Load an average by name; shards take their rows of it. Raises KeyError for a missing one."""
        for name, average in self.tensors.items():
            local_tensor(average).copy_(local_rows(average, saved[name]))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average into the parameters, and their own values back at the end."""
        with torch.no_grad():
            own = {name: local_tensor(param).detach().clone() for name, param in self._params.items()}
            try:
                self._fill({name: local_tensor(average) for name, average in self.tensors.items()})
                yield
            finally:
                self._fill(own)

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, param in self._params.items():
            local_tensor(param).copy_(values[name])
