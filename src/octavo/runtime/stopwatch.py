"""The seconds of a run's start-up, stage by stage."""

import time


class Stopwatch:
    """Divides the time since it was made into stages, without gaps, until the first step.

    Attributes:
        stages: Wall seconds ("wall") and CPU seconds of all threads of this process ("cpu") of each stage, in order.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}
        self.running = True
        self._last = time.perf_counter(), time.process_time()

    def lap(self, stage: str) -> None:
        """Count the time since the last call for `stage`, which may have some already."""
        now = time.perf_counter(), time.process_time()
        seconds = self.stages.setdefault(stage, {"wall": 0.0, "cpu": 0.0})
        for kind, before, after in zip(seconds, self._last, now, strict=True):
            seconds[kind] += after - before
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
