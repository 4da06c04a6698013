"""The PTX interpreter on programs of a few lines, and the compiled kernels in it.

`python -m benchmarks ptx --write` renews the results and docs/ptx.md.
"""

import json
import os
import subprocess
import sys
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks.ptx.arithmetic import Unknown, fused
from benchmarks.ptx.command import PAGE, RESULT, document, excess
from benchmarks.ptx.machine import run
from benchmarks.ptx.memory import DeviceMemory, Fault
from benchmarks.ptx.program import parse

ROOT = Path(__file__).parents[2]
FEW = ("e4m3/row fold=none both", "glu silu e4m3/row rows", "dequantize e4m3")
needs_triton = pytest.mark.skipif(not find_spec("triton"), reason="Triton is not installed (macOS, Windows)")

HEAD = """
.version 8.0
.target sm_90a
.extern .shared .align 16 .b8 global_smem[];
.visible .entry example(
	.param .u64 .ptr .global .align 1 example_param_0,
	.param .u32 example_param_1
)
.reqntid 64
{
	.reg .pred 	%p<9>;
	ld.param.b64 	%rd1, [example_param_0];
	ld.param.b32 	%r1, [example_param_1];
	mov.u32 	%r2, %tid.x;
	mul.wide.u32 	%rd2, %r2, 4;
	add.s64 	%rd3, %rd1, %rd2;
"""


def execute(body, data, number=1, grid=(1,), shared=1024):
    """Run a body on 64 threads per CTA; %rd3 is the address of a thread's word, %r2 its index."""
    return run(parse(HEAD + body + "\n\tret;\n}\n"), [data.data_ptr(), number], grid, DeviceMemory([data]), shared)


def words(count=64):
    return torch.arange(count, dtype=torch.int32)


def test_integers_predicates_and_vectors():
    x = words()
    execute(
        """
        ld.global.b32 %r3, [%rd3];           // a comment; with a semicolon
        setp.lt.s32 %p1, %r3, 32;
        @%p1 add.s32 %r3, %r3, -5;
        { .reg .b16 low, high;
          mov.b32 {low, high}, %r3;
          mov.b32 %r4, {high, low}; }
        shr.s32 %r5, %r3, 1;
        @!%p1 mov.b32 %r5, %r4;
        st.global.b32 [%rd3], %r5;
        """,
        x,
    )
    i = torch.arange(64, dtype=torch.int32)
    assert torch.equal(x, torch.where(i < 32, (i - 5) >> 1, i << 16))


def test_loops_and_branches_that_part_the_ctas():
    x = words(3 * 64)
    execute(
        """
        mov.u32 %r3, %ctaid.x;
        mul.wide.u32 %rd4, %r3, 256;
        add.s64 %rd3, %rd3, %rd4;
        mov.b32 %r4, 0;
        mov.b32 %r5, 0;
$L_loop:
        setp.ge.s32 %p1, %r4, %r3;
        @%p1 bra $L_end;
        add.s32 %r4, %r4, 1;
        add.s32 %r5, %r5, 10;
        bra.uni $L_loop;
$L_end:
        st.global.b32 [%rd3], %r5;
        """,
        x,
        grid=(3,),
    )
    assert x.tolist() == [0] * 64 + [10] * 64 + [20] * 64


EXCHANGE = """
        shl.b32 %r3, %r2, 2;
        st.shared.b32 [%r3], %r2;
        bar.sync 0;
        xor.b32 %r4, %r3, 128;
        ld.shared.b32 %r5, [%r4];
        bar.sync 0;
        st.shared.b32 [%r3], %r5;
        st.global.b32 [%rd3], %r5;
"""


@pytest.mark.parametrize(
    ("barriers", "racing"), [((True, True), []), ((False, True), ["ld.shared"]), ((True, False), ["st.shared"])]
)
def test_a_missing_barrier_between_warps_is_a_hazard(barriers, racing):
    first, second, third = EXCHANGE.split("bar.sync 0;")
    body = first + "bar.sync 0;" * barriers[0] + second + "bar.sync 0;" * barriers[1] + third
    x = words()
    counts = execute(body, x)
    assert torch.equal(x, torch.arange(64, dtype=torch.int32) ^ 32)  # threads in lockstep hide the race
    assert [hazard.split(": ")[1].split(".b32")[0] for hazard in counts.hazards] == racing
    inside_a_warp = body.replace("128", "64")
    assert not execute(inside_a_warp, words()).hazards


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("frobnicate.b32 %r3, %r2;", Unknown, r"line 17: 'frobnicate.b32 %r3, %r2' is not implemented"),
        ("add.rz.f32 %r3, %r2, %r2;", Unknown, r"line 17: 'add.rz.f32"),
        ("cvt.rn.relu.bf16.f32 %rs1, %r2;", Unknown, r"line 17: 'cvt.rn.relu.bf16.f32"),
        ("selp.b32 %r3, %r2, 1, %p9;", Fault, r"line 17: .*%p9 is read before it is written"),
        ("add.s64 %rd3, %rd3, 4;\nst.global.b32 [%rd3], %r2;", Fault, r"line 18: .*1 lanes .* outside of every tensor"),
        ("add.s64 %rd3, %rd3, 2;\nst.global.b32 [%rd3], %r2;", Fault, r"not a multiple of 4 bytes"),
        ("setp.lt.s32 %p1, %r2, 7;\n@%p1 bra $L_x;\n$L_x:\nadd.s32 %r3, %r2, 1;", Unknown, "parts the threads"),
        ("setp.lt.s32 %p1, %r2, 7;\n@%p1 bar.sync 0;", Unknown, "parts the threads"),
        ("shl.b32 %r3, %r2, 6;\nst.shared.b32 [%r3], %r2;", Fault, "outside of the 1024 bytes of shared memory"),
    ],
)
def test_what_is_unknown_or_fatal_is_named_with_its_line(body, error, message):
    with pytest.raises(error, match=message):
        execute(body, words())


@pytest.mark.parametrize("stride", [4, 8, 16, 32])
def test_sectors_and_bank_conflicts_are_those_of_the_stride(stride):
    x = words(64 * 8)
    counts = execute(
        f"""
        mul.lo.s32 %r3, %r2, {stride};
        cvt.u64.u32 %rd4, %r3;
        add.s64 %rd5, %rd1, %rd4;
        ld.global.b32 %r4, [%rd5];
        st.shared.b32 [%r3], %r4;
        """,
        x,
        shared=4096,
    )
    (loads,), (stores,) = counts.sectors.values(), counts.wavefronts.values()
    assert (loads.requests, loads.units, loads.ideal) == (2, 2 * stride, 2 * 4)
    assert (stores.requests, stores.units, stores.ideal) == (2, 2 * stride // 4, 2)


def test_matrices_in_shared_memory():
    """A thread holds two neighbours of a row; stored transposed and loaded plain, the matrix is transposed."""
    x = torch.arange(64, dtype=torch.int32) * 0x10000 + torch.arange(64, dtype=torch.int32) + 0x8000
    before = x.view(torch.int16).clone()
    execute(
        """
        ld.global.b32 %r3, [%rd3];
        shl.b32 %r4, %r2, 4;
        stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%r4], {%r3};
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r4];
        st.global.b32 [%rd3], %r5;
        """,
        x,
    )
    for warp in range(2):
        part = slice(64 * warp, 64 * warp + 64)
        assert torch.equal(x.view(torch.int16)[part].view(8, 8), before[part].view(8, 8).t())


def test_fused_multiply_add_rounds_once():
    generator = np.random.default_rng(0)
    bits = generator.integers(0, 2**32, (3, 20_000), np.uint32)
    bits[:, :10_000] = bits[:, :10_000] & 0x87FFF800 | 0x38000000  # near 1: many exact ties
    a, b, c = bits.view(np.float32)
    with np.errstate(all="ignore"):
        result = fused(a, b, c)
    finite = np.flatnonzero(np.isfinite(result))[::7]
    for i in finite[np.isfinite(a[finite]) & np.isfinite(b[finite]) & np.isfinite(c[finite])]:
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        near = [np.nextafter(result[i], side, dtype=np.float32) for side in (np.float32(-np.inf), np.float32(np.inf))]
        distances = [abs(Fraction(float(x)) - exact) for x in near if np.isfinite(x)]
        own = abs(Fraction(float(result[i])) - exact)
        assert own <= min(distances) and (own < min(distances) or result[i].view(np.uint32) % 2 == 0)


def interpret(*options):
    """Rows of the table, and the exit code."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks", "ptx", "--json", *options]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1) and done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.returncode


@needs_triton
@pytest.mark.thorough
def test_a_few_compiled_kernels_equal_the_reference_and_planted_faults_are_found():
    rows, code = interpret("--jobs", "1", "--only", *FEW, "--plant", "none", "barriers", "predicates")
    assert code == 1 and {row["op"] for row in rows} == {"quantize", "glu", "dequantize"}
    for intact, racing, masked in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert not intact["mismatches"] and not intact["hazards"] and not excess(intact) and intact["kernels"], intact
        assert bool(racing["hazards"]) == bool(intact["wavefronts"]), racing
        assert masked["mismatches"], masked
    assert sum(bool(row["wavefronts"]) for row in rows[::3]) >= 2


@needs_triton
@pytest.mark.slow
def test_a_compiled_product_equals_the_reference_and_needs_its_waits():
    rows, code = interpret(
        "--jobs", "1", "--only", "scaled_mm e4m3/1x128 e4m3/128x128 nt", "--plant", "none", "waits", "barriers"
    )
    intact, early, racing = rows
    assert code == 1 and intact["kernels"] == ["promoted_kernel"]
    assert not intact["mismatches"] and not intact["hazards"], intact
    assert all("got nan" in text for text in early["mismatches"].values()) and len(early["mismatches"]) == 2, early
    assert racing["hazards"], racing


@needs_triton
@pytest.mark.slow
def test_every_compiled_kernel_equals_the_reference():
    rows, code = interpret("--random", "1")
    assert code == 0, [row for row in rows if row["mismatches"] or row["hazards"]]
    assert len(rows) == len(json.loads(RESULT.read_text())["rows"])


def test_the_page_is_that_of_the_results():
    result = json.loads(RESULT.read_text())
    assert PAGE.read_text() == document(result)
    assert not [row for row in result["rows"] if row["mismatches"] or row["hazards"] or excess(row)]


def test_quantizers_access_whole_sectors_of_each_matrix():
    """Every default configuration, in the results that the slow test and `--write` renew."""
    rows = [row for row in json.loads(RESULT.read_text())["rows"] if row["op"].startswith("quantize")]
    for row in rows:
        by_name = {name: kind for kind, name in map(str.split, row["sectors"])}
        assert by_name.keys() >= {"x", "q"} and ".v4" in by_name["x"], row
        if "rows_kernel" in row["kernels"]:  # two reads: the second marks X, and stores their outputs, to be evicted
            reads = [row["sectors"][f"ld.global.v4.b32{hint} x"] for hint in ("", ".evict_first")]
            stores = [kind for kind in row["sectors"] if kind.split()[-1] in ("q", "q_t")]
            assert reads[0] == reads[1] and all(kind.split()[0].endswith(".cs") for kind in stores), row
    half = {**rows[0], "sectors": {"ld.global.v4.b32 x": [72, 2304, 1152], "st.global.b32 s": [9, 72, 9]}}
    assert excess(half) == ["ld.global.v4.b32 x: 2.00 sectors"]
