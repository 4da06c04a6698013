r"""Images with conversations about them, as rows of tokens: the digits with captions, or files in LLaVA's JSON.

A row has one placeholder token for each feature of the image, where "<image>" is written, and then the conversation:

    <image> … <image>  Describe the image. \n  a handwritten seven <end>
    labels: ignored                             these

Every turn of a human ends with a line break, every answer with the end token. Answers alone are targets. Rows are
padded on the right to the length of the run, which a causal model never sees. Every fifth image is held out, with all
of its records.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.nn.causal import IGNORE
from octavo.train.config.run_config import ConfigError
from octavo.train.data.epochs import EpochOrder
from octavo.train.data.images import DIGIT_NAMES, Images, count_and_digest, read_digits, split
from octavo.train.data.tokenizer import TextTokenizer

PLACEHOLDER = "<image>"  # Where the image is, in the text of a human
CAPTIONS = (
    ("Describe the image.", "a handwritten {name}"),
    ("Which digit is it?", "the digit {digit}"),
    ("Is it even or odd?", "{name} is {parity}"),
)
"""Prompts and captions of digits."""


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
    """Tokenized records with their images."""

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
        # training: Number of records to train on.
        # held_out: Number of held-out records.
        self.training, self.held_out = len(training), len(held_out)
        self._order = EpochOrder(len(training), shuffle=shuffle)

    def batch(self, seed: int, step: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Inputs and targets of step 0, 1, …; see `rows`."""
        return self.rows(self._order.rows(seed, step, size))

    def held_out_rows(self, first: int, size: int) -> tuple[Mapping[str, Tensor], Tensor]:
        """Up to `size` held-out records from number `first` on."""
        return self.rows(range(self.training + first, self.training + min(first + size, self.held_out)))

    def rows(self, numbers: Sequence[int]) -> tuple[Mapping[str, Tensor], Tensor]:
        """Some records, with B rows of S tokens."""
        targets = torch.from_numpy(self._targets[numbers])
        inputs = {
            "input_ids": torch.from_numpy(self._inputs[numbers]),
            "pixel_values": self._images.pixels([self._image_of[number] for number in numbers]),
        }
        return inputs, targets


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

    kinds = range(len(CAPTIONS))
    return (
        [record(number, kind) for number in training for kind in kinds],
        [record(number, number % len(CAPTIONS)) for number in held_out],
    )


def read_records(path: Path, folder: Path) -> tuple[list[Record], list[Path]]:
    r"""Read LLaVA's JSON: `[{"image": "x.png", "conversations": [{"from": "human", "value": "<image>\n…"}, …]}, …]`.

    Returns the records and their images, below `folder`.

    Raises:
        ConfigError: For a file that is not JSON, a record without a field or with another value in it, and an image
            outside the folder; names the record and the field.
    """
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
            raise ConfigError(
                f'{name}: "image" is {image!r}, outside of {folder}: set data.images to a folder that has all of them'
            )
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
        raise ConfigError(
            f'{name}: "value" of the human has {PLACEHOLDER} {count} times; write it once, where the image is'
        )
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
