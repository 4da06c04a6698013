"""How a backend is chosen, probed before its first use, and what of that the next process knows."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from octavo.cli import kernels
from octavo.kernels import calibration, probe_cache
from octavo.kernels.gemm import SCALED_MM, accelerated
from octavo.kernels.registry import OPS, Backend, Op, status
from octavo.numerics import RECIPES

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_every_case_has_exactly_one_chosen_backend_and_every_other_a_reason():
    rows = status("cpu")
    for op in {row.op for row in rows}:
        assert [row.backend for row in rows if row.op == op and row.chosen] == ["reference"]
    assert all(bool(row.reason) != row.serves for row in rows)
    assert {f"scaled_mm {name} forward" for name in RECIPES} <= {row.op for row in rows}


def test_cpu_is_reported_as_emulation():
    assert not any(accelerated(recipe, CPU) for recipe in RECIPES.values())


def make_op(run=lambda: 42, probe=None, **options):
    def compares(backend, device, case):
        return None if backend.run() == 42 else "wrong number"

    op = Op(name="answer", cases={"": ()}, probe=probe or compares)
    op.backends["reference"] = Backend(name="reference", run=lambda: 42)
    op.backends["triton"] = Backend(name="triton", run=run, **options)
    return op


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A pretended GPU with a driver, and a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(probe_cache, "cuda_driver_version", lambda: 12080)
    monkeypatch.setattr(probe_cache, "DRIVER", tmp_path / "driver")
    probe_cache._read.cache_clear()
    yield tmp_path
    probe_cache._read.cache_clear()
    calibration.clear_cache()


def test_emulation_on_a_gpu_warns_once_whatever_the_shapes(gpu):
    op = make_op(unsupported_reason=lambda device, case: "not today")
    with pytest.warns(RuntimeWarning, match="answer .* is emulated on cuda:0: .* triton: not today") as caught:
        for rows in (1, 2, 3):
            assert op.choose(GPU, (), (rows, 4)).name == "reference"
    assert len(caught) == 1


def test_the_cache_of_choices_by_shape_is_bounded(monkeypatch, gpu):
    monkeypatch.setattr("octavo.kernels.registry.MAX_CACHED_SHAPES", 10)
    op = make_op()
    for rows in range(100):
        assert op.choose(GPU, (), (rows, 4)).name == "triton"
    assert len(op._measured) <= 10


def test_an_exception_of_a_kernel_is_the_reason():
    def broken():
        raise RuntimeError("no kernel image is available\nfor this device")

    op = make_op(broken)
    assert op.choose(CPU, ()).name == "reference"
    assert op.unavailable_reason(op.backends["triton"], CPU, ()) == "RuntimeError: no kernel image is available"


def test_force_overrides_and_restores():
    with SCALED_MM.force("torch_scaled"):
        assert SCALED_MM.choose(CPU, ("e4m3/row", "e4m3/row", "nt")).name == "torch_scaled"
    assert SCALED_MM.choose(CPU, ("e4m3/row", "e4m3/row", "nt")).name == "reference"
    with pytest.raises(ValueError, match="no backend 'torch_scale'.*did you mean 'torch_scaled'"):
        with SCALED_MM.force("torch_scale"):
            pass


def test_a_probe_sees_real_tensors_under_fake_tensor_mode():
    from torch._subclasses.fake_tensor import FakeTensorMode

    def probe(backend, device, case):
        return None if torch.ones(2, device="cpu").sum().item() == 2 else "fake"

    op = make_op(probe=probe)
    with FakeTensorMode():
        assert op.choose(CPU, ()).name == "triton"


def test_running_out_of_memory_is_not_cached():
    op = make_op(probe=mock.Mock(side_effect=[torch.OutOfMemoryError("CUDA out of memory"), None]))
    with pytest.raises(torch.OutOfMemoryError):
        op.choose(CPU, ())
    assert op.choose(CPU, ()).name == "triton"


def test_gemm_probe_runs_every_kind_of_product_of_a_linear():
    seen = set()

    def run(a, b, layout, out_dtype, bias, fast_accum):
        seen.add((layout, out_dtype, bias is not None, fast_accum))
        return SCALED_MM.backends["reference"].run(a, b, layout, out_dtype, bias, fast_accum)

    for layout in ("nt", "nn"):
        case = ("e4m3/row", "e4m3/row" if layout == "nt" else "unit", layout)
        assert SCALED_MM.probe(Backend(name="some", run=run), CPU, case) is None
    dtypes = (torch.bfloat16, torch.float32)
    expected = {("nt", dtype, biased, True) for dtype in dtypes for biased in (False, True)}
    assert seen == expected | {("nn", dtype, False, False) for dtype in dtypes}


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [((8, 0), None, "sm_80"), ((9, 4), "6.3", "ROCm 6.3"), ((8, 9), None, None), ((12, 0), None, None)],
)
def test_gpus_without_fp8_run_no_kernel_of_octavo(monkeypatch, capability, hip, reason):
    """MI300X reports capability (9, 4); an A100 would fail in ptxas."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    for name, op in OPS.items():
        case = next(iter(op.cases.values()))
        for backend in op.backends.values():
            why = backend.unsupported_reason(GPU, case)
            if reason is None:
                assert why is None or "sm_" not in why, f"{name} {backend.name}: {why}"
            elif backend.name not in ("torch_bf16", "reference"):
                assert reason in why, f"{name} {backend.name}: {why}"


# --- probes that passed in another process ---


def probes(result: str | None = None, device: torch.device = GPU) -> list[str]:
    """The backends that a new process probes for one case."""
    probed = []

    def probe(backend, device, case):
        probed.append(backend.name)
        return result

    op = make_op(probe=probe)
    probe_cache._read.cache_clear()
    assert op.unavailable_reason(op.backends["triton"], device, ()) == (result if probed else None)
    return probed


def test_a_probe_that_passed_does_not_run_in_the_next_process(gpu):
    assert [probes() for _ in range(3)] == [["triton"], [], []]
    assert probes(device=CPU) == ["triton"]


def test_a_probe_that_failed_runs_again(gpu):
    assert [probes("wrong number"), probes("wrong number"), probes(), probes()] == [["triton"]] * 3 + [[]]


CHANGES = {
    "GPU": (torch.cuda, "get_device_name", lambda device: "another GPU"),
    "capability": (torch.cuda, "get_device_capability", lambda device: (10, 0)),
    "CUDA": (probe_cache, "cuda_driver_version", lambda: 13000),
    "torch": (torch, "__version__", "2.99"),
}


@pytest.mark.parametrize("change", [*CHANGES, "driver", "sources"])
def test_another_gpu_driver_version_or_kernel_is_probed(gpu, monkeypatch, change):
    probes()
    if change in CHANGES:
        monkeypatch.setattr(*CHANGES[change])
    elif change == "driver":
        (gpu / "driver").write_text("NVRM version 580")
    else:
        (gpu / "octavo/kernels").mkdir(parents=True)
        (gpu / "octavo/kernels/gemm.py").write_text("changed")
        monkeypatch.setattr(probe_cache, "__file__", str(gpu / "octavo/kernels/probe_cache.py"))
        probe_cache._digest_of_sources.cache_clear()
    assert probes() == ["triton"]
    probe_cache._digest_of_sources.cache_clear()


@pytest.mark.parametrize("content", ["", "{", '{"a": 1}', "[1, 2]", "[[[]]]", "\x00\xff"])
def test_a_damaged_file_costs_probes_only(gpu, content):
    probes()
    path = probe_cache.path(GPU)
    path.write_text(content)
    assert [probes(), probes()] == [["triton"], []]


def test_a_folder_that_cannot_be_written_costs_probes_only(gpu):
    (gpu / "octavo").write_text("a file")
    assert [probes(), probes()] == [["triton"]] * 2


def test_processes_keep_each_others_results(gpu):
    assert not probe_cache.has_passed(GPU, ("a",))
    path = probe_cache.path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text('[["b"]]')
    probe_cache.add(GPU, ("a",))
    assert probe_cache.has_passed(GPU, ("a",)) and probe_cache.has_passed(GPU, ("b",))


def test_nothing_is_stored_without_a_driver_and_doctor_forgets(gpu, monkeypatch):
    probes()
    path = probe_cache.path(GPU)
    probe_cache.forget(GPU)
    assert not path.exists() and probes() == ["triton"] and path.exists()
    monkeypatch.setattr(probe_cache, "cuda_driver_version", lambda: 0)
    assert probe_cache.path(GPU) is None and probes() == ["triton"]


def test_doctor_probes_afresh_and_shows_the_file(gpu, monkeypatch):
    probes()
    properties = SimpleNamespace(name="some GPU", major=9, minor=0, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(kernels, "accelerated", lambda recipe, device: False)
    probed = []
    monkeypatch.setattr(kernels, "status", lambda device: probed.extend(probes()) or [])
    assert kernels._examine(GPU)["gpu"]["passed probes"] == str(probe_cache.path(GPU)) and probed == ["triton"]
