"""The GPU path on a CUDA driver that launches nothing: what kernels would be given, and what the host does for it."""

import json

import pytest
from benchmarks import host
from benchmarks.host import stub
from compiling import run_python

compiles = pytest.mark.skipif(stub.missing() is not None, reason=str(stub.missing()))


@compiles
@pytest.mark.slow
def test_direct_launches_are_those_of_triton():
    """Kernel, grid, stream and the bytes of all arguments, at sizes and alignments that Triton specializes for."""
    names = (
        "launches_pass_what_triton_passes", "casts_pass_what_triton_passes", "a_profilers_hooks_see_every_launch",
        "an_unwritable_cache_is_said_once", "linears_launch_as_their_plans", "scales_with_gaps_are_copied",
        "promoted_products_launch_their_warps_and_the_loader",
        "products_pass_what_triton_passes", "grouped_products_pass_what_triton_passes",
    )  # fmt: skip
    # What is counted as compiled must not have been compiled before, in the same process.
    for part in (names, ("a_cold_start_compiles_few_kernels",)):
        launches = json.loads(run_python("tests/kernels/stub_launches.py", *part).splitlines()[-1])
        assert launches == {name: [] for name in part}


COUNTS = {  # launches of Triton, kernels in all, and at most so many dispatches and Python calls
    "rowwise": (5, 8, 14, 27),
    "tensorwise": (7, 10, 14, 29),
    "rowwise_equalized": (5, 8, 14, 35),
    "rowwise_hp_wgrad": (4, 7, 19, 23),
    "blockwise": (4, 10, 18, 38),
    "mxfp8": (4, 13, 21, 38),
    "rowwise bias": (5, 10, 26, 28),
    "block": (32, 61, 106, 234),
    "block keep_weights": (25, 54, 106, 283),
    "experts": (18, 77, 430, 780),
    "rowwise, products by Triton": (8, 8, 2, 32),
    "blockwise, products by Triton": (7, 7, 2, 31),
}


@compiles
@pytest.mark.thorough
def test_what_a_linear_costs_the_host(tmp_path):
    """Forward and backward; a launch, a dispatch or a call more would be a regression that no time shows here."""
    file = tmp_path / "host.json"
    run_python("-m", "benchmarks", "host", "--counts", "--only", *COUNTS, "--json", str(file))
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    for name, (launches, kernels, dispatches, calls) in COUNTS.items():
        row = rows[name]
        assert (row["launches"], row["kernels"]) == (launches, kernels), row
        assert row["dispatches"] <= dispatches and row["python_calls"] <= calls, row
    assert rows["bf16"]["kernels"] == 3 and rows["bf16 bias"]["kernels"] == 4


def test_the_page_shows_the_result_file():
    page = host.DOCUMENT.read_text()
    assert page == host.document(json.loads(host.RESULT.read_text()), page), (
        "docs/host_time.md is not what the result file says: run python -m benchmarks host --write"
    )


def test_no_compiler_is_one_line(monkeypatch):
    with pytest.raises(SystemExit):
        host.main(["--only", "rowwise", "--write"])
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(SystemExit, match=r"needs a C compiler: install gcc or clang, or set CC"):
        host.main(["--counts"])
