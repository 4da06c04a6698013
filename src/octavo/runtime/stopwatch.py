"""The seconds of a run's start-up, stage by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

Stages = dict[str, dict[str, float]]
"""Wall seconds ("wall") and CPU seconds of all threads of this process ("cpu") of each stage."""
_BLOCKS: Stages = {}  # Of the blocks in `timed` since the last lap


class Stopwatch:
    """Divides the time since it was made into stages, without gaps, until the first step."""

    def __init__(self) -> None:
        self.stages: Stages = {}  # The seconds of each stage, in order
        self.running = True  # Whether the first step has yet to end
        _BLOCKS.clear()
        self._last = _now()

    def lap(self, stage: str) -> None:
        """Count the time since the last call for `stage`, which may have some already, but for blocks in `timed`."""
        now = _now()
        _add(self.stages, stage, {kind: now[kind] - before for kind, before in self._last.items()})
        for block, seconds in _BLOCKS.items():
            _add(self.stages, block, seconds)
            _add(self.stages, stage, {kind: -value for kind, value in seconds.items()})
        _BLOCKS.clear()
        self._last = now

    def finish(self, stage: str) -> str:
        """End the last stage. Returns the stages in a line, the shortest ones summed up."""
        self.lap(stage)
        self.running = False
        wall = {name: seconds["wall"] for name, seconds in self.stages.items()}
        total = sum(wall.values())
        shown = {name: seconds for name, seconds in wall.items() if seconds >= max(0.05, 0.01 * total)}
        parts = [f"{name} {seconds:.1f}" for name, seconds in shown.items()]
        cpu = sum(seconds["cpu"] for seconds in self.stages.values())
        rest = total - sum(shown.values())
        return f"first step after {total:.1f} s ({cpu:.1f} of CPUs): {', '.join(parts)}, others {rest:.1f}"


@contextmanager
def timed(stage: str) -> Iterator[None]:
    """Count the block for a stage of its own, whatever stage it runs in."""
    before = _now()
    try:
        yield
    finally:
        now = _now()
        _add(_BLOCKS, stage, {kind: now[kind] - value for kind, value in before.items()})


def _now() -> dict[str, float]:
    return {"wall": time.perf_counter(), "cpu": time.process_time()}


def _add(stages: Stages, stage: str, seconds: dict[str, float]) -> None:
    entry = stages.setdefault(stage, {"wall": 0.0, "cpu": 0.0})
    for kind, value in seconds.items():
        entry[kind] += value
