"""Signal handling: a signal sets an event, and the run stops after saving; or it ends the process with its clean-up."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
    """Set `stop` when one of `signals` comes; a second one acts as usual, or, with `patient`, does no more.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before: dict[int, Any] = {}

    def request(number: int, frame: Any) -> None:
        stop.set()
        if not patient:
            signal.signal(number, before[number])

    for stop_signal in signals:
        before[stop_signal] = signal.signal(stop_signal, request)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
