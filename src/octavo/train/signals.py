"""Signal handling: a signal asks the run to stop, which then saves; or it ends the process with its clean-up.

With `run.restarts` a supervisor starts `octavo train … --supervised`, and after a crash again with --resume. A crash is
an end by a signal or exit code 70. The run has a process group of its own; SIGTERM, SIGINT and
SIGHUP to the supervisor go to it, and no other run follows. If the supervisor is killed, the run goes on alone.
"""

import _thread
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.train.checkpoint.retention import latest_checkpoint, step_of
from octavo.train.ranks import Ranks
from octavo.train.record.metrics import CONFIG_FILE, EVENTS_FILE, RESTART, add_event
from octavo.train.record.progress import Progress

GRACE_SECONDS = 8.0  # Grace of a run that has not begun to train when a signal reaches it: clusters kill after 30 s
REPORT_SECONDS = 10.0  # Seconds between two reports of an evaluation


class StopRequested(Exception):
    """A signal has asked the run to stop, in the middle of a step, an evaluation or a sample."""


class Stop(threading.Event):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self.training = False  # Whether training has begun, so that there is something to save
        self.expired = False  # Whether it did not begin within `GRACE_SECONDS` of the signal
        self._tell = tell

    def announce(self, number: int, *, patient: bool) -> None:
        """Say what the first signal does. In the preparation, end the run if it takes too long to begin training."""
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        text = f"{name}: finishing the step, then saving"
        text += "" if patient else f"; {name} again stops without saving"
        if not self.training:
            text = f"{name}: the run stops before its first step"
            timer = threading.Timer(GRACE_SECONDS, self._expire, [number])
            timer.daemon = True
            timer.start()
        threading.Thread(target=self._tell, args=(text,), daemon=True).start()

    def _expire(self, number: int) -> None:
        self.expired = not self.training
        if self.expired:
            _thread.interrupt_main(signal.Signals(number))


class Between:
    """What a run does between two micro-batches, batches of an evaluation, or tokens of a sample; on all ranks."""

    def __init__(self, stop: threading.Event, ranks: Ranks, progress: Progress) -> None:
        self._stop, self._ranks, self._progress = stop, ranks, progress
        self._next = 0.0

    def __call__(self, what: str = "", done: int = 0, total: int = 0) -> None:
        """Raise StopRequested if any rank is to stop; report `done` of `total` parts of `what`, if it takes long."""
        if self._ranks.any(self._stop.is_set()):
            raise StopRequested
        now = time.monotonic()
        if not done:
            self._next = now + REPORT_SECONDS
        elif what and now > self._next:
            self._next = now + REPORT_SECONDS
            self._progress.stage(f"{what}: {done:,} of {total:,} batches")


@contextmanager
def _handling(signals: Iterable[signal.Signals], handler: Callable[[int, Any], object]) -> Iterator[dict[int, Any]]:
    before = {int(number): signal.signal(number, handler) for number in signals}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextmanager
def exit_on(stop_signal: signal.Signals) -> Iterator[None]:
    """Raise SystemExit in the main thread when a signal comes, so that unfinished files are removed."""
    with _handling([stop_signal], lambda number, frame: sys.exit(128 + number)):
        yield


@contextmanager
def stop_on(stop: Stop, *signals: signal.Signals, patient: bool = False) -> Iterator[None]:
    """Set `stop` when one of `signals` comes; a second one acts as usual, or, with `patient`, does no more."""
    # Does nothing outside the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    received: set[int] = set()

    def request(number: int, frame: object) -> None:
        if stop.expired:
            sys.exit(128 + number)
        if number in received and not patient:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        if not stop.is_set():
            stop.announce(number, patient=patient)
        received.add(number)
        stop.set()

    with _handling(signals, request) as before:
        yield


FORWARDED = (signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
INTERNAL = 70  # Exit code of an unexpected exception (`octavo.cli.exit_codes`)


def supervise(command: Sequence[str], out: Path, *, resume: bool, restarts: int, note: Callable[[str], None]) -> int:
    """Run a command until it ends without a crash; return its exit code, 128 + the number for a signal."""
    holds_run = (out / CONFIG_FILE).exists()  # of which only --resume asks
    child: list[subprocess.Popen[bytes]] = []
    stopping: list[int] = []

    def forward(number: int, frame: object) -> None:
        stopping.append(number)
        for process in child:
            process.send_signal(number)

    with _handling(FORWARDED, forward):
        for attempt in range(restarts + 1):
            child[:] = [subprocess.Popen([*command, *(["--resume"] if resume else [])], process_group=0)]
            if stopping:  # a signal before there was a process to send it to
                child[0].send_signal(stopping[0])
            code = child[0].wait()
            if stopping or (code >= 0 and code != INTERNAL):
                break
            names = {number.value: number.name for number in signal.Signals}
            ended = f"was ended by {names.get(-code, f'signal {-code}')}"
            crash = "raised an unexpected error" if code == INTERNAL else ended
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
                except OSError as error:  # of a full disk
                    note(f"the restart is not recorded: {out / EVENTS_FILE} cannot be written: {error.strerror}")
    return code if code >= 0 else 128 - code
