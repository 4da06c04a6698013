"""One range of torch and Triton releases, wherever it is named."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parent.parent
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
