"""Images of a run as pixels in [-1, 1]: those of files, read with Pillow, and scikit-learn's digits.

Every image has the shape that the model takes. Files are decoded when they are needed; at the start of a run each is
decoded once, so that a damaged one is an error then, and its bytes are hashed. Of an animation the first frame counts,
and transparency is dropped, as in torchvision and LLaVA.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.train.config.run_config import ConfigError

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_FIELDS = {"image_size": 8, "num_channels": 1}
"""Fields of a model's config for the digits as they are."""
DIGITS = "digits"
"""The `data.source` that is scikit-learn's."""
INSTALL = "pip install 'octavo[images]'"
LARGEST_DIGIT = 16.0
"""Largest value of a pixel of a digit."""
HELD_OUT = 5
"""Each image of which the number is this many times k, less one, is held out."""
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Files of an image folder."""


@dataclass(frozen=True)
class ImageShape:
    """Channels, height and width of the images of a model."""

    channels: int
    height: int
    width: int


def image_shape(config: Any) -> ImageShape:
    """The images that a model of a config of Transformers takes. Raises ConfigError if it does not tell their size."""
    size = getattr(config, "image_size", None)
    if size is None:
        raise ConfigError(f"{config.model_type} has no image_size in its config, so its images cannot be resized to it")
    height, width = (size, size) if isinstance(size, int) else size
    return ImageShape(getattr(config, "num_channels", 3), height, width)


class Images(Protocol):
    """Images by number."""

    fingerprint: str
    """Hash of their content."""

    @property
    def contents(self) -> Sequence[Hashable]:
        """What tells one image from another, by number."""

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """Some images: fp32 [N, C, H, W] in [-1, 1]."""


def split(contents: Sequence[Hashable]) -> tuple[list[int], list[int]]:
    """The numbers of the examples to train on, and those of the held-out ones: of every fifth image."""
    # Examples of one image are on the same side. `contents`: of the image of each example, as in `Images`.
    images: dict[Hashable, int] = {}
    order = [images.setdefault(content, len(images)) for content in contents]
    held_out = [image % HELD_OUT == HELD_OUT - 1 for image in order]
    numbers = range(len(order))
    return [n for n in numbers if not held_out[n]], [n for n in numbers if held_out[n]]


def count_and_digest(contents: Sequence[Hashable]) -> list[Any]:
    """The number of examples, and a digest of what tells them from others, for `Data.files`."""
    return [len(contents), hashlib.sha256(repr([*contents]).encode()).hexdigest()[:16]]


def check_count(count: int, batch: int, source: str) -> None:
    """Raise ConfigError for fewer examples to train on than a batch has."""
    if count < batch:
        raise ConfigError(
            f"data.source = {source} has {count} examples to train on (every fifth image is held out), fewer than "
            f"optim.batch = {batch}: lower optim.batch, or give more data"
        )


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [1797, 8, 8] of 0 to 16, and labels. Raises ConfigError if scikit-learn is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(f'data.source = "digits" is of scikit-learn, which cannot be imported ({error}): {INSTALL}') \
            from None  # fmt: skip
    bunch = load_digits()
    return bunch.images.astype(np.uint8), bunch.target.astype(np.int64)


class DigitImages:
    """The digits in a shape: as they are, or enlarged bilinearly, with equal channels."""

    def __init__(self, pixels: np.ndarray, shape: ImageShape) -> None:
        digest = hashlib.sha256(f"digits 1 {shape}\0".encode())
        digest.update(np.ascontiguousarray(pixels).tobytes())
        self.fingerprint, self.contents = digest.hexdigest(), range(len(pixels))
        self._shape = shape
        self._pixels = torch.from_numpy(pixels.astype(np.float32) / LARGEST_DIGIT * 2 - 1).unsqueeze(1)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """fp32 [N, C, H, W] in [-1, 1]."""
        pixels, size = self._pixels[list(numbers)], (self._shape.height, self._shape.width)
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        return pixels.expand(-1, self._shape.channels, -1, -1).contiguous()


def hash_files(paths: Sequence[Path]) -> list[bytes]:
    """The SHA-256 of each file. Raises ConfigError for one that cannot be read."""
    digests = {}
    for path in dict.fromkeys(paths):
        try:
            digests[path] = hashlib.sha256(path.read_bytes()).digest()
        except OSError as error:
            raise ConfigError(f"the image {path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:  # a path with a NUL
            raise ConfigError(f"the image {str(path)!r} cannot be read: {error}") from None
    return [digests[path] for path in paths]


def read_unchanged(path: Path, digest: bytes) -> BytesIO:
    """The content of a file. Raises ConfigError if it cannot be read, or is no longer that of `digest`."""
    # `digest`: of `hash_files`.
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from None
    if hashlib.sha256(content).digest() != digest:
        raise ConfigError(f"{path} changed after the run began: restore it and resume, or start a new run")
    return BytesIO(content)


class ImageFiles:
    """Images of files, resized (bicubic) to a shape: three channels are RGB, one is grey."""

    def __init__(self, paths: Sequence[Path], contents: Sequence[bytes], shape: ImageShape) -> None:
        if shape.channels not in (1, 3):
            raise ConfigError(f"the model takes images of {shape.channels} channels; files have 1 (grey) or 3 (RGB)")
        try:
            import PIL.Image  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"images are read with Pillow, which cannot be imported ({error}): pip install pillow") \
                from None  # fmt: skip
        self._paths, self._shape, self.contents = list(paths), shape, list(contents)
        digest = hashlib.sha256(f"image files 2 {shape}\0".encode())
        digest.update(b"".join(self.contents))  # of all numbers: which has which file matters
        self.fingerprint = digest.hexdigest()
        for path, content in dict(zip(self._paths, self.contents, strict=True)).items():
            self._decode(path, content)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        """fp32 [N, C, H, W] in [-1, 1]."""
        arrays = np.stack([self._decode(self._paths[number], self.contents[number]) for number in numbers])
        return torch.from_numpy(arrays).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)

    def _decode(self, path: Path, digest: bytes) -> np.ndarray:
        """uint8 [H, W, C]."""
        from PIL import Image, ImageOps

        content = read_unchanged(path, digest)
        try:
            with Image.open(content) as image:
                upright = _in_8_bits(ImageOps.exif_transpose(image), str(image.format))
                if upright.mode == "P" and isinstance(upright.info.get("transparency"), bytes):
                    upright = upright.convert("RGBA")  # Pillow warns otherwise; the colours are the same
                resized: Any = upright.convert("RGB" if self._shape.channels == 3 else "L").resize(
                    (self._shape.width, self._shape.height), Image.Resampling.BICUBIC
                )
        except Exception as error:  # of no common type: each decoder fails in its own way
            reason = " ".join(str(error).split()) or type(error).__name__
            reason = reason.removesuffix(f" {content!r}")  # the buffer, where Pillow names a file
            raise ConfigError(f"the image {path} does not decode: {reason}") from None
        return np.asarray(resized).reshape(self._shape.height, self._shape.width, self._shape.channels)


def _in_8_bits(image: Any, file_format: str) -> Any:
    """The image; if it is grey in 16 bits, its upper eight, which Pillow would clip at 255 instead."""
    # Raises ValueError for 32 bits, of which white may be any number.
    from PIL import Image

    if image.mode.startswith("I;16") or (image.mode == "I" and file_format == "PNG"):  # PNG has 16 bits at most
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have 32 bits (mode {image.mode}), of any range: convert it to 8 or 16 bits")
    return image
