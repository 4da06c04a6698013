"""Documents to flat files of ids, about `BATCH_BYTES` bytes of text at a time.

A tokenizer takes one to two hundred bytes of memory for each byte that it encodes.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from octavo.train.data.chat import Chat
from octavo.train.data.documents import Stream
from octavo.train.data.tokenizer import TextTokenizer

BATCH_BYTES = 1 << 20
"""UTF-8 bytes encoded at once; the tokenizer takes 100 to 200 bytes of memory for each."""
PIECE_BYTES = 2 << 20
"""Longest piece in UTF-8 bytes; it cuts text of more than two bytes a character below `PIECE_CHARACTERS`."""
BATCH_PIECES = 4096
PIECE_CHARACTERS = 1 << 20
"""Longest piece of a document in characters, cut after a line break if there is one."""
DOCUMENT = np.dtype([("end", "<i8"), ("hash", "<u8")])
"""A document: the index after its end token in the ids, and the BLAKE2b of its text as a 64-bit number."""
TARGETS_FILE = "targets.bin"
"""For each id whether it is a target, one byte each; only of conversations with a loss on the assistant."""
Encoded = Iterator[tuple[list[int], np.ndarray | None] | int | None]
"""Ids and targets of pieces of a document; its hash after the last of them; None for a document without text."""


def tokenize(folder: Path, stream: Stream, encoder: TextTokenizer | Chat) -> dict[str, int | str | bool]:
    """Write the ids of all documents, where they end, and the targets of conversations."""
    # Text is followed by the end token; conversations end as their template ends them. Returns counts and the dtype of
    # the ids.
    tokenizer = encoder if isinstance(encoder, TextTokenizer) else encoder.tokenizer
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    tokens = documents = without_text = targets = 0
    masked = False
    pieces = _text(stream, encoder) if isinstance(encoder, TextTokenizer) else _conversations(stream, encoder)
    with (
        (folder / "ids.bin").open("wb") as file,
        (folder / "documents.bin").open("wb") as index,
        (folder / TARGETS_FILE).open("wb") as marks,
    ):
        for piece in pieces:
            if piece is None:
                without_text += 1
            elif isinstance(piece, int):
                documents += 1
                index.write(np.array((tokens, piece), DOCUMENT).tobytes())
            else:
                ids, mask = piece
                file.write(np.asarray(ids, dtype=dtype).tobytes())
                tokens += len(ids)
                if mask is not None:
                    marks.write(mask.astype(np.uint8).tobytes())
                    masked, targets = True, targets + int(mask.sum())
    if not masked:
        (folder / TARGETS_FILE).unlink()
    return {
        "tokens": tokens, "documents": documents, "without_text": without_text, "dtype": dtype.name,
        "targets": targets if masked else tokens, "masked": masked,
    }  # fmt: skip


def _text(stream: Stream, tokenizer: TextTokenizer) -> Encoded:
    digest = hashlib.blake2b(digest_size=8)
    for batch in _batches(_pieces(stream)):
        encoded = iter(tokenizer.encode([piece for piece in batch if piece]))
        for piece in batch:
            if piece is None:
                yield [tokenizer.end_id], None
                yield int.from_bytes(digest.digest(), "little")
                digest = hashlib.blake2b(digest_size=8)
            elif piece:
                yield next(encoded), None
                digest.update(piece.encode())
            else:
                yield None


def _conversations(stream: Stream, chat: Chat) -> Encoded:
    has_text = False
    for batch in _batches(stream):
        encoded = iter(chat.encode([text for text in batch if text]))
        for text in batch:
            if text is None:
                if not has_text:
                    yield None
                has_text = False
                continue
            has_text = True
            yield next(encoded)
            yield int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


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
