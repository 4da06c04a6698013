"""What a run knows about its steps, in `setup.json`: for `octavo watch`, which reads a run that has not ended."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from octavo.train.disk import write_file
from octavo.train.record.json_lines import NonNegative, read_record, record
from octavo.train.record.metrics import RunResult

SETUP_FILE = "setup.json"


@dataclass(frozen=True, kw_only=True)
class DataSize:
    """The data of a run."""

    rows: int
    """Sequences or images of an epoch."""
    documents: NonNegative | None = None
    """Documents; None where the data has none."""
    tokens: NonNegative | None = None
    """Tokens of them."""


@dataclass(frozen=True, kw_only=True)
class ExpectedStep:
    """What the planner predicts for a step of the run."""

    gpu: str
    """The GPU of the prediction."""
    flops: float
    """Operations of the model in a step, on all GPUs, without recomputation."""
    bf16_flops: float
    """bf16 peak of all GPUs, in FLOP/s."""
    fp8_flops: float
    """FP8 peak of all GPUs, in FLOP/s; 0 where they have none."""
    memory: NonNegative | None = None
    """Largest number of bytes of tensors on a GPU; None where the layout has no prediction."""
    tokens_per_s: float | None = None
    """Tokens per second of all GPUs; None as `memory`."""


@dataclass(kw_only=True)
class RunSetup:
    """What a run knows before its first step, and what it predicts after it."""

    started: float
    """When training began or was resumed, in seconds since 1970."""
    steps: int
    """Steps of the whole run."""
    summary: RunResult
    """The summary before the first step."""
    data: DataSize | None
    """Size of the data; None where the task does not count it."""
    expected: ExpectedStep | None
    """The prediction; None until the first step has ended, on a CPU, and where there is none."""

    def write(self, out: Path) -> None:
        """Write `setup.json` into the output folder `out`, replacing the earlier one atomically."""
        write_file(out / SETUP_FILE, json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, out: Path) -> "RunSetup | None":
        """Read `setup.json` from `out`; None if there is none. Raises ValueError for another content."""
        path = out / SETUP_FILE
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        model = record(
            RunSetup, summary=RunResult.model(), data=record(DataSize) | None, expected=record(ExpectedStep) | None
        )
        fields = read_record(content, model, f"{path} is not the setup of a run")
        data, expected = fields["data"], fields["expected"]
        return cls(
            **fields
            | {
                "summary": RunResult.from_json(fields["summary"]),
                "data": data and DataSize(**data),
                "expected": expected and ExpectedStep(**expected),
            }
        )
