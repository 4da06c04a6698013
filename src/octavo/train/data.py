"""Text to batches: tokenize once, keep the ids in one flat file, and compute which ones a step takes.

The documents, each followed by the end-of-document token, are written as one stream of ids that is memory-mapped, so
memory does not grow with the corpus. Window i is the `sequence_length + 1` ids from i · sequence_length: inputs are all
but its last id, targets all but its first, and every id but the very first is a target once; what remains at the end,
less than a window, is not used. Attention crosses document borders inside a window, as usual in pretraining.

The batch of a step is a pure function of (seed, step): sample k of the run is window k mod n of epoch k div n, and
the order of an epoch is a permutation drawn from a counter-based generator keyed on (seed, epoch). So nothing about
the loader is saved, and a resumed run reads exactly what the uninterrupted one would have.

The cache folder holds one directory per (content, vocabulary or tokenizer), made under a temporary name and renamed
when complete and on disk: a killed process leaves nothing that looks finished, and two processes may build the same
entry at once. An entry that was damaged since is built anew.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from octavo.train.config import ConfigError, TrainConfig
from octavo.train.disk import sync
from octavo.train.metrics import Progress
from octavo.train.sections import Data
from octavo.train.source import Source, open_source
from octavo.train.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

LAYOUT = "1"
"""Part of every cache key; changes with the format of an entry or the way text is cut."""
DOCUMENTS_AT_ONCE = 256
BUILDING = ".building-"
"""Prefix of an entry that is not complete."""
ABANDONED = 24 * 3600.0
"""Seconds after which an entry that nobody writes to is taken for a killed builder's."""
PIECE = 1 << 20
"""Longer documents are encoded in pieces of at most this many characters, cut after a line break where there is one."""


class Corpus:
    """Tokenized text, cut into windows.

    Attributes:
        tokenizer: What made the ids, and will make those of a prompt.
        fingerprint: Hash of the content and of the tokenizer.
        skipped: Files left out because they are not UTF-8.
    """

    def __init__(self, folder: Path, tokenizer: TextTokenizer, config: Data, fingerprint: str) -> None:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.skipped: int = facts["skipped"]
        self._config = config
        size = facts["tokens"]
        self.windows = (size - 1) // config.sequence_length
        if self.windows < 1:
            raise ConfigError(
                f"data.sequence_length = {config.sequence_length} is longer than the data: it has {size} tokens in "
                f"{facts['documents']} documents, of which a sequence needs one more than its length"
            )
        self._ids = np.memmap(folder / "ids.bin", dtype=facts["dtype"], mode="r", shape=(size,))
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batch(self, seed: int, step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of step 0, 1, …: two int64 tensors of shape (size, sequence_length)."""
        length = self._config.sequence_length
        rows = []
        for sample in range(step * size, (step + 1) * size):
            epoch, position = divmod(sample, self.windows)
            start = int(self._order(seed, epoch)[position]) * length
            rows.append(self._ids[start : start + length + 1].astype(np.int64))
        ids = torch.from_numpy(np.stack(rows))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if not self._config.shuffle:
            return np.arange(self.windows)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self.windows)


def load_corpus(config: TrainConfig, progress: Progress) -> Corpus:
    """Tokenizes the data of a run, or finds it in the cache. Raises ConfigError for data that cannot serve."""
    progress.stage("reading the data")
    source = open_source(config.data)
    given = _given_tokenizer(config)
    vocabulary = given.fingerprint if given else f"bpe {config.data.vocab_size}"
    fingerprint = hashlib.sha256("\0".join((LAYOUT, source.fingerprint, vocabulary)).encode()).hexdigest()
    cache = Path(config.data.cache).expanduser()
    folder = cache / fingerprint[:24]
    _clear_abandoned(cache)
    if folder.exists() and (damage := _damage(folder)):
        progress.note(f"{folder} is damaged ({damage}): built anew")
        shutil.rmtree(folder)
    if not folder.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=BUILDING, dir=cache))
        except OSError as error:
            raise ConfigError(f"data.cache = {config.data.cache} cannot be written: {error.strerror}") from None
        try:
            _build(scratch, source, given, config.data, progress)
            _publish(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    tokenizer = given or _stored_tokenizer(folder)
    return Corpus(folder, tokenizer, config.data, fingerprint)


def _given_tokenizer(config: TrainConfig) -> TextTokenizer | None:
    folder = config.data.tokenizer or config.model.path
    return None if folder is None else load_tokenizer(Path(folder).expanduser())


def _build(folder: Path, source: Source, given: TextTokenizer | None, config: Data, progress: Progress) -> None:
    documents = source.load(folder / "arrow")
    if not any(_texts(documents)):
        raise ConfigError(f'data.source = "{config.source}" is empty: {len(documents)} documents, none with text')
    tokenizer = given
    if tokenizer is None:
        progress.stage("training the tokenizer")
        tokenizer = train_tokenizer(_spread(documents), config.vocab_size)
    progress.stage("tokenizing")
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    tokens = count = 0
    with (folder / "ids.bin").open("wb") as file:
        for texts in _batches(documents):
            for ids in _encode(tokenizer, texts):
                file.write(np.asarray(ids, dtype=dtype).tobytes())
                tokens += len(ids)
            count += len(texts)
    del documents
    shutil.rmtree(folder / "arrow", ignore_errors=True)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    facts = {
        "tokens": tokens,
        "documents": count,
        "skipped": source.skipped,
        "dtype": dtype.name,
        "end": tokenizer.end,
    }
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _publish(scratch: Path, folder: Path) -> None:
    sync(scratch)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():  # else another process has built the same entry meanwhile
            raise


def _damage(folder: Path) -> str:
    """What is wrong with an entry of the cache; empty where nothing is."""
    try:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        expected = facts["tokens"] * np.dtype(facts["dtype"]).itemsize
        if not facts.keys() >= {"documents", "skipped", "end"}:
            return "facts.json is incomplete"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "facts.json cannot be read"
    try:
        size = (folder / "ids.bin").stat().st_size
        if size != expected:
            return f"ids.bin has {size} bytes, not {expected}"
        _stored_tokenizer(folder)
    except OSError as error:
        return f"{Path(error.filename).name} is missing"
    except Exception:  # of no other type: whatever `tokenizers` finds wrong with its file
        return "tokenizer.json cannot be read"
    return ""


def _stored_tokenizer(folder: Path) -> TextTokenizer:
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    end = str(json.loads((folder / "facts.json").read_text(encoding="utf-8"))["end"])
    return TextTokenizer(tokenizers.Tokenizer.from_str(content), end)


def _clear_abandoned(cache: Path) -> None:
    """Removes what builders that were killed left behind: entries under construction, untouched for a day."""
    for folder in cache.glob(f"{BUILDING}*"):
        try:
            touched = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # its builder has just finished
            continue
        if touched < time.time() - ABANDONED:
            shutil.rmtree(folder, ignore_errors=True)


def _batches(documents: Any) -> Iterator[list[str]]:
    """The documents with text, some hundred at a time."""
    for start in range(0, len(documents), DOCUMENTS_AT_ONCE):
        texts = [text for text in documents[start : start + DOCUMENTS_AT_ONCE] if text]
        if texts:
            yield texts


def _texts(documents: Any) -> Iterator[str]:
    for texts in _batches(documents):
        yield from texts


def _spread(documents: Any) -> Iterator[str]:
    """The documents with text in a fixed random order, so that the first few are a fair sample of all."""
    for index in np.random.Generator(np.random.Philox(key=0)).permutation(len(documents)):
        if text := documents[int(index)]:
            yield text


def _encode(tokenizer: TextTokenizer, texts: list[str]) -> Iterator[list[int]]:
    """Ids of each text, the end-of-document token last."""
    pieces = [_pieces(text) for text in texts]
    encoded = iter(tokenizer.encode([piece for parts in pieces for piece in parts]))
    for parts in pieces:
        ids: list[int] = []
        for _ in parts:
            ids += next(encoded)
        yield [*ids, tokenizer.end_id]


def _pieces(text: str) -> list[str]:
    parts = []
    start = 0
    while len(text) - start > PIECE:
        cut = text.rfind("\n", start, start + PIECE) + 1 or start + PIECE
        parts.append(text[start:cut])
        start = cut
    return [*parts, text[start:]]
