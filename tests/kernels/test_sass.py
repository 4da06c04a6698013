"""What Triton's compiler makes of the kernels for Hopper, without a GPU, against the table kept in the repository."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GOLDEN = json.loads((ROOT / "benchmarks" / "results" / "sass" / "sm_90.json").read_text())

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (macOS, Windows)")


def compiled_for(capability):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks", "sass", "--json", "--capability", str(capability)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def label(row):
    return row["spec"], row["fold"], row["kernel"]


@pytest.fixture(scope="module")
def hopper():
    return compiled_for(90)


def test_nothing_spills_and_matrix_accesses_are_16_bytes_wide(hopper):
    for row in hopper["rows"]:
        assert row["stack"] == row["local"] == 0, label(row)
        assert not any(op.startswith(("LDL", "STL")) for op in row["accesses"]), label(row)
        assert row["accesses"]["LDG.E.128"] > 0, label(row)
        assert row["kernel"] == "_amax_kernel" or row["accesses"]["STG.E.128"] > 0, label(row)
        # What is narrower is scales and fold factors, one for a row or block.
        wide = sum(n for op, n in row["accesses"].items() if op.endswith(".128"))
        assert wide >= sum(row["accesses"].values()) / 2, label(row)


def test_every_spec_and_fold_is_in_the_table(hopper):
    assert [label(row) for row in hopper["rows"]] == [label(row) for row in GOLDEN["rows"]]


def test_no_kernel_became_worse_than_the_table(hopper):
    if hopper["triton"] != GOLDEN["triton"]:
        pytest.skip(f"the table is for Triton {GOLDEN['triton']}; this is {hopper['triton']}")
    for now, before in zip(hopper["rows"], GOLDEN["rows"], strict=True):
        assert now["reg"] <= before["reg"] and now["shared"] <= before["shared"], (label(now), now, before)
        assert now["instructions"] <= 1.02 * before["instructions"], (label(now), now, before)
        assert now["accesses"] == before["accesses"], (label(now), now, before)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 100, 120])
def test_other_targets_compile_without_spills(capability):
    for row in compiled_for(capability)["rows"]:
        assert row["stack"] == row["local"] == 0, label(row)
