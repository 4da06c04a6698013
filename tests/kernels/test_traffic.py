"""Bytes that each kernel moves, counted under the interpreter, against the table in docs/architecture.md."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (macOS, Windows)")

import triton
import triton.language as tl
from benchmarks.variants import quantizations
from traffic import counted

from octavo.kernels.fused import triton as fused
from octavo.kernels.fused.reference import cases_of_inputs, optional_spec
from octavo.kernels.launch import INTERPRETED
from octavo.kernels.quantize import triton as quantizers
from octavo.numerics.spec import COLUMN, ROW, TENSOR, QuantSpec

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="bytes are counted in Triton's interpreter (TRITON_INTERPRET=1)"
)

ROWS, COLUMNS = 128, 512
"""Whole tiles of every configuration."""
TASKS = {label: task for task, label in quantizers.recipe_tasks().items()}


def table(task):
    written = 2 if task.second or task.order == "both" else 1
    maxima_first = task.precomputed == "nothing" and task.first.spec.granularity in (TENSOR, COLUMN)
    if task.second is not None:
        maxima_first = not task.first.one_pass
    return [2, 2 + written] if maxima_first else [2 + written]


def run(task, config, x):
    """Do a task on x, with the fold factors, maxima and scales that it needs; return the traffic of each launch."""
    rows, columns = x.shape
    folds = {"none": None, "rows": torch.ones(rows, 1), "columns": torch.ones(1, columns)}
    spec, fold = task.first.spec, folds[task.first.fold]
    maxima = torch.full(spec.granularity.scale_shape((rows, columns)), 4.0)
    with counted() as launches:
        if task.second is not None:
            quantizers.quantize_pair(x, spec, fold, task.second.spec, folds[task.second.fold], config)
        else:
            amax = maxima if task.precomputed == "amax" else None
            scale = maxima.to(spec.scale_dtype) if task.precomputed == "scale" else None
            quantizers.quantize(x, spec, fold, amax, scale, task.order, config)
    return launches


@pytest.mark.parametrize("label", TASKS)
@pytest.mark.slow
def test_quantizers_move_the_stated_bytes(label):
    task = TASKS[label]
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    variants = [v for v in quantizations() if v.case == label]
    for config in range(len(quantizers.tiles(task))):
        launches = run(task, config, x)
        traffic = [launch.device_bytes(x.numel()) / x.numel() for launch in launches]
        assert traffic == table(task) == [v.device_bytes for v in variants if v.config == config]
        for launch in launches:
            check_operands(launch, x.numel())
        check_scales(task, launches[-1])
        # The default writes no part of a sector: memory need not read it first to fill it up.
        written = [b for name, b in launches[-1].stores.items() if name in ("q", "q_t")]
        assert config or all(b.sectors == x.numel() for b in written)


def check_operands(launch, elements):
    """No two programs read the same bytes; rows read twice are on chip the second time."""
    read = launch.loads["x"]
    assert read.program == read.device == read.sectors == 2 * elements
    assert read.requested == read.device * (2 if launch.kernel == "rows_kernel" else 1)
    for name, written in launch.stores.items():
        assert written.requested == written.program == written.device, f"{name} is stored twice"


def test_rows_are_read_again_backwards():
    """The second pass starts with the columns that were read last, which are still in L2."""
    x = torch.ones(8, 2500, dtype=torch.bfloat16)
    task = quantizers.QuantizeTask(first=quantizers.FoldedSpec(spec=QuantSpec(granularity=ROW)), order="both")
    (launch,) = run(task, 2, x)  # tiles of 8×1024
    tiles = launch.places["x"][::4]  # a tile has four quarters
    assert tiles == [0, 2048, 4096, 4096, 2048, 0]


def check_scales(task, launch):
    """Each scale is stored once; scales, maxima and factors add no other traffic."""
    spec = task.first.spec
    scales = math.prod(spec.granularity.scale_shape((ROWS, COLUMNS)))
    assert task.precomputed == "scale" or launch.stores["s"].device == scales * spec.scale_dtype.itemsize
    small = [b.device for name, b in launch.loads.items() if name != "x"]
    assert sum(small) <= 8 * (ROWS + COLUMNS) + 4 * scales


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (33, 130)])
def test_kernels_access_only_their_operands(shape):
    """Every access of every kernel at odd sizes lies in an argument: `counted` asserts it."""
    x = torch.ones(shape, dtype=torch.bfloat16)
    for task in TASKS.values():
        *_, launch = run(task, 0, x)
        assert launch.device_bytes(x.numel()) >= 3 * x.numel()


FUSED = [
    (spec, order, 2 if spec is None or order == "both" else 1)
    for spec in map(optional_spec, cases_of_inputs())
    for order in (("rows",) if spec is None else ("rows", "columns", "both"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "order", "written"), FUSED, ids=str)
@pytest.mark.parametrize("config", [0, 1])
def test_norms_move_the_stated_bytes(spec, order, written, config):
    """x and the result; repeated reads of a row block are on chip.

    Where the transposed copy is a step of its own, that reads the row-major bytes, which are written for it if need be.
    """
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16)
    weight = torch.ones(COLUMNS, dtype=torch.bfloat16)
    for center in (False, True):
        with counted() as launches:
            fused.norm(x, weight, weight if center else None, 1e-5, False, center, spec, order, config)
        moved = sum(launch.device_bytes(x.numel()) for launch in launches) / x.numel()
        extra = (1 if order == "both" else 2) if len(launches) == 2 else 0
        assert moved == 2 + written + extra


@pytest.mark.slow
@pytest.mark.parametrize("config", range(len(fused.NORM_BACKWARD_CONFIGS)))
def test_gradients_of_norms_move_the_stated_bytes(config):
    """grad and x in, dx out, float32 partial sums per row block beside them."""
    grad, x = (torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in range(2))
    weight, rstd = torch.ones(COLUMNS, dtype=torch.bfloat16), torch.ones(ROWS, 1)
    with counted() as launches:
        fused.norm_backward(grad, x, weight, rstd, None, False, False, config)
    assert launches[0].device_bytes(x.numel()) == 6 * x.numel()
    sums = sum(launch.device_bytes(0) for launch in launches) - launches[0].device_bytes(x.numel())
    assert sums <= (2 * 4 / fused.ROW_BLOCK + 0.1) * x.numel()


@pytest.mark.parametrize(("spec", "order", "written"), FUSED, ids=str)
@pytest.mark.parametrize("config", range(2))
@pytest.mark.slow
def test_gated_activations_move_the_stated_bytes(spec, order, written, config):
    gate, up = (torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16) for _ in range(2))
    with counted() as launches:
        fused.glu(gate, up, "silu", spec, order, config)
    moved = sum(launch.device_bytes(gate.numel()) for launch in launches) / gate.numel()
    extra = (1 if order == "both" else 2) if len(launches) == 2 else 0
    assert moved == 4 + written + extra
    with counted() as launches:
        fused.glu_backward(gate, gate.clone(), up, "silu", False, config)
    assert sum(launch.device_bytes(gate.numel()) for launch in launches) == 10 * gate.numel()


@triton.jit
def _twice_kernel(x, y, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    values = tl.load(x + at, mask=at < 24, other=0.0) + tl.load(x + at, mask=at < 24, other=0.0)
    values += tl.load(x + 3)
    tl.store(y + 2 * at, values, mask=at < 24)
    tl.store(y + 2 * at, values + 0 * tl.load(y + 2 * at, mask=at < 24), mask=at < 24)


def test_traffic_counts():
    """Masked lanes are not; a second read by one program or by two, and of what was just written, is told apart."""
    x, y = torch.ones(64), torch.zeros(64)
    with counted() as launches:
        _twice_kernel[(2,)](x, y, SIZE=16)
    (launch,) = launches
    assert y[:48:2].eq(3).all() and not y[1::2].any()
    loaded, stored = launch.loads["x"], launch.stores["y"]
    assert (loaded.requested, loaded.program, loaded.device) == (4 * (24 + 24 + 2), 4 * (24 + 1), 4 * 24)
    assert (stored.requested, stored.program, stored.device) == (2 * 4 * 24, 4 * 24, 4 * 24)
    assert (launch.loads["y"].program, launch.loads["y"].device) == (4 * 24, 0)  # read back what was just written
    assert stored.sectors == 2 * 4 * 24  # every other element of each sector
    assert launch.device_bytes(4 * 64) == 2 * 4 * 24 and launch.device_bytes(4 * 64 + 1) == 0
