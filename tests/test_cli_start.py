"""What the command imports for help, the version and completion in a shell: little, so that it is quick."""

import json
import subprocess
import sys
from types import NoneType
from typing import get_args

import pytest

import octavo
from octavo.cli import app
from octavo.cli.options import complete_setting
from octavo.train import TrainConfig
from octavo.train.config.sections import Section

DRIVER = """
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
    command = [sys.executable, "-c", DRIVER, json.dumps(cases)]
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
        assert words == ["--help"] or output.count(f"octavo {words[0]}") >= 3, words  # usage, two examples


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
