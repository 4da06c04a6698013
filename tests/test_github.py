"""The files that GitHub reads: workflows, forms for issues, the citation."""

import re
from pathlib import Path

import pytest

from octavo._version import __version__

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).parent.parent
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))


def read(path):
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
