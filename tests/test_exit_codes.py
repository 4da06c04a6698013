"""Exit codes of the command: a verdict's come from a verdict alone, whatever becomes of the output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import get_args

import pytest

import octavo
from octavo import cli
from octavo.cli import app, exit_codes
from octavo.cli.options import complete_setting
from octavo.train import TrainConfig
from octavo.train.config.sections import Section

TABLES = {"pass": [3.0005, 3.0195, 2.9803], "worse": [3.03, 3.051, 3.0103], "inconclusive": [3.02, 3.0, 2.9803]}
CODES = {"pass": 0, "worse": 1, "inconclusive": 3}


@pytest.fixture
def losses(tmp_path):
    paths = {}
    for name, arm in TABLES.items():
        paths[name] = str(tmp_path / f"{name}.json")
        Path(paths[name]).write_text(json.dumps({"baseline": [3.0001, 3.0202, 2.9807], "arms": {"a": arm}}))
    return paths


CLOSED, BOTH, ABSENT, FULL = "a closed pipe", "both closed", "no stdout", "a full disk"
DRIVER = """
import atexit, importlib, json, os, sys
from octavo import cli

HEAVY = {"torch", "numpy", "triton", "transformers", "octavo.train", "pydantic", "rich"}
cases, *preloaded = map(json.loads, sys.argv[1:])
for name in preloaded:
    importlib.import_module(name)
ends = []
for where, words, variables in cases:
    pipes = [os.pipe() for _ in range(3)]
    if not (child := os.fork()):
        output, errors, modules = (write for _, write in pipes)
        if where == "a full disk":
            output = os.open("/dev/full", os.O_WRONLY)
        if "closed" in where:
            read, output = os.pipe()
            os.close(read)
        os.dup2(output, 1)
        os.dup2(output if where == "both closed" else errors, 2)
        sys.stdout = None if where == "no stdout" else sys.stdout
        os.environ |= variables
        sys.argv = ["octavo", *words]
        atexit.register(lambda: os.write(modules, json.dumps(sorted(HEAVY & set(sys.modules))).encode()))
        cli.main()  # and out, as the command does
    texts = []
    for read, write in pipes:
        os.close(write)
        with os.fdopen(read) as file:
            texts.append(file.read())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    ends.append({"code": code, "output": texts[0], "errors": texts[1], "heavy": json.loads(texts[2])})
print(json.dumps(ends))
"""


def ends(cases, *preloaded):
    """How the command ends in each case: what becomes of stdout, words, variables. One start of Python for all."""
    command = [sys.executable, "-c", DRIVER, *map(json.dumps, (cases, *preloaded))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return [SimpleNamespace(**end) for end in json.loads(done.stdout)]


@pytest.mark.slow
def test_what_becomes_of_output_nobody_reads(losses):
    """A verdict keeps its code; all else is 141, and nothing is a traceback."""
    verdicts = [("pass", []), ("worse", []), ("worse", ["--json"]), ("inconclusive", ["--json"])]
    cases = [(CLOSED, ["compare", "--losses", losses[name], *form]) for name, form in verdicts]
    cases += [(CLOSED, ["compare", "--help"]), (CLOSED, ["--version"])]
    cases += [(BOTH, ["compare", "--losses", losses["pass"]]), (ABSENT, ["compare", "--losses", losses["worse"]])]
    cases += [(BOTH, ["compare", "--losses", "none.json"])]
    expected = [CODES[name] for name, _ in verdicts] + [141, 141, 0, 1, 141]
    cases = [(*case, {}) for case in cases]
    for case, code, end in zip(cases, expected, ends(cases, "octavo.inspect"), strict=True):
        assert (end.code, end.errors) == (code, ""), case


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_a_mistake(losses):
    cases = [(FULL, ["compare", "--losses", losses["worse"], "--json"], {}), (FULL, ["--version"], {})]
    for end in ends(cases, "octavo.inspect"):
        assert end.code == 2 and end.errors.count("No space left") == 1 and "Exception ignored" not in end.errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        *((error, 70) for error in (
            RuntimeError("broken"), MemoryError(), EOFError(), AttributeError("x"), RecursionError(),
            BrokenPipeError("of a worker"), SystemExit(0), SystemExit(1), SystemExit("bye"), GeneratorExit(),
        )),
        (KeyboardInterrupt(), 130), (ValueError("yours"), 2), (FileNotFoundError("yours"), 2),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("show", [[], ["--traceback"]])
def test_no_failure_is_taken_for_a_verdict(error, code, show, losses, monkeypatch, capsys):
    from octavo.experiments import loss_file

    def fail(*_):
        raise error

    monkeypatch.setattr(loss_file, "read_losses", fail)
    monkeypatch.setattr(sys, "argv", ["octavo", *show, "compare", "--losses", losses["pass"]])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code
    message = capsys.readouterr().err
    assert ("Traceback" in message) == (code == 70 or (code == 2 and bool(show)))
    assert type(error).__name__ in message or code in (2, 130)


def test_codes_of_commands_stay(losses, monkeypatch):
    for name, code in CODES.items():
        monkeypatch.setattr(sys, "argv", ["octavo", "compare", "--losses", losses[name]])
        assert exit_codes.run(app) == code
    monkeypatch.setattr(sys, "argv", ["octavo", "compare", "--nothing"])
    assert exit_codes.run(app) == 2


def test_a_foreign_exit_while_printing_a_verdict_is_no_verdict():
    with pytest.raises(SystemExit), exit_codes.verdict(0):
        raise SystemExit(7)


@pytest.mark.parametrize(("option", "expected"), [("show", "octavo_completion"), ("install", "completion installed")])
def test_completion_is_shown_and_installed(option, expected, tmp_path):
    """Typer looks for the shell among the parents, and exits by itself."""
    command = f"{sys.executable} -m octavo --{option}-completion; echo ends with $?"
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, env=environment)
    assert expected in done.stdout and "ends with 0" in done.stdout, done.stdout + done.stderr


# --- what the command imports for help, the version and completion in a shell: little, so that it is quick ---


@pytest.mark.thorough
def test_every_command_shows_its_help_without_torch():
    commands = [info.name or info.callback.__name__ for info in app.registered_commands]
    assert len(commands) >= 8
    whole, *others = ends([("", [*name, "--help"], {}) for name in ([], *zip(commands, strict=True))])
    assert all(text in whole.output for text in ("Train PyTorch models in FP8", "train ", "doctor ", "Examples"))
    for name, end in zip(["", *commands], [whole, *others], strict=True):
        assert (end.code, end.heavy, end.errors) == (0, [], "") and "Usage: octavo" in end.output, name
        assert not name or end.output.count(f"octavo {name}") >= 3, name  # usage, two examples


def test_the_version_needs_no_package():
    code = (
        "import sys; from octavo.__main__ import main; sys.argv[1:] = ['--version']; main();"
        "print({'typer', 'rich', 'pydantic', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"octavo {octavo.__version__}\nset()\n", done.stderr


KINDS = ("bash", "zsh", "fish")


def line(text, shell="bash"):
    """The case of a line of which a shell completes the last word."""
    words = text.split(" ")
    variables = {"COMP_WORDS": text, "COMP_CWORD": str(len(words) - 1)}
    if shell != "bash":
        variables = {"_TYPER_COMPLETE_ARGS": text, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return "", [], variables | {"_OCTAVO_COMPLETE": f"complete_{shell}"}


def test_shells_complete_commands_options_and_settings():
    settings = "octavo plan c.toml run.steps=3 inspect.limits.s"
    expected = [
        ("octavo ca", "bash", ["calibrate"]),
        ("octavo train c.toml --re", "bash", ["--resume"]),
        ("octavo init --model qw", "bash", ["qwen3-8b", "qwen3-30b-a3b"]),
        ("octavo train c.toml optim.w", "bash", ["optim.weight_decay=", "optim.warmup="]),
    ]
    expected += [(settings, kind, ["inspect.limits.sqnr=", "inspect.limits.saturation="]) for kind in KINDS]
    completed = ends([line(text, shell) for text, shell, _ in expected])
    for (text, shell, words), end in zip(expected, completed, strict=True):
        assert (end.code, end.heavy) == (0, []), text
        assert all(word in end.output for word in words), (text, shell, end.output)
        assert end.output.split() == words or shell != "bash"


def test_every_setting_is_completed():
    def names(section, prefix):
        settings = []
        for key, field in section.model_fields.items():
            parts = get_args(field.annotation)
            inner = parts[0] if NoneType in parts else field.annotation
            is_section = isinstance(inner, type) and issubclass(inner, Section)
            settings += names(inner, f"{prefix}{key}.") if is_section else [f"{prefix}{key}="]
        return settings

    assert complete_setting("") == names(TrainConfig, "")
