"""Images of a run as pixels in [-1, 1], with their classes, with noise, or with conversations about them.

Images are those of files, read with Pillow, scikit-learn's digits, or latents: arrays [C, H, W] in .npy files, scaled
for the model. At the start of a run each file is decoded once, so that a damaged one is an error then, and hashed.
"""

import hashlib
import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from torch import Tensor

from octavo.nn.causal import IGNORE
from octavo.numerics.suggestions import grouped
from octavo.train.config.run_config import ConfigError, TrainConfig, naming, optional_package
from octavo.train.config.sections import expand
from octavo.train.data.documents import files_below, suffix_counts
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.tokenizer import TextTokenizer
from octavo.train.record.progress import Progress

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DIGIT_FIELDS = {"image_size": 8, "num_channels": 1}  # Fields of a model's config for the digits as they are
DIGITS = "digits"  # The `data.source` that is scikit-learn's
INSTALL = "pip install 'octavo[images]'"
LARGEST_DIGIT = 16.0  # Largest value of a pixel of a digit
HELD_OUT = 5  # Each image of which the number is this many times k, less one, is held out
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")  # Files of an image folder
LATENTS = ".npy"  # Files of latents
NOISE_STREAM = 1  # Counter word that keeps the random numbers of samples apart from those of the order (`EpochOrder`)


@dataclass(frozen=True)
class ImageShape:
    channels: int
    height: int
    width: int

    def patches(self, size: int) -> int:
        return (self.height // size) * (self.width // size)


def image_shape(config: Any) -> ImageShape:
    """The images that a model of a config of Transformers takes. Raises ConfigError if it does not tell their size."""
    size = getattr(config, "image_size", None)
    if size is None:
        raise ConfigError(f"{config.model_type} has no image_size in its config, so its images cannot be resized to it")
    height, width = (size, size) if isinstance(size, int) else size
    return ImageShape(getattr(config, "num_channels", 3), height, width)


class Images(Protocol):
    fingerprint: str  # Hash of their content

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
    sides: tuple[list[int], list[int]] = [], []
    for number, image in enumerate(order):
        sides[image % HELD_OUT == HELD_OUT - 1].append(number)
    return sides


def count_and_digest(contents: Sequence[Hashable]) -> list[Any]:
    """The number of examples, and a digest of what tells them from others, for `Data.files`."""
    return [len(contents), hashlib.sha256(repr([*contents]).encode()).hexdigest()[:16]]


def check_count(count: int, batch: int, source: str) -> None:
    if count < batch:
        problem = f"data.source = {source} has {count} examples to train on (every fifth image is held out)"
        raise ConfigError(f"{problem}, fewer than optim.batch = {batch}: lower optim.batch, or give more data")


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [1797, 8, 8] of 0 to 16, and labels. Raises ConfigError if scikit-learn is not installed."""
    bunch = optional_package("sklearn.datasets", 'data.source = "digits" is of scikit-learn', INSTALL).load_digits()
    return bunch.images.astype(np.uint8), bunch.target.astype(np.int64)


class DigitImages:
    """The digits in a shape: as they are, or enlarged bilinearly, with equal channels."""

    def __init__(self, pixels: np.ndarray, shape: ImageShape) -> None:
        identity = f"digits 1 {shape}\0".encode() + np.ascontiguousarray(pixels).tobytes()
        self.fingerprint, self.contents = hashlib.sha256(identity).hexdigest(), range(len(pixels))
        self._shape = shape
        self._pixels = torch.from_numpy(pixels.astype(np.float32) / LARGEST_DIGIT * 2 - 1).unsqueeze(1)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        pixels, size = self._pixels[list(numbers)], (self._shape.height, self._shape.width)
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size=size, mode="bilinear", align_corners=False)
        return pixels.expand(-1, self._shape.channels, -1, -1).contiguous()


def hash_files(paths: Sequence[Path]) -> list[bytes]:
    """The SHA-256 of each file. Raises ConfigError for one that cannot be read."""
    digests = {}
    for path in dict.fromkeys(paths):
        with naming(f"the image {str(path)!r} cannot be read", OSError, ValueError):  # of a path with a NUL
            digests[path] = hashlib.sha256(path.read_bytes()).digest()
    return [digests[path] for path in paths]


def read_unchanged(path: Path, digest: bytes) -> BytesIO:
    """The content of a file. Raises ConfigError if it cannot be read, or is no longer that of `digest`."""
    with naming(f"{path} cannot be read", OSError):
        content = path.read_bytes()
    if hashlib.sha256(content).digest() != digest:
        raise ConfigError(f"{path} changed after the run began: restore it and resume, or start a new run")
    return BytesIO(content)


class ImageFiles:
    """Images of files, resized (bicubic) to a shape, RGB or grey; or `latents` of that shape. Each is read at once."""

    def __init__(
        self, paths: Sequence[Path], contents: Sequence[bytes], shape: ImageShape, *, latents: bool = False
    ) -> None:
        self._paths, self._shape, self._latents, self.contents = list(paths), shape, latents, list(contents)
        if not latents:
            if shape.channels not in (1, 3):
                problem = f"the model takes images of {shape.channels} channels"
                raise ConfigError(f"{problem}; files have 1 (grey) or 3 (RGB)")
            optional_package("PIL.Image", "images are read with Pillow", "pip install pillow")
        # Of all numbers: which has which file matters.
        identity = f"{'latents 1' if latents else 'image files 2'} {shape}\0".encode() + b"".join(self.contents)
        self.fingerprint = hashlib.sha256(identity).hexdigest()
        for path, content in dict(zip(self._paths, self.contents, strict=True)).items():
            self._read(path, content)

    def _read(self, path: Path, digest: bytes) -> np.ndarray:
        return (_read_latent if self._latents else _read_image)(path, read_unchanged(path, digest), self._shape)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        values = torch.from_numpy(np.stack([self._read(self._paths[n], self.contents[n]) for n in numbers]))
        return values if self._latents else values.permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def _read_image(path: Path, content: BytesIO, shape: ImageShape) -> np.ndarray:
    """Pixels of a file, resized: uint8 [H, W, C]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(content) as image:
            upright = ImageOps.exif_transpose(image)
            # Grey in 16 bits, of which Pillow would clip all above 255; PNG has 16 bits at most.
            if upright.mode.startswith("I;16") or (upright.mode == "I" and image.format == "PNG"):
                upright = Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8))
            if upright.mode in ("I", "F"):  # white may be any number
                raise ValueError(f"its pixels have 32 bits (mode {upright.mode}): convert it to 8 or 16 bits")
            if upright.mode == "P" and isinstance(upright.info.get("transparency"), bytes):
                upright = upright.convert("RGBA")  # Pillow warns otherwise; the colours are the same
            mode = "RGB" if shape.channels == 3 else "L"
            resized = upright.convert(mode).resize((shape.width, shape.height), Image.Resampling.BICUBIC)
    except Exception as error:  # of no common type: each decoder fails in its own way
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason.removesuffix(f" {content!r}")  # the buffer, where Pillow names a file
        raise ConfigError(f"the image {path} does not decode: {reason}") from None
    return np.asarray(resized).reshape(shape.height, shape.width, shape.channels)


def _read_latent(path: Path, content: BytesIO, shape: ImageShape) -> np.ndarray:
    """A latent, scaled for the model: fp32 [C, H, W]."""
    with naming(f"the latent {path} cannot be read", OSError, ValueError, EOFError):
        latent = np.load(content, allow_pickle=False)
    sizes = (shape.channels, shape.height, shape.width)
    if not isinstance(latent, np.ndarray) or latent.shape != sizes or latent.dtype.kind != "f":
        expected = f"floating-point arrays {list(sizes)} (model.config.in_channels, sample_size)"
        raise ConfigError(f"the latent {path} is {latent.dtype} {list(latent.shape)}; the model takes {expected}")
    values = latent.astype(np.float32)
    if not np.isfinite(values).all():
        raise ConfigError(f"the latent {path} holds NaN or infinity")
    return values


class LabelledImages:
    def __init__(
        self, images: Images, labels: Sequence[int], names: Sequence[str], shape: ImageShape, *, shuffle: bool
    ) -> None:
        self.names, self.shape = tuple(names), shape  # The classes, and the shape of the images
        self._images, self._labels = images, torch.tensor(labels, dtype=torch.int64, device="cpu")
        self.training, self.held_out = split(images.contents)  # Numbers of the images that are trained on, and others
        if missing := set(range(len(names))) - {labels[number] for number in self.training}:
            problem = f'no image is left to train on of the class "{names[min(missing)]}"'
            raise ConfigError(f"{problem}: every fifth image is held out; give more of it")
        digest = hashlib.sha256(f"labelled images 1\0{images.fingerprint}\0{list(names)}\0{list(labels)}".encode())
        self.fingerprint = digest.hexdigest()  # Hash of images, labels and classes
        classes = grouped((label, (names[label], each)) for label, each in zip(labels, images.contents, strict=True))
        # Number and digest of the images of each class.
        self.files = {f'class "{name}"': count_and_digest(classes[label]) for label, name in enumerate(names)}
        self._order = EpochOrder(len(self.training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of step 0, 1, …: fp32 [size, C, H, W] and int64 [size]."""
        return self.examples([self.training[row] for row in self._order.rows(seed, step, size)])

    def examples(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._images.pixels(numbers), self._labels[list(numbers)]


def load_labelled(config: TrainConfig, shape: ImageShape, progress: Progress) -> LabelledImages:
    progress.stage("reading the data")
    images = load_images(config.data.source, shape, shuffle=config.data.shuffle, progress=progress)
    check_count(len(images.training), config.optim.batch, config.data.source)
    return images


def image_classes(source: str, count: int | None) -> tuple[str, ...]:
    """The classes of `data.source`; of a folder that is not there, for a plan, `count` numbers."""
    if source == DIGITS:
        return DIGIT_NAMES
    if count is not None and not expand(source).exists():
        return tuple(map(str, range(count)))
    return tuple(classes_of(expand(source)))


def load_images(source: str, shape: ImageShape, *, shuffle: bool, progress: Progress) -> LabelledImages:
    """Read the digits, or a folder of images for each class; `progress` gets a note on files that are left out."""
    if source == DIGITS:
        pixels, digits = read_digits()
        return LabelledImages(DigitImages(pixels, shape), digits.tolist(), DIGIT_NAMES, shape, shuffle=shuffle)
    folder = expand(source)
    classes = classes_of(folder)
    paths = [path for files in classes.values() for path in files]
    everything = files_below(folder)
    if rest := sorted(set(everything) - {str(path) for path in paths}):
        progress.note(f"{len(rest)} of {len(everything)} files in {folder} are left out: {suffix_counts(rest)}")
    images = ImageFiles(paths, hash_files(paths), shape, latents=paths[0].suffix.lower() == LATENTS)
    labels = np.repeat(range(len(classes)), [len(files) for files in classes.values()]).tolist()
    return LabelledImages(images, labels, tuple(classes), shape, shuffle=shuffle)


def classes_of(folder: Path) -> dict[str, list[Path]]:
    """The images of each class, by the names of their folders, in order; without hidden files."""
    where, hidden = f"data.source = {folder}", (".", "__")
    if not folder.is_dir():
        raise ConfigError(f'{where} is no folder: give one with a folder of images for each class, or "digits"')
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(hidden))
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in map(Path, files_below(folder)):
        name, *below = path.relative_to(folder).parts
        if below and path.suffix.lower() in (*SUFFIXES, LATENTS):
            if len(below) > 1:
                problem = f"{where}: {path.relative_to(folder)} is not in the folder of a class but further below"
                remedy = "move the images up, or name the folder that has the folders of the classes"
                raise ConfigError(f"{problem}: {remedy}")
            files[name].append(path)
    if empty := [name for name, images in files.items() if not images]:
        raise ConfigError(f"{where}: its folder {empty[0]} has no images ({', '.join((*SUFFIXES, LATENTS))})")
    if len({path.suffix.lower() == LATENTS for images in files.values() for path in images}) > 1:
        raise ConfigError(f"{where}: it has both images and latents ({LATENTS}): keep one kind")
    if len(files) < 2:
        raise ConfigError(f"{where} has {len(files)} folders: give each class, two or more, a folder")
    return files


class NoisyImages:
    held_out: "NoisyImages | None" = None  # Batches of the held-out images, with their classes; set by who makes both

    def __init__(
        self, images: LabelledImages, numbers: Sequence[int], scheduler: Any, *, shuffle: bool, label_dropout: float
    ) -> None:
        self.names, self.shape, self.windows = images.names, images.shape, len(numbers)
        self.files = images.files  # As of the images
        self._images, self._numbers, self._scheduler, self._dropout = images, numbers, scheduler, label_dropout
        self._order = EpochOrder(len(numbers), shuffle=shuffle)
        digest = hashlib.sha256(f"noisy images 1\0{images.fingerprint}\0{label_dropout}\0".encode())
        digest.update(scheduler.alphas_cumprod.numpy().tobytes())
        self.fingerprint = digest.hexdigest()  # Hash of images, classes, schedule and share

    def batch(self, seed: int, step: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
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


PLACEHOLDER = "<image>"  # Where the image is, in the text of a human
CAPTIONS = (  # Prompts and captions of digits
    ("Describe the image.", "a handwritten {name}"),
    ("Which digit is it?", "the digit {digit}"),
    ("Is it even or odd?", "{name} is {parity}"),
)


@dataclass(frozen=True)
class Record:
    image: int  # Number of the image
    # What the human and the model say in turn, human first; the first text has `PLACEHOLDER` once.
    turns: tuple[tuple[str, str], ...]
    name: str  # What error messages call it


class ImageText:
    def __init__(
        self, records: tuple[Sequence[Record], Sequence[Record]], images: Images, tokenizer: TextTokenizer,
        image: list[int], *, length: int, shuffle: bool,
    ) -> None:  # fmt: skip
        # image: The tokens of an image, where "<image>" is written: of equal ids.
        self.tokenizer, self._images = tokenizer, images
        training, held_out = records
        everything = [*training, *held_out]
        rows = [_tokens(record, tokenizer, image) for record in everything]
        longest = max(range(len(rows)), key=lambda row: len(rows[row][0]))
        if (needed := len(rows[longest][0]) - 1) > length:
            over = sum(len(ids) - 1 > length for ids, _ in rows)
            problem = f"data.sequence_length = {length} is too short for {over} of {len(rows)} records"
            reason = f"{everything[longest].name} has {needed} tokens, {len(image)} of them the image's"
            raise ConfigError(f"{problem}: {reason}; set it to {needed}, or shorten the records")
        for record, (ids, _) in zip(everything, rows, strict=True):
            if (extra := ids.count(image[0]) - len(image)) > 0:
                problem = f"{record.name} has the token {image[0]} {extra} times in its text"
                remedy = "set image_token_index to an id that text does not have"
                raise ConfigError(f"{problem}, and it is the model's placeholder of images: {remedy}")
        self._inputs = np.full((len(rows), length), tokenizer.end_id, dtype=np.int64)
        self._targets = np.full((len(rows), length), IGNORE, dtype=np.int64)
        for row, (ids, labels) in enumerate(rows):
            self._inputs[row, : len(ids) - 1], self._targets[row, : len(ids) - 1] = ids[:-1], labels[1:]
        self._image_of = [record.image for record in everything]
        digest = hashlib.sha256(f"image-text 1\0{images.fingerprint}\0{self._image_of}\0{length}\0".encode())
        digest.update(self._inputs.tobytes() + self._targets.tobytes())
        self.fingerprint = digest.hexdigest()  # Hash of images, tokens and their labels
        turns = [(record.image, record.turns) for record in everything]
        # Number and digest of the images and of the conversations.
        self.files = {"the images": count_and_digest(images.contents), "the conversations": count_and_digest(turns)}
        # Numbers of records.
        self.training, self.held_out = range(len(training)), range(len(training), len(everything))
        self._order = EpochOrder(len(training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        return self.rows(self._order.rows(seed, step, size))

    def rows(self, numbers: Sequence[int]) -> tuple[Mapping[str, Tensor], Tensor]:
        ids, targets = torch.from_numpy(self._inputs[numbers]), torch.from_numpy(self._targets[numbers])
        pixels = self._images.pixels([self._image_of[number] for number in numbers])
        return {"input_ids": ids, "pixel_values": pixels}, targets


def _tokens(record: Record, tokenizer: TextTokenizer, image: list[int]) -> tuple[list[int], list[int]]:
    """Ids and labels of a record: labels are the ids of answers."""
    ids: list[int] = []
    labels: list[int] = []
    for human, answer in record.turns:
        parts = f"{human}\n".split(PLACEHOLDER)
        encoded = tokenizer.encode([*parts, answer])
        for index, part in enumerate(encoded[:-1]):
            ids += (image if index else []) + part
        labels += [IGNORE] * (len(ids) - len(labels))
        ids += [*encoded[-1], tokenizer.end_id]
        labels += ids[len(labels) :]
    return ids, labels


def digit_records() -> tuple[list[Record], list[Record]]:
    """Records of the digits: to train on, one for each image and caption; held out, one for each image."""
    _, labels = read_digits()
    training, held_out = split(range(len(labels)))

    def record(number: int, caption: int) -> Record:
        digit = int(labels[number])
        fields = {"name": DIGIT_NAMES[digit], "digit": digit, "parity": "odd" if digit % 2 else "even"}
        prompt, answer = CAPTIONS[caption]
        return Record(number, ((f"{PLACEHOLDER}\n{prompt}", answer.format(**fields)),), f"image {number}")

    trained = [record(number, kind) for number in training for kind in range(len(CAPTIONS))]
    return trained, [record(number, number % len(CAPTIONS)) for number in held_out]


class _Turn(BaseModel):
    speaker: Literal["human", "gpt"] = Field(alias="from")
    value: str


class _Fields(BaseModel):
    """A record of LLaVA's JSON: {"image": "x.png", "conversations": [{"from": "human", "value": "<image> …"}, …]}."""

    image: str
    conversations: list[_Turn]

    def turns(self) -> tuple[tuple[str, str], ...]:
        """What the human and the model say in turn. Raises ValueError if they do not, or for another placeholder."""
        human, answers = self.conversations[::2], self.conversations[1::2]
        if not answers or [turn.speaker for turn in self.conversations] != ["human", "gpt"] * len(answers):
            turns = len(self.conversations)
            raise ValueError(f'"conversations" has {turns} turns; a human and gpt should speak in turn, gpt last')
        if (times := sum(turn.value.count(PLACEHOLDER) for turn in human)) != 1:
            raise ValueError(f"the human has {PLACEHOLDER} {times} times; write it once, where the image is")
        if any(PLACEHOLDER in turn.value for turn in answers):
            raise ValueError(f"gpt has {PLACEHOLDER}, which only the human writes")
        return tuple((one.value, other.value) for one, other in zip(human, answers, strict=True))


def read_records(path: Path, folder: Path) -> tuple[list[Record], list[Path]]:
    """The records of LLaVA's JSON, and their images, below `folder`. Errors name the record and the field."""
    try:
        content = TypeAdapter(list[_Fields]).validate_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.source = {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = f"record {first['loc'][0]} of {path.name}" if first["loc"] else f"data.source = {path}"
        name = ".".join(map(str, first["loc"][1:]))
        raise ConfigError(f"{where}{f', {name}' * bool(name)}: {first['msg']}, as in LLaVA's JSON") from None
    if not content:
        raise ConfigError(f"data.source = {path} has no record")
    records, paths = [], []
    for number, fields in enumerate(content):
        name = f"record {number} of {path.name}"
        with naming(name, ValueError):
            records.append(Record(number, fields.turns(), name))
        paths.append(Path(os.path.abspath(folder / fields.image)))  # without ..
        if not paths[-1].is_relative_to(os.path.abspath(folder)):
            problem = f'"image" is {fields.image!r}, outside of {folder}'
            raise ConfigError(f"{name}: {problem}: set data.images to a folder that has all of them")
    return records, paths
