r"""Images of a run as pixels in [-1, 1], alone, with their classes, or with noise.

Images are those of files, read with Pillow, scikit-learn's digits, or latents: arrays [C, H, W] in .npy files, as an
autoencoder made them, already scaled for the model. Every image has the shape that the model takes. Files are decoded
when they are needed; at the start of a run each is decoded once, so that a damaged one is an error then, and its bytes
are hashed. Of an animation the first frame counts, and transparency is dropped, as in torchvision and LLaVA.

Classes are those of the digits, or a folder has a folder of images for each. Every fifth image is held out; equal files
count as one.

A diffusion model predicts the noise in images (DDPM, arXiv 2006.11239):

    x_t = √ᾱ_t · x + √(1 − ᾱ_t) · ε        t, ε and whether the class is left out: a function of (seed, position)

The position of a sample is its number in the order of the run, so ranks, micro-batches and resumed runs see the same.

Images with conversations about them are rows of tokens: the digits with captions, or files in LLaVA's JSON. A row has
one placeholder token for each feature of the image, where "<image>" is written, and then the conversation:

    <image> … <image>  Describe the image. \n  a handwritten seven <end>
    labels: ignored                              these

Every turn of a human ends with a line break, every answer with the end token. Answers alone are targets. Rows are
padded on the right to the length of the run, which a causal model never sees.
"""

import hashlib
import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.nn.causal import IGNORE
from octavo.train.config.run_config import ConfigError, TrainConfig, naming, optional_package
from octavo.train.config.sections import expand
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.source import files_below, suffix_counts
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


def image_shape(config: Any) -> ImageShape:
    """The images that a model of a config of Transformers takes. Raises ConfigError if it does not tell their size."""
    size = getattr(config, "image_size", None)
    if size is None:
        raise ConfigError(f"{config.model_type} has no image_size in its config, so its images cannot be resized to it")
    height, width = (size, size) if isinstance(size, int) else size
    return ImageShape(getattr(config, "num_channels", 3), height, width)


class Images(Protocol):
    """Images by number."""

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


class _Files:
    """Images of files by number, each read once at the start."""

    kind: str  # Part of the fingerprint

    def __init__(self, paths: Sequence[Path], contents: Sequence[bytes], shape: ImageShape) -> None:
        self._paths, self._shape, self.contents = list(paths), shape, list(contents)
        # Of all numbers: which has which file matters.
        identity = f"{self.kind} {shape}\0".encode() + b"".join(self.contents)
        self.fingerprint = hashlib.sha256(identity).hexdigest()
        for path, content in dict(zip(self._paths, self.contents, strict=True)).items():
            self._read(path, content)

    def _read(self, path: Path, digest: bytes) -> np.ndarray:
        raise NotImplementedError

    def _arrays(self, numbers: Sequence[int]) -> Tensor:
        return torch.from_numpy(np.stack([self._read(self._paths[n], self.contents[n]) for n in numbers]))


class ImageFiles(_Files):
    """Images of files, resized (bicubic) to a shape: three channels are RGB, one is grey."""

    kind = "image files 2"

    def __init__(self, paths: Sequence[Path], contents: Sequence[bytes], shape: ImageShape) -> None:
        if shape.channels not in (1, 3):
            raise ConfigError(f"the model takes images of {shape.channels} channels; files have 1 (grey) or 3 (RGB)")
        optional_package("PIL.Image", "images are read with Pillow", "pip install pillow")
        super().__init__(paths, contents, shape)

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        return self._arrays(numbers).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)

    def _read(self, path: Path, digest: bytes) -> np.ndarray:
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


class LatentFiles(_Files):
    """Latents by number; an `Images`."""

    kind = "latents 1"

    def pixels(self, numbers: Sequence[int]) -> Tensor:
        return self._arrays(numbers)

    def _read(self, path: Path, digest: bytes) -> np.ndarray:
        content = read_unchanged(path, digest)
        with naming(f"the latent {path} cannot be read", OSError, ValueError, EOFError):
            latent = np.load(content, allow_pickle=False)
        shape = (self._shape.channels, self._shape.height, self._shape.width)
        if not isinstance(latent, np.ndarray) or latent.shape != shape or latent.dtype.kind != "f":
            raise ConfigError(
                f"the latent {path} is {latent.dtype} {list(latent.shape)}; the model takes floating-point arrays "
                f"{list(shape)} (model.config.in_channels, sample_size)"
            )
        values = latent.astype(np.float32)
        if not np.isfinite(values).all():
            raise ConfigError(f"the latent {path} holds NaN or infinity")
        return values


class LabelledImages:
    skipped = 0  # Number of files left out

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
        classes: dict[int, list[Hashable]] = {}
        for label, content in zip(labels, images.contents, strict=True):
            classes.setdefault(label, []).append((names[label], content))
        # Number and digest of the images of each class.
        self.files = {f'class "{name}"': count_and_digest(classes[label]) for label, name in enumerate(names)}
        self._order = EpochOrder(len(self.training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of step 0, 1, …: fp32 [size, C, H, W] and int64 [size]."""
        return self.examples([self.training[row] for row in self._order.rows(seed, step, size)])

    def examples(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._images.pixels(numbers), self._labels[list(numbers)]


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


def image_classes(source: str, count: int | None) -> tuple[str, ...]:
    """The classes of `data.source`; of a folder that is not there, for a plan, `count` numbers."""
    if source == DIGITS:
        return DIGIT_NAMES
    if count is not None and not expand(source).exists():
        return tuple(map(str, range(count)))
    return tuple(classes_of(expand(source)))


def load_digits(shape: ImageShape, *, shuffle: bool) -> LabelledImages:
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
        remedy = 'give one with a folder of images for each class, or "digits"'
        raise ConfigError(f"data.source = {folder} is no folder: {remedy}")
    hidden = (".", "__")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(hidden))
    files: dict[str, list[Path]] = {name: [] for name in names}
    for path in map(Path, files_below(folder)):
        name, *below = path.relative_to(folder).parts
        if below and path.suffix.lower() in (*SUFFIXES, LATENTS):
            files[name].append(path)
    if empty := [name for name, images in files.items() if not images]:
        kinds_text = ", ".join((*SUFFIXES, LATENTS))
        raise ConfigError(f"data.source = {folder}: its folder {empty[0]} has no images ({kinds_text})")
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


class NoisyImages:
    skipped = 0  # Number of files left out
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
    """A conversation about one image."""

    image: int  # Number of the image
    # What the human and the model say in turn, human first; the first text has `PLACEHOLDER` once.
    turns: tuple[tuple[str, str], ...]
    name: str  # What error messages call it


@dataclass(frozen=True)
class Tokens:
    """The tokens of an image: `count` times `id`, where "<image>" is written."""

    id: int
    count: int


class ImageText:
    skipped = 0  # Number of files left out

    def __init__(
        self, records: tuple[Sequence[Record], Sequence[Record]], images: Images, tokenizer: TextTokenizer,
        placeholder: Tokens, *, length: int, shuffle: bool,
    ) -> None:  # fmt: skip
        self.tokenizer, self._images = tokenizer, images  # tokenizer: The tokenizer
        training, held_out = records
        everything = [*training, *held_out]
        rows = [_tokens(record, tokenizer, placeholder) for record in everything]
        longest = max(range(len(rows)), key=lambda row: len(rows[row][0]))
        if (needed := len(rows[longest][0]) - 1) > length:
            over = sum(len(ids) - 1 > length for ids, _ in rows)
            raise ConfigError(
                f"data.sequence_length = {length} is too short for {over} of {len(rows)} records: "
                f"{everything[longest].name} has {needed} tokens, {placeholder.count} of them the image's; set it to "
                f"{needed}, or shorten the records"
            )
        for record, (ids, _) in zip(everything, rows, strict=True):
            if (extra := ids.count(placeholder.id) - placeholder.count) > 0:
                raise ConfigError(
                    f"{record.name} has the token {placeholder.id} {extra} times in its text, and it is the model's "
                    "placeholder of images: set image_token_index to an id that text does not have"
                )
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
        self.training, self.held_out = len(training), len(held_out)  # Numbers of records
        self._order = EpochOrder(len(training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        return self.rows(self._order.rows(seed, step, size))

    def held_out_rows(self, first: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Up to `size` held-out records from number `first` on."""
        return self.rows(range(self.training + first, self.training + min(first + size, self.held_out)))

    def rows(self, numbers: Sequence[int]) -> tuple[Mapping[str, Tensor], Tensor]:
        """Some records, with B rows of S tokens."""
        ids, targets = torch.from_numpy(self._inputs[numbers]), torch.from_numpy(self._targets[numbers])
        pixels = self._images.pixels([self._image_of[number] for number in numbers])
        return {"input_ids": ids, "pixel_values": pixels}, targets


def _tokens(record: Record, tokenizer: TextTokenizer, placeholder: Tokens) -> tuple[list[int], list[int]]:
    """Ids and labels of a record: labels are the ids of answers."""
    ids: list[int] = []
    labels: list[int] = []
    for human, answer in record.turns:
        parts = f"{human}\n".split(PLACEHOLDER)
        encoded = tokenizer.encode([*parts, answer])
        for index, part in enumerate(encoded[:-1]):
            ids += ([placeholder.id] * placeholder.count if index else []) + part
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


def read_records(path: Path, folder: Path) -> tuple[list[Record], list[Path]]:
    r"""Read LLaVA's JSON: `[{"image": "x.png", "conversations": [{"from": "human", "value": "<image>\n…"}, …]}, …]`."""
    # Returns the records and their images, below `folder`. Errors name the record and the field.
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"data.source = {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"data.source = {path} is not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"data.source = {path} is not LLaVA's JSON: it is nested too deeply") from None
    if not isinstance(content, list) or not content:
        raise ConfigError(f"data.source = {path}: expected a list of records in LLaVA's JSON, and at least one")
    records, paths = [], []
    for number, fields in enumerate(content):
        name = f"record {number} of {path.name}"
        records.append(Record(number, tuple(_turns(fields, name)), name))
        image = _field(fields, "image", str, name)
        paths.append(Path(os.path.abspath(folder / image)))  # without ..
        if not paths[-1].is_relative_to(os.path.abspath(folder)):
            problem = f'"image" is {image!r}, outside of {folder}'
            raise ConfigError(f"{name}: {problem}: set data.images to a folder that has all of them")
    return records, paths


def _turns(fields: Any, name: str) -> Iterator[tuple[str, str]]:
    """The turns of a record, in pairs of human and model."""
    turns = _field(fields, "conversations", list, name)
    if not turns or len(turns) % 2:
        raise ConfigError(f'{name}: "conversations" has {len(turns)} turns; a human and gpt speak in turn, gpt last')
    texts = []
    for index, turn in enumerate(turns):
        where = f'{name}, turn {index} of "conversations"'
        speaker, expected = _field(turn, "from", str, where), ("human", "gpt")[index % 2]
        if speaker != expected:
            raise ConfigError(f'{where}: "from" is {speaker!r}; expected "{expected}": a human and gpt speak in turn')
        texts.append(_field(turn, "value", str, where))
    if (count := sum(text.count(PLACEHOLDER) for text in texts[::2])) != 1:
        problem = f'"value" of the human has {PLACEHOLDER} {count} times'
        raise ConfigError(f"{name}: {problem}; write it once, where the image is")
    if PLACEHOLDER in "".join(texts[1::2]):
        raise ConfigError(f'{name}: "value" of gpt has {PLACEHOLDER}, which only the human writes')
    yield from zip(texts[::2], texts[1::2], strict=True)


def _field(fields: Any, key: str, kind: Any, name: str) -> Any:
    noun = "a list" if kind is list else "a string"
    if not isinstance(fields, dict):
        raise ConfigError(f"{name}: expected a table, as in LLaVA's JSON; got {fields!r:.80}")
    if key not in fields:
        raise ConfigError(f'{name} has no field "{key}"; it has {", ".join(map(repr, fields)) or "none"}')
    if not isinstance(fields[key], kind):
        raise ConfigError(f'{name}: "{key}" should be {noun}, got {fields[key]!r:.80}')
    try:
        str(fields[key]).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f'{name}: "{key}" is not valid Unicode ({error.reason}): {fields[key]!r:.80}') from None
    return fields[key]
