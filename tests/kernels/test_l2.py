"""The L2 simulator, and what it says of the row quantizer's default configurations on H100."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from benchmarks.l2 import H100, Cache, Walk, main, shipped, simulate

from octavo.kernels.quantize import triton as quantizers
from octavo.numerics.spec import ROW, QuantSpec

GOLDEN = Path(__file__).parents[2] / "benchmarks" / "results" / "sass" / "sm_90.json"
TASK = quantizers.QuantizeTask(first=quantizers.FoldedSpec(spec=QuantSpec(granularity=ROW)), order="both")


def test_the_cache_evicts_what_is_marked_and_then_what_was_used_last_longest_ago():
    cache = Cache(4)
    assert not any(cache.touch(piece, 1, piece == "c") for piece in "abcd")
    assert cache.touch("a", 1, False)
    assert not cache.touch("e", 1, False)  # in place of c
    assert not cache.touch("f", 1, False)  # in place of b
    assert [cache.touch(piece, 1, False) for piece in "adef"] == [True] * 4
    assert cache.touch("a", 1, True) and not cache.touch("g", 2, False)  # in place of a and d
    assert [cache.touch(piece, 0, False) for piece in "efgd"] == [True, True, True, False]


@pytest.mark.parametrize(("megabytes", "backwards", "expected"), [(50, False, 4), (0.1, False, 6), (0.1, True, 6)])
def test_bytes_of_one_row_block_after_the_other(megabytes, backwards, expected):
    """One program: 0.25 MB of X per row block, which L2 holds or, but for the last tile, does not."""
    walk = Walk(name="", programs=1, backwards=backwards)
    total = simulate(512, 4096, walk, megabytes)
    assert total == expected - (0.5 if backwards else 0)  # a quarter of the columns
    assert simulate(512, 4096, Walk(name="", programs=16, backwards=True), 50) == 4


@pytest.mark.parametrize(
    "rows", [2048, 4096, *(pytest.param(rows, marks=pytest.mark.thorough) for rows in (8192, 16384))]
)
@pytest.mark.parametrize(("columns", "most"), [(4096, 4.3), (14336, 5.0)])
def test_l2_holds_the_row_blocks_of_the_kernel(rows, columns, most):
    assert simulate(rows, columns, shipped(rows)) <= most
    if rows * columns > 2048 * 4096:
        before = Walk(name="", programs=528, backwards=False)
        assert simulate(rows, columns, shipped(rows)) < simulate(rows, columns, before) - 0.4


def test_one_program_is_resident_per_multiprocessor():
    """As simulated: from the registers of the compiled kernels."""
    for rows in json.loads(GOLDEN.read_text()).values():
        (row,) = (r for r in rows if r["case"] == "e4m3/row fold=none both" and not r["config"])
        assert row["programs"] == 1 and row["kernel"] == "rows_kernel"


@pytest.mark.parametrize(
    ("rows", "row_block", "programs"),
    [(16384, 32, 512), (4096, 32, 128), (3000, 16, 188), (2048, 16, 128), (1024, 8, 128), (512, 8, 64), (1, 8, 1)],
)
def test_few_rows_have_small_row_blocks(rows, row_block, programs):
    """Of 132 multiprocessors, three quarters have a program if the rows suffice."""
    config = quantizers.default_config(TASK, rows, H100["multiprocessors"])
    tile_rows, *_ = quantizers.tiles(TASK)[config]
    assert (tile_rows, -(-rows // tile_rows)) == (row_block, programs)
    rows_only = quantizers.QuantizeTask(first=TASK.first)
    assert quantizers.default_config(rows_only, rows, H100["multiprocessors"]) == 0


def test_json_has_a_line_per_walk_and_size(capsys):
    main(["--rows", "64", "2048", "--columns", "1024", "--json"])
    table = json.loads(capsys.readouterr().out)
    kernel = [row for row in table if row["walk"] == "the kernel"]
    assert [(row["rows"], row["row_block"], row["programs"]) for row in kernel] == [(64, 8, 8), (2048, 16, 128)]
    assert all(row["bytes_per_element"] == 4 for row in table)
