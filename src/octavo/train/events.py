"""What happened in a run besides its steps, in `events.jsonl`: statistics that crossed a limit, layers that were moved,
rollbacks, loss scales that were restored.

    {"step": 50, "event": "move", "text": "model.layers.3.mlp.down_proj: rowwise → blockwise (x: …)"}
    {"step": 23, "event": "rollback", "text": "…", "to": 20, "rollbacks": 1, "skipped_batches": 3}

A resumed run takes the steps after its checkpoint again, and what they brought is dropped. A rollback to that
checkpoint or to one before it has happened: it is the state of the guard until the next checkpoint is saved.
"""

import json
from pathlib import Path
from typing import Any

from octavo.train.disk import write_file

EVENTS_FILE = "events.jsonl"
FINDING, MOVE, ROLLBACK, LOSS_SCALE = "finding", "move", "rollback", "loss_scale"


def add_event(out: Path, step: int, event: str, text: str, **details: int) -> None:
    """Append an event to the record of the run in `out`."""
    with (out / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(_line({"step": step, "event": event, "text": text} | details))


def read_events(out: Path) -> list[dict[str, Any]]:
    """The events of a run, in order; [] where there were none.

    A last line without its newline is one that a killed process did not finish, and is left out. Any other line that is
    not an event raises ValueError with its number.
    """
    path = out / EVENTS_FILE
    if not path.exists():
        return []
    events = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            try:
                events.append(_event(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not an event of a run: {error!r}") from None
    return events


def last_rollback(out: Path, step: int) -> dict[str, Any] | None:
    """The last rollback of a run that goes on from a checkpoint of `step`; None where there was none."""
    return next((event for event in reversed(read_events(out)) if _happened(event, step)), None)


def drop_later_events(out: Path, after_step: int) -> None:
    """Leave out what steps brought that will be taken again, and rollbacks to steps after these."""
    if not (out / EVENTS_FILE).exists():
        return
    events = read_events(out)
    last = max((number for number, event in enumerate(events) if _happened(event, after_step)), default=-1)
    remaining = [
        event
        for number, event in enumerate(events)
        if (number <= last if event["event"] == ROLLBACK else event["step"] <= after_step)
    ]
    write_file(out / EVENTS_FILE, "".join(map(_line, remaining)))


def _event(event: dict[str, Any]) -> dict[str, Any]:
    """The event itself. Raises one error or another where it is none."""
    details = {key: value for key, value in event.items() if key not in ("event", "text")}
    if not (isinstance(event["event"], str) and isinstance(event["text"], str)):
        raise TypeError("event and text are strings")
    if any(type(value) is not int or value < 0 for value in details.values()):
        raise TypeError("all but event and text are whole numbers from 0 up")
    if missing := {"step", *(("to", "skipped_batches") if "rollbacks" in event else ())} - event.keys():
        raise KeyError(*missing)
    return event


def _happened(event: dict[str, Any], step: int) -> bool:
    return event["event"] == ROLLBACK and event.get("to", event["step"]) <= step


def _line(event: dict[str, Any]) -> str:
    return json.dumps(event, ensure_ascii=False) + "\n"
