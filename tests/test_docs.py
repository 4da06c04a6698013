"""The documents keep up with the code."""

import re
from pathlib import Path

import pytest

from octavo.numerics import RECIPES

ROOT = Path(__file__).parent.parent


def test_every_recipe_is_in_the_numerics_guide():
    text = (ROOT / "docs" / "numerics.md").read_text()
    assert all(f"| `{name}`" in text for name in RECIPES)


@pytest.mark.parametrize("document", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))])
def test_files_named_in_documents_exist(document):
    text = (ROOT / document).read_text()
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    paths = re.findall(r"`((?:src|tests|docs|configs|benchmarks|examples)/[\w./-]+)`", text)
    modules = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)`", text)
    commands = re.findall(r"(?:pytest|octavo train|python) ((?:tests|configs|examples)/[\w./-]+)", text)
    base = (ROOT / document).parent
    for link in links:
        assert (base / link).exists(), link
    for path in (*paths, *commands):
        assert (ROOT / path).exists(), path
    for module in modules:
        assert (ROOT / module).exists() or (ROOT / "src/octavo" / module).exists(), module


def test_troubleshooting_quotes_errors_of_the_code():
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    written = re.sub(r"""["']\s+f?["']""", "", code)  # literals side by side are one
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.M)
    quotes = [quote for row in rows for quote in re.findall(r"`([^`]+)`", row)]
    assert len(quotes) >= 40
    assert [quote for quote in quotes if quote not in written] == []


def test_every_page_is_in_the_navigation():
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())) == pages
