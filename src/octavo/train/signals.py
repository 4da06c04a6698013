"""Signal handling: a signal asks the run to stop, which then saves; or it ends the process with its clean-up."""

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from octavo.train.ranks import Ranks
from octavo.train.record.progress import Progress

GRACE_SECONDS = 8.0
"""How long a run that a signal reached may go on without having begun to train: clusters kill after 30 s."""
REPORT_SECONDS = 10.0
"""Seconds between two reports of an evaluation."""


class StopRequested(Exception):
    """A signal has asked the run to stop, in the middle of a step, an evaluation or a sample."""


class Stop(threading.Event):
    """Set when a signal asks the run to stop."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        # training: Whether training has begun, so that there is something to save.
        # expired: Whether it did not begin within `GRACE_SECONDS` of the signal: nothing is saved.
        self.training, self.expired, self._tell = False, False, tell

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
def exit_on(stop_signal: signal.Signals) -> Iterator[None]:
    """Raise SystemExit in the main thread when a signal comes, so that unfinished files are removed."""
    before = signal.signal(stop_signal, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(stop_signal, before)


@contextmanager
def stop_on(stop: threading.Event, *signals: signal.Signals, patient: bool = False) -> Iterator[None]:
    """Set `stop` when one of `signals` comes; a second one acts as usual, or, with `patient`, does no more."""
    # A `Stop` tells the user. Does nothing outside the main thread.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before: dict[int, Any] = {}
    received: set[int] = set()

    def request(number: int, frame: Any) -> None:
        if isinstance(stop, Stop) and stop.expired:
            sys.exit(128 + number)
        if number in received and not patient:
            signal.signal(number, before[number])
            signal.raise_signal(number)
        if isinstance(stop, Stop) and not stop.is_set():
            stop.announce(number, patient=patient)
        received.add(number)
        stop.set()

    for stop_signal in signals:
        before[stop_signal] = signal.signal(stop_signal, request)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
