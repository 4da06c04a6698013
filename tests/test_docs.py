"""The documents keep up with the code."""

import re
from pathlib import Path

import pytest

from octavo.numerics import RECIPES
from octavo.train.config.run_config import TrainConfig
from octavo.train.config.sections import Section

ROOT = Path(__file__).parent.parent


def test_every_setting_is_in_the_training_guide():
    text = (ROOT / "docs" / "training.md").read_text()
    for name, section in TrainConfig.model_fields.items():
        assert isinstance(section.annotation, type) and issubclass(section.annotation, Section)
        row = next(line for line in text.splitlines() if line.startswith(f"| `[{name}]`"))
        assert set(re.findall(r"`(\w+)`", row)) == set(section.annotation.model_fields), name


def test_every_recipe_is_in_the_numerics_guide():
    text = (ROOT / "docs" / "numerics.md").read_text()
    assert all(f"| `{name}`" in text for name in RECIPES)


@pytest.mark.parametrize("document", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_files_named_in_documents_exist(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    paths = re.findall(r"`((?:src|tests|docs|configs|benchmarks|examples)/[\w./-]+)`", text)
    commands = re.findall(r"(?:pytest|octavo train|python) ((?:tests|configs|examples)/[\w./-]+)", text)
    base = (ROOT / document).parent
    for link in links:
        assert (base / link).exists(), link
    for path in (*paths, *commands):
        assert (ROOT / path).exists(), path
