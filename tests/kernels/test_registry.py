import pytest
import torch

from octavo.kernels.gemm import SCALED_MM, accelerated
from octavo.kernels.registry import OPS, Backend, Op, status
from octavo.numerics import RECIPES

CPU = torch.device("cpu")


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
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return torch.device("cuda", 0)


def test_emulation_on_a_gpu_warns_once_whatever_the_shapes(gpu):
    op = make_op(unsupported_reason=lambda device, case: "not today")
    with pytest.warns(RuntimeWarning, match="answer .* is emulated on cuda:0: .* triton: not today") as caught:
        for rows in (1, 2, 3):
            assert op.choose(gpu, (), (rows, 4)).name == "reference"
    assert len(caught) == 1


def test_the_cache_of_choices_by_shape_is_bounded(monkeypatch, gpu):
    from octavo.kernels import registry

    monkeypatch.setattr(registry, "MAX_CACHED_SHAPES", 10)
    op = make_op()
    for rows in range(100):
        assert op.choose(gpu, (), (rows, 4)).name == "triton"
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
    calls = []

    def probe(backend, device, case):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")

    op = make_op(probe=probe)
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
    device = torch.device("cuda", 0)
    for name, op in OPS.items():
        case = next(iter(op.cases.values()))
        for backend in op.backends.values():
            why = backend.unsupported_reason(device, case)
            if reason is None:
                assert why is None or "sm_" not in why, f"{name} {backend.name}: {why}"
            elif backend.name not in ("torch_bf16", "reference"):
                assert reason in why, f"{name} {backend.name}: {why}"
