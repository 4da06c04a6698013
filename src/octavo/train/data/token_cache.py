"""Tokenized documents in a cache folder: tokenize once into flat files, and open them again, memory-mapped.

    ids.bin         the ids of all documents; text is followed by the end-of-document token
    targets.bin     which ids are targets, one byte each, of conversations with a loss on the assistant
    documents.bin   for each document where it ends in ids.bin, and a hash of its text (`DOCUMENT`)
    facts.json      counts, and the dtype of the ids
    tokenizer.json  digests.json

There is one folder for each (content, vocabulary or tokenizer), which is renamed once it is complete. Its digests are
checked at each opening, and a damaged one is rebuilt.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import tokenizers

from octavo.train.checkpoint.digests import DIGESTS, find_damage, write_digests
from octavo.train.config.run_config import naming
from octavo.train.config.sections import Data, expand
from octavo.train.data.chat import Chat, Conversation, chat_template, content
from octavo.train.data.chat import fingerprint as chat_fingerprint
from octavo.train.data.documents import NoSequencesError, Source, Stream, open_source
from octavo.train.data.epochs import permutation
from octavo.train.data.tokenizer import END, SAMPLE_CHARACTERS, TextTokenizer, train_tokenizer
from octavo.train.disk import lock, sync
from octavo.train.record.progress import Progress

FORMAT_VERSION = "1"  # Part of every fingerprint; changes with the ids that a text gives
MAX_CANDIDATES = 1 << 23  # Most documents to draw the sample for the BPE from; of more, each second, fourth, … counts
BUILDING = ".building-"  # Prefix of an incomplete entry
ABANDONED_AFTER = 24 * 3600.0  # Seconds without a write after which an entry counts as left by a killed process
LAYOUT = "-3"  # Ends the name of an entry; changes with its files
REPORT_SECONDS = 10.0  # Seconds between two progress reports
BATCH_BYTES = 1 << 20  # UTF-8 bytes encoded at once; the tokenizer takes 100 to 200 bytes of memory for each
PIECE_BYTES = 2 << 20  # Longest piece in UTF-8; cuts text of more than two bytes a character below `PIECE_CHARACTERS`
BATCH_PIECES = 4096
PIECE_CHARACTERS = 1 << 20  # Longest piece of a document in characters, cut after a line break if there is one
DOCUMENT = np.dtype([("end", "<i8"), ("hash", "<u8")])
"""A document: the index after its end token in the ids, and the BLAKE2b of its text as a 64-bit number."""
TARGETS_FILE = "targets.bin"


class TokenizedText:
    def __init__(
        self, folder: Path, fingerprint: str, tokenizer: TextTokenizer, files: Mapping[str, list[int | str]]
    ) -> None:
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.folder, self.tokenizer = folder, tokenizer  # The entry, and the tokenizer of the ids
        self.fingerprint = fingerprint  # Hash of the content and the tokenizer
        # digest: Digest of the ids.
        self.digest: str = json.loads((folder / DIGESTS).read_text(encoding="utf-8"))["files"]["ids.bin"]
        self.files = dict(files)  # Size and digest of each file of the source by name, as `Source.files`
        self.without_text: int = facts["without_text"]  # Number of documents that are left out
        # Ids of all documents, each with its end token: uint16 or uint32 [tokens].
        self.ids: np.ndarray = np.memmap(folder / "ids.bin", dtype=facts["dtype"], mode="r", shape=(facts["tokens"],))
        rows = np.memmap(folder / "documents.bin", dtype=DOCUMENT, mode="r", shape=(facts["documents"],))
        self.ends: np.ndarray = rows["end"]  # Where each document ends in `ids`: int64 [documents]
        self.hashes: np.ndarray = rows["hash"]  # A hash of the text of each document: uint64 [documents]
        self.targets: np.ndarray | None = None  # Which ids are targets: uint8 [tokens]; None if all are
        if facts["masked"]:
            self.targets = np.memmap(folder / TARGETS_FILE, dtype=np.uint8, mode="r", shape=(facts["tokens"],))
        self.target_count: int = facts["targets"]  # How many are


class ReadProgress:
    """Reports every few seconds how many bytes a stage has read. A `documents.OnBytesRead`."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def stage(self, text: str) -> None:
        self._text, self._bytes, self._next = text, 0, time.monotonic() + REPORT_SECONDS
        self.progress.stage(text)

    def __call__(self, size: int) -> None:
        self._bytes += size
        if time.monotonic() > self._next:
            self._next = time.monotonic() + REPORT_SECONDS
            self.progress.stage(f"{self._text}: {self._bytes / 1e9:.2f} GB")

    def counted(self, text: str) -> str:
        self(len(text))
        return text


def open_tokens(data: Data, meter: ReadProgress, pretrained: TextTokenizer | None = None) -> TokenizedText:
    """Tokenize the documents of `data.source`, or open them in the cache. Raises ConfigError for unusable data."""
    # `pretrained`: the tokenizer; None to train a BPE on the documents.
    template = chat_template(data, pretrained) if data.format == "messages" else None
    meter.stage("reading the data")
    return open_entry(data, open_source(data, meter), template, expand(data.cache), meter, pretrained)


def open_entry(
    data: Data, source: Source, template: str | None, cache: Path, meter: ReadProgress,
    pretrained: TextTokenizer | None,
) -> TokenizedText:  # fmt: skip
    """The tokenized documents of `source`, in the folder `cache`. `template`: the chat template of conversations."""
    identity = [FORMAT_VERSION, source.fingerprint, pretrained.fingerprint if pretrained else f"bpe {data.vocab_size}"]
    if template is not None:
        identity.append(chat_fingerprint(template, data.loss_on))
    fingerprint = hashlib.sha256("\0".join(identity).encode()).hexdigest()
    folder = cache / f"{fingerprint[:24]}{LAYOUT}"
    if _damage(folder, fingerprint, meter):
        with naming(f"data.cache = {data.cache} cannot be written", OSError):
            cache.mkdir(parents=True, exist_ok=True)
            with _exclusive(folder, meter):
                # Another process may have built it meanwhile.
                if damage := _damage(folder, fingerprint, meter):
                    _build(folder, fingerprint, damage, source, template, pretrained, data, meter)
    tokenizer = pretrained
    if tokenizer is None:
        content = (folder / "tokenizer.json").read_text(encoding="utf-8")
        tokenizer = TextTokenizer(tokenizers.Tokenizer.from_str(content), END)
    if template is not None:
        tokenizer = replace(tokenizer, chat_template=template)
    tokens = TokenizedText(folder, fingerprint, tokenizer, source.files)
    if source.skipped_files:
        meter.progress.note(source.skipped_files)
    if source.without_text and (empty := tokens.without_text):
        meter.progress.note(f"{empty} of {len(tokens.ends) + empty} {source.without_text} and are left out")
    return tokens


def _damage(folder: Path, fingerprint: str, meter: ReadProgress) -> str:
    if not folder.exists():
        return "missing"
    meter.stage("checking the tokenized data")
    if damage := find_damage(folder):
        return damage
    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    return "" if facts.get("entry") == fingerprint else "facts.json is of another entry"


@contextmanager
def _exclusive(folder: Path, meter: ReadProgress) -> Iterator[None]:
    """Lock the entry; wait while another process builds it."""
    path = folder.with_name(f"{folder.name}.lock")
    for tries in count():
        with suppress(BlockingIOError):
            descriptor = lock(path)
            break
        if not tries:
            meter.stage("waiting for another process that prepares the same data")
        time.sleep(0.1)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _build(
    folder: Path, fingerprint: str, damage: str, source: Source, template: str | None,
    pretrained: TextTokenizer | None, config: Data, meter: ReadProgress,
) -> None:  # fmt: skip
    """Build the entry, of which `damage` is the reason. Call with the entry locked."""
    for left in folder.parent.glob(f"{BUILDING}*"):
        with suppress(OSError):  # its builder has just finished
            touched = max(path.stat().st_mtime for path in (left, *left.rglob("*")))
            if touched < time.time() - ABANDONED_AFTER:
                shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=BUILDING, dir=folder.parent))
    try:
        if folder.exists():
            meter.progress.note(f"{folder} is damaged ({damage}): rebuilding it")
            folder.rename(scratch / "damaged")
        entry = scratch / "entry"
        entry.mkdir()
        tokenizer = pretrained or train_on(lambda: source.read(scratch), config.vocab_size, meter)
        meter.stage("tokenizing")
        encoder = tokenizer if template is None else Chat(tokenizer, template, config.loss_on)
        facts = tokenize(entry, (map(meter.counted, document) for document in source.read(scratch)), encoder)
        if not facts["documents"]:
            reason = f"{facts['without_text']} documents, none with text"
            raise NoSequencesError(f'data.source = "{config.source}" is empty: {reason}')
        # `save` of a tokenizer raises no OSError where a disk is full. One that is not from here is not needed.
        content = "{}" if pretrained else tokenizer.backend.to_str(pretty=True)
        (entry / "tokenizer.json").write_text(content, encoding="utf-8")
        (entry / "facts.json").write_text(json.dumps(facts | {"entry": fingerprint}, indent=2) + "\n", encoding="utf-8")
        write_digests(entry, {})
        sync(entry)
        try:
            entry.rename(folder)
        except OSError:
            if not folder.exists():  # else another process has built it, on a file system without locks
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def tokenize(folder: Path, stream: Stream, encoder: TextTokenizer | Chat) -> dict[str, int | str | bool]:
    """Write the ids of all documents, where they end, and the targets of conversations."""
    # Text is followed by the end token; conversations end as their template does. Returns counts and the ids' dtype.
    tokenizer = encoder if isinstance(encoder, TextTokenizer) else encoder.tokenizer
    end = [tokenizer.end_id] if isinstance(encoder, TextTokenizer) else []
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    tokens, documents, without_text, targets, masked = 0, 0, 0, 0, False
    digest = hashlib.blake2b(digest_size=8)
    with (
        (folder / "ids.bin").open("wb") as file,
        (folder / "documents.bin").open("wb") as index,
        (folder / TARGETS_FILE).open("wb") as marks,
    ):
        for batch in _batches(_pieces(stream)):
            texts = [piece for piece in batch if piece]
            encoded = iter(encoder.encode(texts) if texts else [])
            for piece in batch:
                if piece == "":
                    without_text += 1
                    continue
                pair = next(encoded) if piece else end
                ids, mask = pair if isinstance(pair, tuple) else (pair, None)
                file.write(np.asarray(ids, dtype=dtype).tobytes())
                tokens += len(ids)
                if mask is not None:
                    marks.write(mask.astype(np.uint8).tobytes())
                    masked, targets = True, targets + int(mask.sum())
                if piece:
                    digest.update(piece.encode())
                else:
                    index.write(np.array((tokens, int.from_bytes(digest.digest(), "little")), DOCUMENT).tobytes())
                    documents, digest = documents + 1, hashlib.blake2b(digest_size=8)
    if not masked:
        (folder / TARGETS_FILE).unlink()
    return {
        "tokens": tokens, "documents": documents, "without_text": without_text, "dtype": dtype.name,
        "targets": targets if masked else tokens, "masked": masked,
    }  # fmt: skip


def _pieces(stream: Stream) -> Iterator[str | None]:
    """Conversations, and text of at most `PIECE_CHARACTERS`; None after each document, "" for one without text."""
    for document in stream:
        rest, has_text = "", False
        for text in document:
            has_text = True
            if isinstance(text, Conversation):
                yield text
                continue
            rest, start = rest + text, 0
            while len(rest) - start > PIECE_CHARACTERS:
                cut = rest.rfind("\n", start, start + PIECE_CHARACTERS) + 1 or start + PIECE_CHARACTERS
                yield from _halves(rest[start:cut])
                start = cut
            rest = rest[start:]
        yield from _halves(rest) if rest else ()
        yield None if has_text else ""


def _halves(piece: str) -> Iterator[str]:
    """The piece, cut if it has more than `PIECE_BYTES`."""
    if len(piece.encode()) <= PIECE_BYTES:
        yield piece
        return
    cut = piece.rfind("\n", 0, len(piece) // 2) + 1 or len(piece) // 2
    yield from _halves(piece[:cut])
    yield from _halves(piece[cut:])


def _batches(pieces: Iterator[str | None]) -> Iterator[list[str | None]]:
    batch, size = list[str | None](), 0
    for piece in pieces:
        added = len(piece.encode()) if piece else 0
        if size + added > BATCH_BYTES or len(batch) >= BATCH_PIECES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += added
    yield batch


def train_on(streams: Callable[[], Stream], vocab_size: int, meter: ReadProgress) -> TextTokenizer:
    """Train a BPE on a sample of documents. `streams` is called twice."""
    meter.stage("training the tokenizer")

    def read() -> Stream:
        return ((meter.counted(content(text)) for text in document) for document in streams())

    return train_tokenizer(_sample(read), vocab_size)


def _sample(read: Callable[[], Stream]) -> list[str]:
    """A uniform sample of the documents with text, in a fixed random order, as long as `train_tokenizer` needs."""
    # The first pass reads the lengths of all documents and chooses the sample; the second reads its text.
    lengths, step = array("I"), 1
    for number, document in enumerate(read()):
        length = min(sum(map(len, document)), SAMPLE_CHARACTERS)
        if number % step == 0:
            lengths.append(length)
            if len(lengths) == MAX_CANDIDATES:
                lengths, step = lengths[::2], 2 * step
    order = permutation(len(lengths), 0, 0)
    sizes = np.array(lengths, dtype=np.uint32)[order]
    order = order[: np.searchsorted(np.cumsum(sizes, dtype=np.int64), SAMPLE_CHARACTERS) + 1]
    order = order[sizes[: len(order)] > 0]
    # The beginnings of these documents, by their numbers.
    texts = dict.fromkeys((order * step).tolist(), "")
    for number, document in zip(range(max(texts, default=-1) + 1), read(), strict=False):
        for text in document if number in texts else ():
            texts[number] += text[: SAMPLE_CHARACTERS - len(texts[number])]
    return list(texts.values())
