import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny_runs import MakeConfig, Recorder, sentences

from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.data import source
from octavo.train.data import token_cache as data
from octavo.train.data.corpus import Corpus
from octavo.train.data.load import load_corpus
from octavo.train.data.tokenizer import END
from octavo.train.record.progress import NullProgress

ENTRY = {"digests.json", "documents.bin", "facts.json", "ids.bin", "tokenizer.json"}


def corpus(config: TrainConfig) -> Corpus:
    return load_corpus(config.data, config.model, NullProgress())


def decoded(loaded: Corpus, step: int = 0) -> str:
    inputs, _ = loaded.batch(0, step, 1)
    return str(loaded.tokenizer.backend.decode(inputs[0].tolist(), skip_special_tokens=False))


def write_jsonl(folder: Path) -> str:
    rows = [{"text": line, "n": 1} for line in sentences(60).splitlines()]
    rows[3]["text"] = None
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "*.jsonl")


def write_parquet(folder: Path) -> str:
    datasets.Dataset.from_dict({"text": sentences(60).splitlines()}).to_parquet(folder / "a.parquet")
    return str(folder / "a.parquet")


def write_text(folder: Path) -> str:
    (folder / "odd [1]*.txt").write_text(sentences(60))
    return str(folder / "*.txt")


def write_nested(folder: Path) -> str:
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "b" / "x.txt").write_text(sentences(60))
    return str(folder / "**" / "*.txt")


def write_dataset_folder(folder: Path) -> str:
    write_jsonl(folder)
    return str(folder)


def write_saved_dataset(folder: Path) -> str:
    datasets.Dataset.from_dict({"text": sentences(60).splitlines()}).save_to_disk(str(folder))
    return str(folder)


WRITERS = [write_jsonl, write_parquet, write_text, write_nested, write_dataset_folder, write_saved_dataset]


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()


@pytest.mark.parametrize("write", WRITERS)
def test_every_kind_of_source(write: Callable[[Path], str], make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(data={"source": write(tmp_path), "shuffle": False})
    assert sentences(60).startswith(decoded(corpus(config)).replace(END, "\n"))


def test_standard_library_skips_what_is_not_utf8(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "site-packages/x.py", "test/y.py", "pkg/tests/z.py", "pkg/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    files = source._standard_library("python-stdlib", tmp_path)
    assert list(files.read(tmp_path)) == ["# a.py", None, "# b.py", None, "# pkg/c.py", None]
    assert files.skipped == 1
    (tmp_path / "a.py").write_text("# other")
    assert source._standard_library("python-stdlib", tmp_path).fingerprint != files.fingerprint


def test_the_real_standard_library_is_found(make_config: MakeConfig) -> None:
    opened = source.open_source(make_config(data={"source": "python-stdlib"}).data, lambda _: None)
    texts = [text for text in opened.read(Path()) if text]
    assert sum(map(len, texts)) > 5_000_000
    assert any("class OrderedDict" in text for text in texts)


def test_windows_cover_every_token_once(make_config: MakeConfig) -> None:
    loaded = corpus(make_config(data={"shuffle": False}))
    inputs, targets = loaded.batch(0, 0, loaded.windows)
    stream = torch.cat([inputs[:1, :1].flatten(), targets.flatten()])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs.flatten(), stream[:-1])
    assert np.array_equal(stream.numpy(), loaded._ids[: len(stream)])
    assert len(loaded._ids) - len(stream) < 16
    assert (loaded._ids == loaded.tokenizer.end_id).sum() == 4  # one a document
    assert loaded._ids[-1] == loaded.tokenizer.end_id


def test_an_epoch_is_a_permutation_and_epochs_differ(make_config: MakeConfig) -> None:
    loaded = corpus(make_config())
    epochs = [loaded.batch(5, epoch, loaded.windows)[0] for epoch in range(2)]
    plain = corpus(make_config(data={"shuffle": False})).batch(5, 0, loaded.windows)[0]
    as_sets = [{tuple(row.tolist()) for row in epoch} for epoch in (*epochs, plain)]
    assert as_sets[0] == as_sets[1] == as_sets[2]
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], plain)


def test_a_batch_is_a_pure_function_of_seed_and_step(make_config: MakeConfig) -> None:
    first, second = corpus(make_config()), corpus(make_config())
    later = first.batch(1, 40, 3)[0]
    for step in (7, 0, 40):
        last = second.batch(1, step, 3)[0]
    assert torch.equal(later, last)
    assert not torch.equal(later, first.batch(2, 40, 3)[0])
    # Across the border of two epochs: the same samples, however they are grouped into steps.
    size = first.windows + 2
    whole = first.batch(1, 0, 2 * size)[0]
    assert torch.equal(whole, torch.cat([first.batch(1, 0, size)[0], first.batch(1, 1, size)[0]]))


def test_the_cache_is_used_and_keyed_on_content(make_config: MakeConfig, tmp_path: Path) -> None:
    def load(**keys: Any) -> tuple[list[str], Corpus]:
        seen = Recorder()
        where = {"cache": str(tmp_path / "cache"), "source": str(tmp_path / "*.txt")}
        config = make_config(data=where | keys)
        return seen.stages, load_corpus(config.data, config.model, seen)

    (tmp_path / "a.txt").write_text(sentences(50))
    stages, first = load()
    assert "tokenizing" in stages
    stages, again = load(sequence_length=8)
    assert "tokenizing" not in stages
    assert again.fingerprint == first.fingerprint
    assert load(vocab_size=290)[1].fingerprint != first.fingerprint
    (tmp_path / "a.txt").write_text(sentences(51))
    stages, changed = load()
    assert "tokenizing" in stages
    assert changed.fingerprint != first.fingerprint
    entries = list((tmp_path / "cache").iterdir())
    assert len(entries) == 3
    assert {path.name for path in entries[0].iterdir()} == ENTRY


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("ids.bin", b"\0\0", "ids.bin is not what was written"),
        ("ids.bin", None, "ids.bin is missing"),
        ("facts.json", b"{}", "facts.json is not what was written"),
        ("tokenizer.json", b"", "tokenizer.json is not what was written"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("digests.json", None, "digests.json is not what was written"),
        ("digests.json", b"[]", "digests.json is not what was written"),
    ],
)
def test_a_damaged_entry_is_built_anew(
    name: str, content: bytes | None, reason: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(data={"cache": str(tmp_path)})
    expected = corpus(config).batch(0, 0, 4)[0]
    (entry,) = tmp_path.iterdir()
    (entry / name).unlink()
    if content is not None:
        (entry / name).write_bytes(content)
    seen = Recorder()
    again = load_corpus(config.data, config.model, seen)
    assert torch.equal(again.batch(0, 0, 4)[0], expected)
    assert len(seen.notes) == 1 and f"is damaged ({reason}" in seen.notes[0]
    seen = Recorder()
    load_corpus(config.data, config.model, seen)
    assert seen.notes == [] and "tokenizing" not in seen.stages


def test_what_killed_builders_left_is_removed_after_a_day(make_config: MakeConfig, tmp_path: Path) -> None:
    for name, age in (("old", 25 * 3600), ("new", 3600)):
        folder = tmp_path / f".building-{name}"
        folder.mkdir()
        (folder / "ids.bin").touch()
        for path in (folder / "ids.bin", folder):
            os.utime(path, (time.time() - age,) * 2)
    corpus(make_config(data={"cache": str(tmp_path)}))
    assert [path.name for path in tmp_path.glob(".building-*")] == [".building-new"]


def test_an_entry_is_on_disk_before_it_is_published(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[set[str]] = []
    monkeypatch.setattr(data, "sync", lambda folder: synced.append({path.name for path in folder.iterdir()}))
    corpus(make_config(data={"cache": str(tmp_path)}))
    assert synced == [ENTRY]


def test_jsonl_rows_may_differ_in_all_but_the_text(make_config: MakeConfig, tmp_path: Path) -> None:
    lines = sentences(60).splitlines()
    rows: list[dict[str, Any]] = [{"text": line} for line in lines]
    rows[1] |= {"n": 1, "of": {"a": []}}
    rows[2] |= {"n": "two"}
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(json.dumps(row) + "\n" for row in rows[:30]), encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row | {"k": 2}) + "\n" for row in rows[30:]))
    loaded = corpus(make_config(data={"source": str(tmp_path / "*.jsonl"), "shuffle": False}))
    stream = loaded.tokenizer.backend.decode(loaded._ids.tolist(), skip_special_tokens=False)
    assert stream == "".join(line + END for line in lines)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_another_field_is_other_data(suffix: str, make_config: MakeConfig, tmp_path: Path) -> None:
    texts = {field: sentences(60, seed).splitlines() for seed, field in enumerate(("a", "b"))}
    table = datasets.Dataset.from_dict(texts)
    source = tmp_path / f"x.{suffix}"
    table.to_json(source) if suffix == "jsonl" else table.to_parquet(source)
    for field, lines in texts.items():
        keys = {"source": str(source), "text_field": field, "shuffle": False, "cache": str(tmp_path / "cache")}
        assert "\n".join(lines).startswith(decoded(corpus(make_config(data=keys))).replace(END, "\n"))


def test_a_file_whose_name_looks_like_a_pattern(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text(sentences(60))
    (tmp_path / "a1.txt").write_text("another file " * 100)
    loaded = corpus(make_config(data={"source": str(tmp_path / "a[1].txt"), "shuffle": False}))
    assert sentences(60).startswith(decoded(loaded))


def test_a_build_that_dies_leaves_no_entry(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(data={"cache": str(tmp_path / "cache")})
    with monkeypatch.context() as patch:
        patch.setattr(data, "tokenize", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            corpus(config)
    assert list((tmp_path / "cache").iterdir()) == []
    assert corpus(config).windows > 0


def test_two_builders_of_one_entry(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(data={"cache": str(tmp_path)})
    monkeypatch.setattr(data, "lock", lambda _: os.open(os.devnull, os.O_RDONLY))  # a file system without locks
    publish = data._publish

    def overtaken(scratch: Path, folder: Path) -> None:
        monkeypatch.setattr(data, "_publish", publish)
        corpus(config)
        publish(scratch, folder)

    monkeypatch.setattr(data, "_publish", overtaken)
    loaded = corpus(config)
    assert [path.name for path in tmp_path.iterdir()] == [loaded.fingerprint[:24] + data.LAYOUT]


def test_text_that_spells_a_special_token_stays_text(make_config: MakeConfig, tmp_path: Path) -> None:
    text = "a <|endoftext|> b " * 20
    (tmp_path / "a.txt").write_text(text)
    loaded = corpus(make_config(data={"source": str(tmp_path / "a.txt"), "shuffle": False}))
    inputs, _ = loaded.batch(0, 0, 1)
    assert loaded.tokenizer.end_id not in inputs
    assert text.startswith(decoded(loaded))


@pytest.mark.parametrize("text", ["line one\n" * 40, "x" * 400])
def test_long_documents_are_cut_without_loss(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "PIECE_CHARACTERS", 100)
    pieces = [piece for piece in data._pieces(iter([text[:70], text[70:], None])) if piece]
    assert "".join(pieces) == text
    assert 4 <= len(pieces) <= 5
    assert all(len(piece) <= 100 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces) == ("\n" in text)


def test_a_vocabulary_over_16_bits(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = corpus(make_config()).batch(0, 0, 4)[0]
    monkeypatch.setattr(data.TextTokenizer, "size", property(lambda self: 70000))
    wide = corpus(make_config(data={"cache": str(tmp_path)}))
    assert wide._ids.dtype == np.uint32
    assert torch.equal(wide.batch(0, 0, 4)[0], plain)


def test_training_the_tokenizer_is_repeatable(text_files: Path) -> None:
    texts = [path.read_text() for path in sorted(text_files.iterdir())]
    first, second = (data.train_tokenizer(texts, 300) for _ in range(2))
    assert first.fingerprint == second.fingerprint
    assert first.size == 300


def bad_source(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return str(folder / name)


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("a.txt", b"", {}, "is empty"),
        ("a.jsonl", b'{"text": null}\n{"text": ""}\n', {}, "is empty|not text"),
        ("a.txt", b"text\0more", {}, "is not text: byte 4 is NUL"),
        ("a.txt", b"\x89PNG\r\n", {}, r"a\.txt is not UTF-8 text: byte 0 "),
        ("a.txt", b"good" * 300_000 + b"\xe2\x82", {}, r"is not UTF-8 text: byte 1200000 "),
        ("a.txt", b"x" * ((1 << 20) - 1) + b"\xe2\x82x", {}, r"is not UTF-8 text: byte 1048575 "),
        ("a.parquet", b"not parquet at all", {}, "cannot be read: .*[Pp]arquet"),
        ("a.jsonl", b'{"text": "a"}\nnonsense{\n', {}, "cannot be read: .*JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', {}, r"no field \"text\".*did you mean 'txt'.*set data\.text_field"),
        ("a.jsonl", b'{"messages": []}\n', {}, r"no field \"text\".*for conversations data\.format = \"messages\""),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 3}\n', {}, 'a.jsonl, line 3: field "text" is not text but int'),
        ("a.jsonl", b'{"text": [{}]}\n', {}, 'is not text but list; of conversations. set data.format = "messages"'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "a.jsonl, line 1: the text is not valid Unicode"),
        ("a.jsonl", b"[" * 100_000, {}, "a.jsonl, line 1 is not JSON"),
        ("a.txt.gz", b"x", {}, "a.txt.gz cannot be read: Truncated compressed stream"),
        ("a.txt.xz", b"x", {}, "of compressed files only .txt and .jsonl with .gz or .zst are read"),
        ("a.txt", b"x" * 90, {"split": "test"}, r'data\.split = "test": files have no splits'),
        ("a.jsonl", b"", {}, "is empty"),
        ("a.jsonl", b"\n\n", {}, "is empty"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', {}, "a.jsonl, line 2 is no JSON object but list"),
        ("a.txt", b"too short", {"sequence_length": 64}, r"sequence_length = 64 is longer than the data: it has \d+"),
        ("a.csv", b"x", {}, r"files must end in \.txt, \.jsonl, \.parquet"),
    ],
)
def test_bad_data(
    name: str, content: bytes, keys: dict[str, Any], message: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(data={"source": bad_source(tmp_path, name, content)} | keys)
    with pytest.raises(ConfigError, match=message):
        corpus(config)


def test_sources_that_are_not_there(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="matches no file"):
        corpus(make_config(data={"source": str(tmp_path / "*.txt")}))
    with pytest.raises(ConfigError, match=r"files must end in"):
        corpus(make_config(data={"source": str(tmp_path / "*.md")}))
    with pytest.raises(ConfigError, match="cannot be read"):
        corpus(make_config(data={"source": str(tmp_path / "folder")}))

    def offline(name: str, *_: Any, **__: Any) -> None:
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(ConfigError, match=r"\"python-stdlb\" cannot be read: .*Hub.*did you mean 'python-stdlib'"):
        corpus(make_config(data={"source": "python-stdlb"}))


def test_a_cache_that_cannot_be_written(make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache = .* cannot be written"):
        corpus(make_config(data={"cache": str(tmp_path / "file" / "cache")}))


def test_a_cache_on_a_full_disk(make_config: MakeConfig, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "a.txt").write_text("a leaf folds eight times before a printer cuts it")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the tokens fit, their tokenizer does not
    try:
        with pytest.raises(ConfigError, match=r"data\.cache = .* cannot be written: File too large"):
            corpus(make_config(data={"source": str(tmp_path / "a.txt"), "cache": str(tmp_path / "cache")}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def test_a_split_that_is_not_there(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no split "test"; it has train: set data\.split'):
        corpus(make_config(data={"source": write_dataset_folder(tmp_path), "split": "test"}))
