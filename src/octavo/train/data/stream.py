"""Streaming: files that are read and tokenized when a run needs them (`data.streaming`).

    files ─▶ blocks: byte ranges of .jsonl, row groups of .parquet, .txt files
          ─▶ chunks: blocks from several places of the files, about `data.chunk_bytes` of text
          ─▶ an entry of the token cache for each chunk ─▶ its sequences, packed and permuted as those of a `Corpus`

An epoch takes the chunks in an order permuted by (seed, epoch), and all sequences of a chunk before those of the next
one. How many sequences a chunk has is known once it is tokenized; a checkpoint has the counts, so that a resume reads
the chunk that it needs and none before it.
"""

import hashlib
import os
import shutil
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from octavo.numerics.suggestions import grouped
from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data, expand
from octavo.train.data import documents
from octavo.train.data.chat import chat_template
from octavo.train.data.corpus import Corpus, Sequences
from octavo.train.data.documents import SUFFIXES, Block, NoFieldError, NoSequencesError, Source, list_files
from octavo.train.data.epochs import EpochOrder, permutation
from octavo.train.data.token_cache import ReadProgress, TokenizedText, open_entry
from octavo.train.data.tokenizer import TextTokenizer
from octavo.train.record.progress import NullProgress, Progress

BLOCKS_OF_CHUNK = 16  # Places of .jsonl files that a chunk is from, at least
HASHED_EDGE_BYTES = 1 << 16  # Bytes at the beginning and the end of each file that are hashed at each start
OPEN_CHUNKS = 3  # Chunks of which the index stays in memory: the one in use, the one before it, and that of step 0


class StreamedCorpus(Sequences):
    """The sequences of files that are larger than memory, or than the time before the first step."""

    def __init__(self, data: Data, tokenizer: TextTokenizer, progress: Progress) -> None:
        self._data, self._pretrained, self._progress = data, tokenizer, progress
        self._template = chat_template(data, tokenizer) if data.format == "messages" else None
        progress.stage("looking at the files")
        if (files := list_files(data)) is None:
            problem = f'data.source = "{data.source}" cannot be streamed: data.streaming takes files of one kind'
            remedy = "leave data.streaming out for other sources"
            raise ConfigError(f"{problem} ({', '.join(SUFFIXES)}), as a pattern or a folder; {remedy}")
        if files.note:
            progress.note(files.note)
        if packed := next(filter(documents.is_compressed, files.paths), None):
            problem = f"data.streaming = true reads parts of files, and {packed} is compressed"
            raise ConfigError(f"{problem}: decompress it, or leave data.streaming out")
        self._kind, self.files = files.kind, {path: _identity(path) for path in files.paths}
        size = data.chunk_bytes // BLOCKS_OF_CHUNK
        blocks = [block for path in files.paths for block in _blocks(path, self._kind, size, data)]
        if not blocks:
            raise ConfigError(f'data.source = "{data.source}" is empty: {len(files.paths)} files without a byte')
        self._chunks = _chunks(blocks, data.chunk_bytes, shuffle=data.shuffle)
        names = [f"{entry}" for entry in self.files.values()]
        identity = ["stream 1", self._kind, documents.column_identity(data), str(data.chunk_bytes)]
        identity += [tokenizer.fingerprint, *names, self._template or "", data.loss_on, str(data.shuffle)]
        self.fingerprint = hashlib.sha256("\0".join(identity).encode()).hexdigest()
        self._rows: dict[int, tuple[int, str]] = {}  # Sequences of each known chunk, and the digest of its ids
        self._sizes = np.array([sum(block.size for block in chunk) for chunk in self._chunks], np.int64)
        self._windows: int | None = None
        self._order = EpochOrder(len(self._chunks), shuffle=data.shuffle).order
        # By (seed, epoch): how many sequences there are up to the end of each chunk of its order, as far as known.
        self._ends = lru_cache(maxsize=2)(lambda seed, epoch: list[int]())
        self._open: OrderedDict[int, Corpus | None] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="octavo-data")
        self._next: dict[int, Future[TokenizedText | None]] = {}
        self._turn, self._turns = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._held_out_hashes = np.empty(0, np.uint64)
        self._shared: dict[int, int] = {}
        first = next((corpus for chunk in range(len(self._chunks)) if (corpus := self._corpus(chunk))), None)
        if first is None:
            raise NoSequencesError(f'data.source = "{data.source}" has no sequence of data.sequence_length')
        self.tokenizer, self._first = first.tokenizer, first

    @property
    def windows(self) -> int:
        """Number of sequences: an estimate from the chunks that are known, until all are."""
        if self._windows is not None:
            return self._windows
        known = sum(rows for rows, _ in self._rows.values())
        return max(1, round(known * int(self._sizes.sum()) / int(self._sizes[list(self._rows)].sum())))

    def row(self, seed: int, sample: int) -> tuple[Tensor, Tensor]:
        epoch, position, chunk, number = self._locate(seed, sample)
        corpus = self._corpus(chunk)
        assert corpus is not None
        order = self._order(seed, epoch)
        coming = position + 1 + (self._turn - position - 1) % self._turns
        if coming < len(order) and (later := int(order[coming])) not in self._next and later not in self._open:
            self._next.clear()  # of a step that was only looked at
            self._next[later] = self._thread.submit(self._tokenized, later, NullProgress())
        return corpus.row(seed, epoch * corpus.windows + number)

    def size(self) -> str:
        return (
            f"{len(self.files):,} streamed files with {self._sizes.sum() / 1e9:.3g} GB in "
            f"{len(self._chunks):,} chunks, about {self.windows:,} sequences (the first chunk: {self._first.size()})"
        )

    def state(self) -> dict[str, Any]:
        """The files, and how many sequences each known chunk has, with the digest of its ids."""
        rows = {str(chunk): [count, digest] for chunk, (count, digest) in sorted(self._rows.items())}
        return super().state() | {"chunks": {self.fingerprint: rows}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the counts of a checkpoint. Raises ConfigError if a chunk that is known has changed."""
        for name, (count, digest) in state.get("chunks", {}).get(self.fingerprint, {}).items():
            self._remember(int(name), count, digest)

    def _locate(self, seed: int, sample: int) -> tuple[int, int, int, int]:
        """The epoch of a sample, the position of its chunk in it, the chunk, and the number of its sequence there."""
        epoch = 0
        if self._windows is not None:
            epoch, sample = divmod(sample, self._windows)
        while True:
            order, ends = self._order(seed, epoch), self._ends(seed, epoch)
            while (not ends or ends[-1] <= sample) and len(ends) < len(order):
                ends.append((ends[-1] if ends else 0) + self._count(int(order[len(ends)])))
            if ends[-1] > sample:
                position = bisect_right(ends, sample)
                return epoch, position, int(order[position]), sample - (ends[position - 1] if position else 0)
            epoch, sample = epoch + 1, sample - ends[-1]

    def _count(self, chunk: int) -> int:
        if chunk not in self._rows:
            self._corpus(chunk)
        return self._rows[chunk][0]

    def _remember(self, chunk: int, count: int, digest: str) -> None:
        if self._rows.setdefault(chunk, (count, digest)) != (count, digest):
            paths = dict.fromkeys(block.path for block in self._chunks[chunk])
            problem = f'data.source = "{self._data.source}" has changed since the run read it'
            ids = f"ids {digest}, not {self._rows[chunk][1]}"
            raise ConfigError(f"{problem}: chunk {chunk} has other text ({ids}), which is from {', '.join(paths)}")
        if self._windows is None and len(self._rows) == len(self._chunks):
            self._windows = sum(rows for rows, _ in self._rows.values())

    def _corpus(self, chunk: int) -> Corpus | None:
        if chunk in self._open:
            self._open.move_to_end(chunk)
            return self._open[chunk]
        text = self._next.pop(chunk).result() if chunk in self._next else self._tokenized(chunk, self._progress)
        corpus = None
        if text is not None:
            with suppress(NoSequencesError):
                corpus = Corpus(text, self._data, shuffle=self._data.shuffle)
        self._remember(chunk, 0 if corpus is None else corpus.windows, "" if text is None else text.digest[:16])
        self._open[chunk] = corpus
        while len(self._open) > OPEN_CHUNKS:
            self._open.popitem(last=False)
        self._count_shared(chunk)
        return corpus

    def count_shared(self, hashes: np.ndarray) -> None:
        """Note from now on how many documents with these hashes, which are evaluated on, are trained on."""
        self._held_out_hashes = np.array(hashes)
        for chunk in self._open:
            self._count_shared(chunk)

    def _count_shared(self, chunk: int) -> None:
        corpus = self._open[chunk]
        if corpus is not None and chunk not in self._shared and len(self._held_out_hashes):
            self._shared[chunk] = int(np.isin(corpus.hashes, self._held_out_hashes).sum())
            if self._shared[chunk]:
                count = sum(self._shared.values())
                self._progress.note(f"{count} documents trained on so far are also evaluated on")

    def _tokenized(self, chunk: int, progress: Progress) -> TokenizedText | None:
        """The tokens of a chunk from the cache, or from the files; None if it has no text."""
        blocks, cache = self._chunks[chunk], expand(self._data.cache) / "stream"
        digest = hashlib.sha256(f"{self._kind}{documents.column_identity(self._data)}".encode())
        for block in blocks:
            stat, identity = os.stat(block.path), self.files[block.path]
            if stat.st_size != identity[0]:
                problem = f"{block.path} has {stat.st_size:,} bytes, and had {identity[0]:,} when the run began"
                raise ConfigError(f"{problem}: do not write to files that are streamed")
            changed = stat.st_mtime_ns  # or the cache could have the text of an earlier content
            digest.update(f"{identity}\0{changed}\0{block.start}\0{block.stop}\0".encode())
        read = documents.read_documents
        source = Source(fingerprint=digest.hexdigest(), read=lambda _: read(blocks, self._kind, self._data))
        meter = ReadProgress(progress)
        for tries_left in (2, 1, 0):
            try:
                text = open_entry(self._data, source, self._template, cache, meter, self._pretrained)
                break
            except NoSequencesError as error:
                if isinstance(error, NoFieldError) and not self._rows:  # the first chunk: the name is wrong
                    raise
                return None
            except FileNotFoundError:  # another process has just removed it, for its own chunks
                if not tries_left:
                    raise
        with suppress(OSError):  # a cache that is read only
            os.utime(text.folder)
        keep = {text.folder} | {corpus.folder for corpus in self._open.values() if corpus is not None}
        _evict(cache, int(self._data.cache_gib * 2**30), keep)
        return text


def _identity(path: str) -> list[int | str]:
    with documents.reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(file.read(HASHED_EDGE_BYTES))
        file.seek(max(0, size - HASHED_EDGE_BYTES))
        digest.update(file.read(HASHED_EDGE_BYTES))
    return [size, digest.hexdigest()[:16]]


def _blocks(path: str, kind: str, size: int, data: Data) -> list[Block]:
    """The blocks of a file. Raises ConfigError for a .parquet without the column."""
    if kind == ".parquet":
        from pyarrow import parquet

        with documents.reading(path), parquet.ParquetFile(path) as file:
            documents.columns_of(data, file.schema_arrow.names)
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        return [Block(path, number, number + 1, group.total_byte_size) for number, group in enumerate(groups)]
    total = os.path.getsize(path)
    step = size if kind == ".jsonl" else max(1, total)
    return [Block(path, start, min(start + step, total), min(step, total - start)) for start in range(0, total, step)]


def _chunks(blocks: list[Block], size: int, *, shuffle: bool) -> list[list[Block]]:
    """Blocks in groups of about `size` bytes, from all over the files with `shuffle`."""
    order = permutation(len(blocks), 0, 0) if shuffle else range(len(blocks))
    ordered = [blocks[number] for number in order]
    ends = accumulate(block.size for block in ordered)
    return [*grouped(((end - 1) // size, block) for block, end in zip(ordered, ends, strict=True)).values()]


def _evict(cache: Path, limit: int, keep: set[Path]) -> None:
    """Remove the entries that were opened longest ago, until `limit` bytes are left. Those in `keep` stay."""
    entries: list[tuple[float, Path, int]] = []
    for folder in cache.iterdir():
        with suppress(OSError):  # removed by another process
            if folder.is_dir() and not folder.name.startswith("."):
                size = sum(file.stat().st_size for file in folder.iterdir())
                entries.append((folder.stat().st_mtime, folder, size))
    total = sum(size for *_, size in entries)
    for _, folder, size in sorted(entries):
        if total > limit and folder not in keep:
            total -= size
            shutil.rmtree(folder, ignore_errors=True)
