"""Draw the initial weights of a model once, on all cores.

`nn.Linear` and the like draw their weights when they are made, and Transformers draws them again: 11 s of one thread
for 10⁹ parameters. Here a draw into a whole tensor is recorded, and replaced by the next one into the same tensor. What
remains is drawn at the end, in chunks. Each chunk has a generator of its own, seeded with a number made of the run's
seed, plus the chunk's number in the order of all recorded draws. So the weights are a function of seed and model,
whatever the number of threads.
"""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from octavo.runtime.torch_compat import TorchDispatchMode, tree_leaves

T = TypeVar("T")

CHUNK = 1 << 20
"""Elements that one generator draws."""
_aten = torch.ops.aten
DRAWS = {_aten.normal_.default, _aten.uniform_.default}
"""Overwrite a tensor with random numbers."""
FILLS = {_aten.zero_.default, _aten.fill_.Scalar}
"""Overwrite a tensor with something else."""
POINTWISE = {
    _aten.erfinv_.default, _aten.mul_.Tensor, _aten.mul_.Scalar, _aten.add_.Tensor, _aten.add_.Scalar,
    _aten.clamp_.default,
}  # fmt: skip
"""Steps of `torch.nn.init.trunc_normal_` after its draw."""


def draw_once(build: Callable[[], T], seed: int) -> T:
    """Return the model that `build` makes, with initial weights that depend on the seed and on the model alone."""
    torch.manual_seed(seed)  # for what is not drawn into a tensor, as `torch.randn`
    with _Draws(seed) as draws:
        model = build()
    draws.draw(draws.pending.values())
    return model


class _Draw:
    """A recorded draw into a tensor, and what changes the numbers afterwards."""

    def __init__(self, tensor: Tensor, first: int) -> None:
        # The storage: a parameter may be given another one, as `weight.data = …`.
        self.tensor, self.first = tensor.detach(), first
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []


class _Draws(TorchDispatchMode):
    """Records draws into whole tensors; whatever else touches such a tensor draws it before."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pending: dict[int, _Draw] = {}  # by storage, which the tensor keeps alive
        # A generator of the CPU takes 32 bits: consecutive seeds never meet within a model, random ones would.
        self._seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._chunks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, Tensor)]
        if len(tensors) == 1 and _is_whole(first := tensors[0]):
            key = _storage(first)
            if func in DRAWS and kwargs.get("generator") is None:
                draw = self.pending[key] = _Draw(first, self._chunks)
                self._chunks += -(-first.numel() // CHUNK)
                draw.steps.append((func, args[1:], kwargs))
                return first
            if func in POINTWISE and key in self.pending:
                self.pending[key].steps.append((func, args[1:], kwargs))
                return first
            if func in FILLS or func in DRAWS:
                self.pending.pop(key, None)
        touched = map(_storage, tensors)
        self.draw([self.pending.pop(key) for key in touched if key in self.pending])
        return func(*args, **kwargs)

    def draw(self, draws: Iterable[_Draw]) -> None:
        """Draw into these tensors."""
        chunks = [
            (draw, part, self._seed + draw.first + number)
            for draw in draws
            for number, part in enumerate(draw.tensor.view(-1).split(CHUNK))
        ]
        if not chunks:
            return
        with ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1)) as pool:
            list(pool.map(_draw, chunks))


def _draw(chunk: tuple[_Draw, Tensor, int]) -> None:
    draw, part, seed = chunk
    generator = torch.Generator(part.device).manual_seed(seed % 2**32)
    for func, arguments, settings in draw.steps:
        func(part, *arguments, **settings | ({"generator": generator} if func in DRAWS else {}))


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, in order, on the CPU, and has numbers, unlike fake tensors."""
    return (
        type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.is_contiguous()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    )  # fmt: skip


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address
