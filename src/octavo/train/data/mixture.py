"""A mixture of sources: which source each sample of a run is from, by weights.

Samples come in blocks of `BLOCK`, in each of which every source has a fixed number: its share of the weights, rounded.
The picks of a source are spread evenly over the block, each at a random place of its own part of it, so that any run of
samples is close to the weights. Sample k is from source i, and its sequence is sample j of that source, where j counts
the earlier picks of i. Both are a function of (seed, k): a resume needs no state, and a source that is used up begins
its next epoch, permuted anew, while the others go on.

Weights are of sequences, which are of equal length; padding and ignored targets are not counted.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from octavo.train.config.run_config import ConfigError
from octavo.train.data.sequences import STATE, Sequences

BLOCK = 100_000
"""Samples of a block: the smallest share of a source is a 1/100,000."""


class Mixture(Sequences):
    """Sequences of several sources."""

    def __init__(self, parts: Sequence[Sequences], weights: Sequence[tuple[str, float]]) -> None:
        self._parts, self._names = parts, [name for name, _ in weights]
        largest = max(weight for _, weight in weights)  # the sum of the weights themselves may overflow
        total = sum(weight / largest for _, weight in weights)
        self._shares = [weight / largest / total for _, weight in weights]
        self._counts = _apportion(self._shares, BLOCK)
        for (name, weight), count in zip(weights, self._counts, strict=True):
            if not count:
                raise ConfigError(
                    f"data.sources: the weight {weight:g} of {name} is less than 1/{BLOCK:,} of the sum of the "
                    "weights: raise it, or leave the source out"
                )
        self.tokenizer = next((part.tokenizer for part in parts if part.tokenizer.chat_template), parts[0].tokenizer)
        self.files = {name: entry for part in parts for name, entry in part.files.items()}
        self.skipped = sum(part.skipped for part in parts)
        rows = [f"{part.fingerprint} {count}" for part, count in zip(parts, self._counts, strict=True)]
        self.fingerprint = hashlib.sha256("\0".join(["mixture 1", *rows]).encode()).hexdigest()
        self.documents = _sum([part.documents for part in parts])
        self.tokens = _sum([part.tokens for part in parts])
        held_out = [part.held_out for part in parts if part.held_out is not None]
        if held_out:
            self.held_out = Mixture(held_out, weights)
        self._block = lru_cache(maxsize=4)(self._block_of)

    def state(self) -> dict[str, Any]:
        """The states of all sources."""
        states = [part.state() for part in self._parts]
        return {key: {name: entry for state in states for name, entry in state.get(key, {}).items()} for key in STATE}

    def load_state(self, state: dict[str, Any]) -> None:
        """Hand it on to the sources."""
        for part in self._parts:
            part.load_state(state)

    @property
    def windows(self) -> int:
        """Number of sequences until the first source repeats; at least one."""
        return max(1, min(int(part.windows / share) for part, share in zip(self._parts, self._shares, strict=True)))

    def row(self, seed: int, sample: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a sample."""
        block, position = divmod(sample, BLOCK)
        sources, picks = self._block(seed, block)
        source = int(sources[position])
        return self._parts[source].row(seed, block * self._counts[source] + int(picks[position]))

    def size(self) -> str:
        """Documents, tokens and sequences of each source, in words."""
        shares = zip(self._names, self._parts, self._shares, strict=True)
        return "; ".join(f"{100 * share:.3g} % {name}: {part.size()}" for name, part, share in shares)

    def summary(self, samples: int, seed: int = 0) -> str:
        """The size, share and epochs of each source in a run of `samples` sequences."""
        lines = [f"a mixture of {len(self._parts)} sources"]
        for name, part, count in zip(self._names, self._parts, self._picked(samples, seed), strict=True):
            share, epochs = 100 * count / samples, count / part.windows
            lines.append(f"  {share:.4g} % {name}: {count:,} sequences, {epochs:.3g} epochs of {part.size()}")
        return "\n".join(lines)

    def repeats(self, samples: int, batch: int) -> str:
        """The sources that a run of `samples` sequences repeats; "" for none."""
        counts = zip(self._names, self._parts, self._picked(samples, 0), strict=True)
        return ", ".join(
            f"{name} is taken {count / part.windows:.3g} times" for name, part, count in counts if count > part.windows
        )

    def _picked(self, samples: int, seed: int) -> list[int]:
        """How many of the first samples are from each source."""
        blocks, rest = divmod(samples, BLOCK)
        last = np.bincount(self._block(seed, blocks)[0][:rest], minlength=len(self._parts))
        return [blocks * count + int(more) for count, more in zip(self._counts, last, strict=True)]

    def _block_of(self, seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each sample of a block, and which pick of that source in the block it is: int64 [BLOCK]."""
        generator = np.random.Generator(np.random.Philox(key=[seed, block]))
        sources = np.repeat(np.arange(len(self._counts)), self._counts)
        picks = np.concatenate([np.arange(count) for count in self._counts])
        places = (picks + generator.random(BLOCK)) / np.array(self._counts)[sources]
        order = np.argsort(places, kind="stable")
        return sources[order], picks[order]


def _sum(numbers: Sequence[int | None]) -> int | None:
    counted = [number for number in numbers if number is not None]
    return sum(counted) if len(counted) == len(numbers) else None


def _apportion(shares: list[float], total: int) -> list[int]:
    """Whole numbers with the sum `total` in these shares, by largest remainder."""
    exact = [share * total for share in shares]
    counts = [int(number) for number in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
