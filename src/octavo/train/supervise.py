"""Supervised runs (`run.restarts`): a process that starts `octavo train` and, after a crash, starts it again.

    octavo train CONFIG run.restarts=3        the supervisor, which trains nothing
      └─ octavo train … --supervised          the run; after a crash with --resume

A crash is an end by a signal (killed for memory, a segmentation fault) or exit code 70 (an exception that Octavo does
not expect, as of CUDA). Mistakes in the configuration, losses that are not finite, and a requested stop are none. A
checkpoint holds all that a step depends on, so the losses are those of a run without crashes, bit for bit.

The run has a process group of its own. SIGTERM, SIGINT and SIGHUP to the supervisor go to the run, and no other run
follows. If the supervisor itself is killed, the run goes on alone.
"""

import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.train.checkpoint.retention import latest_checkpoint, step_of
from octavo.train.record.events import EVENTS_FILE, RESTART, add_event
from octavo.train.record.outputs import CONFIG_FILE

FORWARDED = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
INTERNAL = 70
"""Exit code of an unexpected exception (`octavo.cli.exit_codes`)."""


def supervise(command: Sequence[str], out: Path, *, resume: bool, restarts: int, note: Callable[[str], None]) -> int:
    """Run a command until it ends without a crash; return its exit code, 128 + the number for a signal."""
    holds_run = (out / CONFIG_FILE).exists()  # of which only --resume asks
    child: list[subprocess.Popen[bytes]] = []
    stopping: list[int] = []

    def forward(number: int, frame: Any) -> None:
        stopping.append(number)
        for process in child:
            process.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        for attempt in range(restarts + 1):
            child[:] = [subprocess.Popen([*command, *(["--resume"] if resume else [])], process_group=0)]
            if stopping:  # a signal before there was a process to send it to
                child[0].send_signal(stopping[0])
            code = child[0].wait()
            crash = _crash(code)
            if stopping or crash is None:
                break
            if attempt == restarts:
                note(f"the run {crash}, after {restarts} restarts (run.restarts): it stays ended")
                break
            resume = resume or (not holds_run and (out / CONFIG_FILE).exists())
            newest = latest_checkpoint(out)
            step = 0 if newest is None else step_of(newest)
            text = f"the run {crash}: restart {attempt + 1} of {restarts}, from "
            text += f"step {step}" if newest is not None else "the beginning: there is no checkpoint"
            note(text)
            if resume and (out / CONFIG_FILE).exists():
                try:
                    add_event(out, step, RESTART, text)
                except OSError as error:
                    note(f"the restart is not recorded: {out / EVENTS_FILE} cannot be written: {error.strerror}")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _crash(code: int) -> str | None:
    """How a process crashed, by its exit code; None if it did not."""
    if code == INTERNAL:
        return "raised an unexpected error"
    if code >= 0:
        return None
    return (
        f"was ended by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"was ended by signal {-code}"
    )
