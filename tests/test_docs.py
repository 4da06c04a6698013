"""Documents, and what GitHub reads, keep up with the code; one range of torch and Triton releases stands everywhere."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from octavo._version import __version__
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
    base = (ROOT / document).parent
    for link in links:
        assert (base / link).exists(), link
    for path in paths:
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


# --- one range of torch and Triton releases, wherever it is named ---


MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINS = re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
PINNED = {name: Version(version) for name, version in PINS}


def variable(name):
    return re.search(rf"^{re.escape(name)} *:= *(.+)$", MAKEFILE, re.M)[1]


def lower_bound(requirements, name):
    (requirement,) = (r for r in map(Requirement, requirements) if r.name == name)
    (bound,) = requirement.specifier
    assert bound.operator == ">="
    return Version(bound.version)


def minor(version):
    return f"{version.major}.{version.minor}"


OLDEST, NEWEST = map(Version, variable("TORCHES").split())
TRITONS = [Version(re.search(r"triton==([\d.]+)", variable(f"WITH_{torch}"))[1]) for torch in (OLDEST, NEWEST)]


def test_the_lower_bounds_are_tested():
    assert lower_bound(PROJECT["project"]["dependencies"], "torch") == OLDEST
    assert lower_bound(PROJECT["dependency-groups"]["test"], "triton") == TRITONS[0]
    assert minor(TRITONS[0]) == variable("TRITON")


def test_the_pinned_releases_are_in_the_range():
    assert OLDEST < PINNED["torch"] <= NEWEST
    assert TRITONS[0] < TRITONS[1] <= PINNED["triton"]


def test_the_readme_names_the_range():
    torch, triton = (minor(OLDEST), minor(NEWEST)), (minor(TRITONS[0]), minor(PINNED["triton"]))
    line = f"PyTorch {torch[0]} to {torch[1]} and Triton {triton[0]} to {triton[1]}"
    assert line in (ROOT / "README.md").read_text()


def test_every_folder_of_library_tests_runs_on_every_release():
    """The trainer's are left out."""
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - set(variable("LIBRARY").split()) == {"train", "experiments"}


# --- the files that GitHub reads ---


TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.M))


def read(path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.stem)
def test_workflows_run_what_the_makefile_has(path):
    workflow = read(path)
    assert workflow["name"] == path.stem
    assert workflow["permissions"] == {"contents": "read"}
    assert True in workflow  # YAML 1.1 reads the key `on` so
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"] and job["steps"][0]["uses"].startswith("actions/checkout@"), name
        assert job["steps"][0]["with"] == {"persist-credentials": False}, name
        for step in job["steps"]:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"a@{40 * '0'}")), f"pin {step} to a commit"
            assert ("run" in step) != ("uses" in step), (name, step)
            for target in re.findall(r"\bmake ([a-z-]+)", step.get("run", "")):
                assert target in TARGETS, (name, target)


def test_a_bug_report_asks_for_the_doctor():
    (field,) = [field for field in read(ROOT / ".github/ISSUE_TEMPLATE/bug.yml")["body"] if field["id"] == "doctor"]
    assert "octavo doctor" in field["attributes"]["label"] and field["validations"]["required"]


def test_the_citation_is_of_this_version():
    citation = read(ROOT / "CITATION.cff")
    assert str(citation["version"]) == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
