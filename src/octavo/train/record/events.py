"""What happened in a run besides its steps, in `events.jsonl`: statistics that crossed a limit, layers that were moved,
rollbacks, loss scales that were restored, restarts after a crash (at the step of the checkpoint).

    {"step": 50, "event": "move", "text": "model.layers.3.mlp.down_proj: rowwise → blockwise (x: …)"}
    {"step": 23, "event": "rollback", "text": "…", "to": 20, "rollbacks": 1, "skipped_batches": 3}

A resumed run takes the steps after its checkpoint again, and what they brought is dropped. A rollback to that
checkpoint or to one before it has happened: it is the state of the guard until the next checkpoint is saved.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import AfterValidator, with_config
from typing_extensions import TypedDict

from octavo.train.disk import names_file, write_file
from octavo.train.record.json_lines import STRICT, NonNegative, read_records

EVENTS_FILE = "events.jsonl"
EVENT = "an event of a run"
"""What a line of `events.jsonl` is, in errors."""
FINDING, MOVE, ROLLBACK, LOSS_SCALE, RESTART = "finding", "move", "rollback", "loss_scale", "restart"
EVALUATION = "evaluation"
"""Of the model before its first step."""


def _check_rollback(event: dict[str, Any]) -> dict[str, Any]:
    if "rollbacks" in event and not {"to", "skipped_batches"} <= event.keys():
        raise ValueError("rollbacks: come with to and skipped_batches")
    return event


@with_config(STRICT)
class _Event(TypedDict):
    step: NonNegative
    event: str
    text: str
    to: NotRequired[NonNegative]
    rollbacks: NotRequired[NonNegative]
    skipped_batches: NotRequired[NonNegative]


Event: Any = Annotated[_Event, AfterValidator(_check_rollback)]
"""A line of `events.jsonl`, as a dictionary."""


def add_event(out: Path, step: int, event: str, text: str, **details: int) -> None:
    """Append an event to the record of the run in `out`, after its last whole line."""
    path = out / EVENTS_FILE
    with names_file(path), path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        if file.read() not in (b"", b"\n"):  # a process was killed while it wrote
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(_line({"step": step, "event": event, "text": text} | details).encode())


def read_events(out: Path) -> list[dict[str, Any]]:
    """The events of a run, in order; [] where there were none."""
    # A last line without its newline is one that a killed process did not finish: it is left out, with a warning. Any
    # other line that is not an event raises ValueError with its number and the field.
    return read_records(out / EVENTS_FILE, Event, EVENT)


def last_rollback(out: Path, step: int) -> dict[str, Any] | None:
    """The last rollback of a run that resumes from a checkpoint of `step`; None if there was none."""
    return next((event for event in reversed(read_events(out)) if _happened_before(event, step)), None)


def drop_later_events(out: Path, after_step: int) -> None:
    """Drop the events of steps after `after_step`, and rollbacks to such steps."""
    if not (out / EVENTS_FILE).exists():
        return
    events = read_events(out)
    last = max((number for number, event in enumerate(events) if _happened_before(event, after_step)), default=-1)
    remaining = [
        event
        for number, event in enumerate(events)
        if (number <= last if event["event"] == ROLLBACK else event["step"] <= after_step)
    ]
    write_file(out / EVENTS_FILE, "".join(map(_line, remaining)))


def _happened_before(event: dict[str, Any], step: int) -> bool:
    return bool(event["event"] == ROLLBACK and event.get("to", event["step"]) <= step)


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False) + "\n"
