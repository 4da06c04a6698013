"""The order in which a run sees its examples: sample k is example k mod n of epoch k div n, permuted anew per epoch."""

from functools import lru_cache

import numpy as np


class EpochOrder:
    """Numbers of the examples of each batch, a function of (seed, step)."""

    def __init__(self, count: int, *, shuffle: bool) -> None:
        self._count, self._shuffle = count, shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    def rows(self, seed: int, step: int, size: int) -> list[int]:
        """The numbers of the `size` examples of step 0, 1, …"""
        samples = (divmod(sample, self._count) for sample in range(step * size, (step + 1) * size))
        return [int(self._order(seed, epoch)[position]) for epoch, position in samples]

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return np.arange(self._count)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self._count)
