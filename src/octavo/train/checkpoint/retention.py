"""Which checkpoints of a run exist, and which stay: the newest, every n-th, and the best by held-out loss."""

import json
import re
import shutil
import warnings
from pathlib import Path

FOLDER = "checkpoints"
REMOVING = ".removing-"  # Prefix of a checkpoint during removal
HELD_OUT_LOSS = "held_out_loss"  # Key of `trainer.json`: the held-out loss of the checkpoint, if it was measured


def obsolete_checkpoints(out: Path, newest: int, every: int = 0, best: int = 0) -> list[Path]:
    """The checkpoints under `out` to remove, the oldest first. Of equal losses the older checkpoint is better."""
    paths = checkpoints(out)
    staying = {*paths[-newest:], *(path for path in paths if every and step_of(path) % every == 0)}
    losses = [(loss, step_of(path), path) for path in paths if best and (loss := held_out_loss(path)) is not None]
    staying |= {path for _, _, path in sorted(losses)[:best]}
    return [path for path in paths if path not in staying]


def checkpoints(out: Path) -> list[Path]:
    """Folders of the checkpoints under `out`, the newest last; none that are empty, or not named by their step."""
    name = re.compile(r"step-(\d{6}|[1-9]\d{6,})", re.ASCII)
    paths = (path for path in (out / FOLDER).glob("step-*") if name.fullmatch(path.name))
    return sorted((path for path in paths if path.is_dir() and any(path.iterdir())), key=step_of)


def latest_checkpoint(out: Path) -> Path | None:
    return next(reversed(checkpoints(out)), None)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def held_out_loss(checkpoint: Path) -> float | None:
    try:
        loss = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8")).get(HELD_OUT_LOSS)
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return loss if isinstance(loss, float) else None


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, or warn. It is renamed first, so that a partial one never looks complete."""
    removing = checkpoint.with_name(f"{REMOVING}{checkpoint.name}")
    try:
        shutil.rmtree(checkpoint.rename(removing))
    except OSError as error:
        warnings.warn(f"the old checkpoint {checkpoint} cannot be removed: {error}", RuntimeWarning, stacklevel=2)
