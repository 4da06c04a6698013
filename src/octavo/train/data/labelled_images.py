"""Images with the number of their class: scikit-learn's digits, or a folder with a folder of images for each class.

Instead of images a folder may have latents of them, arrays in .npy files.

Every fifth image is held out; equal files count as one.
"""

import hashlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import expand
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.files import files_below, suffix_counts
from octavo.train.data.images import (
    DIGIT_NAMES,
    DIGITS,
    SUFFIXES,
    DigitImages,
    ImageFiles,
    Images,
    ImageShape,
    check_count,
    count_and_digest,
    hash_files,
    read_digits,
)
from octavo.train.data.images import split as split_examples
from octavo.train.data.latents import LATENTS, LatentFiles
from octavo.train.record.progress import Progress

KNOWN = (*SUFFIXES, LATENTS)
"""Files of a class."""


class LabelledImages:
    """Images and their classes.

    Attributes:
        skipped: Number of files left out as damaged: none.
    """

    skipped = 0

    def __init__(
        self, images: Images, labels: Sequence[int], names: Sequence[str], shape: ImageShape, *, shuffle: bool
    ) -> None:
        # names: The classes.
        # shape: Shape of the images.
        self.names, self.shape = tuple(names), shape
        self._images, self._labels = images, torch.tensor(labels, dtype=torch.int64, device="cpu")
        # training: Numbers of the images that are trained on.
        # held_out: Numbers of the others.
        self.training, self.held_out = split_examples(images.contents)
        if missing := set(range(len(names))) - {labels[number] for number in self.training}:
            raise ConfigError(
                f'no image is left to train on of the class "{names[min(missing)]}": every fifth image is held out; '
                "give more of it"
            )
        digest = hashlib.sha256(f"labelled images 1\0{images.fingerprint}\0{list(names)}\0{list(labels)}".encode())
        self.fingerprint = digest.hexdigest()  # Hash of images, labels and classes
        classes: dict[int, list[Hashable]] = {}
        for label, content in zip(labels, images.contents, strict=True):
            classes.setdefault(label, []).append((names[label], content))
        # Number and digest of the images of each class.
        self.files = {f'class "{name}"': count_and_digest(classes[label]) for label, name in enumerate(names)}
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


@dataclass(frozen=True)
class ImageClasses:
    """Stand-in for `LabelledImages` where nothing is read, as in a plan."""

    names: tuple[str, ...]
    shape: ImageShape


def load_labelled(config: TrainConfig, shape: ImageShape, progress: Progress) -> LabelledImages:
    """Read the images of a run and their classes, with enough of them for a batch."""
    progress.stage("reading the data")
    data = config.data
    if data.source == DIGITS:
        images = load_digits(shape, shuffle=data.shuffle)
    else:
        images = load_folder(expand(data.source), shape, shuffle=data.shuffle, progress=progress)
    check_count(len(images.training), config.optim.batch, data.source)
    return images


def image_classes(source: str, shape: ImageShape, count: int | None) -> ImageClasses:
    """The classes of `data.source`; of a folder that is not there, for a plan, `count` numbers."""
    folder = expand(source)
    if source == DIGITS:
        return ImageClasses(DIGIT_NAMES, shape)
    if count is not None and not folder.exists():
        return ImageClasses(tuple(map(str, range(count))), shape)
    return ImageClasses(tuple(classes_of(folder)), shape)


def load_digits(shape: ImageShape, *, shuffle: bool) -> LabelledImages:
    """Read the digits of scikit-learn. Raises ConfigError if it is not installed."""
    pixels, labels = read_digits()
    return LabelledImages(DigitImages(pixels, shape), labels.tolist(), DIGIT_NAMES, shape, shuffle=shuffle)


def load_folder(folder: Path, shape: ImageShape, *, shuffle: bool, progress: Progress) -> LabelledImages:
    """Read a folder with a folder of images for each class; `progress` gets a note on files that are left out."""
    classes = classes_of(folder)
    paths = [path for files in classes.values() for path in files]
    everything = files_below(folder)
    if rest := sorted(set(everything) - {str(path) for path in paths}):
        progress.note(f"{len(rest)} of {len(everything)} files in {folder} are left out: {suffix_counts(rest)}")
    read = LatentFiles if paths[0].suffix.lower() == LATENTS else ImageFiles
    labels = np.repeat(range(len(classes)), [len(files) for files in classes.values()]).tolist()
    images = read(paths, hash_files(paths), shape)
    return LabelledImages(images, labels, tuple(classes), shape, shuffle=shuffle)


def classes_of(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, by the names of their folders, in order; without hidden files."""
    if not folder.is_dir():
        raise ConfigError(
            f'data.source = {folder} is no folder: give one with a folder of images for each class, or "digits"'
        )
    hidden = (".", "__")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(hidden))
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in map(Path, files_below(folder)):
        name, *below = path.relative_to(folder).parts
        if below and path.suffix.lower() in KNOWN:
            files[name].append(path)
    if empty := [name for name, images in files.items() if not images]:
        raise ConfigError(f"data.source = {folder}: its folder {empty[0]} has no images ({', '.join(KNOWN)})")
    if nested := [path for images in files.values() for path in images if path.parent.parent != folder]:
        raise ConfigError(
            f"data.source = {folder}: {nested[0].relative_to(folder)} is not in the folder of a class but further "
            "below: move the images up, or name the folder that has the folders of the classes"
        )
    kinds = {name: {file.suffix.lower() == LATENTS for file in images} for name, images in files.items()}
    if len(set[bool]().union(*kinds.values())) > 1:
        mixed = next((name for name, kind in kinds.items() if len(kind) > 1), "one folder")
        raise ConfigError(f"data.source = {folder}: it has both images and latents ({LATENTS}; {mixed}): keep one kind")
    if len(files) < 2:
        raise ConfigError(f"data.source = {folder} has {len(files)} folders: give each class, two or more, a folder")
    return files
