"""Several sources with weights, and sources that are streamed: what is taken, resumes, ranks, and files that change."""

import gzip
import json
import shutil
import threading
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import datasets
import numpy as np
import pytest
import tiny_runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import At, Recorder, assert_same, curve, job, load, put, put_texts, recorded, sentences, terminate

from octavo.nn.causal import IGNORE
from octavo.train import ConfigError, run
from octavo.train.config.sections import Data
from octavo.train.data import documents, stream
from octavo.train.data.corpus import Sequences
from octavo.train.data.documents import Block
from octavo.train.data.load import BLOCK, Mixture
from octavo.train.data.tokenizer import train_tokenizer


def rows_of(count, seed):
    return [f"{seed} {number} {line}" for number, line in enumerate(sentences(count, seed=seed).splitlines())]


@pytest.fixture
def tokenizer(tmp_path):
    train_tokenizer([sentences(60), "0123456789"], 300).save(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


@pytest.fixture
def files(tmp_path, tokenizer):
    """Two folders: .jsonl in two files, and .parquet with row groups."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    for number in range(2):
        put_texts(tmp_path / "a" / f"{number}.jsonl", rows_of(90, number))
    datasets.Dataset.from_dict({"text": rows_of(60, 7)}).to_parquet(tmp_path / "b" / "x.parquet", batch_size=10)
    weights = {tmp_path / "a" / "*.jsonl": 3, tmp_path / "b" / "*.parquet": 1}
    return {
        "source": "", "tokenizer": tokenizer, "cache": str(tmp_path / "cache"), "packing": "documents",
        "sequence_length": 48, "sources": [{"source": str(path), "weight": weights[path]} for path in weights],
    }  # fmt: skip


STREAMED = {"streaming": True, "chunk_bytes": 2000}


def one_of(files, number=0):
    """One of the sources."""
    return {**files, "sources": [], "source": files["sources"][number]["source"]}


class Counted(Sequences):
    def __init__(self, tokenizer, count):
        self.tokenizer, self.fingerprint, self.files, self._count = tokenizer, str(count), {}, count

    @property
    def windows(self):
        return self._count

    def row(self, seed, sample):
        return torch.tensor([self._count, sample]), torch.tensor([0])

    def size(self):
        return ""


@settings(max_examples=20, deadline=None)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_shares_are_the_weights_and_no_sequence_is_left_out(weights, seed):
    tokenizer = train_tokenizer(["a"], 257)
    mixture = Mixture([Counted(tokenizer, 100 + n) for n in range(len(weights))], [("", w) for w in weights])
    for first in (0, BLOCK - 150):
        drawn = [mixture.row(seed, sample)[0].tolist() for sample in range(first, first + 300)]
        for number, weight in enumerate(weights):
            own = [sample for source, sample in drawn if source == 100 + number]
            assert own == list(range(own[0], own[0] + len(own))) if own else True  # one after the other
            assert len(own) == pytest.approx(300 * weight / sum(weights), abs=4)
    whole = [len(mixture._block(seed, 0)[0][mixture._block(seed, 0)[0] == n]) for n in range(len(weights))]
    assert whole == pytest.approx([BLOCK * weight / sum(weights) for weight in weights], abs=1)


@pytest.mark.parametrize(("count", "steps"), [(3, "0.75"), (1000, "250")])
def test_an_epoch_may_be_shorter_than_a_step(count, steps):
    data = Counted(train_tokenizer(["a"], 257), count)
    assert data.repeats(8 * count, 4) == f"{2 * count:,} steps take 8 epochs of {steps} steps"


@pytest.mark.parametrize("extra", [{}, STREAMED], ids=["cached", "streamed"])
def test_a_mixed_epoch_has_every_document_once(extra, make_config, files):
    """Of the first epoch of each source; shares are printed, and the source that repeats."""
    config = make_config(data=files | extra, run={"steps": 40})
    data = load(config)
    expected = {text for number in range(2) for text in rows_of(90, number)} | set(rows_of(60, 7))
    seen = Counter()
    end = data.tokenizer.end_id
    for sample in range(260):
        inputs, targets = data.row(0, sample)
        ids = inputs[:, 0].tolist()
        starts = [n for n in range(48) if inputs[n, 1] == 0 and targets[n] != IGNORE]
        for start in starts:
            stop = next(n for n in range(start, 48) if targets[n] == end)
            seen[data.tokenizer.backend.decode(ids[start : stop + 1])] += 1
    assert set(seen) == expected
    assert all(count <= 3 for count in seen.values())
    told = recorded(config, Path(files["cache"]).parent / "out")
    (summary,) = [stage for stage in told.stages if stage.startswith("data: ")]
    assert "75 % " in summary and "25 % " in summary and "120 sequences" in summary


@pytest.mark.thorough
def test_bitwise_resume_in_the_middle_of_a_streamed_mixed_epoch(make_config, files, tmp_path, monkeypatch):
    config = make_config(data=files | STREAMED, run={"steps": 12})
    run(config, out=tmp_path / "whole")
    run(config, out=tmp_path / "cut", progress=At(7, terminate))
    shutil.rmtree(files["cache"])
    tokenized = []
    original = stream.StreamedCorpus._tokenized

    def counted(self, chunk, progress):
        tokenized.append(chunk)
        return original(self, chunk, progress)

    monkeypatch.setattr(stream.StreamedCorpus, "_tokenized", counted)
    run(config, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    chunks = json.loads((tmp_path / "cut/checkpoints/step-000012/data.json").read_text())["chunks"]
    assert len(chunks) == 2
    assert len(tokenized) < 2 + sum(map(len, chunks.values()))  # not those that are behind


@pytest.mark.slow
@pytest.mark.dist
def test_other_numbers_of_ranks_see_the_same_documents(gloo, make_config, files, tmp_path):
    """A streamed mixture begun by one process, gone on with by two, and again by one."""
    optim = {"schedule": "constant", "warmup": 0}  # whatever the number of steps
    config = make_config(data=files | STREAMED, run={"steps": 9}, optim=optim, precision={"parameters": "fp32"})
    tables = config.model_dump(exclude_none=True)
    job(tables, str(tmp_path / "one"))
    run(config, out=tmp_path / "other", progress=At(3, terminate))
    two = tables | {"parallel": {"fp8_comm": "off"}, "run": tables["run"] | {"steps": 6}}
    gloo.run(job, 2, two, str(tmp_path / "other"), resume=True)
    job(tables, str(tmp_path / "other"), resume=True)
    losses = [[row[2] for row in curve(tmp_path / name)] for name in ("one", "other")]
    assert losses[0][:3] == losses[1][:3]
    assert losses[1] == pytest.approx(losses[0], rel=5e-4)


def test_a_streamed_epoch_follows_another_and_chunks_come_from_all_files(make_config, files):
    one = one_of(files)
    data = load(make_config(data=one | STREAMED))
    total = sum(data._count(chunk) for chunk in range(len(data._chunks)))
    fresh = load(make_config(data=one | STREAMED))  # finds out where an epoch ends on its way
    epochs = [[tuple(fresh.row(0, epoch * total + n)[1].tolist()) for n in range(total)] for epoch in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert len(data._chunks) > 4 and fresh.windows == total
    assert all(len({block.path for block in blocks}) > 1 for blocks in data._chunks[:-1])
    assert torch.equal(data.row(0, total + 3)[0], fresh.row(0, total + 3)[0])


TEXT = Data(source="x", sequence_length=1)


@given(lines=st.lists(st.text("ab\r", max_size=12), min_size=1, max_size=12), size=st.integers(1, 40))
def test_blocks_of_lines_have_each_line_once(lines, size, tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    content = "\n".join(json.dumps({"text": line}) for line in lines).encode()
    path.write_bytes(content)
    read = [
        text
        for start in range(0, len(content), size)
        for _, row in documents.lines_of(Block(str(path), start, start + size))
        if (text := documents.document_of(TEXT, "", json.loads(row))) is not None
    ]
    assert read == lines


def test_bad_lines_deep_in_a_streamed_file_have_their_number(make_config, files, tmp_path):
    rows = [{"text": text} for text in rows_of(90, 3)]
    for bad in ("{", {"text": 3}):
        path = put(tmp_path / "bad.jsonl", *rows[:70], bad, *rows[70:])
        data = {**files, "sources": [], "source": path} | STREAMED
        with pytest.raises(ConfigError, match=r"bad.jsonl, line 71"):
            loaded = load(make_config(data=data))
            [loaded.row(0, sample) for sample in range(loaded.windows)]


@pytest.mark.thorough
def test_a_file_that_changes_before_a_resume(make_config, files, tmp_path):
    for name, extra in (("cached", {}), ("streamed", STREAMED)):
        path = tmp_path / "a" / "0.jsonl"
        before = path.read_text()
        run(make_config(data=files | extra), out=tmp_path / name, progress=At(2, terminate))
        path.write_text(before + before[: before.index("\n") + 1])
        message = r"0.jsonl: then [\d,]+ bytes, digest \w+, now [\d,]+ bytes, digest"
        tiny_runs.refused_run(message, make_config(data=files | extra), tmp_path / name, resume=True)
        path.write_text(before)
    weights = [part | {"weight": 1} for part in files["sources"]]
    swapped = [part | {"weight": weight} for part, weight in zip(files["sources"][::-1], (3, 1), strict=True)]
    for sources, message in (
        (weights, r"weights of data\.sources: then \[3\.0, 1\.0\], now \[1\.0, 1\.0\]"),
        (swapped, r"has now: the order of data\.sources: .* now comes after "),
    ):
        tiny_runs.refused_run(message, make_config(data=files | {"sources": sources}), tmp_path / "cached", resume=True)


def test_a_change_in_the_middle_of_a_streamed_file(make_config, files, monkeypatch):
    monkeypatch.setattr(stream, "HASHED_EDGE_BYTES", 8)
    one = one_of(files) | {"shuffle": False} | STREAMED
    data = load(make_config(data=one))
    data.row(0, 0)
    state = json.loads(json.dumps(data.state()))
    path = Path(one["source"]).parent / "0.jsonl"
    path.write_text(path.read_text().replace("0 1 ", "0 2 ", 1))
    other = load(make_config(data=one))
    assert other.fingerprint == data.fingerprint
    tiny_runs.rejected("has changed since the run read it: chunk 0 has other text", other.load_state, state)


def test_processes_of_a_machine_tokenize_chunks_in_turns(make_config, files, monkeypatch):
    """Each one every third, ahead of its training; all have the rows of a process alone."""
    one = one_of(files) | STREAMED
    alone = load(make_config(data=one))
    expected = [alone.row(0, sample)[0] for sample in range(alone.windows)]
    shutil.rmtree(files["cache"])
    processes = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        processes.append(load(make_config(data=one)))
    built = []
    original = documents.read_documents

    def noted(blocks, kind, data):
        rank = [process._data is data for process in processes].index(True)
        built.append((threading.current_thread().name, rank))
        return original(blocks, kind, data)

    monkeypatch.setattr(documents, "read_documents", noted)
    for sample, row in enumerate(expected):
        for process in processes:
            assert torch.equal(process.row(0, sample)[0], row)
            wait([future for future in process._next.values()])
    ahead = Counter(rank for thread, rank in built if thread.startswith("octavo-data"))
    chunks = len(alone._chunks)
    assert len(built) == ahead.total() >= chunks - 2 > 2 and max(ahead.values()) <= -(-chunks // 3)


def test_the_cache_of_chunks_is_bounded(make_config, files):
    one = one_of(files) | STREAMED | {"chunk_bytes": 1024}
    data = load(make_config(data=one | {"cache_gib": 1e-9}))
    rows = [data.row(0, sample)[0] for sample in range(data.windows)]
    assert len(data._chunks) > stream.OPEN_CHUNKS + 4
    folder = Path(files["cache"]) / "stream"
    assert sum(path.is_dir() for path in folder.iterdir()) <= stream.OPEN_CHUNKS + 2
    again = load(make_config(data=one))
    assert all(torch.equal(row, again.row(0, sample)[0]) for sample, row in enumerate(rows))


def test_what_cannot_be_streamed(make_config, refuse, files, tmp_path):
    for data, message in (
        ({"source": "python-stdlib"}, "cannot be streamed: data.streaming takes files"),
        ({"tokenizer": None}, "a tokenizer would be trained on all of it before: set data.tokenizer"),
        ({"source": str(tmp_path / "empty.jsonl")}, "is empty: 1 files without a byte"),
        ({"source": str(tmp_path / "a.jsonl.gz")}, r"a\.jsonl\.gz is compressed: decompress it"),
        ({"source": str(tmp_path / "a" / "*.jsonl"), "sequence_length": 500_000}, "no sequence|longer than the data"),
        ({"source": str(tmp_path / "b" / "*.parquet")}, 'no field "text"'),  # before the first step
    ):
        datasets.Dataset.from_dict({"title": rows_of(9, 7)}).to_parquet(tmp_path / "b" / "y.parquet")
        (tmp_path / "empty.jsonl").touch()
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n'))
        one = {key: value for key, value in (files | {"sources": []} | STREAMED | data).items() if value is not None}
        one["source"] = one["source"] or files["sources"][0]["source"]
        refuse(message=message, **one | {"packing": "stream"})
    message = r"\[eval\] without a source holds out a share"
    tiny_runs.rejected(message, lambda: load(make_config(data=files | STREAMED, eval={})))


def test_documents_that_are_also_evaluated_on_count_once_and_from_the_first_chunk_on(make_config, files, tmp_path):
    held_out = put_texts(tmp_path / "e.jsonl", rows_of(5, 0))
    for chunk_bytes in (2000, 1 << 20):
        one = one_of(files) | STREAMED | {"chunk_bytes": chunk_bytes}
        seen = Recorder()
        data = load(make_config(data=one, eval={"source": held_out}), seen)
        [data.row(0, sample) for sample in range(3 * data.windows)]
        notes = [note for note in seen.notes if "also evaluated" in note]
        assert notes[-1] == "5 documents trained on so far are also evaluated on", notes


def test_a_chunk_whose_rows_have_no_text(read, refuse, files, tmp_path):
    put(tmp_path / "a" / "1.jsonl", *({"title": text} for text in rows_of(90, 1)))
    one = one_of(files) | {"shuffle": False} | STREAMED
    data = read(**one)
    rows = [data.row(0, sample)[0] for sample in range(3 * data.windows)]
    assert len(data._rows) == len(data._chunks) and torch.equal(rows[0], rows[data.windows])
    refuse(message='no field "txt".*set data.text_field', **one | {"text_field": "txt"})


def test_held_out_documents_of_each_source(make_config, files):
    data = load(make_config(data=files, eval={"fraction": 0.2}))
    held_out = [data.held_out.row(0, sample)[1] for sample in range(data.held_out.windows)]
    trained = [data.row(0, sample)[1] for sample in range(300)]
    firsts = [{tuple(row[:9].tolist()) for row in rows} for rows in (held_out, trained)]
    assert not firsts[0] & firsts[1]
    assert np.isclose(sum(part.held_out.documents for part in data._parts), 48, atol=3)
