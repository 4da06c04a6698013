"""Sources by their content: what is read, what is refused, what is counted, and what a damaged cache does."""

import glob
import gzip
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tiny_runs import MakeConfig, Recorder, sentences

from octavo.train.config.run_config import ConfigError, TrainConfig
from octavo.train.config.sections import Data
from octavo.train.data import documents, source
from octavo.train.data import token_cache as data
from octavo.train.data.corpus import Corpus
from octavo.train.data.load import load_corpus
from octavo.train.data.source import matches
from octavo.train.data.tokenizer import END, train_tokenizer
from octavo.train.record.progress import NullProgress

LINES = sentences(60).splitlines()


@pytest.fixture(autouse=True)
def own_datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()


def corpus(config: TrainConfig, seen: Recorder | None = None) -> Corpus:
    return load_corpus(config.data, config.model, seen or NullProgress())


def decoded(loaded: Corpus) -> str:
    return str(loaded.tokenizer.backend.decode(loaded._ids.tolist(), skip_special_tokens=False))


def put(folder: Path, **files: str | bytes) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(folder)


def rows(lines: list[str]) -> str:
    return "".join(json.dumps({"text": line}) + "\n" for line in lines)


def save(folder: Path, lines: list[str]) -> None:
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(str(folder))


def csv(folder: Path, lines: list[str]) -> None:
    put(folder, a__csv="text\n" + "".join(f'"{line}"\n' for line in lines))


def folder_of_rows(folder: Path, lines: list[str]) -> None:
    put(folder, a__jsonl=rows(lines))


@pytest.mark.parametrize("write", [save, csv, folder_of_rows])
def test_content_identifies_a_folder_and_times_do_not(write: Any, make_config: MakeConfig, tmp_path: Path) -> None:
    where = tmp_path / "data"
    config = make_config(data={"source": str(where)})
    write(where, LINES)
    first = corpus(config).fingerprint
    files = [path for path in where.rglob("*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in files}
    for path in files:
        os.utime(path, (1, 1))
    assert corpus(config).fingerprint == first
    word = LINES[7].split()[0]
    for path in files:
        path.write_bytes(path.read_bytes().replace(word.encode(), word.upper().encode()))
        os.utime(path, ns=(times[path], times[path]))
    changed = corpus(config)
    assert changed.fingerprint != first
    assert word.upper() in decoded(changed)


def test_splits_of_a_saved_data_set(make_config: MakeConfig, tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict
    both = datasets.DatasetDict({"train": table({"text": LINES}), "test": table({"text": LINES[::-1]})})
    both.save_to_disk(str(tmp_path))
    for split, lines in (("train", LINES), ("test", LINES[::-1])):
        loaded = corpus(make_config(data={"source": str(tmp_path), "split": split}))
        assert decoded(loaded) == "".join(line + END for line in lines)
    with pytest.raises(ConfigError, match=r'no split "dev"; it has train, test: set data\.split'):
        corpus(make_config(data={"source": str(tmp_path), "split": "dev"}))
    with pytest.raises(ConfigError, match=r'data\.split = "test": a saved data set .* has no splits'):
        corpus(make_config(data={"source": str(tmp_path / "train"), "split": "test"}))


def test_splits_by_the_names_of_files(make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path, train__jsonl=rows(LINES), test__jsonl=rows(LINES[::-1]), notes__md="x")
    seen = Recorder()
    loaded = corpus(make_config(data={"source": str(tmp_path), "split": "test"}), seen)
    assert decoded(loaded) == "".join(line + END for line in LINES[::-1])
    assert f'2 of 3 files in "{tmp_path}" are left out: 1 .md, 1 .jsonl' in seen.notes


def test_rows_without_text_are_counted(make_config: MakeConfig, tmp_path: Path) -> None:
    more = '{"text": null}\n{"text": ""}\n{"other": 1}\n'
    config = make_config(data={"source": put(tmp_path, a__jsonl=more + rows(LINES))})
    for _ in range(2):  # from the cache too
        seen = Recorder()
        corpus(config, seen)
        assert seen.notes == ['3 of 63 rows have no text in field "text" (missing, null or empty) and are left out']


def test_a_field_that_comes_late_is_no_error(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(data={"source": put(tmp_path, a__jsonl='{"n": 1}\n' * 500 + rows(LINES))})
    assert decoded(corpus(config)).count(END) == len(LINES)


def test_each_file_of_a_folder_is_a_document(make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path / "b", z__txt="\ufeff" + sentences(60) + "\r\nend")
    put(tmp_path, a__txt=sentences(30), e__txt="", notes__md="# not read", README__md="---\nconfigs:\n")
    (tmp_path / "loop").symlink_to(tmp_path)
    seen = Recorder()
    loaded = corpus(make_config(data={"source": str(tmp_path)}), seen)
    assert decoded(loaded) == sentences(30) + END + sentences(60) + "\r\nend" + END
    assert any("2 of 5 files" in note and "2 .md" in note for note in seen.notes)
    assert "1 of 3 files are empty and are left out" in seen.notes


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds nothing to read: no files"),
        ({"a__md": "x", "b__gz": gzip.compress(b"x")}, "holds nothing to read: 1 .md, 1 .gz; .*decompressed"),
        ({"a__txt": "x", "b__jsonl": "{}"}, "folder of several kinds: 1 .txt, 1 .jsonl"),
    ],
)
def test_folders_that_are_refused(files: dict[str, Any], message: str, make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        corpus(make_config(data={"source": put(tmp_path / "x", **files)}))


def test_no_code_of_a_data_folder_runs(make_config: MakeConfig, tmp_path: Path) -> None:
    for kind, content in (("csv", "text\n" + "a b c d\n" * 50), ("jsonl", rows(LINES)), ("none", "")):
        folder = tmp_path / kind
        script = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        put(folder, **{f"{kind}__py": script, "setup__py": script, "__init____py": script, f"a__{kind}": content})
        try:
            corpus(make_config(data={"source": str(folder)}))
        except ConfigError:
            assert kind != "jsonl"
    assert not (tmp_path / "ran").exists()


def test_links_to_nothing_are_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path, a__txt=sentences(60))
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    for where in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(ConfigError, match=r"b\.txt cannot be read: it is a link to .*gone, which does not exist"):
            corpus(make_config(data={"source": str(where)}))


def test_a_pattern_reads_a_file_once(make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path / "a", a__txt=sentences(60))
    for name in ("loop", "again"):  # two of them make a path for every number
        (tmp_path / "a" / name).symlink_to(tmp_path)
    assert decoded(corpus(make_config(data={"source": str(tmp_path / "**" / "*.txt")}))).count(END) == 1


def test_patterns_match_as_those_of_glob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_file_that_changes_while_it_is_read(
    kind: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data" / f"a.{kind}"
    put(path.parent, a__txt=sentences(60), a__jsonl=rows(LINES))
    table = datasets.Dataset.from_dict({"text": LINES})
    table.to_parquet(path.with_suffix(".parquet"))
    table.save_to_disk(str(path.with_suffix(".saved")))
    opened = data.open_source

    def changed(*arguments: Any) -> source.Source:
        opened_source = opened(*arguments)
        file = next(path.glob("*.arrow")) if kind == "saved" else path
        content = file.read_bytes()
        if kind == "parquet":
            datasets.Dataset.from_dict({"text": LINES[::-1]}).to_parquet(path)
        else:
            file.write_bytes(content.replace(b"a", b"e", 1) if kind != "saved" else content.replace(b" the", b" teh"))
        return opened_source

    monkeypatch.setattr(data, "open_source", changed)
    config = make_config(data={"source": str(path), "cache": str(tmp_path / "cache")})
    with pytest.raises(ConfigError, match="changed while it was read"):
        corpus(config)
    assert list((tmp_path / "cache").iterdir()) == []


def test_any_damage_to_an_entry_is_found(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(data={"cache": str(tmp_path)})
    expected = corpus(config)._ids.tobytes()
    (entry,) = tmp_path.iterdir()
    for path in sorted(entry.iterdir()):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
        seen = Recorder()
        assert corpus(config, seen)._ids.tobytes() == expected
        assert len(seen.notes) == 1 and "is damaged" in seen.notes[0]
    assert list(tmp_path.iterdir()) == [entry]


def rebuild(config: TrainConfig, start: Any, results: Any) -> None:
    start.wait()
    seen = Recorder()
    try:
        results.put((corpus(config, seen)._ids.tobytes(), seen.notes))
    except BaseException as error:
        results.put((repr(error), []))


@pytest.mark.slow
def test_processes_that_rebuild_one_entry(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(data={"cache": str(tmp_path)})
    expected = corpus(config)._ids.tobytes()
    (entry,) = tmp_path.iterdir()
    (entry / "ids.bin").write_bytes(b"x" * len(expected))
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(2), context.Queue()
    processes = [context.Process(target=rebuild, args=(config, start, results)) for _ in range(2)]
    for process in processes:
        process.start()
    got = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert [ids for ids, _ in got] == [expected] * 2
    assert sum(len(notes) for _, notes in got) == 1  # one built it, the other waited
    assert list(tmp_path.iterdir()) == [entry]


def test_rows_that_are_too_long(make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "ROW_LIMIT", 3000)
    lines = ["short", "long " * 1000]
    put(tmp_path, a__jsonl=rows(lines))
    datasets.Dataset.from_dict({"text": lines}).to_parquet(tmp_path / "a.parquet")
    save(tmp_path / "saved", lines)
    for name, where in (("a.jsonl", "line 2"), ("a.parquet", "row 1"), ("saved", "row 1")):
        with pytest.raises(ConfigError, match=rf"{where} .*is longer than .*\.txt file"):
            corpus(make_config(data={"source": str(tmp_path / name)}))


def test_the_sample_is_that_of_whole_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [("x" * (i * 37 % 90)) + str(i) if i % 3 else "" for i in range(200)]

    def read() -> documents.Stream:
        for text in texts:
            yield from (text[:20], text[20:]) if text else ()
            yield None

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
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for size in (12, 48):
        text = (sentences(2000) * (1 + (size << 20) // len(sentences(2000))))[: size << 20]
        (tmp_path / "a.txt").write_text(text.replace("\n", " "))
        command = [sys.executable, "-c", PEAK, str(tmp_path / "a.txt")]
        peaks.append(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    assert peaks[1] < peaks[0] + 60, peaks
    assert peaks[1] < 1000


def card(data_files: str) -> str:
    return f"---\nconfigs:\n- config_name: default\n  data_files: '{data_files}'\n---\n"


@pytest.mark.parametrize("name", [".h/x.jsonl", "__p/x.jsonl", ".x.jsonl"])
def test_what_a_card_names_is_hashed_even_if_hidden(name: str, make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(data={"source": put(tmp_path / "data", README__md=card(name))})
    path = tmp_path / "data" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(rows(LINES))
    first = corpus(config).fingerprint
    path.write_text(rows(LINES[::-1]))
    changed = corpus(config)
    assert changed.fingerprint != first
    assert decoded(changed) == "".join(line + END for line in LINES[::-1])


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("name", ["../x.jsonl", "ABSOLUTE", "https://localhost/x.jsonl", "zip://x.jsonl::../x.zip"])
def test_a_card_names_nothing_outside_its_folder(file: str, name: str, make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path, x__jsonl=rows(LINES))
    content = card(name.replace("ABSOLUTE", str(tmp_path / "x.jsonl")))
    put(tmp_path / "data", a__csv="text\n" + "a b c d\n" * 50)
    (tmp_path / "data" / file).write_text(content if file == "README.md" else content.replace("---\n", ""))
    with pytest.raises(ConfigError, match=r"its card names .*(not in the folder|must be in it)"):
        corpus(make_config(data={"source": str(tmp_path / "data")}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("README.md", "---\nconfigs: [\n: -\n---\n", "while parsing"),
        ("README.md", "---\nconfigs: [3]\n---\n", "cannot be read"),
        ("README.md", card("a.md"), r"names a\.md: files must end in"),
        ("state.json", '{"_data_files": ["x"]}', "save_to_disk"),
        ("state.json", '{"_data_files": 3}', "save_to_disk"),
        ("state.json", '{"_data_files": []}', "is empty"),
        ("state.json", '{"_data_files": [{"filename": "a\\u0000"}]}', "save_to_disk"),
        ("state.json", '{"splits": []}', "save_to_disk"),
        ("state.json", "[" * 100_000, "save_to_disk"),
        ("dataset_dict.json", '{"_data_files": []}', "save_to_disk"),
        ("dataset_dict.json", '{"splits": 3}', "save_to_disk"),
        ("dataset_dict.json", '{"splits": "train"}', "save_to_disk"),
        ("dataset_dict.json", '{"splits": ["../saved"]}', "the split '../saved' is no folder in it"),
        ("dataset_dict.json", '{"splits": [".."]}', "the split '..' is no folder in it"),
    ],
)
def test_manifests_and_cards_of_another_content(
    name: str, content: str, message: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    save(tmp_path / "saved", LINES)
    put(tmp_path / "data", a__md="x")
    (tmp_path / "data" / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        split = "../saved" if "saved" in content else "train"
        corpus(make_config(data={"source": str(tmp_path / "data"), "split": split}))


def test_two_columns_of_one_name(make_config: MakeConfig, tmp_path: Path) -> None:
    table = pyarrow.table([pyarrow.array(LINES)] * 2, names=["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match='has 2 columns "text"'):
        corpus(make_config(data={"source": str(tmp_path / "a.parquet")}))


@pytest.mark.parametrize(("name", "content"), [("A.TXT", sentences(60)), ("a.Jsonl", rows(LINES))])
def test_suffixes_in_any_case(name: str, content: str, make_config: MakeConfig, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    loaded = [corpus(make_config(data={"source": str(where)})) for where in (tmp_path, tmp_path / name)]
    (tmp_path / name).rename(tmp_path / name.lower())
    loaded.append(corpus(make_config(data={"source": str(tmp_path)})))
    assert len({each.fingerprint for each in loaded}) == 1


def test_a_suffix_that_would_be_left_out(make_config: MakeConfig, tmp_path: Path) -> None:
    put(tmp_path, A__CSV="text\na\n", b__csv="text\nb\n")
    with pytest.raises(ConfigError, match=r"A\.CSV would be left out: rename it to end in \.csv"):
        corpus(make_config(data={"source": str(tmp_path)}))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_is_named(make_config: MakeConfig, tmp_path: Path, encoding: str) -> None:
    source = put(tmp_path / "data", a__txt=("\ufeff" + sentences(3)).encode(encoding))
    with pytest.raises(ConfigError, match=r"a\.txt is UTF-16 text: convert it to UTF-8"):
        corpus(make_config(data={"source": source + "/a.txt"}))


def test_compressed_text_is_read(make_config: MakeConfig, tmp_path: Path) -> None:
    lines = sentences(60).splitlines()
    plain = put(tmp_path / "plain", a__jsonl=rows(lines))
    expected = decoded(corpus(make_config(data={"source": plain})))
    packed = tmp_path / "packed"
    put(packed, a__jsonl__gz=gzip.compress(rows(lines[:30]).encode()) + gzip.compress(rows(lines[30:]).encode()))
    assert decoded(corpus(make_config(data={"source": str(packed)}))) == expected
    for name, compression in (("a.txt.zst", "zstd"), ("a.txt.gz", "gzip")):
        content = pyarrow.Codec(compression).compress(sentences(60).encode(), asbytes=True)
        (tmp_path / name).write_bytes(content)
        config = make_config(data={"source": str(tmp_path / name)})
        assert decoded(corpus(config)) == sentences(60) + END
        (tmp_path / name).write_bytes(content[:100])
        with pytest.raises(ConfigError, match=f"{name} cannot be read"):
            corpus(config)


def test_compressed_files_are_not_streamed(make_config: MakeConfig, tmp_path: Path) -> None:
    train_tokenizer([sentences(60)], 300).save(tmp_path / "tokenizer")
    source = put(tmp_path / "data", a__jsonl__gz=gzip.compress(rows(LINES).encode()))
    data = {"source": source, "streaming": True, "tokenizer": str(tmp_path / "tokenizer")}
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz is compressed: decompress it"):
        corpus(make_config(data=data))
