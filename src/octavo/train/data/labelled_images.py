"""Images with the number of their class: scikit-learn's digits, or a folder with a folder of images for each class.

Every fifth image is held out.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.train.config.run_config import ConfigError
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.images import DIGIT_NAMES, SUFFIXES, DigitImages, ImageFiles, Images, ImageShape, read_digits
from octavo.train.data.images import split as split_examples


class LabelledImages:
    """Images and their classes.

    Args:
        images: The images.
        labels: The number of the class of each.
        names: The classes.
        shape: Shape of the images.
        shuffle: Permute the images anew in each epoch.

    Attributes:
        names: The classes.
        shape: Shape of the images.
        training: Numbers of the images that are trained on.
        held_out: Numbers of the others.
        fingerprint: Hash of images, labels and classes.
        skipped: Number of files left out: none.
    """

    skipped = 0

    def __init__(
        self, images: Images, labels: Sequence[int], names: Sequence[str], shape: ImageShape, *, shuffle: bool
    ) -> None:
        self.names, self.shape = tuple(names), shape
        self._images, self._labels = images, torch.tensor(labels, dtype=torch.int64)
        self.training, self.held_out = split_examples(len(labels))
        digest = hashlib.sha256(f"labelled images 1\0{images.fingerprint}\0{list(names)}\0{list(labels)}".encode())
        self.fingerprint = digest.hexdigest()
        self._order = EpochOrder(len(self.training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of step 0, 1, …: fp32 [size, C, H, W] and int64 [size]."""
        return self.examples([self.training[row] for row in self._order.rows(seed, step, size)])

    def held_out_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Held-out images and labels, up to `size` at a time."""
        for first in range(0, len(self.held_out), size):
            yield self.examples(self.held_out[first : first + size])

    def examples(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Some images and their labels: fp32 [N, C, H, W] in [-1, 1] and int64 [N]."""
        return self._images.pixels(numbers), self._labels[list(numbers)]


def load_digits(shape: ImageShape, *, shuffle: bool) -> LabelledImages:
    """Read the digits of scikit-learn. Raises ConfigError if it is not installed."""
    pixels, labels = read_digits()
    return LabelledImages(DigitImages(pixels, shape), labels.tolist(), DIGIT_NAMES, shape, shuffle=shuffle)


def load_folder(folder: Path, shape: ImageShape, *, shuffle: bool) -> LabelledImages:
    """Read a folder with a folder of images for each class.

    Raises:
        ConfigError: As `classes_of` and `ImageFiles`.
    """
    classes = classes_of(folder)
    paths = [path for files in classes.values() for path in files]
    labels = np.repeat(range(len(classes)), [len(files) for files in classes.values()]).tolist()
    return LabelledImages(ImageFiles(paths, shape), labels, tuple(classes), shape, shuffle=shuffle)


def classes_of(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, by the names of their folders, in order.

    Raises:
        ConfigError: If there are fewer than two folders with images.
    """
    if not folder.is_dir():
        raise ConfigError(
            f'data.source = {folder} is no folder: give one with a folder of images for each class, or "digits"'
        )
    folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    files = {
        path.name: sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
        for path in folders
    }
    if empty := [name for name, images in files.items() if not images]:
        raise ConfigError(f"data.source = {folder}: its folder {empty[0]} has no images ({', '.join(SUFFIXES)})")
    if len(files) < 2:
        raise ConfigError(f"data.source = {folder} has {len(files)} folders: give each class, two or more, a folder")
    return files
