"""Gpu: the properties of a GPU that predictions use, a table of known GPUs, and a way to describe another one."""

import json
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from octavo.kernels.calibration import Entry, UnknownFormatError, read
from octavo.kernels.registry import Case, Shape
from octavo.numerics.suggestions import nearest

MAX_INTERPOLATION_FACTOR = 2.0  # Largest ratio of two neighbouring measured sizes to interpolate between


class Measurements:
    """Times by op, case and shape."""

    def __init__(self, device: str, entries: Iterable[Entry]) -> None:
        self.device = device
        self._times: dict[tuple[str, Case], dict[Shape, float]] = {}
        for entry in entries:
            self._times.setdefault((entry.op, entry.case), {})[entry.shape] = entry.microseconds * 1e-6

    def __len__(self) -> int:
        return sum(map(len, self._times.values()))

    def seconds(self, op: str, case: Case, shape: Shape) -> float | None:
        """Return the time of one call; None without a measurement at or around this shape."""
        times = self._times.get((op, case), {})
        if shape in times:
            return times[shape]
        for dim in range(len(shape)):
            line = {s[dim]: t for s, t in times.items() if s[:dim] == shape[:dim] and s[dim + 1 :] == shape[dim + 1 :]}
            if (seconds := _interpolated(line, shape[dim])) is not None:
                return seconds
        return None


def read_measurements(path: Path) -> Measurements:
    try:
        device, entries = read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the calibration from {path}: {error}") from None
    except UnknownFormatError as error:
        remedy = "another release of Octavo wrote it. Run `octavo calibrate` on that GPU again"
        raise ValueError(f"{path} has {error}: {remedy}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path} is not a table of `octavo calibrate` ({type(error).__name__}: {error})"
        raise ValueError(f"{problem}; the last line that it prints names its table") from None
    return Measurements(device, entries)


def _interpolated(times: dict[int, float], size: int) -> float | None:
    sizes: Sequence[int] = sorted(times)
    at = bisect_left(sizes, size)
    if not 0 < at < len(sizes) or sizes[at] > MAX_INTERPOLATION_FACTOR * sizes[at - 1]:
        return None
    low, high = sizes[at - 1], sizes[at]
    return times[low] + (times[high] - times[low]) * (size - low) / (high - low)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """The properties of a GPU that the roofline uses."""

    name: str  # Name in tables
    bf16_tflops: float  # Peak dense bf16 rate, TFLOP/s
    fp8_tflops: float  # Peak dense FP8 rate, TFLOP/s; 0 without FP8 matrix units
    memory_tbs: float  # Memory bandwidth, TB/s
    memory_gib: float  # Memory size in GiB, as drivers report it: the advertised size minus what error correction takes
    link_gbs: float  # Bandwidth to other GPUs of the machine, GB/s per direction
    multiprocessors: int  # Number of multiprocessors: output tiles computed at a time
    network_gbs: float = 50.0  # Bandwidth to other machines, GB/s per direction, as is usual with this GPU
    native_mx: bool = False  # Whether its matrix units apply MX scales themselves
    capability: int = 0  # 90 for sm_90: which scaled products PyTorch has. 0: of another vendor, assumed to have all
    bf16_efficiency: float = 0.80  # Share of the peak that large bf16 products reach
    fp8_efficiency: float = 0.70  # Share of the peak that large FP8 products reach with scales by tensor
    row_efficiency: float = 1.0  # Share of that rate that they reach with scales by row
    exact_efficiency: float = 1.0  # Share of the rate by tensor that backward products, which sum exactly, reach
    row_exact_efficiency: float = 1.0  # The same with scales by row
    block_efficiency: float = 0.62  # The same with scales by block along the contraction
    triton_efficiency: float = 0.50  # Largest share of the peak of products that PyTorch lacks and Triton computes
    attention_efficiency: float = 0.40  # Share of the bf16 peak that fused attention reaches
    memory_efficiency: float = 0.90  # Share of the bandwidth that large copies reach
    maxima_efficiency: float = 1.0  # Share of the bandwidth of copies that a pass which finds maxima of columns reaches
    link_efficiency: float = 0.80  # Share of a link's rate that collectives reach
    launch_us: float = 2.5  # Time of the smallest kernel when launches are queued, µs
    host_us: float = 8.0  # Host time per operation of eager PyTorch, µs
    rates_from: str = "given"  # Source of the rates
    efficiency_from: str = "assumed: an H200's, published, and no loss by exact accumulation"
    # Times of products and quantizations, as of `octavo calibrate`, which take precedence over the fields above.
    measured: Measurements | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        for key, value in self.to_json().items():
            if isinstance(value, str | bool) or (key in _MAY_BE_ZERO and value == 0):
                continue
            if key.endswith("_efficiency") and not 0 < value <= 1:
                raise ValueError(f"{self.name}: {key} is a share, above 0 and at most 1; got {value!r}")
            least = 1 if key == "memory_gib" else 0  # `usable` reserves 1 GiB
            if not least < value < math.inf:
                bound = "0 or more" if key in _MAY_BE_ZERO else f"above {least}"
                raise ValueError(f"{self.name}: {key} is a finite number, {bound}; got {value!r}")
        for key in ("multiprocessors", "capability"):
            if getattr(self, key) != int(getattr(self, key)):
                raise ValueError(f"{self.name}: {key} is a whole number; got {getattr(self, key)!r}")

    def to_json(self) -> dict[str, Any]:
        """Return all fields but the measurements as a dictionary; as TOML, it describes this GPU."""
        return {name: getattr(self, name) for name in _field_types()}

    @property
    def usable(self) -> int:
        """Bytes of memory available to tensors: all but 1 GiB for the CUDA context and workspaces."""
        return int((self.memory_gib - 1.0) * 2**30)

    @property
    def bandwidth(self) -> float:
        """Bytes/s, read and written, that large copies reach."""
        return self.memory_tbs * 1e12 * self.memory_efficiency

    @property
    def link(self) -> float:
        """Bytes/s that collectives reach between GPUs of a machine, per GPU and direction."""
        return self.link_gbs * 1e9 * self.link_efficiency

    @property
    def network(self) -> float:
        """The same between machines."""
        return self.network_gbs * 1e9 * self.link_efficiency


def _field_types() -> dict[str, Any]:
    return {field.name: field.type for field in fields(Gpu) if field.name != "measured"}


_MAY_BE_ZERO = ("fp8_tflops", "launch_us", "host_us", "capability")

DEVICES: dict[str, Gpu] = {}  # Known GPUs by their short name
_ALIASES = {"h100-sxm": "h100", "h200-sxm": "h200", "4090": "rtx4090", "5090": "rtx5090", "a100-sxm": "a100"}


def find_gpu(device: str | Path | Mapping[str, Any] | Gpu) -> Gpu:
    """Return the GPU for a name, a file, a table or a `Gpu`."""
    if isinstance(device, Gpu):
        return device
    if isinstance(device, Mapping):
        return _gpu_from_table(device, "the table")
    if not isinstance(device, str | Path):
        raise TypeError(f"a device is a name, the path of a TOML file, or a table; got {type(device).__name__}")
    if isinstance(device, Path) or device.endswith(".toml"):
        import tomllib  # slow to import: it compiles large regular expressions

        path = Path(device)
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"cannot read the description of a GPU from {path}: {error}") from None
        return _gpu_from_table(table, str(device))
    if (gpu := _gpu_by_name(device)) is None:
        problem = f"unknown GPU {device!r}{nearest(device.lower(), DEVICES)}. Known: {', '.join(DEVICES)}"
        remedy = 'For another GPU pass the path of a TOML file: like = "h100", name = "Other", and a line such as'
        remedy += f" bf16_tflops = 800 for each property that differs. Properties: {', '.join(_field_types())}"
        raise ValueError(f"{problem}. {remedy}")
    return gpu


def _gpu_by_name(name: str) -> Gpu | None:
    key = "-".join(name.lower().replace("_", " ").replace("-", " ").removeprefix("nvidia ").split())
    key = _ALIASES.get(key, key if key in DEVICES else key.replace("-", ""))
    return DEVICES.get(key) or gpu_by_driver_name(name)


DRIVER_NAMES = (
    (("h100", "pcie"), "h100-pcie"), (("h100", "hbm3"), "h100"), (("h200", "nvl"), ""), (("h200",), "h200"),
    (("h800", "pcie"), ""), (("h800",), "h800"), (("a100", "sxm4", "80gb"), "a100"),
    (("l40s",), "l40s"), (("l4",), "l4"),
    (("rtx", "4090", "laptop"), ""), (("rtx", "4090", "d"), ""), (("rtx", "4090"), "rtx4090"),
    (("rtx", "5090", "laptop"), ""), (("rtx", "5090", "d"), ""), (("rtx", "5090"), "rtx5090"),
    (("b200",), "b200"), (("mi300x",), "mi300x"),
)  # fmt: skip
"""Words of a driver's name for a GPU, and the key in `DEVICES`. The first entry whose words all occur wins. The key is
empty for a GPU whose name resembles a known one but that is not in the table."""


def gpu_by_driver_name(name: str) -> Gpu | None:
    """Return the GPU with this driver name, such as "NVIDIA H100 80GB HBM3"; None if the table lacks it."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    key = next((key for required, key in DRIVER_NAMES if words.issuperset(required)), "")
    return DEVICES.get(key)


def with_measurements(gpu: Gpu, calibration: str | Path | None) -> Gpu:
    """Add measured times to a GPU: those of a file, or this machine's if this is its GPU."""
    if calibration is not None:
        measured = read_measurements(Path(calibration))
        measured_gpu = gpu_by_driver_name(measured.device)
        if measured_gpu is not None and measured_gpu.name != gpu.name:
            problem = f"{calibration} was measured on {measured.device}, not on {gpu.name}"
            raise ValueError(f"{problem}: pass the table of that GPU, or plan for {measured_gpu.name}")
        return replace(gpu, measured=measured)
    import torch

    if torch.cuda.is_available():
        from octavo.kernels import calibration as tables

        name, local = torch.cuda.get_device_name(), torch.device("cuda", torch.cuda.current_device())
        if gpu_by_driver_name(name) == gpu and (entries := tables.entries(local)):
            return replace(gpu, measured=Measurements(name, entries))
    return gpu


def _gpu_from_table(table: Mapping[str, Any], where: str) -> Gpu:
    types, entries = _field_types(), dict(table)
    like = entries.pop("like", None)
    base = _gpu_by_name(str(like))
    if like is not None and base is None:
        hint = nearest(str(like).lower(), DEVICES)
        raise ValueError(f"{where}: like is one of {', '.join(DEVICES)}; got {like!r}{hint}")
    for key, value in entries.items():
        if key not in types:
            raise ValueError(f"{where}: a GPU has no {key!r}{nearest(key, types)}. It has: like, {', '.join(types)}")
        expected = "a string" if types[key] is str else "true or false" if types[key] is bool else "a number"
        if not isinstance(value, _TYPES[expected]) or (isinstance(value, bool) and expected != "true or false"):
            raise ValueError(f"{where}: {key} is {expected}; got {value!r}")
    if base is not None:
        return replace(base, **{"measured": None, "rates_from": "given", "name": f"like {like}", **entries})
    if missing := [name for name in _REQUIRED if name not in entries]:
        raise ValueError(f'{where}: {", ".join(missing)} missing; give them, or like = "h100" to take them from there')
    return Gpu(**entries)


_TYPES: dict[str, tuple[type, ...]] = {"a string": (str,), "true or false": (bool,), "a number": (int, float)}
_REQUIRED = [field.name for field in fields(Gpu) if field.default is MISSING]

# The known GPUs: gpus.json has what data sheets say, and h100.json what the benchmark `rates` (docs/log.md) measured.


def _known_gpus() -> None:
    folder = Path(__file__).parent
    shares = json.loads((folder / "h100.json").read_text("utf-8"))["gpu"]
    for key, table in json.loads((folder / "gpus.json").read_text("utf-8")).items():
        DEVICES[key] = _gpu_from_table(table, key)
        if key == "h100":
            source = f"{shares['efficiency_from']}; {table['efficiency_from']}"
            measured = read_measurements(folder / "h100.json")
            DEVICES[key] = replace(DEVICES[key], **shares | {"efficiency_from": source}, measured=measured)


_known_gpus()
