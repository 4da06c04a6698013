"""Latents of images: arrays [C, H, W] in .npy files, as an autoencoder made them, already scaled for the model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.train.config.run_config import ConfigError
from octavo.train.data.images import ImageShape, read_unchanged

LATENTS = ".npy"
"""The suffix of their files."""


class LatentFiles:
    """Latents by number; an `Images`."""

    def __init__(self, paths: Sequence[Path], contents: Sequence[bytes], shape: ImageShape) -> None:
        self._paths, self._shape = list(paths), (shape.channels, shape.height, shape.width)
        self.contents = list(contents)
        digest = hashlib.sha256(f"latents 1 {shape}\0".encode())
        digest.update(b"".join(self.contents))
        self.fingerprint = digest.hexdigest()
        for path, content in dict(zip(self._paths, self.contents, strict=True)).items():
            self._read(path, content)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """fp32 [N, C, H, W]."""
        latents = [self._read(self._paths[number], self.contents[number]) for number in numbers]
        return torch.from_numpy(np.stack(latents))

    def _read(self, path: Path, digest: bytes) -> np.ndarray:
        content = read_unchanged(path, digest)
        try:
            latent = np.load(content, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise ConfigError(f"the latent {path} cannot be read: {error}") from None
        if not isinstance(latent, np.ndarray) or latent.shape != self._shape or latent.dtype.kind != "f":
            raise ConfigError(
                f"the latent {path} is {latent.dtype} {list(latent.shape)}; the model takes floating-point arrays "
                f"{list(self._shape)} (model.config.in_channels, sample_size)"
            )
        values = latent.astype(np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"the latent {path} holds NaN or infinity")
        return values
