"""Images with noise, of which a diffusion model predicts the noise (DDPM, arXiv 2006.11239).

    x_t = √ᾱ_t · x + √(1 − ᾱ_t) · ε        t, ε and whether the class is left out: a function of (seed, position)

The position of a sample is its number in the order of the run, so ranks, micro-batches and resumed runs see the same.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.train.data.epochs import EpochOrder
from octavo.train.data.labelled_images import LabelledImages

NOISE_STREAM = 1
"""Counter word that keeps the random numbers of samples apart from those of the order (`EpochOrder`)."""


class NoisyImages:
    """Batches of noisy images.

    Attributes:
        skipped: Number of files left out: none.
    """

    skipped = 0
    held_out: "NoisyImages | None" = None  # Batches of the held-out images, with their classes; set by who makes both

    def __init__(
        self, images: LabelledImages, numbers: Sequence[int], scheduler: Any, *, shuffle: bool, label_dropout: float
    ) -> None:
        # names: The classes.
        # shape: Shape of the images.
        # windows: Number of images.
        self.names, self.shape, self.windows = images.names, images.shape, len(numbers)
        self.files = images.files  # As of the images
        self._images, self._numbers, self._scheduler, self._dropout = images, numbers, scheduler, label_dropout
        self._order = EpochOrder(len(numbers), shuffle=shuffle)
        digest = hashlib.sha256(f"noisy images 1\0{images.fingerprint}\0{label_dropout}\0".encode())
        digest.update(scheduler.alphas_cumprod.numpy().tobytes())
        self.fingerprint = digest.hexdigest()  # Hash of images, classes, schedule and share

    def batch(self, seed: int, step: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Inputs and targets of step 0, 1, …"""
        clean, classes = self._images.examples([self._numbers[row] for row in self._order.rows(seed, step, size)])
        noise, steps = torch.empty_like(clean), torch.empty(size, dtype=torch.int64, device="cpu")
        for row in range(size):
            rng = np.random.Generator(np.random.Philox(key=[seed, step * size + row], counter=[0, 0, 0, NOISE_STREAM]))
            steps[row] = int(rng.integers(self._scheduler.config.num_train_timesteps))
            if rng.random() < self._dropout:
                classes[row] = len(self.names)
            noise[row] = torch.from_numpy(rng.standard_normal(clean.shape[1:], dtype=np.float32))
        sample = self._scheduler.add_noise(clean, noise, steps)
        return {"sample": sample, "timestep": steps, "noise": noise}, classes
