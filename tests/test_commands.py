"""Every command and every Python block of README, documents, configurations and `--help`, in one of these classes:

    run        run as written in a sandbox: a copy of the repository and what a reader would have, made small (slow)
    tutorial   run in order with its page (slow)
    parsed     taken by the parser that would run it; `NOT_RUN` has the reason why it is not run here

A command in none of them fails, and so does a code block without a language. `sh`, `bash` and `console` are commands
(of a tutorial, `sh` is run with the page). `pytest -m "" -s tests/test_commands.py -k class` prints the counts.
"""

import ast
import importlib
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from _pytest.mark.expression import Expression
from benchmarks import __main__ as benchmarks
from benchmarks import tutorials
from torch.distributed.run import get_args_parser
from typer.main import get_command

import octavo
from octavo.cli import app
from octavo.cli.options import EXAMPLES
from octavo.train.config.run_config import ConfigError, load_config
from octavo.train.data.tokenizer import train_tokenizer
from support.llamas import counting_rows, forget_settings, small_llama

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.S | re.M)
SHELLS, LANGUAGES = {"sh", "bash", "console"}, {"python", "text", "toml", "json"}
PROGRAMS = r"(?:octavo|torchrun|python|pytest|make|pip|sbatch|tensorboard|ls) (?!…|\[)"
PLACES = {"RUN": "runs/demo", "N": "1", "OUT": "exported", "CHECKPOINT": "runs/demo/checkpoints/step-000200"} | (
    dict.fromkeys(("CONFIG", "CONFIG.toml", "config.toml"), "configs/demo.toml")
)
"""What documents leave open, in the place of which something is given here."""
FILES = tempfile.TemporaryDirectory()
for page in PAGES.values():
    for name, content in tutorials.files_of(page).items():
        PLACES[name] = str(Path(FILES.name, name))
        Path(FILES.name, name).write_text(content, encoding="utf-8")
MADE = ("runs/", "data/", "corpus/", "notes/", "my-gpu.toml", "h100.json", "exported")
"""Beginnings of names of files that a reader has or makes."""
SMALL = (
    "model.config.hidden_size=32", "model.config.intermediate_size=64", "model.config.num_hidden_layers=2",
    "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1", "data.vocab_size=512",
    "data.sequence_length=64", "optim.batch=4", "run.steps=6",
)  # fmt: skip
TRAINING = ("train", "demo", "compare")
QUICK = {"compiled": ("--only", "bf16"), "host": ("--only", "bf16", "--repetitions", "1")} | dict.fromkeys(
    ("kernels", "layer", "linear", "published", "run", "smoke", "step"), ("--quick", "--minutes", "0.1")
)
"""Options that make a benchmark small."""
NOT_RUN = {
    r"octavo train configs/(llama|qwen|command|mixtral|deepseek|lora|nvila|dit-xl|vit-l)[\w.-]+$": "needs GPUs",
    r"(plan|train) configs/(?!llama3-8b)[\w.-]+ (--gpu h100 --gpus \d+|--shrink)$": "held by train/test_config.py",
    r"torchrun .* parallel\.(tp|pp|cp|ep)=": "held by train/test_hybrid.py",
    r"h100\.json|my-gpu\.toml": "reads what a reader has measured or described; held by tests/planner",
    r"--nnodes|^sbatch": "needs four machines",
    r"--max-restarts( N)?$|--nproc-per-node 8$": "an option in a sentence, not a command",
    r"^octavo (calibrate|compare|export|init|inspect|plan|train|watch|plan --memory|compare --shrink)$": "a name",
    r"^(python -m compileall|tensorboard --logdir)$": "a name",
    r"^octavo calibrate": "needs a GPU; without one it ends with an error, which tests/experiments/test_cli.py holds",
    r"^pytest": "the suite runs these tests",
    r"^make": "sets up environments, for minutes",
    r"^pip": "needs a registry",
    r"^ls ": "beside commands of its tutorial",
    r"--install-completion$": "changes the shell of whoever runs it",
    r"^python -m benchmarks (configs|tutorials|linear --shapes|sass|gpu --total|\w+ --write)": "takes minutes here too",
    r"^python -m timeit": "takes minutes",
}
RUN_PAGES = {
    "README.md": "given alternatives", "docs/autopilot.md": "given", "docs/compare.md": "", "docs/extending.md": "",
    "docs/filters.md": "given alternatives", "docs/howto.md": "", "docs/index.md": "given", "docs/inspect.md": "given",
    "docs/migration.md": "", "docs/numerics.md": "", "docs/planner.md": "given large", "docs/quickstart.md": "",
    "docs/tutorials/ten-minutes.md": "", "docs/integrations.md": "given tools",
}  # fmt: skip
"""Pages whose Python runs, with `model` and the like given; each of alternatives has a model of its own."""
NOT_RUN_PYTHON = {
    "docs/parallel.md": "takes several ranks; held by tests/parallel",
    "docs/tutorials/the-layer-that-breaks.md": "a file of the tutorial, which runs it",
    "octavo.integrations.torchtitan": "is not installed everywhere; held by tests/integrations",
}
"""Pages, and what is in blocks."""
PYTHON = re.compile(r"^```python\n(.*?)^```$(?:\n\nIt prints:\n\n```text\n(.*?)^```$)?", flags=re.S | re.M)
ALLOWED_CODES = {"compare": (0, 1, 3, 4), "watch": (0, 130)}
"""Verdicts are exit codes, and of a few steps of a small model any may come; a page is watched until an interrupt."""
TEXT = "A leaf folds eight times before a printer cuts it into pages and binds them in order {}.\n"


def commands_of(page, text):
    """Commands of a page with what shows them: a language of a code block, or "inline"."""
    text = re.sub(r" \\\n\s*", " ", text)
    for _, language, block in BLOCK.findall(text):
        lines = [line.strip() for line in block.splitlines()]
        if language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        yield from ((language, line) for line in lines if language in SHELLS and line and line[0] != "#")
    for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text)):
        if re.match(PROGRAMS, " ".join(code.split())):
            yield "inline", " ".join(code.split())


def quoted():
    """All commands, without comments and pipes, by the pages that have them."""
    shown = [(page, *command) for page, text in PAGES.items() for command in commands_of(page, text)]
    for path in sorted((ROOT / "configs").glob("*.toml")):
        lines = [line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("#")]
        shown += [(path.name, "inline", line) for line in lines if re.match(PROGRAMS, line)]
    for name, text in EXAMPLES.items():
        lines = re.sub(r"\[/?[a-z]+\]", "", re.sub(r" \\\n\s*", " ", text)).splitlines()
        shown += [(f"{name} --help", "inline", line.strip()) for line in lines if re.match(rf"\s*{PROGRAMS}", line)]
    return [
        (page, language, re.sub(r"\s+(#|\| ).*", "", command).removesuffix(" …")) for page, language, command in shown
    ]


QUOTED = quoted()
COMMANDS = sorted({command for _, _, command in QUOTED})
ALONE = {c for page, language, c in QUOTED if language != "sh" or not page.startswith("docs/tutorials/")}
"""Commands that are not only in a tutorial's blocks, which build on each other."""


def class_of(command):
    """The class of a command; None for a program that nothing here knows."""
    if any(re.search(pattern, command) for pattern in NOT_RUN):
        return "parsed"
    return ("run" if command in ALONE else "tutorial") if re.match(PROGRAMS, command) else None


def class_of_block(page, code):
    held = any(part == page or part in code for part in NOT_RUN_PYTHON)
    return "parsed" if held else "run" if page in RUN_PAGES else None


CLASSES = {command: class_of(command) for command in COMMANDS}


def words_of(command):
    words = shlex.split(re.sub(r"\[[^]]*…?\]", "", command) if "[section" in command else command)
    left_out = ("…", ">", "operands.json", "plan.json", "doctor.json")
    return [PLACES.get(word, word) for word in words if word not in left_out]


def test_every_command_and_block_has_a_class():
    for page, text in PAGES.items():
        for _, language, block in BLOCK.findall(text):
            assert language in SHELLS | LANGUAGES, f"{page}: a block in {language or 'no language'}:\n{block}"
            assert language != "text" or not re.search(rf"^\$? *{PROGRAMS}", block, flags=re.M), f"{page}:\n{block}"
        assert not re.search(rf"^ {{4}}{PROGRAMS}", BLOCK.sub("", text), flags=re.M), page
    assert [command for command, held in CLASSES.items() if held is None] == []
    stale = [pattern for pattern in NOT_RUN if not any(re.search(pattern, command) for command in COMMANDS)]
    assert stale == []
    counts = Counter(CLASSES.values())
    fenced = Counter(CLASSES[command] for command in {c for _, language, c in QUOTED if language in SHELLS})
    blocks = Counter(class_of_block(page, code) for page, text in PAGES.items() for code, _ in PYTHON.findall(text))
    assert None not in blocks, "a page with Python is in neither RUN_PAGES nor NOT_RUN_PYTHON"
    print(f"\n{len(COMMANDS)} commands: {dict(counts)}; in code blocks: {dict(fenced)}; Python blocks: {dict(blocks)}")
    assert counts["run"] >= 120 and fenced["run"] + fenced["tutorial"] >= 80 and blocks["run"] >= 25


@pytest.mark.parametrize("command", COMMANDS)
def test_its_parser_takes_it(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = words_of(command)
    PARSERS[words[0]](words[1:])


def check_torchrun(words):
    if "-m" in words:  # else torchrun's own options alone
        get_args_parser().parse_args(["run" if word == "RUN" else word for word in words])
        start = words.index("-m") + 1
        PARSERS[words[start]](words[start + 1 :])


def check_octavo(words):
    group = get_command(app)
    if words[0].startswith("-"):
        group.make_context("octavo", words, resilient_parsing=True)
        return
    sub = group.commands.get(words[0])
    assert sub is not None, f"octavo has no command {words[0]!r}"
    if words[1:] in ([], ["--memory"]):
        return  # its name
    parameters = sub.make_context(words[0], words[1:]).params
    for name in ("config", "gpu", "calibration", "run", "checkpoint"):
        value = str(parameters.get(name) or "")
        if "/" in value or "." in value:
            assert value.startswith(MADE) or Path(value).exists(), value
    path = parameters.get("config") or (ROOT / "configs/demo.toml" if words[0] == "demo" else None)
    settings = list(parameters.get("overrides") or [])
    arms = [arm.partition(":")[2].split() for arm in parameters.get("arm") or ()] or [[]]
    for arm in arms if path is not None else ():
        load_config(path, [*settings, *arm])


def split_pytest(words):
    """The files that a command names, its `-k` and its `-m`."""
    parser = ArgumentParser()
    for option in ("-k", "-m", "-n"):
        parser.add_argument(option)
    parser.add_argument("names", nargs="*")
    options, _ = parser.parse_known_args(words)
    return options.names, options.k or "test", options.m


def check_pytest(words):
    names, keywords, _ = split_pytest(words)
    assert all((ROOT / name).exists() for name in names), names
    files = [file for name in names for file in ([ROOT / name] if ".py" in name else (ROOT / name).rglob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    for word in set(re.findall(r"\w+", keywords)) - {"or", "and", "not"}:
        assert re.search(rf'def test_\w*{word}|def {word}|"{word}', text), f"no test is like {word!r}"


class ParsedError(Exception):
    """Ends a program once it has parsed its arguments."""


def check_python(words):
    if words[0] in ("-m", "-c") and words[1] != "benchmarks":
        return
    if words[0] != "-m":
        assert (ROOT / words[0]).exists() or Path(words[0]).exists(), words[0]
        return
    name, *rest = words[2:]
    if name == "--help":
        return
    assert name in benchmarks.NAMES, name

    def parse(parser, arguments=None, namespace=None):
        parse_args(parser, arguments, namespace)
        raise ParsedError

    parse_args = ArgumentParser.parse_args
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ArgumentParser, "parse_args", parse)
        with pytest.raises(ParsedError):
            importlib.import_module(f"benchmarks.{name}").main(rest)


def check_make(words):
    subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True, text=True)


def check_pip(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"[.o]\[([\w,-]+)\]", " ".join(words)):
        assert set(extra.split(",")) <= set(extras), extra


PARSERS = {
    "octavo": check_octavo, "torchrun": check_torchrun, "pytest": check_pytest, "python": check_python,
    "make": check_make, "pip": check_pip, "sbatch": lambda words: check_python(words[:1]),
    "ls": lambda words: None, "tensorboard": lambda words: None,
}  # fmt: skip


MISTAKES = {
    "octavo trian configs/demo.toml": AssertionError, "octavo plan configs/demo.toml --gpux h100": Exception,
    "octavo train configs/nothing.toml": AssertionError, "make nothing": subprocess.CalledProcessError,
    "octavo train configs/demo.toml optim.learning=1": ConfigError, "pip install '.[nothing]'": AssertionError,
    "torchrun --nothing -m octavo train configs/demo.toml": SystemExit, "pytest tests/nothing.py": AssertionError,
    "pytest tests/test_docs.py -k nothing_like_it": AssertionError, "sbatch examples/nothing.sh": AssertionError,
    "python -m benchmarks linear --nothing": SystemExit, "cargo build": KeyError,
}  # fmt: skip


@pytest.mark.parametrize(("command", "error"), MISTAKES.items())
def test_what_is_not_there_is_found(command, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = words_of(command)
    with pytest.raises(error):
        PARSERS[words[0]](words[1:])


@cache
def collected(marker):
    """Identifiers of tests that `pytest` collects with `-m marker`, lower case."""
    # The program, not `python -m pytest`, which puts the working directory on the path by itself.
    command = [str(Path(sys.executable).with_name("pytest")), "-n", "0", "--collect-only", "tests"]
    options = [] if marker is None else ["-m", marker]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.lower() for line in done.stdout.splitlines() if "::" in line]


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if command.startswith("pytest ")])
def test_pytest_selects_something(command):
    names, keywords, marker = split_pytest(words_of(command)[1:])
    tests = [test for test in collected(marker) if test.startswith(tuple(names))]
    expression = Expression.compile(keywords)
    assert any(expression.evaluate(lambda word, test=test: word.lower() in test) for test in tests), command


def ended(folder, *words):
    """Run a command in the sandbox; `octavo watch` until it serves its page, and is interrupted."""
    programs = {"octavo": ("-m", "octavo"), "torchrun": ("-m", "torch.distributed.run"), "python": ()}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": f"{folder / 'src'}:{folder}"}
    process = subprocess.Popen(
        [sys.executable, *programs[words[0]], *words[1:]], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        shown = ""
        if words[1] == "watch":
            while (line := process.stdout.readline()) and not (address := re.search(r"http://[\w.:/]+", line)):
                shown += line
            if line:
                urlopen(address[0], timeout=60).close()
            process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, shown + output, errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The sandbox: a copy of the repository, texts, a tokenizer, losses, and runs of 200 steps."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("src", "configs", "benchmarks", "docs", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name in ("corpus", "notes", "train", "validation", "web", "chats"):
        (folder / name).mkdir()
        texts = [TEXT.format(f"{name} {number}") for number in range(4000)]
        talks = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[:20]}] for text in texts]
        field, rows = ("conversation", talks[:800]) if name == "chats" else ("text", texts[:800])
        lines = texts if name in ("corpus", "notes") else [json.dumps({field: row}) + "\n" for row in rows]
        for number in range(2):
            path = folder / name / f"{number}{'.txt' if lines is texts else '.jsonl'}"
            path.write_text("".join(lines[number::2]))
    train_tokenizer([TEXT], 300).save(folder / "tokenizer")
    losses = {"baseline": [3.00, 3.02, 2.99], "arms": {"fp8": [3.01, 3.02, 3.0]}}
    (folder / "losses.json").write_text(json.dumps(losses))
    code, *output = ended(folder, "octavo", "train", "configs/demo.toml", *SMALL, "precision.level=fp8",
                          "inspect.every=50", "optim.ema=0.9", "run.steps=200", "run.save_every=100", "--out",
                          "runs/looked")  # fmt: skip
    assert code == 0, output
    (folder / "runs").rename(folder / "made")
    return folder


def made_small(command):
    """The words of a command; training by settings behind it, and eight ranks by two."""
    words = words_of(command)
    if "--gpus" in words:
        words = [word.replace("configs/demo.toml", "configs/llama3-70b.toml") for word in words]
    counts = {"--nproc-per-node": "2", "--seconds": "20", "--minutes": "0.1"}
    words = [counts.get(before, word) for before, word in zip(["", *words], words, strict=False)]
    if words[1:3] == ["-m", "benchmarks"]:
        words += QUICK.get(words[3], ())
    if words[0] == "python":
        return words
    start = words.index("octavo") + 1
    if "--shrink" in words:
        words += ["run.steps=6"]
    elif start < len(words) and words[start] in TRAINING and "--losses" not in words:
        small_already = any(re.match(r"configs/(vit|vlm|dit)-digits", word) for word in words)
        words += SMALL[-1:] if small_already else SMALL
    return words


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if CLASSES[command] == "run"])
def test_it_runs_as_written(command, folder):
    words = made_small(command)
    for name in ("runs", "exported"):
        shutil.rmtree(folder / name, ignore_errors=True)
    if not set(words) & set(TRAINING):
        for name in ("looked", "demo", "inspected", "fp8"):
            shutil.copytree(folder / "made" / "looked", folder / "runs" / name)
    if "--resume" in words:
        assert ended(folder, *(word for word in words if word != "--resume"))[0] == 0
    code, output, errors = ended(folder, *words)
    assert code in ALLOWED_CODES.get(words[1], (0,)), output[-2000:] + errors[-3000:]
    assert "Traceback" not in errors
    if "--json" in words:
        json.loads(output)


TUTORIALS = sorted(tutorials.PAGES.glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_written(page, tmp_path):
    pytest.importorskip("peft")
    folder = tmp_path / "folder"
    tutorials.run(page, folder)  # raises if a command fails
    for picture in tutorials.PICTURES:
        assert picture.page != page.stem or (folder / picture.report).exists()


def test_every_picture_is_shown_by_the_page_that_makes_it():
    for picture in tutorials.PICTURES:
        text = (tutorials.PAGES / f"{picture.page}.md").read_text(encoding="utf-8")
        assert f"](../images/{picture.name}.png)" in text
        out = picture.report.removesuffix("/report.html")
        assert any(re.search(rf"--out {out}\b", command) for command in tutorials.commands_of(text)), picture
    pages = [page.read_text(encoding="utf-8") for page in TUTORIALS]
    shown = {name for page in pages for name in re.findall(r"images/([\w-]+)\.png", page)}
    assert shown == {picture.name for picture in tutorials.PICTURES}


def test_files_and_commands_of_a_tutorial(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\n# a.py\nprint(1)\n```\n\n```sh\npython a.py > out\n```\n\n```\nexit 1\n```\n")
    folder = tmp_path / "folder"
    tutorials.run(page, folder)
    assert (folder / "out").read_text() == "1\n" and (folder / "configs" / "demo.toml").exists()
    page.write_text("```sh\npython -c 'raise SystemExit(3)' | cat\n```\n")
    with pytest.raises(subprocess.CalledProcessError):
        tutorials.run(page, tmp_path / "other")


def given(kind):
    """What blocks expect that begin in the middle of a program."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336} if "large" in kind else {}
    with torch.device("meta" if sizes else "cpu"):
        model = small_llama(num_hidden_layers=4, **sizes)
    data = [{"input_ids": row, "labels": row} for row in counting_rows(4)]
    loader = torch.utils.data.DataLoader(data, 2)
    names = {
        "torch": torch, "octavo": octavo, "filters": octavo.nn.filters, "model": model, "data": data, "loader": loader,
        "batches": [*loader], "evaluate": lambda model: model(**next(iter(loader))),
        "optimizer": torch.optim.SGD(model.parameters(), 0.01),
    }  # fmt: skip
    if "tools" in kind:
        import lightning
        from transformers import TrainingArguments

        forget_settings()
        args = TrainingArguments("out", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True)
        names |= {"lightning": lightning, "args": args}
    return names


def matches(text, expected):
    """The same words, and numbers within 2 %: other CPUs round otherwise."""
    words, expected_words = text.split(), expected.split()
    assert len(words) == len(expected_words), text
    for word, expected_word in zip(words, expected_words, strict=True):
        numeric = re.fullmatch(r"[\d.]+", expected_word)
        assert float(word) == pytest.approx(float(expected_word), rel=0.02) if numeric else word == expected_word


@pytest.mark.thorough
@pytest.mark.parametrize("page", RUN_PAGES)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    """In order, with the names of the blocks before; a block of text right after one is what it prints."""
    monkeypatch.chdir(tmp_path)
    kind, names = RUN_PAGES[page], {}
    if "tools" in kind:
        pytest.importorskip("lightning")
    if "alternatives" in kind:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for code, output in PYTHON.findall(PAGES[page]):
            if "tools" in kind:
                forget_settings()  # of the frameworks of blocks before
            body = ast.parse(code).body if class_of_block(page, code) == "run" else []
            for part in [[statement] for statement in body] if "alternatives" in kind else [body]:
                if kind and (not names or re.search("convert|parallelize|plan", ast.unparse(part[:1]))):
                    names |= given(kind)
                exec(compile(ast.Module(part, []), page, "exec"), names)
            printed = capsys.readouterr().out
            if output:
                matches(printed, output)
    finally:
        if "alternatives" in kind:
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if PYTHON.search(text)])
def test_python_blocks_name_what_exists(page):
    """Names of octavo, and keywords of its functions, also in blocks that do not run here."""
    for node in [node for code, _ in PYTHON.findall(PAGES[page]) for node in ast.walk(ast.parse(code))]:
        if isinstance(node, ast.ImportFrom) and node.module in sys.modules:
            assert all(hasattr(sys.modules[node.module], alias.name) for alias in node.names), ast.unparse(node)
        if isinstance(node, ast.Attribute) and re.fullmatch(r"octavo[.\w]+", ast.unparse(node)):
            resolve(node)
        if isinstance(node, ast.Call) and re.fullmatch(r"octavo[.\w]+", ast.unparse(node.func)):
            inspect.signature(resolve(node.func)).bind_partial(**{word.arg: ... for word in node.keywords if word.arg})


def resolve(node):
    return octavo if isinstance(node, ast.Name) else getattr(resolve(node.value), node.attr)


SHOWN_PLAN = re.compile(r"```sh\n(octavo plan [^\n]*)\n```\n(?:(?!```).)*?```text\n(.*?)```", flags=re.S)


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if SHOWN_PLAN.search(text)])
def test_plans_that_pages_show_are_those_of_today(page):
    """Of each line that a page shows, the first word and the numbers stand in this order in a line of the output."""
    for command, shown in SHOWN_PLAN.findall(PAGES[page]):
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)], cwd=ROOT, env=os.environ | {"COLUMNS": "400"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        lines = [numbers_of(line) for line in done.stdout.splitlines()]
        missing = [line for line in shown.splitlines() if not any(in_order(numbers_of(line), words) for words in lines)]
        assert not missing, f"{command}: {missing}"


def numbers_of(line):
    words = line.split()
    return [*words[:1], *(word.strip("…,;()") for word in words[1:] if re.search(r"\d", word))]


def in_order(some, words):
    rest = iter(words)
    return all(word in rest for word in some)
