"""Tokenized documents in a cache folder: tokenize once into flat files, and open them again.

    ids.bin         the ids of all documents; text is followed by the end-of-document token
    targets.bin     which ids are targets, of conversations with a loss on the assistant
    documents.bin   for each document where it ends in ids.bin, and a hash of its text (`DOCUMENT`)
    facts.json      counts, and the dtype of the ids
    tokenizer.json  digests.json

The files are memory-mapped, so memory does not grow with the number of tokens. Sampling text to train a BPE takes two
passes over the data.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import tokenizers

from octavo.train.config.data_section import Data
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import expand
from octavo.train.data.chat import Chat, chat_template
from octavo.train.data.chat import fingerprint as chat_fingerprint
from octavo.train.data.documents import OnBytesRead, Stream
from octavo.train.data.encoding import DOCUMENT, TARGETS_FILE, tokenize
from octavo.train.data.sequences import NoSequencesError
from octavo.train.data.source import Source, open_source
from octavo.train.data.tokenizer import SAMPLE_CHARACTERS, TextTokenizer, train_tokenizer
from octavo.train.disk import lock, sync
from octavo.train.record.progress import Progress

FORMAT_VERSION = "1"
"""Part of every fingerprint; changes with the ids that a text gives."""
MAX_CANDIDATES = 1 << 23
"""Most documents to draw the sample for the BPE from; of more, only each second, fourth, … counts."""
BUILDING = ".building-"
"""Prefix of an incomplete entry."""
ABANDONED_AFTER = 24 * 3600.0
"""Seconds without a write after which an incomplete entry counts as left by a killed process."""
ENTRY_FILES = ("facts.json", "ids.bin", "documents.bin", "tokenizer.json")
LAYOUT = "-2"
"""Ends the name of an entry; changes with its files."""
DIGESTS = "digests.json"
REPORT_SECONDS = 10.0
"""Seconds between two progress reports."""


NO_FILES: Mapping[str, list[Any]] = MappingProxyType({})


class TokenizedText:
    """The tokenized documents of a cache entry."""

    def __init__(
        self, folder: Path, tokenizer: TextTokenizer, fingerprint: str, files: Mapping[str, list[Any]] = NO_FILES
    ) -> None:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.tokenizer = tokenizer  # The tokenizer of the ids
        # folder: The entry.
        # fingerprint: Hash of the content and the tokenizer.
        self.folder, self.fingerprint = folder, fingerprint
        self.digest: str = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))["ids.bin"]  # Digest of the ids
        self.files = dict(files)  # Size and digest of each file of the source by name, as `Source.files`
        self.skipped: int = facts["skipped"]  # Number of files left out because they are not UTF-8
        self._empty: int = facts["without_text"]
        # Ids of all documents, each with its end token: uint16 or uint32 [tokens].
        self.ids: np.ndarray = np.memmap(folder / "ids.bin", dtype=facts["dtype"], mode="r", shape=(facts["tokens"],))
        rows = np.memmap(folder / "documents.bin", dtype=DOCUMENT, mode="r", shape=(facts["documents"],))
        self.ends: np.ndarray = rows["end"]  # Where each document ends in `ids`: int64 [documents]
        self.hashes: np.ndarray = rows["hash"]  # A hash of the text of each document: uint64 [documents]
        self.targets: np.ndarray | None = None  # Which ids are targets: uint8 [tokens]; None if all are
        if facts.get("masked"):
            self.targets = np.memmap(folder / TARGETS_FILE, dtype=np.uint8, mode="r", shape=(facts["tokens"],))
        self.target_count: int = facts.get("targets", facts["tokens"])  # How many are

    def without_text(self, what: str) -> str:
        """A sentence about documents without text; empty if there are none."""
        return f"{self._empty} of {len(self.ends) + self._empty} {what} and are left out" if self._empty else ""


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


def open_tokens(
    data: Data, meter: ReadProgress, progress: Progress, pretrained: TextTokenizer | None = None
) -> TokenizedText:  # fmt: skip
    """Tokenize the documents of `data.source`, or open them in the cache. Raises ConfigError for unusable data."""
    # `pretrained`: the tokenizer; None to train a BPE on the documents.
    template = chat_template(data, pretrained) if data.format == "messages" else None
    meter.stage("reading the data")
    return open_entry(data, open_source(data, meter), template, expand(data.cache), meter, progress, pretrained)


def open_entry(
    data: Data, source: Source, template: str | None, cache: Path, meter: ReadProgress, progress: Progress,
    pretrained: TextTokenizer | None,
) -> TokenizedText:  # fmt: skip
    """The tokenized documents of `source`, in the folder `cache`. `template`: the chat template of conversations."""
    identity = [FORMAT_VERSION, source.fingerprint, pretrained.fingerprint if pretrained else f"bpe {data.vocab_size}"]
    if template is not None:
        identity.append(chat_fingerprint(template, data.loss_on))
    fingerprint = hashlib.sha256("\0".join(identity).encode()).hexdigest()
    folder = cache / f"{fingerprint[:24]}{LAYOUT}"
    if _damage(folder, fingerprint, meter):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder, progress):
                _build_entry(folder, fingerprint, source, template, pretrained, data, meter, progress)
        except OSError as error:
            raise ConfigError(f"data.cache = {data.cache} cannot be written: {error.strerror or error}") from None
    tokenizer = pretrained or _cached_tokenizer(folder)
    if template is not None:
        tokenizer = replace(tokenizer, chat_template=template)
    tokens = TokenizedText(folder, tokenizer, fingerprint, source.files)
    for note in (source.skipped_files, source.without_text and tokens.without_text(source.without_text)):
        if note:
            progress.note(note)
    return tokens


def _build_entry(
    folder: Path,
    fingerprint: str,
    source: Source,
    template: str | None,
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
        _build(scratch, source, template, pretrained, config, meter)
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


def train_on(streams: Callable[[], Stream], vocab_size: int, meter: ReadProgress) -> TextTokenizer:
    """Train a BPE on a sample of documents. `streams` is called twice."""
    meter.stage("training the tokenizer")
    return train_tokenizer(_sample(streams), vocab_size)


def _build(
    scratch: Path, source: Source, template: str | None, pretrained: TextTokenizer | None, config: Data,
    meter: ReadProgress,
) -> None:  # fmt: skip
    folder = scratch / "entry"
    tokenizer = pretrained or train_on(lambda: source.plain_text(scratch), config.vocab_size, meter)
    meter.stage("tokenizing")
    encoder = tokenizer if template is None else Chat(tokenizer, template, config.loss_on)
    counts: dict[str, Any] = tokenize(folder, source.read(scratch), encoder)
    if not counts["documents"]:
        raise NoSequencesError(
            f'data.source = "{config.source}" is empty: {counts["without_text"]} documents, none with text'
        )
    if source.is_part:
        (folder / "tokenizer.json").write_text("{}", encoding="utf-8")  # not the 10 MB of it for each chunk
    else:
        content = tokenizer.backend.to_str(pretty=True)  # its own `save` raises no OSError where a disk is full
        (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    counts |= {"skipped": source.skipped, "end": tokenizer.end}
    (folder / "facts.json").write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")


def _write_digests(folder: Path, fingerprint: str) -> None:
    """Write the digests of an entry's files, and its fingerprint."""
    names = [*ENTRY_FILES, *([TARGETS_FILE] if (folder / TARGETS_FILE).exists() else [])]
    digests = {"entry": fingerprint} | {name: _digest(folder / name) for name in names}
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
    for name in {*ENTRY_FILES, *digests} - {"entry"}:
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
    """A uniform sample of the documents with text, in a fixed random order, as long as `train_tokenizer` needs."""
    # The first pass reads the lengths of all documents and chooses the sample; the second reads its text.
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
