from types import SimpleNamespace

import pytest
import torch

from octavo.cli import kernels
from octavo.kernels import calibration, probe_cache
from octavo.kernels.registry import Backend, Op

GPU = torch.device("cuda", 0)
CASE = ("e4m3/row", "nt")


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


def probes(result: str | None = None, device: torch.device = GPU) -> list[str]:
    """The backends that a new process probes for one case."""
    probed = []

    def probe(backend, device, case):
        probed.append(backend.name)
        return result

    op = Op(name="answer", cases={"": CASE}, probe=probe)
    for name in ("triton", "reference"):
        op.backends[name] = Backend(name=name, run=lambda: 42)
    probe_cache._read.cache_clear()
    assert op.unavailable_reason(op.backends["triton"], device, CASE) == (result if probed else None)
    return probed


def test_a_probe_that_passed_does_not_run_in_the_next_process(gpu):
    assert [probes() for _ in range(3)] == [["triton"], [], []]
    assert probes(device=torch.device("cpu")) == ["triton"]


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
