"""The API reference lists every public name, and the examples in the docstrings run, some of them on two ranks."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import octavo
from processes import gloo  # noqa: F401

PAGES = Path(__file__).parent.parent / "docs" / "api"
SUBPACKAGES = ("comm", "inspect", "nn", "numerics", "optim", "parallel", "serving", "train")
ENTRY = re.compile(r"^::: (\S+)\n    options: {heading: (\S+), toc_label: (\S+)}$", re.M)
ENTRIES = [entry for page in sorted(PAGES.glob("*.md")) for entry in ENTRY.findall(page.read_text())]
OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
CONFIG = """
run = {name = "tiny", steps = 10, device = "cpu"}
data = {source = "corpus/*.txt", sequence_length = 16, vocab_size = 300, cache = "cache"}
optim = {lr = 1e-3, batch = 2}
[model]
type = "llama"
config = {hidden_size = 32, intermediate_size = 64, num_hidden_layers = 1, num_attention_heads = 2}
"""


def thing(path):
    """The function or class at a dotted path, without decorators."""
    package, _, name = path.rpartition(".")
    return inspect.unwrap(getattr(importlib.import_module(package), name))


def examples(path):
    return doctest.DocTestParser().get_examples(inspect.getdoc(thing(path)) or "")


def spans_ranks(path):
    return bool(re.search("on two ranks|[Uu]nder `?torchrun`?, on each rank", inspect.getdoc(thing(path)) or ""))


ALONE = [path for path, *_ in ENTRIES if examples(path) and not spans_ranks(path)]
SECTIONS = {"Args", "Attributes", "Examples", "Raises", "Returns"}
RANKED = [path for path, *_ in ENTRIES if examples(path) and spans_ranks(path)]


def run_examples(path):
    """Run the examples of a docstring; returns the failures as text."""
    text = []
    names = {"octavo": octavo, "torch": torch, "dist": dist, "Path": Path}
    test = doctest.DocTest(examples(path), names, path, None, None, None)
    doctest.DocTestRunner(optionflags=OPTIONS, verbose=False).run(test, out=text.append)
    return "".join(text)


def test_every_public_name_has_one_entry():
    listed = [thing(path) for path, *_ in ENTRIES]
    assert len(listed) == len(set(listed))
    for package in ("octavo", *(f"octavo.{name}" for name in SUBPACKAGES)):
        module = importlib.import_module(package)
        for name in module.__all__:
            value = inspect.unwrap(getattr(module, name))
            if inspect.isclass(value) or inspect.isfunction(value):
                assert value in listed, f"docs/api has no entry for {package}.{name}"


def test_every_public_name_and_its_methods_have_docstrings():
    for path, *_ in ENTRIES:
        value = thing(path)
        assert value.__doc__, path
        # Their own: the pages leave out what only inherits one.
        members = vars(value).items() if inspect.isclass(value) else ()
        kinds = types.FunctionType | property | classmethod | staticmethod
        bare = [name for name, each in members if name[0] != "_" and isinstance(each, kinds) and not each.__doc__]
        assert bare == [], path


def test_sections_of_docstrings_are_those_that_the_pages_render():
    for path, *_ in ENTRIES:
        sections = re.findall(r"^([A-Z]\w+):\n +\S", inspect.getdoc(thing(path)) or "", re.M)
        assert SECTIONS.issuperset(sections), path


def test_every_entry_is_reached_by_its_heading():
    for path, heading, label in ENTRIES:
        assert thing(heading) is thing(path) and heading.endswith(f".{label}"), heading


@pytest.mark.thorough
def test_every_heading_is_reached_after_import_octavo():
    """Except what needs other tools: integrations and the trainer's."""
    headings = [h for _, h, _ in ENTRIES if not h.startswith(("octavo.integrations.", "octavo.compat."))]
    code = f"import octavo\nfor heading in {headings}: eval(heading)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("path", [path for path, *_ in ENTRIES if inspect.isfunction(thing(path))])
def test_every_public_function_has_an_example(path):
    assert examples(path)


@pytest.mark.parametrize("path", ALONE)
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(CONFIG)
    Path("corpus").mkdir()
    Path("corpus/text.txt").write_text("All work and no play makes Jack a dull boy. " * 40)
    torch.manual_seed(0)
    assert run_examples(path) == ""


@pytest.mark.thorough
@pytest.mark.dist
def test_examples_of_several_ranks_run(gloo):  # noqa: F811
    assert len(RANKED) >= 11
    assert gloo.run(run_ranked, 2) == ["", ""]


def run_ranked():
    return "".join(map(run_examples, RANKED))
