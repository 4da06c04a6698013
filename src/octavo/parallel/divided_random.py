"""Random numbers of tensor parallelism: equal where ranks hold the same values, different where they hold other heads.

Between the first column-parallel layer of a module and its row-parallel one, generators are seeded with a hash of their
state and the rank (Megatron's model-parallel seed, without a second state to save). Afterwards they are as they were,
one number further if that was used: the same on all ranks, in recomputation, and after a resume.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from octavo.runtime.torch_compat import FakeTensor, in_backward, never_compiled

_EAGERLY = never_compiled("octavo: dropout between divided layers draws from a generator of this rank")


def divide_dropout(model: nn.Module, columns: Iterable[str], rows: Iterable[str], rank: int) -> None:
    """Give dropout between column-parallel layers and a row-parallel one random numbers of this rank's own."""
    begins, ends = list(columns), list(rows)
    for name in dict.fromkeys(row.rpartition(".")[0] for row in ends):
        owner = model.get_submodule(name)
        if not any(rate > 0 for rate in _dropout_rates(owner)):
            continue
        divided = _Divided(owner, rank)
        owner.register_forward_pre_hook(divided.enter)
        for column in begins:
            if column.rpartition(".")[0] == name:
                model.get_submodule(column).register_forward_hook(divided.begin)
        for row in ends:
            if row.rpartition(".")[0] == name:
                model.get_submodule(row).register_forward_pre_hook(divided.end)
        owner.register_forward_hook(divided.leave, always_call=True)  # also if it failed midway


def _dropout_rates(owner: nn.Module) -> Iterator[float]:
    """Yield what may be dropout rates of a module and its parts, by name: of attributes, dropout modules, configs."""
    for module in owner.modules():
        if "dropout" in type(module).__name__.lower():
            yield getattr(module, "p", 1.0)
        for holder in (module, getattr(module, "config", None)):
            for name, value in getattr(holder, "__dict__", {}).items():
                if "drop" in name and isinstance(value, int | float):
                    yield value


class _Divided:
    """The generators of a rank inside and outside of divided layers."""

    def __init__(self, owner: nn.Module, rank: int) -> None:
        self._owner, self._rank, self._entered = owner, rank, False
        self._generators: list[torch.Generator] = []
        self._outside: list[Tensor] = []
        self._inside: list[Tensor] = []

    @_EAGERLY
    def enter(self, *_: object) -> None:
        """Begin a forward of the module. A recomputed part of an earlier one may have had no end."""
        self._entered, self._outside = True, []

    @_EAGERLY
    def begin(self, layer: nn.Module, args: object, y: Tensor) -> None:
        """Seed the generators for this rank, unless the module's first divided layer has done so."""
        if not self._owner.training or y.is_meta or isinstance(y, FakeTensor):
            return
        if not (self._entered or in_backward()):  # this layer alone
            return
        if self._outside and (self._entered or all(map(torch.equal, self._inside, self._states()))):
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

    @_EAGERLY
    def end(self, *_: object) -> None:
        """Return to the random numbers of all ranks."""
        if not self._outside:
            return
        used = not all(map(torch.equal, self._inside, self._states()))
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = []
        if used:
            torch.rand((), device="cpu")  # whose state the next hash reads

    @_EAGERLY
    def leave(self, *_: object) -> None:
        self.end()
        self._entered = False

    def _states(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]
