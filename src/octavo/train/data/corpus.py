"""Text to batches: tokenize once into one flat file, and compute the windows of each step.

The documents, each followed by the end-of-document token, form one stream of ids in a memory-mapped file, so memory
does not grow with the corpus. Window i is the `sequence_length + 1` ids from i · sequence_length. Inputs are all but
its last id, targets all but its first. Every id except the first is a target once; a rest shorter than a window is not
used. Attention crosses document borders inside a window, as usual in pretraining.

The batch of a step is a function of (seed, step): sample k of the run is window k mod n of epoch k div n, and a
counter-based generator keyed on (seed, epoch) permutes the windows of an epoch. So the loader has no state to save, and
a resumed run reads the same batches as an uninterrupted one.

Documents are streamed: about `BATCH_BYTES` bytes of text are encoded at a time, because a tokenizer takes one to two
hundred bytes of memory per byte. Sampling text to train a BPE takes two passes over the data.

The cache folder holds one directory per (content, vocabulary or tokenizer). It is written under a temporary name,
synced and renamed, so a killed process leaves no entry that looks complete. The digests of its files are checked
each time it is opened. A damaged entry is rebuilt. A lock keeps two processes from building or removing the same entry
at once.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import numpy as np
import tokenizers
import torch

from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, Model, expand
from octavo.train.data.documents import OnBytesRead, Stream
from octavo.train.data.source import Source, open_source
from octavo.train.data.tokenizer import SAMPLE_CHARACTERS, TextTokenizer, load_tokenizer, train_tokenizer
from octavo.train.disk import lock, sync
from octavo.train.record.metrics import Progress

FORMAT_VERSION = "1"
"""Part of every cache key; changes with the format of an entry or the way text is cut."""
BATCH_BYTES = 1 << 20
"""UTF-8 bytes encoded at once; the tokenizer takes 100 to 200 bytes of memory for each."""
PIECE_BYTES = 2 << 20
"""Longest piece in UTF-8 bytes; it cuts text of more than two bytes a character below `PIECE_CHARACTERS`."""
BATCH_PIECES = 4096
PIECE_CHARACTERS = 1 << 20
"""Longest piece of a document in characters, cut after a line break if there is one."""
MAX_CANDIDATES = 1 << 23
"""Most documents to draw the sample for the BPE from; of more, only each second, fourth, … counts."""
BUILDING = ".building-"
"""Prefix of an incomplete entry."""
ABANDONED_AFTER = 24 * 3600.0
"""Seconds without a write after which an incomplete entry counts as left by a killed process."""
ENTRY_FILES = ("facts.json", "ids.bin", "tokenizer.json")
DIGESTS = "digests.json"
REPORT_SECONDS = 10.0
"""Seconds between two progress reports."""


class Corpus:
    """Tokenized text, cut into windows.

    Attributes:
        tokenizer: The tokenizer of the ids.
        fingerprint: Hash of the content and the tokenizer.
        skipped: Number of files left out because they are not UTF-8.
    """

    def __init__(self, folder: Path, tokenizer: TextTokenizer, config: Data, fingerprint: str) -> None:
        counts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.skipped: int = counts["skipped"]
        self._documents = (counts["without_text"], counts["documents"] + counts["without_text"])
        self._config = config
        size = counts["tokens"]
        self.windows = (size - 1) // config.sequence_length
        if self.windows < 1:
            raise ConfigError(
                f"data.sequence_length = {config.sequence_length} is longer than the data: it has {size} tokens in "
                f"{counts['documents']} documents, of which a sequence needs one more than its length"
            )
        self._ids = np.memmap(folder / "ids.bin", dtype=counts["dtype"], mode="r", shape=(size,))
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

    def without_text(self, what: str) -> str:
        """A sentence about documents without text; empty if there are none."""
        empty, all_documents = self._documents
        return f"{empty} of {all_documents} {what} and are left out" if empty else ""

    def _permutation(self, seed: int, epoch: int) -> np.ndarray:
        if not self._config.shuffle:
            return np.arange(self.windows)
        return np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(self.windows)


class ReadProgress:
    """Reports every few seconds how many bytes a stage has read. An `OnBytesRead`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def stage(self, text: str) -> None:
        """Begin a stage."""
        self._text, self._bytes, self._next = text, 0, time.monotonic() + REPORT_SECONDS
        self._progress.stage(text)

    def __call__(self, size: int) -> None:
        """Count `size` bytes."""
        self._bytes += size
        if time.monotonic() > self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            self._progress.stage(f"{self._text}: {self._bytes / 1e9:.2f} GB")


def load_corpus(data: Data, model: Model, progress: Progress) -> Corpus:
    """Tokenize the data of a run, or open it in the cache. Raises ConfigError for unusable data.

    The tokenizer is that of `data.tokenizer`, else of the checkpoint at `model.path`, else trained on the data.
    """
    meter = ReadProgress(progress)
    meter.stage("reading the data")
    source = open_source(data, meter)
    pretrained = _configured_tokenizer(data, model)
    vocabulary = pretrained.fingerprint if pretrained else f"bpe {data.vocab_size}"
    fingerprint = hashlib.sha256("\0".join((FORMAT_VERSION, source.fingerprint, vocabulary)).encode()).hexdigest()
    cache = expand(data.cache)
    folder = cache / fingerprint[:24]
    if _damage(folder, fingerprint, meter):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder, progress):
                _build_entry(folder, fingerprint, source, pretrained, data, meter, progress)
        except OSError as error:
            raise ConfigError(f"data.cache = {data.cache} cannot be written: {error.strerror or error}") from None
    corpus = Corpus(folder, pretrained or _cached_tokenizer(folder), data, fingerprint)
    for note in (source.skipped_files, source.without_text and corpus.without_text(source.without_text)):
        if note:
            progress.note(note)
    return corpus


def _build_entry(
    folder: Path,
    fingerprint: str,
    source: Source,
    pretrained: TextTokenizer | None,
    config: Data,
    meter: ReadProgress,
    progress: Progress,
) -> None:
    """Build the entry, unless another process has just built it. Call with the entry locked."""
    damage = _damage(folder, fingerprint, meter)
    if not damage:
        return
    _clear_abandoned(folder.parent)
    scratch = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder.parent))
    try:
        if folder.exists():
            progress.note(f"{folder} is damaged ({damage}): rebuilding it")
            folder.rename(scratch / "damaged")
        (scratch / "entry").mkdir()
        _build(scratch, source, pretrained, config, meter)
        _write_digests(scratch / "entry", fingerprint)
        _publish(scratch / "entry", folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _exclusive(folder: Path, progress: Progress) -> Iterator[None]:
    """Lock the entry; wait while another process builds it."""
    path = folder.with_name(f"{folder.name}.lock")
    waited = False
    while True:
        try:
            descriptor = lock(path)
            break
        except BlockingIOError:
            if not waited:
                progress.stage("waiting for another process that prepares the same data")
            waited = True
            time.sleep(0.1)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _configured_tokenizer(data: Data, model: Model) -> TextTokenizer | None:
    folder = data.tokenizer or model.path
    return None if folder is None else load_tokenizer(expand(folder))


def _build(scratch: Path, source: Source, pretrained: TextTokenizer | None, config: Data, meter: ReadProgress) -> None:
    folder = scratch / "entry"
    tokenizer = pretrained
    if tokenizer is None:
        meter.stage("training the tokenizer")
        tokenizer = train_tokenizer(_sample(lambda: source.read(scratch)), config.vocab_size)
    meter.stage("tokenizing")
    counts = _tokenize(folder / "ids.bin", source.read(scratch), tokenizer)
    if not counts["documents"]:
        raise ConfigError(
            f'data.source = "{config.source}" is empty: {counts["without_text"]} documents, none with text'
        )
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    counts |= {"skipped": source.skipped, "end": tokenizer.end}
    (folder / "facts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


def _tokenize(path: Path, stream: Stream, tokenizer: TextTokenizer) -> dict[str, int | str]:
    """Write the ids of all documents, each followed by the end token. Returns counts and the dtype of the ids."""
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    end = np.array(tokenizer.end_id, dtype=dtype).tobytes()
    tokens = documents = without_text = 0
    with path.open("wb") as file:
        for batch in _batches(_pieces(stream)):
            encoded = iter(tokenizer.encode([piece for piece in batch if piece]))
            for piece in batch:
                if piece is None:
                    file.write(end)
                    tokens, documents = tokens + 1, documents + 1
                elif piece:
                    ids = next(encoded)
                    file.write(np.asarray(ids, dtype=dtype).tobytes())
                    tokens += len(ids)
                else:
                    without_text += 1
    return {"tokens": tokens, "documents": documents, "without_text": without_text, "dtype": dtype.name}


def _write_digests(folder: Path, fingerprint: str) -> None:
    """Write the digests of an entry's files, and its fingerprint."""
    digests = {"entry": fingerprint} | {name: _digest(folder / name) for name in ENTRY_FILES}
    (folder / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")


def _digest(path: Path, on_bytes_read: OnBytesRead = lambda _: None) -> str:
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            on_bytes_read(len(piece))
    return digest.hexdigest()


def _publish(scratch: Path, folder: Path) -> None:
    sync(scratch)
    try:
        scratch.rename(folder)
    except OSError:
        if not folder.exists():  # else another process has just built the same entry
            raise


def _damage(folder: Path, fingerprint: str, meter: ReadProgress) -> str:
    """The damage of a cache entry; empty if it is intact."""
    if not folder.exists():
        return "missing"
    meter.stage("checking the tokenized data")
    try:
        digests = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))
        if not isinstance(digests, dict):
            raise ValueError
    except (OSError, ValueError):
        return f"{DIGESTS} cannot be read"
    if digests.get("entry") != fingerprint:
        return f"{DIGESTS} is of another entry"
    for name in ENTRY_FILES:
        try:
            if _digest(folder / name, meter) != digests.get(name):
                return f"{name} is not what was written"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""


def _cached_tokenizer(folder: Path) -> TextTokenizer:
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    end = str(json.loads((folder / "facts.json").read_text(encoding="utf-8"))["end"])
    return TextTokenizer(tokenizers.Tokenizer.from_str(content), end)


def _clear_abandoned(cache: Path) -> None:
    """Remove incomplete entries of killed processes, untouched for a day."""
    for folder in cache.glob(f"{BUILDING}*"):
        try:
            touched = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # its builder has just finished
            continue
        if touched < time.time() - ABANDONED_AFTER:
            shutil.rmtree(folder, ignore_errors=True)


def _sample(read: Callable[[], Stream]) -> list[str]:
    """A uniform sample of the documents with text, in a fixed random order, as long as `train_tokenizer` needs.

    The first pass reads the lengths of all documents and chooses the sample; the second reads its text.
    """
    lengths = array("I")
    step, length = 1, 0
    number = 0
    for text in read():
        if text is not None:
            length = min(length + len(text), SAMPLE_CHARACTERS)
            continue
        if number % step == 0:
            lengths.append(length)
            if len(lengths) == MAX_CANDIDATES:
                lengths, step = lengths[::2], 2 * step
        number, length = number + 1, 0
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(lengths))
    sizes = np.frombuffer(lengths, dtype=np.uint32)[order] if lengths else np.empty(0, np.uint32)
    order = order[: np.searchsorted(np.cumsum(sizes, dtype=np.int64), SAMPLE_CHARACTERS) + 1]
    order = order[sizes[: len(order)] > 0]
    return _documents(read(), order * step)


def _documents(stream: Stream, numbers: np.ndarray) -> list[str]:
    """The beginnings of the documents with these numbers, in the order of `numbers`."""
    order_of_numbers = np.argsort(numbers)
    texts = [""] * len(numbers)
    number = done = 0
    parts: list[str] = []
    left = SAMPLE_CHARACTERS
    while done < len(order_of_numbers):
        text = next(stream)
        if number != numbers[order_of_numbers[done]]:
            number += text is None
        elif text is None:
            texts[order_of_numbers[done]] = "".join(parts)
            number, done = number + 1, done + 1
            parts, left = [], SAMPLE_CHARACTERS
        elif left:
            parts.append(text[:left])
            left -= len(parts[-1])
    return texts


def _pieces(stream: Stream) -> Iterator[str | None]:
    """Text of at most `PIECE_CHARACTERS`; None after each document with text, "" for one without."""
    rest, has_text = "", False
    for text in stream:
        if text is None:
            yield from _halves(rest) if rest else ()
            yield None if has_text else ""
            rest, has_text = "", False
            continue
        rest, has_text = rest + text, True
        start = 0
        while len(rest) - start > PIECE_CHARACTERS:
            cut = rest.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
            yield from _halves(rest[start:cut])
            start = cut
        rest = rest[start:]


def _halves(piece: str) -> Iterator[str]:
    """The piece, cut if it has more than `PIECE_BYTES`."""
    if len(piece.encode()) <= PIECE_BYTES:
        yield piece
        return
    cut = piece.rfind("\n", 0, len(piece) // 2) + 1 or len(piece) // 2
    yield from _halves(piece[:cut])
    yield from _halves(piece[cut:])


def _batches(pieces: Iterator[str | None]) -> Iterator[list[str | None]]:
    """Groups of pieces to encode at once."""
    batch: list[str | None] = []
    size = 0
    for piece in pieces:
        added = len(piece.encode()) if piece else 0
        if size + added > BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += added
    yield batch
