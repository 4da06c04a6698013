"""The table of GPUs, and descriptions of others."""

import pytest

from octavo.planner.devices import DEVICES, DRIVER_NAMES, Gpu, find_gpu, gpu_by_driver_name


def test_every_gpu_says_where_its_figures_are_from():
    for name, gpu in DEVICES.items():
        assert gpu.rates_from != "given", name
        assert gpu.efficiency_from, name
        assert gpu.fp8_tflops == 0 or 1.9 < gpu.fp8_tflops / gpu.bf16_tflops < 2.1, name  # both dense


def test_measured_times_are_of_the_h100_alone():
    measured = DEVICES["h100"].measured
    assert measured.device == "NVIDIA H100 80GB HBM3"
    assert measured.seconds("matmul", ("bf16", "bf16", "nt"), (8192, 8192, 8192)) == pytest.approx(1446.14e-6)
    assert all(gpu.measured is None for name, gpu in DEVICES.items() if name != "h100")
    assert find_gpu({"like": "h100", "bf16_tflops": 800}).measured is None


SPELLINGS = {
    "h100": "h100", "H100": "h100", "H100 SXM": "h100", "NVIDIA H100": "h100", "h100_sxm": "h100", "4090": "rtx4090",
    "H100 PCIe": "h100-pcie", "h100-pcie": "h100-pcie", "RTX 4090": "rtx4090", "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA-H100": "h100", "nvidia_h100": "h100", "h-100": "h100", "mi-300x": "mi300x", "b-200": "b200",
    "l40-s": "l40s", "A100 SXM": "a100",
}  # fmt: skip
DRIVERS = {
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H200": "h200", "NVIDIA L4": "l4",
    "NVIDIA A100-SXM4-80GB": "a100", "NVIDIA L40S": "l40s", "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090", "NVIDIA B200": "b200", "AMD Instinct MI300X": "mi300x",
} | dict.fromkeys((  # another memory, another rate
    "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA L40",
    "NVIDIA A100-SXM-64GB", "NVIDIA H100 SXM 64GB", "NVIDIA H100 SXM 94GB",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 5090 D", "NVIDIA GB200", "Tesla T4", "",
))  # fmt: skip


@pytest.mark.parametrize(("names", "find"), [(SPELLINGS, find_gpu), (DRIVERS, gpu_by_driver_name)])
def test_names_in_any_spelling_and_those_that_drivers_give(names, find):
    for name, key in names.items():
        assert find(name) is DEVICES.get(key), name
    assert find_gpu(DEVICES["l4"]) is DEVICES["l4"]
    with pytest.raises(ValueError, match="A100-SXM-40GB"):
        find_gpu("A100-SXM-40GB")
    assert find_gpu({"like": "H100 PCIe"}).bf16_tflops == DEVICES["h100-pcie"].bf16_tflops


def test_every_gpu_has_a_name_that_drivers_give():
    assert {key for _, key in DRIVER_NAMES} - {""} == set(DEVICES)


def test_a_gpu_described_in_toml(tmp_path):
    path = tmp_path / "slow.toml"
    path.write_text('like = "h100"\nname = "H100 at 500 W"\nbf16_tflops = 700\n', encoding="utf-8")
    for source in (path, str(path)):
        gpu = find_gpu(source)
        assert (gpu.name, gpu.bf16_tflops, gpu.fp8_tflops) == ("H100 at 500 W", 700, 1979)
        assert gpu.rates_from == "given"
    whole = {"name": "X", "bf16_tflops": 1, "fp8_tflops": 2, "memory_tbs": 1, "memory_gib": 2, "link_gbs": 1,
             "multiprocessors": 10}  # fmt: skip
    assert find_gpu(whole) == Gpu(**whole)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ("h10", "unknown GPU 'h10'.*did you mean 'h100'.*Known: h100,.*TOML file.*like = \"h100\".*memory_tbs"),
        ("Tesla T4", "unknown GPU 'Tesla T4'. Known: "),
        ("missing.toml", "cannot read the description of a GPU from missing.toml"),
        ({"like": "h100", "memory_tb": 4}, r"has no 'memory_tb' \(did you mean 'memory_tbs'\?\)"),
        ({"like": "h100", "memory_tbs": "fast"}, "memory_tbs is a number; got 'fast'"),
        ({"like": "h100", "memory_tbs": True}, "memory_tbs is a number; got True"),
        ({"like": "h100", "native_mx": 1}, "native_mx is true or false"),
        ({"like": "h100", "memory_tbs": 0}, "memory_tbs is a finite number, above 0; got 0"),
        ({"like": "h100", "memory_tbs": float("inf")}, "memory_tbs is a finite number, above 0; got inf"),
        ({"like": "h100", "memory_tbs": float("nan")}, "memory_tbs is a finite number, above 0; got nan"),
        ({"like": "h100", "fp8_tflops": -1}, "fp8_tflops is a finite number, 0 or more; got -1"),
        ({"like": "h100", "memory_gib": 1}, "memory_gib is a finite number, above 1; got 1"),
        ({"like": "h100", "multiprocessors": 1.5}, "multiprocessors is a whole number; got 1.5"),
        ({"like": "h100", "fp8_efficiency": 70}, "is a share, above 0 and at most 1; got 70"),
        ({"like": 7}, "the table: like is one of h100, .*; got 7"),
        ({"like": "h1"}, r"the table: like is one of h100, .*; got 'h1' \(did you mean 'h100'\?\)"),
        ({"like": "h100", "measured": 7}, "has no 'measured'"),
        ({"name": "X", "bf16_tflops": 1}, "fp8_tflops, memory_tbs.* missing"),
    ],
    ids=str,
)
def test_mistakes(description, message):
    with pytest.raises(ValueError, match=message):
        find_gpu(description)
