"""Every command that README, documents, configurations and `--help` quote: it is there, and takes what it is given.

Collected from blocks of code and from inline code. Each is parsed by what would run it, so that an option, a setting, a
file, a test or a target of make that is not there fails; the quick ones are run.
"""

import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from benchmarks import __main__ as benchmarks
from benchmarks.tutorials import files_of
from typer.main import get_command
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.examples import EXAMPLES
from octavo.train.config.run_config import ConfigError, load_config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = r"(?:octavo|python -m benchmarks|pytest|make|torchrun|tensorboard|python)"
PLACES = {"RUN": "runs/demo", "N": "1"} | dict.fromkeys(("CONFIG", "CONFIG.toml", "config.toml"), "configs/demo.toml")
"""What documents leave open, in the place of which something is given here."""
FOLDER = tempfile.TemporaryDirectory()
for page in DOCUMENTS:
    for name, content in files_of(page.read_text(encoding="utf-8")).items():
        PLACES[name] = str(Path(FOLDER.name, name))
        Path(FOLDER.name, name).write_text(content, encoding="utf-8")
MADE = ("runs/", "data/", "corpus/", "notes/", "my-gpu.toml", "h100.json", "exported")
"""Beginnings of names of files that a reader has or makes."""
SUBCOMMANDS = ("init", "train", "watch", "export", "demo", "compare", "inspect", "doctor", "plan", "calibrate")
QUICK = ("octavo --help", "python -m benchmarks --help", "octavo doctor")


def commands_in(text):
    """Commands in a document: lines of code blocks, continued ones joined, and inline code."""
    text = re.sub(r" \\\n\s*", " ", text)
    blocks = re.findall(r"```[a-z]*\n(.*?)```", text, flags=re.S) + re.findall(r"(?:^ {4}.+\n?)+", text, flags=re.M)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    inline = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    commands = [line for line in (*lines, *inline) if re.match(rf"{PROGRAMS} ", line)]
    return [line for line in commands if not re.match(r"(octavo|make) (?!-)[^a-z]", line)]


def quoted():
    commands = {(path.name, command) for path in DOCUMENTS for command in commands_in(path.read_text(encoding="utf-8"))}
    for path in sorted((ROOT / "configs").glob("*.toml")):
        lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
        commands |= {(path.name, line) for line in lines if re.match(rf"{PROGRAMS} ", line)}
    for name, text in EXAMPLES.items():
        lines = re.sub(r"\[/?[a-z]+\]", "", re.sub(r" \\\n\s*", " ", text)).splitlines()
        commands |= {(f"{name} --help", line.strip()) for line in lines if re.match(rf"\s*{PROGRAMS} ", line)}
    return sorted(commands)


QUOTED = quoted()


def words_of(command):
    command = command.partition(" | ")[0]
    words = shlex.split(re.sub(r"\[[^]]*…?\]", "", command) if "[section" in command else command, comments=True)
    return [
        PLACES.get(word, word) for word in words if word not in ("…", ">", "operands.json", "plan.json", "doctor.json")
    ]


def test_there_are_commands_of_every_kind():
    for start, least in (("octavo", 60), ("pytest", 40), ("python -m benchmarks", 12), ("make", 8), ("torchrun", 4)):
        assert sum(command.startswith(start) for _, command in QUOTED) >= least, start


@pytest.mark.parametrize("command", dict.fromkeys(c for _, c in QUOTED if re.match("octavo |torchrun ", c)))
def test_octavo_takes_its_arguments(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = words_of(command)
    if words[0] == "torchrun":
        if "-m" not in words:
            return  # torchrun's own options alone
        start = words.index("-m")
        assert words[start + 1] == "octavo"
        torchrun_takes(words[1:])
        words = words[start + 1 :]
    check_octavo(words[1:], bare=command in (f"octavo {name}" for name in SUBCOMMANDS))


def check_octavo(words, *, bare):
    group = get_command(app)
    if words[0].startswith("-"):
        group.make_context("octavo", words, resilient_parsing=True)
        return
    sub = group.commands.get(words[0])
    assert sub is not None, f"octavo has no command {words[0]!r}"
    if bare or words[1:] == ["--memory"]:
        return
    context = sub.make_context(words[0], words[1:])
    parameters = context.params
    for name in ("config", "gpu", "calibration", "run", "checkpoint"):
        value = str(parameters.get(name) or "")
        if "/" in value or "." in value:
            assert value.startswith(MADE) or Path(value).exists() or value == "CHECKPOINT", value
    path = parameters.get("config") or (ROOT / "configs/demo.toml" if words[0] == "demo" else None)
    settings = list(parameters.get("overrides") or [])
    arms = [arm.partition(":")[2].split() for arm in parameters.get("arm") or ()] or [[]]
    for arm in arms if path is not None else ():
        load_config(path, [*settings, *arm])


def torchrun_takes(words):
    from torch.distributed.run import get_args_parser

    words = [word if word != "RUN" else "run" for word in words]
    get_args_parser().parse_args(words)


@pytest.mark.parametrize("command", dict.fromkeys(c for _, c in QUOTED if c.startswith("pytest ")))
def test_pytest_finds_what_is_named(command):
    words = words_of(command)[1:]
    names, skipped = [], False
    for word in words:
        names += [word] if not word.startswith("-") and not skipped else []
        skipped = word in ("-k", "-m", "-n")
    files = []
    for name in names:
        path = ROOT / name
        assert path.exists(), name
        files += [path] if path.is_file() else sorted(path.rglob("test_*.py"))
    if "-k" in words:
        keywords = re.findall(r"\w+", words[words.index("-k") + 1].replace(" or ", " ").replace(" and ", " "))
        text = "\n".join(path.read_text(encoding="utf-8") for path in files)
        for word in keywords:
            assert re.search(rf'def test_\w*{word}|"{word}', text), f"no test is like {word!r}"


def collected(*words):
    """What the program pytest collects, which does not put the working directory on the path by itself."""
    program = Path(sys.executable).with_name("pytest")
    command = [str(program), "-n", "0", "--collect-only", "-q", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_pytest_itself_finds_the_benchmarks():
    assert "test_benchmarks_writing.py" in collected("tests/test_benchmarks_writing.py")


@pytest.mark.slow
@pytest.mark.parametrize("command", dict.fromkeys(c for _, c in QUOTED if c.startswith("pytest ")))
def test_pytest_selects_something(command):
    assert "::" in collected(*words_of(command)[1:])


@pytest.mark.parametrize("command", dict.fromkeys(c for _, c in QUOTED if c.startswith("python ")))
def test_python_finds_what_is_named(command):
    words = words_of(command)[1:]
    if words[:2] != ["-m", "benchmarks"]:
        assert (ROOT / words[0]).exists() or words[0] in ("-m", "-c"), command
        return
    names = re.sub(r"[{}]", "", words[2]).split(",") if len(words) > 2 else []
    for name in names:
        assert name in (*benchmarks.NAMES, "--help"), name
    if len(names) == 1 and len(words) > 3:
        import importlib

        main = importlib.import_module(f"benchmarks.{names[0]}").main
        text = StringIO()
        with pytest.raises(SystemExit) as ended, redirect_stdout(text), redirect_stderr(text):
            main([*words[3:], "--help"])
        assert ended.value.code == 0, text.getvalue()
        assert all(word in text.getvalue() for word in words[3:] if word.startswith("--"))


@pytest.mark.parametrize("command", dict.fromkeys(c for _, c in QUOTED if c.startswith("make ")))
def test_make_has_the_target(command):
    text = (ROOT / "Makefile").read_text()
    for word in words_of(command)[1:]:
        assert "=" in word or re.search(rf"^{re.escape(word)}:", text, flags=re.M), word


@pytest.mark.parametrize("command", QUICK)
def test_quick_ones_run(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = words_of(command)
    if words[0] == "octavo":
        result = CliRunner().invoke(app, words[1:])
        assert result.exit_code == 0, result.output
    else:
        with pytest.raises(SystemExit) as ended, redirect_stdout(StringIO()):
            benchmarks.main(words[3:])
        assert ended.value.code == 0


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("octavo trian configs/demo.toml", AssertionError),
        ("octavo plan configs/demo.toml --gpux h100", Exception),
        ("octavo train configs/nothing.toml", AssertionError),
        ("octavo train configs/demo.toml optim.learning=1", ConfigError),
    ],
)
def test_what_is_not_there_is_found(command, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(error):
        check_octavo(words_of(command)[1:], bare=False)
