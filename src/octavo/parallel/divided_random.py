"""Random numbers of tensor parallelism: equal where ranks hold the same values, different where they hold other heads.

    x (all ranks alike) ─▶ q, k, v ─▶ attention of a rank's heads: dropout of its own ─▶ o ─▶ dropout, alike

Ranks that hold all tokens are seeded alike, so that they drop the same values of the residual stream. But then dropout
of attention, or of an MLP's features, would repeat one mask in the heads or features of every rank. So between the
first column-parallel layer of a module and its row-parallel one, generators are seeded with a hash of their state and
the rank (Megatron's model-parallel seed, without a second state to save). Afterwards they are as they were, one number
further if that was used: the same on all ranks, in recomputation under activation checkpointing, and after a resume.
Modules without dropout draw nothing, and get no hooks.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.runtime.torch_compat import FakeTensor


def divide_dropout(model: nn.Module, columns: Iterable[str], rows: Iterable[str], rank: int) -> None:
    """Give dropout between column-parallel layers and a row-parallel one random numbers of this rank's own.

    Args:
        model: The model.
        columns: Names of its column-parallel layers.
        rows: Names of its row-parallel layers, each in a module with column-parallel ones, such as attention.
        rank: Of tensor parallelism.
    """
    for row in rows:
        name = row.rpartition(".")[0]
        owner = model.get_submodule(name)
        if not _has_dropout(owner):
            continue
        divided = _Divided(owner, rank)
        for column in columns:
            if column.rpartition(".")[0] == name:
                model.get_submodule(column).register_forward_hook(divided.begin)
        model.get_submodule(row).register_forward_pre_hook(divided.end)
        owner.register_forward_hook(divided.end, always_call=True)  # if it failed midway


def _has_dropout(owner: nn.Module) -> bool:
    rates = [value for name, value in vars(owner).items() if "drop" in name and isinstance(value, int | float)]
    rates += [module.p for module in owner.modules() if isinstance(module, nn.Dropout)]
    return any(rate > 0 for rate in rates)


class _Divided:
    """The generators of a rank inside and outside of divided layers."""

    def __init__(self, owner: nn.Module, rank: int) -> None:
        self._owner, self._rank = owner, rank
        self._generators: list[torch.Generator] = []
        self._outside: list[Tensor] = []
        self._inside: list[Tensor] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, layer: nn.Module, args: Any, y: Tensor) -> None:
        """Seed the generators for this rank, unless the module's first divided layer has done so."""
        if self._outside or not self._owner.training or y.is_meta or isinstance(y, FakeTensor):
            return
        self._generators = [torch.default_generator]
        if y.device.type != "cpu":
            self._generators.append(torch.get_device_module(y.device).default_generators[y.device.index])
        self._outside = self._states()
        digest = hashlib.blake2b(str(self._rank).encode(), digest_size=7)
        for state in self._outside:
            digest.update(state.numpy().tobytes())
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest.digest(), "big"))
        self._inside = self._states()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, *_: Any) -> None:
        """Return to the random numbers of all ranks."""
        if not self._outside:
            return
        used = not all(map(torch.equal, self._inside, self._states()))
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []
        if used:
            torch.rand(())  # on the CPU, whose state the next hash reads

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]
