"""A profile by kernel: what ran, for how long, and which operations (of the launching thread) and phases (by time, as
backward has a thread of its own) were around its launch. On a CPU, operations stand for kernels.
"""

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LONGEST_NAME = 80


@dataclass(frozen=True)
class Kernel:
    """One kernel of a profile, in microseconds; `stack` and `phases` enclose its launch, outermost first."""

    name: str
    start: float
    us: float
    stack: tuple[str, ...]
    phases: tuple[str, ...]


def record(run: Callable[[], Any], device: torch.device) -> list[Kernel]:
    """The kernels of one call, in order of their launches. Warm up before: a compilation would be in the profile."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        run()
        if gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text(errors="replace"))["traceEvents"])


def read(events: Iterable[Event]) -> list[Kernel]:
    spans = [event for event in events if event.get("ph") == "X"]
    by_thread: dict[Any, list[Event]] = {}
    for event in spans:
        if event["cat"] == "cpu_op":
            by_thread.setdefault(event["tid"], []).append(event)
    on_gpu = [event for event in spans if event["cat"] in ON_GPU]
    of_host = (event for event in spans if event["cat"] in ("cuda_runtime", "cuda_driver"))
    calls = {event["args"]["correlation"]: event for event in of_host if "correlation" in event.get("args", {})}
    kernels = on_gpu or [operation for operations in by_thread.values() for operation in operations]
    pairs = [(event, calls.get(event.get("args", {}).get("correlation"), event)) for event in kernels]
    pairs.sort(key=lambda pair: pair[1]["ts"])
    phases = _enclosing([e for e in spans if e["cat"] == "user_annotation"], [call["ts"] for _, call in pairs])
    stacks: dict[int, tuple[str, ...]] = {}
    for thread, operations in by_thread.items():
        own = [index for index, (_, call) in enumerate(pairs) if call["tid"] == thread]
        stacks |= zip(own, _enclosing(operations, [pairs[index][1]["ts"] for index in own]), strict=True)
    return [
        Kernel(_short(event["name"]), event["ts"], event["dur"], stacks.get(index, ()), phases[index])
        for index, (event, _) in enumerate(pairs)
    ]


def _enclosing(spans: Sequence[Event], times: Sequence[float]) -> list[tuple[str, ...]]:
    """For each of the ascending times the names of the spans around it, outermost first."""
    rows, around, names = sorted(spans, key=lambda event: (event["ts"], -event["dur"])), [], []
    index = 0
    for time in times:
        while index < len(rows) and rows[index]["ts"] <= time:
            around = [span for span in around if span["ts"] + span["dur"] > rows[index]["ts"]]
            around.append(rows[index])
            index += 1
        around = [span for span in around if span["ts"] + span["dur"] >= time]
        names.append(tuple(span["name"] for span in around))
    return names


def _short(name: str) -> str:
    """A kernel's name without arguments, templates and `void`."""
    plain = name.removeprefix("void ").partition("(")[0] if not name.startswith("Mem") else name
    for _ in range(8):
        plain, found = re.subn(r"<[^<>]*>", "", plain)
        if not found:
            break
    return plain.partition("<")[0][:LONGEST_NAME]


def busy_us(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel ran."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        end = kernel.start + kernel.us
        total += max(end - max(kernel.start, until), 0.0)
        until = max(until, end)
    return total


def table(kernels: Sequence[Kernel], most: int = 14) -> list[dict[str, Any]]:
    """Name, count and microseconds of the kernels that took the longest, and of the others together."""
    sums: dict[str, list[float]] = {}
    for kernel in kernels:
        one = sums.setdefault(kernel.name, [0, 0.0])
        one[0], one[1] = one[0] + 1, one[1] + kernel.us
    rows = sorted(sums.items(), key=lambda item: -item[1][1])
    others = [sum(numbers) for numbers in zip(*(one for _, one in rows[most:]), strict=True)]
    rows = rows[:most] + ([(f"{len(rows) - most} others", others)] if others else [])
    return [{"name": name, "count": int(count), "us": round(us, 2)} for name, (count, us) in rows]
