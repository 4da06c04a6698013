"""Signal handling: a signal sets an event, and the run stops after saving."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
