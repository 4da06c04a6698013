"""What every benchmark shares: its options, its clock, its result file, and rows that survive what goes wrong.

A benchmark is a list of attempts in order of importance. Each attempt makes one row, and all rows so far are written
after each, so that a limit loses nothing that was measured. An attempt that fails leaves a row with the error and the
benchmark goes on, except where the GPU itself has failed: then the process ends, and `--resume` goes on after that.

An attempt has a price in seconds, with what it compiles: what the same row took in an earlier result file, else a guess
by its mode. It does not begin if it costs more than the time that is left. It belongs to a part of the benchmark, which
`--only-parts` and `--without-parts` name: the field `stage` of its identity, else `shape`.
"""

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import STARTED, command
from benchmarks.environment import RESULTS, device_name, environment, read_json, unfinished, write_json
from benchmarks.timing import Clock, CpuClock, GpuClock, Rehearsal, Timing
from octavo.kernels import calibration

NOTHING_TIMED = "timed nothing: no GPU"
FATAL = ("CUDA error", "device-side assert", "unspecified launch failure", "illegal memory access")
"""In an error's text: the CUDA context is lost, and nothing more can run in this process."""
NO_GPU = 69  # Exit status of `--require-gpu` where no GPU works
PRICES_S = {"compiled": 15.0}
"""Guessed price of an attempt by its `mode`; `EAGER_S` for the rest. On an H100 they took 5 to 34 s and 0 to 5 s."""
EAGER_S = 2.0
OVERRUN, LEAST_LIMIT_S = 3.0, 30.0
"""The GPU runner cuts an attempt at this multiple of a price that is no guess, and never before so many seconds."""
ERROR_LINES = 12  # Last lines of a traceback, in a row

Row = dict[str, Any]


def parser(name: str, description: str | None, *examples: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have; `examples` are options of commands."""
    text = command(name, description, "\n".join(f"{name} {each}" for each in ("", "--quick", *examples, "--rehearse")))
    add = text.add_argument
    add("--quick", action="store_true", help="only what the project's targets need")
    add("--minutes", type=float, help="stop cleanly, between two rows, after so long")
    add("--deadline", type=float, metavar="EPOCH", help="the same, at a time in seconds since 1970")
    part: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "PART"}
    add("--only-parts", **part, help="only these parts (python -m benchmarks gpu --list)")
    add("--without-parts", **part, help="all parts but these")
    add("--require-gpu", action="store_true", help=f"exit with status {NO_GPU} where no GPU works; no rehearsal then")
    add("--peers", type=Path, default=Path(sys.prefix) / "peers", help="folder with torchao (pip install --target)")
    add("--out", type=Path, help=f"write <out>/{name}.json, beside benchmarks/results/<device>/{name}.json")
    add("--resume", action="store_true", help="keep the rows of the last result file and go on behind them")
    add("--rehearse", action="store_true", help="tiny shapes, nothing timed; always so where a needed GPU is absent")
    return text


def part_of(row: Row) -> str:
    """Name of the part of a benchmark that a row belongs to."""
    return str(row.get("stage") or row.get("shape") or "")


@dataclass(eq=False)
class Session:
    """One run of one benchmark.

    `facts` go into the result files `paths` beside rows and environment; they are replaced at the end, and written
    beside themselves (`unfinished`) after every row. `only` (all if empty) and `without` name parts.
    """

    name: str
    device: torch.device
    clock: Clock
    options: argparse.Namespace
    rows: list[Row] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    paths: list[Path] = field(default_factory=list)
    only: Sequence[str] = ()
    without: Sequence[str] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    end: float = float("inf")  # On the monotonic clock
    _began: Row = field(default_factory=dict)
    _earlier: Sequence[Row] = ()

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def tiny(self) -> bool:
        return not self.clock.timed

    @property
    def left_s(self) -> float:
        return self.end - time.monotonic()

    def _price(self, identity: Row) -> tuple[float, Row]:
        """Seconds that an attempt will take, and its limit as the GPU runner reads it; none in a rehearsal."""
        if self.tiny:
            return 0.0, {}
        least = LEAST_LIMIT_S + (own := getattr(self.options, "limit", 0.0))  # after which `run` itself ends a row
        for row in self._earlier:
            if identity.items() <= row.items() and "took_s" in row:
                return row["took_s"], {"limit_s": max(least, OVERRUN * row["took_s"])}
        return PRICES_S.get(identity.get("mode", ""), EAGER_S), {"limit_s": least} if own else {}

    def attempt(self, identity: Row, measure: Callable[..., Row | None], *arguments: Any, **options: Any) -> Row | None:
        """Make the row of `identity` by calling `measure(*arguments, **options)`, unless it is there already, is of
        another part, or costs more than the time left.

        An error makes a row as well. Returns the row, or None where there is none.
        """
        if (known := self.find(**identity)) is not None:
            return known
        if (self.only and part_of(identity) not in self.only) or part_of(identity) in self.without:
            return None
        seconds, limit = self._price(identity)
        if seconds > self.left_s:
            self.facts["stopped"] = "time"
            return None
        self.facts.setdefault("start_s", round(time.time() - STARTED, 1))
        self._began = {"running": identity, **limit}
        self.save()
        start = time.monotonic()
        try:
            figures = measure(*arguments, **options)
        except Exception as error:
            text = "".join(traceback.format_exception(error)).rstrip()
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            figures = {"error": "out of memory" if out_of_memory else "\n".join(text.splitlines()[-ERROR_LINES:])}
            fatal = any(words in str(error) for words in FATAL) and self.gpu
        else:
            fatal = False
        self._began = {}
        row = None if figures is None else {**identity, **figures, "took_s": round(time.monotonic() - start, 1)}
        if row is not None:
            self.rows.append(row)
            print(line(row), flush=True)
        self.save()
        if fatal:
            raise SystemExit(f"{self.name}: the GPU failed in {identity}; --resume goes on behind it")
        self.clean()
        return row

    def clean(self) -> None:
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()

    def save(self, *, finished: bool = False) -> None:
        content = {
            "benchmark": self.name, "command": f"python -m benchmarks {self.name}",
            "arguments": [str(value) for value in self.options.arguments], "timed": self.clock.timed,
            **({} if self.clock.timed else {"note": NOTHING_TIMED}), "environment": self.environment,
            **({"calibrated": len(calibration.entries(self.device))} if self.gpu else {}),
            **self.facts, **self._began, "rows": self.rows,
        }  # fmt: skip
        for path in self.paths:
            write_json(unfinished(path), content)
            if finished:
                unfinished(path).replace(path)

    def finish(self, *, checks: bool = False) -> None:
        if checks:
            wrong = sum("error" in row or "WRONG" in row.get("result", "") for row in self.rows)
            self.facts["wrong"] = wrong
            print(f"{len(self.rows)} checks, {wrong} of them wrong")
        self.facts.setdefault("stopped", "done")
        self.save(finished=True)
        if self.tiny:
            print(NOTHING_TIMED)
        for path in self.paths:
            print(f"written to {path}")

    def take_up(self, content: Row) -> None:
        """Go on with the rows of a result file; what was running when it ended counts as crashed."""
        self.rows = content["rows"]
        if content.get("running"):
            self.rows.append({**content["running"], "error": "the process crashed or hung here"})
        keys = ("ceilings", "stopped") if self.only or self.without else ("ceilings",)
        self.facts |= {key: content[key] for key in keys if key in content and content[key] != "done"}

    def find(self, **fields: Any) -> Row | None:
        return next((row for row in self.rows if fields.items() <= row.items()), None)


def begin(command: argparse.ArgumentParser, arguments: list[str], *, times_cpus: bool = False) -> Session:
    """A session on the GPU; without one a rehearsal, or wall times where the benchmark has a use for them."""
    options, name = command.parse_args(arguments), command.prog.rpartition(" ")[2]
    sys.path.append(str(options.peers))
    if options.require_gpu:
        try:
            torch.ones(1, device="cuda").item()
        except (RuntimeError, AssertionError) as error:  # no driver, a device that has failed, no CUDA
            print(f"{name}: no GPU works: {str(error).splitlines()[0]}", flush=True)
            raise SystemExit(NO_GPU) from None
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    clock: Clock
    if options.rehearse or not (times_cpus or device.type == "cuda"):
        clock, device = Rehearsal(), torch.device("cpu")
    else:
        clock = GpuClock(device) if device.type == "cuda" else CpuClock()
    options.arguments = arguments
    folders = [] if options.out is None else [options.out]
    folders += [RESULTS / device_name(device)] if clock.timed else []
    paths = list(dict.fromkeys((folder / f"{name}.json").resolve() for folder in folders))
    session = Session(
        name, device, clock, options, only=options.only_parts, without=options.without_parts,
        environment=environment(device), paths=paths,
    )  # fmt: skip
    session._earlier = next((content["rows"] for content in map(read_json, paths) if content.get("timed")), [])
    if options.deadline is not None:
        options.minutes = min(options.minutes or float("inf"), max(options.deadline - time.time(), 0.0) / 60)
    if options.minutes is not None:
        session.end = time.monotonic() + 60 * options.minutes
    before = [each for path in paths[:1] for each in (unfinished(path), path)]
    if options.resume and (content := next(filter(None, map(read_json, before)), None)) is not None:
        session.take_up(content)
    return session


def line(row: Row) -> str:
    """A row as one line of a terminal: what it is, then what was found."""
    words = [str(row[key]) for key in ("stage", "shape", "case", "arm", "mode") if key in row]
    if "error" in row:
        return f"{' '.join(words):<64} {row['error'].strip().splitlines()[-1][:120]}"
    numbers = [
        form.format(row[key])
        for key, form in (
            ("kernel_ms", "{:9.3f} ms"), ("wall_ms", "{:9.3f} ms wall"), ("speedup", "{:5.2f} × bf16"),
            ("tbs", "{:5.2f} TB/s"), ("tflops", "{:6.0f} TFLOP/s"), ("percent", "{:4.0f} % of ceiling"),
            ("peak_mib", "{:8.0f} MiB peak"), ("tokens_per_s", "{:9.0f} tokens/s"),
        )
        if row.get(key) is not None
    ]  # fmt: skip
    return f"{' '.join(words):<64} {'  '.join(numbers) or row.get('result', 'ran')}"


def times(timing: Timing) -> Row:
    return {key: round(value, 5) if isinstance(value, float) else value for key, value in asdict(timing).items()}
