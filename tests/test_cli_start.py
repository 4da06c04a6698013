"""How fast the command starts, for help, the version and the completion of a line in a shell."""

import json
import os
import subprocess
import sys

import pytest

from octavo.cli import app
from octavo.cli.completion import complete_setting
from octavo.train import TrainConfig
from octavo.train.config.sections import Section

MOST_SECONDS = 0.45
"""CPU time of one start: 0.3 s on an idle core, and half as much again where another process shares the core."""
DRIVER = """
import json, os, sys, time
import octavo.__main__, octavo.cli

imported = time.process_time()
HEAVY = {"torch", "numpy", "triton", "transformers", "octavo.train"}
for words, variables in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        os.dup2(write, 1)
        os.environ |= variables
        sys.argv = ["octavo", *words]
        began = time.process_time()
        try:
            octavo.__main__.main()
        except SystemExit as end:
            seconds = imported + time.process_time() - began
            print("\\n", json.dumps([end.code, seconds, sorted(HEAVY & set(sys.modules))]), flush=True)
        os._exit(0)
    os.close(write)
    os.wait()
    with os.fdopen(read) as output:
        print(json.dumps(output.read()))
"""


@pytest.fixture
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which Python saves bytecode, as it does by default."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return variables | {"PYTHONPYCACHEPREFIX": str(tmp_path_factory.getbasetemp() / "bytecode")}


Start = tuple[str, int, float, list[str]]
"""Output, exit code, CPU seconds and heavy modules of one start of the command."""


def starts(cases: list[tuple[list[str], dict[str, str]]], environment: dict[str, str]) -> list[Start]:
    """Start the command for each case, its words and environment variables, at most twice: the first writes bytecode.

    The seconds are those of the faster one.
    """
    first = starts_once(cases, environment)
    if max(seconds for _, _, seconds, _ in first) < MOST_SECONDS:
        return first
    second = starts_once(cases, environment)
    return [(*b[:2], min(a[2], b[2]), b[3]) for a, b in zip(first, second, strict=True)]


def starts_once(cases: list[tuple[list[str], dict[str, str]]], environment: dict[str, str]) -> list[Start]:
    command = [sys.executable, "-c", DRIVER, json.dumps(cases)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    found = []
    for line in done.stdout.splitlines():
        output, _, end = json.loads(line).rstrip().rpartition("\n")
        found.append((output.rstrip(), *json.loads(end)))
    return found


@pytest.mark.thorough
def test_every_command_shows_its_help_without_delay(environment: dict[str, str]) -> None:
    commands = [info.name or info.callback.__name__ for info in app.registered_commands]
    cases = [(["--version"], {}), (["--help"], {}), *(([name, "--help"], {}) for name in commands)]
    assert len(commands) >= 8
    for (words, _), (output, code, seconds, heavy) in zip(cases, starts(cases, environment), strict=True):
        assert (code, heavy) == (0, []), words
        assert "Usage: octavo" in output or words == ["--version"]
        assert seconds < MOST_SECONDS, words


def line(text: str, shell: str = "bash") -> tuple[list[str], dict[str, str]]:
    """The case of a line of which a shell completes the last word."""
    words = text.split(" ")
    variables = {"COMP_WORDS": text, "COMP_CWORD": str(len(words) - 1)}
    if shell != "bash":
        variables = {"_TYPER_COMPLETE_ARGS": text, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return [], variables | {"_OCTAVO_COMPLETE": f"complete_{shell}"}


def test_shells_complete_commands_options_and_settings(environment: dict[str, str]) -> None:
    settings = "octavo plan c.toml run.steps=3 inspect.limits.s"
    expected = [
        ("octavo ca", "bash", ["calibrate"]),
        ("octavo train c.toml --re", "bash", ["--resume"]),
        ("octavo train c.toml optim.w", "bash", ["optim.weight_decay=", "optim.warmup="]),
        *(
            (settings, shell, ["inspect.limits.sqnr=", "inspect.limits.saturation="])
            for shell in ("bash", "zsh", "fish")
        ),
    ]
    ends = starts([line(text, shell) for text, shell, _ in expected], environment)
    for (text, shell, words), (output, code, seconds, heavy) in zip(expected, ends, strict=True):
        assert (code, heavy) == (0, []), text
        assert all(word in output for word in words), (text, shell, output)
        assert output.split() == words or shell != "bash"
        assert seconds < MOST_SECONDS, (text, shell)


def test_every_setting_is_completed() -> None:
    def names(section: type[Section], prefix: str) -> list[str]:
        found = []
        for key, field in section.model_fields.items():
            inner = field.annotation
            is_section = isinstance(inner, type) and issubclass(inner, Section)
            found += names(inner, f"{prefix}{key}.") if is_section else [f"{prefix}{key}="]
        return found

    assert complete_setting("") == names(TrainConfig, "")
