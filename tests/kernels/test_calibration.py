"""The calibration table: lookups, damaged tables, and that only `octavo calibrate` measures."""

import functools
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from octavo.cli import app, kernels
from octavo.kernels import calibration, timing
from octavo.kernels.calibration import Entry
from octavo.kernels.quantize import triton as triton_quantize
from octavo.kernels.quantize.quantize_timing import quantizations
from octavo.kernels.registry import Backend, Op
from octavo.kernels.timing import CallTime, TimingResult, time_candidates
from octavo.numerics import RECIPES
from octavo.planner import roofline

GPU = torch.device("cuda", 0)
CASE = ("e4m3/row", "e4m3/row", "nt")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    calibration.clear_cache()
    yield tmp_path / "octavo" / "calibration"
    calibration.clear_cache()


def entry(shape=(1024, 1024, 1024), backend="triton", config=2, op="scaled_mm", case=CASE):
    times = {"microseconds": 10.0, "host_microseconds": 4.0, "others": {"torch_scaled": 12.5}}
    return Entry(op=op, case=case, shape=shape, backend=backend, config=config, **times)


def test_saved_entries_are_read_back(cache):
    file = calibration.save(GPU, [entry()])
    assert file.parent == cache and set(cache.iterdir()) == {file, file.with_suffix(".lock")}
    assert re.fullmatch(r"nvidia-h200-octavo.*-torch.*-triton.*-cuda.*\.json", file.name)
    calibration.clear_cache()
    assert calibration.best(GPU, "scaled_mm", CASE, (1024, 1024, 1024)) == entry()
    assert json.loads(file.read_text())["device"] == "NVIDIA H200"


def test_savers_at_the_same_time_lose_nothing():
    shapes = [(8 * n, 8, 8) for n in range(1, 17)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda shape: calibration.save(GPU, [entry(shape=shape)]), shapes))
    calibration.clear_cache()
    assert {e.shape for e in calibration.entries(GPU)} == set(shapes)


def test_saving_adds_and_replaces():
    calibration.save(GPU, [entry(), entry(shape=(8, 8, 8))])
    calibration.save(GPU, [entry(config=4), entry(shape=(64, 64, 64))])
    configs = {e.shape: e.config for e in calibration.entries(GPU)}
    assert configs == {(1024, 1024, 1024): 4, (8, 8, 8): 2, (64, 64, 64): 2}


def test_only_shapes_near_a_measured_one_use_its_choice():
    calibration.save(GPU, [entry(), entry(shape=(4096, 1024, 1024), config=3)])
    configs = {
        (1000, 1024, 1100): 2, (3000, 1024, 1024): 3, (1024, 1024, 2048): None, (0, 1024, 1024): None,
        (1024, 1024): None,
    }  # fmt: skip
    for shape, config in configs.items():
        result = calibration.best(GPU, "scaled_mm", CASE, shape)
        assert (result and result.config) == config, shape
    assert calibration.best(GPU, "scaled_mm", ("e4m3/row", "unit", "nn"), (1024, 1024, 1024)) is None
    assert calibration.best(GPU, "quantize", CASE, (1024, 1024, 1024)) is None


def test_other_devices_and_versions_have_tables_of_their_own(monkeypatch):
    calibration.save(GPU, [entry()])
    for module, name, value in ((torch.cuda, "get_device_name", lambda device: "H100"), (torch, "__version__", "2.99")):
        calibration.clear_cache()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert calibration.entries(GPU) == []


def test_a_cpu_has_nothing_to_look_up(monkeypatch):
    monkeypatch.setattr(calibration, "read", lambda file: pytest.fail("read a table for a CPU"))
    assert calibration.best(torch.device("cpu"), "scaled_mm", CASE, (1, 1, 1)) is None
    assert calibration.config(torch.device("cpu"), "quantize", ("e4m3/row",), 16, 16) is None
    assert "nothing to measure" in calibration.summary(torch.device("cpu"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"format": 2}', '{"format": 2, "device": "x", "entries": 7}'),
        '{"format": 2, "device": "x", "entries": [{"op": "x", "case": "c", "shape": [1]}]}',
        '{"format": 2, "device": "x", "entries": [{"op": "x", "case": "c", "shape": ["a"]}]}',
        '{"format": 1, "device": "x", "entries": []}',  # which chose without host times
    ],
)
def test_a_table_that_cannot_be_read_causes_one_warning_until_one_is_saved(text):
    file = calibration.save(GPU, [entry()])
    file.write_text(text)
    calibration.clear_cache()
    with pytest.warns(RuntimeWarning, match=f"{re.escape(str(file))} cannot be read .*`octavo calibrate` replaces it"):
        assert calibration.best(GPU, "scaled_mm", CASE, (1024, 1024, 1024)) is None
    assert calibration.entries(GPU) == []  # and no second warning
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        calibration.save(GPU, [entry()])
    assert calibration.entries(GPU) == [entry()]


def test_a_folder_that_cannot_be_written_is_an_error(cache):
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=rf"{re.escape(str(cache))} cannot be written .*set XDG_CACHE_HOME"):
        calibration.save(GPU, [entry()])
    assert calibration.entries(GPU) == []


def test_without_a_home_folder_a_warning_says_so(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    with pytest.warns(RuntimeWarning, match=r"cannot be opened \(no home directory\); running .*Set XDG_CACHE_HOME"):
        assert calibration.best(GPU, "scaled_mm", CASE, (8, 8, 8)) is None


def test_saving_is_all_or_nothing(cache, monkeypatch):
    calibration.save(GPU, [entry()])
    before = calibration.path(GPU).read_text()
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        calibration.save(GPU, [entry(config=5)])
    assert calibration.path(GPU).read_text() == before and len(list(cache.iterdir())) == 2  # with the lock


def make_op():
    op = Op(name="scaled_mm", cases={"": CASE}, probe=lambda backend, device, case: None)
    op.backends["first"] = Backend(name="first", run=lambda: "first")
    op.backends["triton"] = Backend(name="triton", run=lambda config=0: f"triton {config}")
    op.backends["slow"] = Backend(name="slow", run=lambda: "slow", unsupported_reason=lambda device, case: "too slow")
    op.backends["reference"] = Backend(name="reference", run=lambda: "reference")
    return op


def test_the_registry_uses_measurements_else_its_order():
    calibration.save(GPU, [entry(), entry(shape=(8, 8, 8), backend="slow", config=None)])
    op = make_op()
    assert op.choose(GPU, CASE, (1024, 1024, 1024)).run() == "triton 2"
    assert op.choose(GPU, CASE, (100, 1024, 1024)).run() == "first"
    assert op.choose(GPU, CASE, (8, 8, 8)).run() == "first"  # measured, but refused here
    assert op.choose(GPU, CASE).run() == "first"
    with op.force("reference"):
        assert op.choose(GPU, CASE, (1024, 1024, 1024)).run() == "reference"


def test_a_choice_is_looked_up_once(monkeypatch):
    calibration.save(GPU, [entry()])
    op = make_op()
    first = op.choose(GPU, CASE, (1024, 1024, 1024))
    monkeypatch.setattr(calibration, "best", lambda *arguments: pytest.fail("looked up again"))
    assert op.choose(GPU, CASE, (1024, 1024, 1024)) is first


def test_nothing_is_cached_during_graph_capture(monkeypatch):
    op = make_op()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert op.choose(GPU, CASE, (8, 8, 8)).run() == "first"
    assert not op._measured and not op._chosen


@pytest.mark.parametrize("name", RECIPES)
def test_measuring_times_every_candidate_and_names_the_fastest(monkeypatch, name):
    reference = timing.SCALED_MM.backends["reference"].run
    times = {"slow": CallTime(9.0, 1.0), "fast": CallTime(3.0, 2.0)}
    ran = []

    def candidate(label):
        def run(a, b, layout, dtype, bias, fast, config=None):
            ran.append((label, fast))
            return reference(a, b, layout, dtype, bias, fast)

        return label, Backend(name=label, run=run), {"slow": None, "fast": 1}[label]

    broken = "broken", Backend(name="broken", run=lambda *rest, config=None: torch.zeros(1)), 0
    candidates = [candidate("slow"), candidate("fast"), broken]
    monkeypatch.setattr(timing, "_candidates", lambda device, case: candidates)

    def timer(calls):
        for call in calls[:1]:
            call()
        return times[ran[-1][0]]

    for task in timing.fp8_gemms(RECIPES[name], [(32, 64, 48)]):
        result = time_candidates(task, task.candidates(torch.device("cpu")), timer)
        assert list(result.times) == ["fast", "slow"]
        assert (result.entry.backend, result.entry.config, result.entry.others) == ("fast", 1, {"slow": 9.0})
        assert (result.entry.microseconds, result.entry.host_microseconds) == (3.0, 2.0)
        assert result.entry.shape == task.shape and result.entry.case == task.case
        assert "ValueError" in result.skipped["broken"]
        assert ran[-1][1] == (task.case[2] == "nt")  # fast accumulation in forward only
        assert kernels._choices([result]).row_count == 1


@pytest.mark.parametrize(
    ("measured", "chosen"),
    [
        ({"cublas": (30, 5), "triton #0": (20, 90), "triton #1": (25, 80)}, "cublas"),  # the host sets the pace
        ({"cublas": (30, 5), "triton #0": (20, 15), "triton #1": (25, 10)}, "triton #0"),  # the GPU does
        ({"cublas": (4, 9), "triton #0": (7, 8), "triton #1": (3, 8.5)}, "triton #1"),  # the host, noise aside
    ],
)
def test_the_candidate_that_a_caller_waits_for_least_is_saved(measured, chosen):
    task = timing.fp8_gemms(RECIPES["rowwise"], [(16, 16, 16)])[0]
    times = {label: CallTime(*pair) for label, pair in measured.items()}
    choices = {label: (label.split()[0], label[-1]) for label in measured}
    candidates = [(label, choice, lambda label=label: [label]) for label, choice in choices.items()]
    result = time_candidates(task, candidates, lambda calls: times[calls[0]])
    assert next(iter(result.times)) == chosen
    assert result.entry.backend == chosen.split()[0] and result.entry.microseconds == measured[chosen][0]
    assert result.entry.host_microseconds == min(h for label, (_, h) in measured.items() if label[0] == chosen[0])


def test_products_are_timed_as_a_planned_linear_runs_them():
    """From the backend's plan, which the dispatcher's path would hide."""
    task, calls = timing.fp8_gemms(RECIPES["rowwise"], [(16, 16, 16)])[0], []
    plan = lambda *arguments: lambda *tensors: calls.append(tensors)  # noqa: E731
    backend = Backend(name="some", run=lambda *arguments: pytest.fail("ran without its plan"), plan=plan)
    (a, b), *_ = timing._operands(task, torch.device("cpu"))
    timing._prepared(backend, a, b, "nt")(a, b)
    assert [id(x) for x in calls[0]] == [id(x) for x in (a.data, b.data, a.scale, b.scale, None)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "nothing to calibrate on device type 'cpu'"),
        (("--shapes", "1,2"), "--shapes takes M,K,N"),
        (("--shapes", "0,2,3"), "--shapes takes M,K,N"),
        (("--recipe", "rowwis"), "did you mean 'rowwise'"),
        (("--device", "cda"), "device is auto, cpu, cuda"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_command_errors(arguments, message):
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    assert result.exit_code == 2 and message in result.stderr and "Traceback" not in result.output


def test_command_measures_prints_and_saves(monkeypatch):
    monkeypatch.setattr("octavo.cli.planning._device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())

    def measured(task, candidates, time):
        won = entry(shape=task.shape, case=task.case)
        times = {"triton 128x128 #0": CallTime(10.0, 4.0), "torch_scaled": CallTime(3.0, 12.5)}
        return TimingResult(task=task, times=times, entry=won)

    monkeypatch.setattr(kernels, "time_candidates", measured)
    monkeypatch.setattr(
        "octavo.cli.kernels.measure_host",
        lambda device, recipes: [entry(op="host", case=(r.name,), shape=roofline.HOST_SHAPE) for r in recipes],
    )
    result = CliRunner().invoke(app, ["calibrate", "--shapes", "64,128,256", "--recipe", "all"])
    assert result.exit_code == 0, result.output
    assert "25 %" in result.stdout and str(calibration.path(GPU)) in result.stdout.replace("\n", "")
    sizes = [(64, 128, 256)]
    tasks = [t for r in RECIPES.values() for t in (*timing.fp8_gemms(r, sizes), *quantizations(r, sizes))]
    expected = {(t.case, t.shape) for t in (*tasks, *timing.bf16_gemms(sizes))}
    expected |= {((r,), roofline.HOST_SHAPE) for r in RECIPES}
    assert "host time of a linear, forward and backward, µs: rowwise 10, tensorwise 10" in result.stdout
    assert len(calibration.entries(GPU)) == len(expected)
    assert str(calibration.path(GPU)) in calibration.summary(GPU)


@pytest.mark.thorough
def test_a_quantizer_whose_bytes_differ_is_left_out(monkeypatch):
    quantization = quantizations(RECIPES["rowwise"], [(64, 96, 160)])[0]
    right = triton_quantize.quantize

    def wrong(x, spec, fold, amax, scale, order, config):
        outputs = right(x, spec, fold, amax, scale, order, config)
        if config == 1:
            outputs[0].view(torch.uint8)[3, 5] ^= 1
        return outputs

    monkeypatch.setattr(triton_quantize, "quantize", wrong)
    candidates = quantization.candidates(torch.device("cpu"))
    result = time_candidates(quantization, candidates, lambda calls: CallTime(1.0, 1.0))
    assert [label[-2:] for label in result.skipped] == ["#1"]
    assert "differs from reference" in next(iter(result.skipped.values()))


def test_a_quantizer_takes_the_configuration_that_was_measured(monkeypatch):
    lookups = []

    @functools.lru_cache
    def config(device, op, case, rows, columns):
        lookups.append((op, case, rows, columns))
        return 1 if rows == 64 else 99

    monkeypatch.setattr(calibration, "config", config)
    triton_quantize._fastest.cache_clear()
    used = []
    launches = triton_quantize.launches

    def noted(task, config=0, *strip):
        used.append(config)
        return launches(task, config, *strip)

    monkeypatch.setattr(triton_quantize, "launches", noted)
    for rows in (64, 128, 32):  # measured; not measured, and the same in few rows
        triton_quantize.quantize(torch.randn(rows, 48), RECIPES["rowwise"].x, None, None, None, "both")
    triton_quantize._fastest.cache_clear()
    assert used == [1, 0, 2]
    assert lookups[0] == ("quantize", ("e4m3/row", "both", "nothing"), 64, 48)
