"""What Triton's compiler makes of the kernels, without a GPU: for Hopper, against the table kept in the repository.

`make test` compiles what the recipes use most, in its default configuration; all of it, for every target and with the
Triton of PyTorch 2.11, are slow tests. `python -m benchmarks sass --capability 90 --write` renews the table.
"""

import json
from collections import Counter

import pytest
from compiling import ROOT, run_python

from tensors import needs_triton

GOLDEN = json.loads((ROOT / "benchmarks" / "results" / "sass" / "sm_90.json").read_text())
OLDER_TRITON = ROOT / ".venv" / "triton-3.6"
MOST_USED = (
    "e4m3/row fold=none both", "e4m3/row fold=none rows", "e4m3/row and e4m3/column folded",
    "e4m3/tensor fold=none both", "e5m2/tensor fold=none both", "e4m3/tensor amax given both",
    "e4m3/row scale given both", "e4m3/1x128 and", "e4m3/128x128 fold=none both", "1x32/e8m0 and",
    "scaled_mm e4m3/row e4m3/row nt fast", "scaled_mm e4m3/row unit nn promoted", "scaled_mm e4m3/1x128",
    "rms_norm e4m3/row both", "glu silu e4m3/row",
)  # fmt: skip
ISSUED = 132 * 4 * 32 * 1.755 / 2420
"""Instructions of a lane that an H100 issues in the time of a byte: 4 a clock and multiprocessor, 2.42 TB/s."""

pytestmark = needs_triton


def compiled(capability, *options, path=()):
    printed = run_python("-m", "benchmarks", "sass", "--json", "--capability", str(capability), *options, path=path)
    report = json.loads(printed.splitlines()[-1])
    return by_name(report["targets"][str(capability)]), report["triton"]


def by_name(rows):
    named = {f"{r['op']} {r['case']} {r['kernel']} {r['config']}": r for r in rows}
    assert len(named) == len(rows)
    return named


def check_that_nothing_spills(rows):
    for name, row in rows.items():
        assert "error" not in row, f"{name}: {row['error']}"
        assert row["stack"] == row["local"] == 0, name
        assert not any(op.startswith(("LDL", "STL")) for op in row["accesses"]), name


def check_accesses(rows):
    """Matrices 16 bytes of bf16 or of the transposed copy at a time; narrower are scales, maxima and fold factors.

    A row-major store has the FP8 bytes of one load, 8 per thread, so both are of a contiguous piece of memory (seen in
    their PTX: docs/ptx.md); 16 bytes per thread would put loads 32 bytes apart.
    """
    for name, row in rows.items():
        if row["op"] == "adaptive_quantize":
            wide = row["accesses"]["STG.8"]
            assert row["accesses"] == {"LDG.16": wide, "STG.8": wide, "STG.4": 1}
        elif row["op"] in ("quantize", "quantize_pair"):
            order = row["case"].removesuffix(" by column")
            loads = sum(n for op, n in row["accesses"].items() if op.startswith("LDG.16"))
            reads = 1 + (row["kernel"] == "rows_kernel")
            writes = row["kernel"] != "maxima_kernel"
            assert loads >= reads * loads_of_x(row), (name, row["accesses"])
            stores = Counter({8: writes * (not order.endswith("columns")) * loads_of_x(row)})
            width = min(16, int(row["shape"].split("x")[0]))  # a column of a block of 8 rows has 8 bytes
            stores[width] += writes * (not order.endswith(" rows")) * loads_of_x(row) * 8 / width
            assert all(row["accesses"].get(f"STG.{w}", 0) >= n for w, n in stores.items()), (name, row["accesses"])
        elif row["op"] == "scaled_mm":
            assert row["accesses"]["UTMALDG"] and row["accesses"]["STG.16"], name
            assert not any(op in row["accesses"] for op in ("STG.1", "STG.2", "STG.4", "STG.8")), name
        else:
            assert row["wide"] >= 0.5 * (row["loaded"] + row["stored"]), (name, row["accesses"])
            of_rows = row["kernel"] in ("norm_rows_kernel", "glu_rows_kernel", "grouped_cast_kernel")
            by_rows = of_rows and row["case"] != "plain"
            assert row["accesses"].get("STG.8", 0) == (loads_of_x(row) if by_rows else 0), (name, row["accesses"])


def loads_of_x(row):
    """16-byte loads of the matrix by one thread, from the size of its tile."""
    rows, columns = map(int, row["shape"].split()[0].split("x"))
    return 2 * rows * columns / (32 * int(row["shape"].split()[1][1:])) / 16


def check_what_bounds(rows):
    """Quantizers move what docs/architecture.md states and issue no longer; products run on Hopper's units."""
    for name, row in rows.items():
        if row["op"] in ("quantize", "quantize_pair"):
            assert row["instructions"] <= ISSUED * row["bytes"], (name, row["instructions"], row["bytes"])
            copies = 2 if row["case"].endswith(" both") or row["op"] == "quantize_pair" else 1
            table = 2 if row["kernel"] == "maxima_kernel" else 2 + copies
            assert 0.9 * table <= row["bytes"] <= 1.1 * table, (name, row["bytes"])
        if row["op"] == "scaled_mm":
            assert row["matrix"] and all(op.startswith("QGMMA.64x") for op in row["matrix"]), name


def check_promoted(rows):
    """While partial sums are added, the next products are under way; all are waited for once in four steps of 128."""
    for name, row in rows.items():
        if row["op"] == "scaled_mm" and row["case"].endswith("promoted"):
            assert row["kernel"] == "promoted_kernel" and row["step"]["pending"] == [1, 1, 1, 1, 1, 1, 0], (name, row)
            most = 200 if "128x1 e4m3/128x1" in row["case"] else 130  # two operations per sum are 128 already
            assert row["step"]["per_4_qgmma"] <= most, (name, row["step"])


def check_against_the_table(rows, version):
    golden = by_name(GOLDEN[version])
    for name, now in rows.items():
        assert name in golden, f"{name} is not in the table: renew it"
        before = golden[name]
        assert now["accesses"] == before["accesses"] and now["matrix"] == before["matrix"], (name, now, before)
        assert now["reg"] <= before["reg"] and now["shared"] <= before["shared"], (name, now, before)
        assert now["instructions"] <= 1.02 * before["instructions"], (name, now, before)


def check(rows, version):
    check_that_nothing_spills(rows)
    check_accesses(rows)
    check_what_bounds(rows)
    check_promoted(rows)
    if version in GOLDEN:
        check_against_the_table(rows, version)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_most_used_kernels_on_hopper():
    rows, version = compiled(90, "--default", "--jobs", "2", "--only", *MOST_USED)
    assert all(any(text in name for name in rows) for text in MOST_USED)
    check(rows, version)


def test_the_table_holds_the_newest_triton_and_the_one_of_pytorch_2_11():
    """And nothing in it is what the other tests refuse, so that a renewed table cannot hide it."""
    assert len(GOLDEN) >= 2 and "3.6.0" in GOLDEN
    for rows in map(by_name, GOLDEN.values()):
        check_that_nothing_spills(rows)
        check_accesses(rows)
        check_what_bounds(rows)
        check_promoted(rows)


@pytest.mark.slow
def test_every_configuration_on_hopper():
    rows, version = compiled(90)
    check(rows, version)
    if version in GOLDEN:
        assert rows.keys() == by_name(GOLDEN[version]).keys(), "the table is of other kernels: renew it"


@pytest.mark.slow
@pytest.mark.skipif(not OLDER_TRITON.exists(), reason="make sass installs Triton 3.6 beside the pinned one")
def test_every_configuration_on_hopper_with_the_triton_of_pytorch_2_11():
    rows, version = compiled(90, path=[OLDER_TRITON])
    assert version == "3.6.0"
    check(rows, version)
    assert rows.keys() == by_name(GOLDEN[version]).keys(), "the table is of other kernels: renew it"


@pytest.mark.slow
@pytest.mark.parametrize("capability", [89, 100, 120])
def test_other_targets_compile_without_spills(capability):
    check_that_nothing_spills(compiled(capability)[0])


@pytest.mark.parametrize(
    ("rows", "row_block", "programs"), [(16384, 32, 512), (3000, 16, 188), (1024, 8, 128), (512, 8, 64), (1, 8, 1)]
)
def test_few_rows_have_small_row_blocks(rows, row_block, programs):
    """Of H100's 132 multiprocessors, three quarters have a program if the rows suffice."""
    from octavo.kernels.quantize import triton as quantizers
    from octavo.numerics.spec import ROW, QuantSpec

    first = quantizers.FoldedSpec(spec=QuantSpec(granularity=ROW))
    task = quantizers.QuantizeTask(first=first, order="both")
    tile_rows, *_ = quantizers.tiles(task)[quantizers.default_config(task, rows, 132)]
    assert (tile_rows, -(-rows // tile_rows)) == (row_block, programs)
    assert quantizers.default_config(quantizers.QuantizeTask(first=first), rows, 132) == 0
