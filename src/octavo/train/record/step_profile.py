"""`run.profile`: PyTorch's profiler over some steps of a run, as a trace for Perfetto and a table of operations."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")

TRACE, TABLE = "profile.json", "profile.txt"
ROWS = 40
"""Operations in the table, the longest first."""


class StepProfile:
    """Profiles the steps from the first to the last of `steps`, counted from 1; none for None.

    A run that ends in between writes what it has.
    """

    def __init__(self, steps: Sequence[int] | None, out: Path, note: Callable[[str], None]) -> None:
        self._first, self._last = steps or (0, 0)
        self._out, self._note = out, note
        self._profiler: Any = None
        self._taken = 0

    def run(self, step: int, take: Callable[[], T]) -> T:
        """Take a step, profiled if it is one of these."""
        if step == self._first or (self._first < step <= self._last and not self._taken):  # or resumed in between
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()
        result = take()
        if self._profiler is not None:
            self._taken += 1
            if step == self._last:
                self.finish()
        return result

    def finish(self) -> None:
        """Write what was profiled, if anything was."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self._out / TRACE))
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=ROWS, max_name_column_width=80)
        (self._out / TABLE).write_text(f"{self._taken} steps\n{table}\n")
        self._note(f"profiled {self._taken} steps: {self._out / TABLE}, and {TRACE} for ui.perfetto.dev")
