import glob
import gzip
import json
import os
import resource
import subprocess
import sys
import time

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from tiny_runs import Recorder, load, sentences

from octavo.train.config.run_config import ConfigError
from octavo.train.config.sections import Data
from octavo.train.data import documents
from octavo.train.data import token_cache as data
from octavo.train.data.documents import matches
from octavo.train.data.load import load_corpus
from octavo.train.data.tokenizer import END

ENTRY = {"digests.json", "documents.bin", "facts.json", "ids.bin", "tokenizer.json"}
LINES = sentences(60).splitlines()


def whole_text(loaded):
    return str(loaded.tokenizer.backend.decode(loaded._ids.tolist(), skip_special_tokens=False))


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def rows(lines):
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)


def joined(lines):
    return "".join(line + END for line in lines)


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()


def test_standard_library_skips_what_is_not_utf8(tmp_path):
    for name in ("b.py", "a.py", "site-packages/x.py", "test/y.py", "pkg/tests/z.py", "pkg/c.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    files = documents._standard_library("python-stdlib", tmp_path)
    assert list(files.read(tmp_path)) == [["# a.py"], ["# b.py"], ["# pkg/c.py"]]
    assert files.skipped_files == "1 files of the data were left out: not UTF-8"
    (tmp_path / "a.py").write_text("# other")
    assert documents._standard_library("python-stdlib", tmp_path).fingerprint != files.fingerprint


def test_windows_cover_every_token_once(make_config):
    loaded = load(make_config(data={"shuffle": False}))
    inputs, targets = loaded.batch(0, 0, loaded.windows)
    stream = torch.cat([inputs[:1, :1].flatten(), targets.flatten()])
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs.flatten(), stream[:-1])
    assert np.array_equal(stream.numpy(), loaded._ids[: len(stream)])
    assert len(loaded._ids) - len(stream) < 16
    assert (loaded._ids == loaded.tokenizer.end_id).sum() == 4  # one a document
    assert loaded._ids[-1] == loaded.tokenizer.end_id


def test_an_epoch_is_a_permutation_and_epochs_differ(make_config):
    loaded = load(make_config())
    epochs = [loaded.batch(5, epoch, loaded.windows)[0] for epoch in range(2)]
    plain = load(make_config(data={"shuffle": False})).batch(5, 0, loaded.windows)[0]
    as_sets = [{tuple(row.tolist()) for row in epoch} for epoch in (*epochs, plain)]
    assert as_sets[0] == as_sets[1] == as_sets[2]
    assert not torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], plain)


def test_a_batch_is_a_pure_function_of_seed_and_step(make_config):
    first, second = load(make_config()), load(make_config())
    later = first.batch(1, 40, 3)[0]
    for step in (7, 0, 40):
        last = second.batch(1, step, 3)[0]
    assert torch.equal(later, last)
    assert not torch.equal(later, first.batch(2, 40, 3)[0])
    # Across the border of two epochs: the same samples, however they are grouped into steps.
    size = first.windows + 2
    whole = first.batch(1, 0, 2 * size)[0]
    assert torch.equal(whole, torch.cat([first.batch(1, 0, size)[0], first.batch(1, 1, size)[0]]))


def test_the_cache_is_used_and_keyed_on_content(make_config, tmp_path):
    def load(**keys):
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


def test_what_killed_builders_left_is_removed_after_a_day(make_config, tmp_path):
    for name, age in (("old", 25 * 3600), ("new", 3600)):
        folder = tmp_path / f".building-{name}"
        folder.mkdir()
        (folder / "ids.bin").touch()
        for path in (folder / "ids.bin", folder):
            os.utime(path, (time.time() - age,) * 2)
    load(make_config(data={"cache": str(tmp_path)}))
    assert [path.name for path in tmp_path.glob(".building-*")] == [".building-new"]


def test_jsonl_rows_may_differ_in_all_but_the_text(read, tmp_path):
    texts = [{"text": line} for line in LINES]
    texts[1] |= {"n": 1, "of": {"a": []}}
    texts[2] |= {"n": "two"}
    for name, part in (("a", texts[:30]), ("b", [row | {"k": 2} for row in texts[30:]])):
        (tmp_path / f"{name}.jsonl").write_text("\ufeff" + "\r\n\n".join(map(json.dumps, part)), encoding="utf-8")
    assert whole_text(read(tmp_path / "*.jsonl")) == joined(LINES)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_another_field_is_other_data(suffix, read, tmp_path):
    texts = {field: sentences(60, seed).splitlines() for seed, field in enumerate(("a", "b"))}
    table = datasets.Dataset.from_dict(texts)
    source = tmp_path / f"[1] x.{suffix}"
    table.to_json(source) if suffix == "jsonl" else table.to_parquet(source)
    for field, lines in texts.items():
        assert whole_text(read(source, text_field=field, cache=str(tmp_path / "cache"))) == joined(lines)


def test_a_build_that_dies_leaves_no_entry(make_config, tmp_path, monkeypatch):
    config = make_config(data={"cache": str(tmp_path / "cache")})
    with monkeypatch.context() as patch:
        patch.setattr(data, "tokenize", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            load(config)
    assert list((tmp_path / "cache").iterdir()) == []
    assert load(config).windows > 0


def test_an_entry_of_other_data_is_built_anew(read, tmp_path):
    cache, entries = tmp_path / "cache", []
    for lines in (LINES, LINES[::-1]):
        folder = put(tmp_path / str(len(entries)), a__jsonl=rows(lines))
        read(folder, cache=str(cache))
        entries += sorted({*cache.iterdir()}.difference(entries))
    entries[1].rename(tmp_path / "own")
    entries[0].rename(entries[1])
    assert whole_text(read(folder, cache=str(cache))) == joined(LINES[::-1])


def test_two_builders_of_one_entry(make_config, tmp_path, monkeypatch):
    config = make_config(data={"cache": str(tmp_path)})
    monkeypatch.setattr(data, "lock", lambda _: os.open(os.devnull, os.O_RDONLY))  # a file system without locks
    sync = data.sync

    def overtaken(entry):
        monkeypatch.setattr(data, "sync", sync)
        load(config)
        sync(entry)

    monkeypatch.setattr(data, "sync", overtaken)
    loaded = load(config)
    assert [path.name for path in tmp_path.iterdir()] == [loaded.fingerprint[:24] + data.LAYOUT]


def test_text_that_spells_a_special_token_stays_text(read, tmp_path):
    text = "a <|endoftext|> b " * 20
    (tmp_path / "a.txt").write_text(text)
    loaded = read(tmp_path / "a.txt")
    assert (loaded._ids == loaded.tokenizer.end_id).sum() == 1 and whole_text(loaded) == text + END


@pytest.mark.parametrize("text", ["line one\n" * 40, "x" * 400])
def test_long_documents_are_cut_without_loss(text, monkeypatch):
    monkeypatch.setattr(data, "PIECE_CHARACTERS", 100)
    pieces = [piece for piece in data._pieces(iter([[text[:70], text[70:]]])) if piece]
    assert "".join(pieces) == text
    assert 4 <= len(pieces) <= 5
    assert all(len(piece) <= 100 for piece in pieces)
    assert all(piece.endswith("\n") for piece in pieces) == ("\n" in text)


def test_a_vocabulary_over_16_bits(make_config, tmp_path, monkeypatch):
    plain = load(make_config()).batch(0, 0, 4)[0]
    monkeypatch.setattr(data.TextTokenizer, "size", property(lambda self: 70000))
    wide = load(make_config(data={"cache": str(tmp_path)}))
    assert wide._ids.dtype == np.uint32
    assert torch.equal(wide.batch(0, 0, 4)[0], plain)


@pytest.mark.parametrize(
    ("name", "content", "keys", "message"),
    [
        ("a.txt", b"", {}, "is empty"),
        ("a.jsonl", b'{"text": null}\n{"text": ""}\n', {}, "is empty|not text"),
        ("a.txt", b"a\ntext\0more", {}, "is not UTF-8 text: line 2 has a byte 0x00; convert"),
        ("a.txt", b"\x89PNG\r\n", {}, r"a\.txt is not UTF-8 text: line 1 has a byte 0x89"),
        ("a.txt", b"goo\n" * 300_000 + b"\xe2\x82", {}, "line 300001 has a byte 0xe2"),
        ("a.txt", b"\n" * ((1 << 20) - 1) + b"\xe2\x82x", {}, "line 1048576 has a byte 0xe2"),
        ("a.parquet", b"not parquet at all", {}, "cannot be read: .*[Pp]arquet"),
        ("a.jsonl", b'{"text": "a"}\nnonsense{\n', {}, "cannot be read: .*JSON"),
        ("a.jsonl", b'{"txt": "a"}\n', {}, r"no field \"text\".*did you mean 'txt'.*set data\.text_field"),
        ("a.jsonl", b'{"messages": []}\n', {}, r"no field \"text\".*for conversations data\.format = \"messages\""),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": 3}\n', {}, 'a.jsonl, line 3: field "text" is not text but int'),
        ("a.jsonl", b'{"text": [{}]}\n', {}, 'is not text but list; of conversations. set data.format = "messages"'),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "a.jsonl, line 1: the text is not valid Unicode"),
        ("a.jsonl", b"[" * 100_000, {}, "a.jsonl, line 1 is not JSON"),
        ("a.txt", "a leaf".encode("utf-16"), {}, r"a byte 0xff; convert it \(UTF-16: iconv -f UTF-16 -t UTF-8\)"),
        ("a.txt.gz", b"x", {}, "a.txt.gz cannot be read: Truncated compressed stream"),
        ("a.txt.xz", b"x", {}, "must end in .txt, .jsonl .both also with .gz or .zst. or .parquet: decompress"),
        ("a.txt", b"x" * 90, {"split": "test"}, 'no split "test"; it has train: set data.split'),
        ("a.jsonl", b"", {}, "is empty"),
        ("a.jsonl", b"\n\n", {}, "is empty"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', {}, "a.jsonl, line 2 is no JSON object but list"),
        ("a.txt", b"too short", {"sequence_length": 64}, r"sequence_length = 64 is longer than the data: it has \d+"),
        ("a.csv", b"x", {}, r"files must end in \.txt, \.jsonl .*parquet: decompress or convert others"),
    ],
)
def test_bad_data(name, content, keys, message, refuse, tmp_path):
    (tmp_path / name).write_bytes(content)
    refuse(tmp_path / name, message, **keys)


def test_sources_that_are_not_there(refuse, tmp_path, monkeypatch):
    refuse(tmp_path / "*.txt", "matches no file")
    refuse(tmp_path / "*.md", r"files must end in")
    refuse(tmp_path / "folder", "cannot be read")

    def offline(name, *_, **__):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    refuse("python-stdlb", r"\"python-stdlb\" cannot be read: .*Hub.*did you mean 'python-stdlib'")


def test_a_cache_on_a_full_disk(refuse, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (tmp_path / "a.txt").write_text("a leaf folds eight times before a printer cuts it")
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))  # the tokens fit, their tokenizer does not
    try:
        refuse(tmp_path / "a.txt", r"data\.cache = .* cannot be written: File too large", cache=str(tmp_path / "cache"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not any(path.is_dir() for path in (tmp_path / "cache").iterdir())


def save(folder, lines):
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(str(folder))


def csv(folder, lines):
    put(folder, a__csv="text\n" + "".join(f'"{line}"\n' for line in lines))


@pytest.mark.parametrize("write", [save, csv, lambda folder, lines: put(folder, a__jsonl=rows(lines))])
def test_content_identifies_a_folder_and_times_do_not(write, read, tmp_path):
    where = tmp_path / "data"
    write(where, LINES)
    first = read(where).fingerprint
    files = [path for path in where.rglob("*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    for path in files:
        os.utime(path, (1, 1))
    assert read(where).fingerprint == first
    word = LINES[7].split()[0]
    for path in files:
        path.write_bytes(path.read_bytes().replace(word.encode(), word.upper().encode()))
        os.utime(path, ns=(times[path], times[path]))
    changed = read(where)
    assert changed.fingerprint != first
    assert word.upper() in whole_text(changed)


def test_splits_of_a_saved_data_set(read, refuse, tmp_path):
    table = datasets.Dataset.from_dict
    both = datasets.DatasetDict({"train": table({"text": LINES}), "test": table({"text": LINES[::-1]})})
    both.save_to_disk(str(tmp_path))
    for split, lines in (("train", LINES), ("test", LINES[::-1])):
        assert whole_text(read(tmp_path, split=split)) == joined(lines)
    refuse(tmp_path, r'no split "dev"; it has train, test: set data\.split', split="dev")
    refuse(tmp_path / "train", 'no split "test"; it has train: set data.split', split="test")


def test_splits_by_the_names_of_files(read, tmp_path):
    put(tmp_path, train__jsonl=rows(LINES), test__jsonl=rows(LINES[::-1]), notes__md="x")
    seen = Recorder()
    assert whole_text(read(tmp_path, seen, split="test")) == joined(LINES[::-1])
    assert f'2 of 3 files in "{tmp_path}" are left out: 1 .md, 1 .jsonl' in seen.notes


def test_rows_without_text_are_counted(read, tmp_path):
    put(tmp_path, a__jsonl='{"text": null}\n{"text": ""}\n{"other": 1}\n' + rows(LINES))
    for _ in range(2):  # from the cache too
        seen = Recorder()
        read(tmp_path, seen)
        assert seen.notes == ['3 of 63 rows have no text in field "text" (missing, null or empty) and are left out']


def test_each_file_of_a_folder_is_a_document(read, tmp_path):
    put(tmp_path / "b", z__txt="\ufeff" + sentences(60) + "\r\nend")
    put(tmp_path, a__txt=sentences(30), e__txt="", notes__md="# not read", README__md="---\nconfigs:\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    seen = Recorder()
    assert whole_text(read(tmp_path, seen)) == sentences(30) + END + sentences(60) + "\r\nend" + END
    assert any("2 of 5 files" in note and "2 .md" in note for note in seen.notes)
    assert "1 of 3 files are empty and are left out" in seen.notes


def test_folders_that_are_refused(refuse, tmp_path):
    refuse(put(tmp_path / "x"), "should hold files of one kind to read, and holds no files")
    refuse(put(tmp_path / "y", a__md="x", b__gz=gzip.compress(b"x")), "holds 1 .md, 1 .gz: .*decompressed")
    refuse(put(tmp_path / "z", a__txt="x", b__jsonl="{}"), r"holds 1 .txt, 1 .jsonl: name some .*/\*\*/\*.jsonl")
    save(tmp_path / "saved", LINES)
    state = (tmp_path / "saved/state.json").read_text().replace("data-00000", "../x/data-00000")
    (tmp_path / "saved/state.json").write_text(state)
    (tmp_path / "saved/data-00000-of-00001.arrow").rename(tmp_path / "x/data-00000-of-00001.arrow")
    refuse(tmp_path / "saved", "its file .* is not in the folder")


def test_no_code_of_a_data_folder_runs(read, tmp_path):
    for kind, content in (("csv", "text\n" + "a b c d\n" * 50), ("jsonl", rows(LINES)), ("none", "")):
        folder = tmp_path / kind
        script = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        put(folder, **{f"{kind}__py": script, "setup__py": script, "__init____py": script, f"a__{kind}": content})
        try:
            read(folder)
        except ConfigError:
            assert kind != "jsonl"
    assert not (tmp_path / "ran").exists()


def test_links_to_nothing_are_refused(refuse, tmp_path):
    put(tmp_path, a__txt=sentences(60))
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    for where in (tmp_path, tmp_path / "*.txt"):
        refuse(where, r"b\.txt cannot be read: it is a link to .*gone, which does not exist")


def test_a_pattern_reads_a_file_once(read, tmp_path):
    put(tmp_path / "a", a__txt=sentences(60))
    for name in ("loop", "again"):  # two of them make a path for every number
        (tmp_path / "a" / name).symlink_to(tmp_path)
    assert whole_text(read(tmp_path / "**" / "*.txt")).count(END) == 1


def test_patterns_match_as_those_of_glob(tmp_path, monkeypatch):
    for name in ("a.txt", "b/c.txt", "b/.hidden/d.txt", "b/[e]/f.txt", "b/g/h/i.txt", "b/g/j.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    patterns = ("**/*.txt", "*.txt", "**", "b/**/*.txt", "b/**", "**/g/**/*.txt", "./**/*.md", f"{tmp_path}/**/?.txt")
    for pattern in patterns:
        expected = {os.path.normpath(path) for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        assert {
            os.path.normpath(path) for path in matches(Data(source=pattern, sequence_length=16), pattern)
        } == expected, pattern


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "saved"])
def test_a_file_that_changes_while_it_is_read(kind, refuse, tmp_path, monkeypatch):
    path = tmp_path / "data" / f"a.{kind}"
    put(path.parent, a__txt=sentences(60), a__jsonl=rows(LINES))
    table = datasets.Dataset.from_dict({"text": LINES})
    table.to_parquet(path.with_suffix(".parquet"))
    table.save_to_disk(str(path.with_suffix(".saved")))
    opened = data.open_source

    def changed(*arguments):
        opened_source = opened(*arguments)
        file = next(path.glob("*.arrow")) if kind == "saved" else path
        content = file.read_bytes()
        if kind == "parquet":
            datasets.Dataset.from_dict({"text": LINES[::-1]}).to_parquet(path)
        else:
            file.write_bytes(content.replace(b"a", b"e", 1) if kind != "saved" else content.replace(b" the", b" teh"))
        return opened_source

    monkeypatch.setattr(data, "open_source", changed)
    refuse(path, "changed while it was read", cache=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_any_damage_to_an_entry_is_found(make_config, tmp_path):
    config = make_config(data={"cache": str(tmp_path)})
    expected = load(config)._ids.tobytes()
    (entry,), removed = tmp_path.iterdir(), []
    for path in sorted(entry.iterdir()) * 2:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.unlink()
        if path.name not in removed:
            removed.append(path.name)
        else:
            path.write_bytes(content)
        seen = Recorder()
        assert load(config, seen)._ids.tobytes() == expected
        assert len(seen.notes) == 1 and "is damaged" in seen.notes[0] and path.name in seen.notes[0]
    seen = Recorder()
    assert load(config, seen)._ids.tobytes() == expected and not seen.notes
    assert list(tmp_path.iterdir()) == [entry]


def test_rows_that_are_too_long(refuse, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "ROW_LIMIT", 3000)
    monkeypatch.setattr(documents, "CHUNK", 1000)
    lines = ["short", "long " * 1000]
    put(tmp_path, a__jsonl=rows(lines))
    datasets.Dataset.from_dict({"text": lines}).to_parquet(tmp_path / "a.parquet")
    save(tmp_path / "saved", lines)
    for name, where in (("a.jsonl", "line 2"), ("a.parquet", "row 1"), ("saved", "row 1")):
        refuse(tmp_path / name, rf"{where} .*is longer than .*\.txt file")


def test_the_sample_is_that_of_whole_documents(monkeypatch):
    texts = [("x" * (i * 37 % 90)) + str(i) if i % 3 else "" for i in range(200)]

    def read():
        return ([text[:20], text[20:]] if text else [] for text in texts)

    monkeypatch.setattr(data, "SAMPLE_CHARACTERS", 2000)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(texts))
    shuffled = [texts[i] for i in order if texts[i]]
    total = np.cumsum([len(text) for text in shuffled])
    assert data._sample(read) == shuffled[: int(np.searchsorted(total, 2000)) + 1]
    monkeypatch.setattr(data, "MAX_CANDIDATES", 64)
    thinned = data._sample(read)
    assert set(thinned) <= set(texts[::4])


PEAK = """
import resource, sys, tempfile
from octavo.train.config.sections import Data
from octavo.train.config.sections import Model
from octavo.train.data.load import load_corpus
from octavo.train.record.progress import NullProgress
data = Data(sequence_length=16, vocab_size=300, cache=tempfile.mkdtemp(), source=sys.argv[1])
load_corpus(data, Model(type="llama"), NullProgress())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_text(tmp_path):
    peaks = []
    for size in (12, 48):
        text = (sentences(2000) * (1 + (size << 20) // len(sentences(2000))))[: size << 20]
        (tmp_path / "a.txt").write_text(text.replace("\n", " "))
        command = [sys.executable, "-c", PEAK, str(tmp_path / "a.txt")]
        alone = os.environ | {"RAYON_NUM_THREADS": "1"}  # of many threads of the tokenizer's, each has memory
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True, env=alone).stdout))
    assert peaks[1] < peaks[0] + 60, peaks
    assert peaks[1] < 1000


def card(data_files):
    return f"---\nconfigs:\n- config_name: default\n  data_files: '{data_files}'\n---\n"


@pytest.mark.parametrize("name", [".h/x.jsonl", "__p/x.jsonl", ".x.jsonl"])
def test_what_a_card_names_is_hashed_even_if_hidden(name, read, tmp_path):
    path = tmp_path / "data" / name
    put(tmp_path / "data", README__md=card(name))
    path.parent.mkdir(exist_ok=True)
    path.write_text(rows(LINES))
    first = read(tmp_path / "data").fingerprint
    path.write_text(rows(LINES[::-1]))
    changed = read(tmp_path / "data")
    assert changed.fingerprint != first
    assert whole_text(changed) == joined(LINES[::-1])


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("name", ["../x.jsonl", "ABSOLUTE", "https://localhost/x.jsonl", "zip://x.jsonl::../x.zip"])
def test_a_card_names_nothing_outside_its_folder(file, name, refuse, tmp_path):
    put(tmp_path, x__jsonl=rows(LINES))
    content = card(name.replace("ABSOLUTE", str(tmp_path / "x.jsonl")))
    put(tmp_path / "data", a__csv="text\n" + "a b c d\n" * 50)
    (tmp_path / "data" / file).write_text(content if file == "README.md" else content.replace("---\n", ""))
    refuse(tmp_path / "data", r"its card names .*(not in the folder|must be in it)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", "---\nconfigs: [\n: -\n---\n", "while parsing"),
        ("README.md", "---\nconfigs: [3]\n---\n", "cannot be read"),
        ("README.md", card("a.md"), r"names a\.md: files must end in"),
        ("state.json", '{"_data_files": ["x"]}', "cannot be read"),
        ("state.json", '{"_data_files": []}', "cannot be read"),
        ("dataset_dict.json", '{"splits": 3}', "cannot be read"),
        ("dataset_dict.json", '{"splits": ["../saved"]}', 'no split "train"; it has ../saved'),
    ],
)
def test_manifests_and_cards_of_another_content(name, content, message, refuse, tmp_path):
    save(tmp_path / "saved", LINES)
    put(tmp_path / "data", a__md="x")
    (tmp_path / "data" / name).write_text(content)
    refuse(tmp_path / "data", message)


@pytest.mark.parametrize(("name", "content"), [("A.TXT", sentences(60)), ("a.Jsonl", rows(LINES))])
def test_suffixes_in_any_case(name, content, read, tmp_path):
    (tmp_path / name).write_text(content)
    loaded = [read(where) for where in (tmp_path, tmp_path / name)]
    (tmp_path / name).rename(tmp_path / name.lower())
    loaded.append(read(tmp_path))
    assert len({each.fingerprint for each in loaded}) == 1


def test_compressed_text_is_read(read, refuse, tmp_path):
    parts = [gzip.compress(rows(part).encode()) for part in (LINES[:30], LINES[30:])]
    packed = put(tmp_path / "packed", a__jsonl__gz=b"".join(parts))
    assert whole_text(read(packed)) == joined(LINES)
    for name, compression in (("a.txt.zst", "zstd"), ("a.txt.gz", "gzip")):
        content = pyarrow.Codec(compression).compress(sentences(60).encode(), asbytes=True)
        (tmp_path / name).write_bytes(content)
        assert whole_text(read(tmp_path / name)) == sentences(60) + END
        (tmp_path / name).write_bytes(content[:100])
        refuse(tmp_path / name, f"{name} cannot be read")
