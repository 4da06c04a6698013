"""What happened in a run besides its steps, in `events.jsonl`: statistics that crossed a limit, layers that were moved,
returns to a checkpoint.

    {"step": 50, "event": "move", "text": "model.layers.3.mlp.down_proj: rowwise → blockwise (x: …)"}

A resumed run takes the steps after its checkpoint again, and what they brought is dropped; a return to a checkpoint has
happened.
"""

import json
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
FINDING, MOVE, ROLLBACK = "finding", "move", "rollback"


def add_event(out: Path, step: int, event: str, text: str) -> None:
    """Append an event to the record of the run in `out`."""
    with (out / EVENTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "event": event, "text": text}, ensure_ascii=False) + "\n")


def read_events(out: Path) -> list[dict[str, Any]]:
    """The events of a run, in order; [] where there were none."""
    path = out / EVENTS_FILE
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half of a killed process


def drop_later_events(out: Path, after_step: int) -> None:
    """Leave out what steps brought that will be taken again."""
    found = read_events(out)
    kept = [event for event in found if event["event"] == ROLLBACK or event["step"] <= after_step]
    if len(kept) < len(found):
        temporary = (out / EVENTS_FILE).with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(event, ensure_ascii=False) + "\n" for event in kept), encoding="utf-8")
        temporary.replace(out / EVENTS_FILE)
