"""Exit codes of the command: a verdict's come from a verdict alone, whatever becomes of the output."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import NoneType
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


CLOSED, ABSENT, FULL = "a closed pipe", "no stdout", "a full disk"
DRIVER = """
import json, os, sys
import octavo.inspect
from octavo import cli

ends = []
for where, words in json.loads(sys.argv[1]):
    errors, messages = os.pipe()
    if not (child := os.fork()):
        os.dup2(messages, 2)
        if where == "no stdout":
            sys.stdout = None
        elif where == "a full disk":
            os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        else:
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, 1)
            if where != "a closed pipe":
                os.dup2(write, 2)
        sys.argv = ["octavo", *words]
        cli.main()  # and out, as the command does
    os.close(messages)
    with os.fdopen(errors) as file:
        ends.append([file.read(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])])
print(json.dumps(ends))
"""


def ends(cases):
    """Exit codes and stderr of the command with a stdout that takes nothing; of all cases from one start of Python."""
    command = [sys.executable, "-c", DRIVER, json.dumps(cases)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    return [(code, message) for message, code in json.loads(done.stdout)]


@pytest.mark.slow
def test_what_becomes_of_output_nobody_reads(losses):
    """A verdict keeps its code; all else is 141, and nothing is a traceback."""
    verdicts = [("pass", []), ("worse", []), ("worse", ["--json"]), ("inconclusive", ["--json"])]
    cases = [(CLOSED, ["compare", "--losses", losses[name], *form]) for name, form in verdicts]
    cases += [(CLOSED, ["compare", "--help"]), (CLOSED, ["--version"])]
    closed, absent = ("both closed", ABSENT)
    cases += [(closed, ["compare", "--losses", losses["pass"]]), (absent, ["compare", "--losses", losses["worse"]])]
    cases += [(closed, ["compare", "--losses", "none.json"])]
    expected = [CODES[name] for name, _ in verdicts] + [141, 141, 0, 1, 141]
    for case, code, end in zip(cases, expected, ends(cases), strict=True):
        assert end == (code, ""), case


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has it")
@pytest.mark.slow
def test_an_output_that_cannot_be_written_is_a_mistake(losses):
    cases = [(FULL, ["compare", "--losses", losses["worse"], "--json"]), (FULL, ["--version"])]
    for code, message in ends(cases):
        assert code == 2 and message.count("No space left") == 1 and "Exception ignored" not in message


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


START = """
import json, os, sys
import octavo.__main__, octavo.cli

HEAVY = {"torch", "numpy", "triton", "transformers", "octavo.train", "pydantic", "rich"}
for words, variables in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1)
        os.environ |= variables
        sys.argv = ["octavo", *words]
        try:
            octavo.__main__.main()
        except SystemExit as end:
            print("\\n", json.dumps([end.code, sorted(HEAVY & set(sys.modules))]), flush=True)
        os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as output:
        print(json.dumps(output.read()))
"""


def starts(cases):
    """Return the output, exit code and heavy modules of the command for each case, its words and variables."""
    command = [sys.executable, "-c", START, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    commands = []
    for line in done.stdout.splitlines():
        output, _, end = json.loads(line).rstrip().rpartition("\n")
        commands.append((output.rstrip(), *json.loads(end)))
    return commands


@pytest.mark.thorough
def test_every_command_shows_its_help_without_torch():
    commands = [info.name or info.callback.__name__ for info in app.registered_commands]
    cases = [(["--help"], {}), *(([name, "--help"], {}) for name in commands)]
    assert len(commands) >= 8
    for (words, _), (output, code, heavy) in zip(cases, starts(cases), strict=True):
        assert (code, heavy) == (0, []), words
        assert "Usage: octavo" in output
        if words == ["--help"]:
            assert all(text in output for text in ("Train PyTorch models in FP8", "train ", "doctor ", "Examples"))
        else:
            assert output.count(f"octavo {words[0]}") >= 3, words  # usage, two examples


def test_the_version_needs_no_package():
    code = (
        "import sys; from octavo.__main__ import main; sys.argv[1:] = ['--version']; main();"
        "print({'typer', 'rich', 'pydantic', 'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"octavo {octavo.__version__}\nset()\n", done.stderr


def line(text, shell="bash"):
    """The case of a line of which a shell completes the last word."""
    words = text.split(" ")
    variables = {"COMP_WORDS": text, "COMP_CWORD": str(len(words) - 1)}
    if shell != "bash":
        variables = {"_TYPER_COMPLETE_ARGS": text, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return [], variables | {"_OCTAVO_COMPLETE": f"complete_{shell}"}


def test_shells_complete_commands_options_and_settings():
    settings = "octavo plan c.toml run.steps=3 inspect.limits.s"
    expected = [
        ("octavo ca", "bash", ["calibrate"]),
        ("octavo train c.toml --re", "bash", ["--resume"]),
        ("octavo init --model qw", "bash", ["qwen3-8b", "qwen3-30b-a3b"]),
        ("octavo train c.toml optim.w", "bash", ["optim.weight_decay=", "optim.warmup="]),
        *(
            (settings, shell, ["inspect.limits.sqnr=", "inspect.limits.saturation="])
            for shell in ("bash", "zsh", "fish")
        ),
    ]
    ends = starts([line(text, shell) for text, shell, _ in expected])
    for (text, shell, words), (output, code, heavy) in zip(expected, ends, strict=True):
        assert (code, heavy) == (0, []), text
        assert all(word in output for word in words), (text, shell, output)
        assert output.split() == words or shell != "bash"


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
