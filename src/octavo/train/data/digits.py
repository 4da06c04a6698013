"""Images of digits, with labels: scikit-learn's 1797 images of 8 × 8 pixels, which it brings along.

Every fifth image is held out. The batch of a step is a function of (seed, step), as that of text: sample k of the run
is image k mod n of epoch k div n, and a generator keyed on (seed, epoch) permutes the images of an epoch.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from octavo.train.config.run_config import ConfigError

INSTALL = "pip install 'octavo[images]'"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
HELD_OUT = 5
"""Each image of which the number is this many times k, less one, is held out."""
LARGEST = 16.0
"""Largest value of a pixel."""


@dataclass(frozen=True)
class Images:
    """Images with their labels.

    Attributes:
        pixels: fp32 [N, C, H, W] in [-1, 1].
        labels: int64 [N].
    """

    pixels: Tensor
    labels: Tensor


class Digits:
    """The digits, in images to train on and held-out ones.

    Attributes:
        training: The images that are trained on, 1438.
        held_out: The others, 359.
        fingerprint: Hash of all of them.
        skipped: Number of files left out: none.
    """

    skipped = 0

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, *, shuffle: bool) -> None:
        digest = hashlib.sha256(b"digits 1\0")
        digest.update(np.ascontiguousarray(pixels, dtype=np.uint8).tobytes())
        digest.update(np.ascontiguousarray(labels, dtype=np.uint8).tobytes())
        self.fingerprint = digest.hexdigest()
        is_held_out = np.arange(len(labels)) % HELD_OUT == HELD_OUT - 1
        scaled = torch.from_numpy(pixels.astype(np.float32) / LARGEST * 2 - 1).unsqueeze(1)
        self.training, self.held_out = (
            Images(scaled[mask], torch.from_numpy(labels[mask].astype(np.int64)))
            for mask in (~is_held_out, is_held_out)
        )
        self._shuffle = shuffle
        self._order = lru_cache(maxsize=2)(self._permutation)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(NAMES)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of step 0, 1, …: fp32 [size, C, H, W] and int64 [size]."""
        count = len(self.training.labels)
        rows = []
        for sample in range(step * size, (step + 1) * size):
            epoch, position = divmod(sample, count)
            rows.append(int(self._order(seed, epoch)[position]))
        return self.training.pixels[rows], self.training.labels[rows]

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        count = len(self.training.labels)
        if not self._shuffle:
            return np.arange(count)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(count)


def load_digits(*, shuffle: bool) -> Digits:
    """Read the digits of scikit-learn. Raises ConfigError if it is not installed."""
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise ConfigError(f'data.source = "digits" is of scikit-learn, which cannot be imported ({error}): {INSTALL}') \
            from None  # fmt: skip
    bunch = load()
    return Digits(bunch.images, bunch.target, shuffle=shuffle)
