"""Runs that are killed at a named point, in and around rollbacks, moves and skipped steps, and resumed: the same runs.

A kill is an exception that nothing catches. Compared with the undisturbed run are the weights, masters, moments, state,
curve and the bytes of `events.jsonl`.
"""

import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from test_guard import GUARDED
from test_loss_scale import FP16
from tiny_runs import assert_same, curve, scaled_losses, slow

from octavo.inspect import Autopilot, RecipeChange
from octavo.train import loop, run
from octavo.train.checkpoint import retention
from octavo.train.checkpoint import store as checkpoint
from octavo.train.checkpoint.retention import checkpoints
from octavo.train.guard import steps_in_a_row
from octavo.train.record import metrics

LAYER = "model.layers.0.mlp.up_proj"
LASTING = steps_in_a_row(16)
BAD = {*range(22, 22 + LASTING), *range(32, 32 + LASTING)}
"""Batches of two spikes, the second of which goes back further."""
PILOTED = {"run": {"steps": 36, "save_every": 5, "keep": 2}, "precision": {"level": "fp8", "autopilot": True}}
CONFIGS = {"guard": GUARDED | PILOTED, "fp16": FP16 | {"run": {"steps": 32, "save_every": 4, "keep": 2}}}
OVERFLOWS = {5, *range(10, 22), 26}  # Steps before which gradients overflow: the scale falls, collapses and is restored


class Killed(BaseException):
    """What ends a process."""


def remove_half(folder, ignore_errors=False):
    """What `shutil.rmtree` has done when it is killed."""
    if Path(folder).exists():
        for path in sorted(Path(folder).iterdir())[::2]:
            path.unlink() if path.is_file() else shutil.rmtree(path)
        raise Killed


POINTS = {
    "event": (metrics, "add_event"), "event shown": (loop, "_record_event"), "state put": (loop, "_load_state"),
    "row": (metrics.MetricsWriter, "write"), "removal": (checkpoint, "remove_checkpoint"),
    "save": (checkpoint.CheckpointSaver, "save"), "save begun": (checkpoint._NewCheckpoint, "begin"),
    "save published": (checkpoint._NewCheckpoint, "publish"), "prune": (checkpoint._NewCheckpoint, "prune"),
    "beginning of rows": (metrics, "drop_later_events"),
}  # fmt: skip


@contextmanager
def killed_at(point, number, after):
    """Die before or after call `number` of a point, 1, 2, …; number 0 for never. Gives a list of the calls."""
    owner, name = POINTS[point]
    function, calls = getattr(owner, name), []

    def counted(*args, **options):
        calls.append(args)
        result = None if len(calls) == number and not after else function(*args, **options)
        if len(calls) == number:
            raise Killed
        return result

    with mock.patch.object(owner, name, counted):
        yield calls


@contextmanager
def faults():
    act = Autopilot.act

    def factor(trainer):
        if trainer.loss_scale.active:
            return 1e30 if trainer.step in OVERFLOWS else 1.0
        return 6.0 if trainer.step + trainer.skipped_batches in BAD else 1.0

    def moving(pilot, *args, **options):
        moves = act(pilot, *args, **options)
        for step, after in ((6, "blockwise"), (24, "tensorwise")):
            if pilot.watch.number == step:
                move = RecipeChange(step=step, layer=LAYER, before="rowwise", after=after, why="test")
                pilot._move(move)
                moves = [*moves, move]
        return moves

    with scaled_losses(factor), mock.patch.object(Autopilot, "act", moving):
        yield


def events(out):
    path = out / "events.jsonl"
    return path.read_bytes() if path.exists() else b""


def names(out):
    return [path.name for path in checkpoints(out)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    trained = {}

    def get(name, config):
        if name not in trained:
            out = tmp_path_factory.mktemp("undisturbed") / name
            with faults(), ExitStack() as stack:
                calls = {point: stack.enter_context(killed_at(point, 0, False)) for point in POINTS}
                run(config, out=out)
            trained[name] = out, {point: len(each) for point, each in calls.items()}
        return trained[name]

    return get


GUARD_KILLS = [
    *(("event", number, after) for number in (2, 3) for after in (False, True)),
    *(("state put", number, after) for number in (1, 2) for after in (False, True)),
    *(("removal", number, after) for number in (1, 3, 4) for after in (False, True)),
    *(("save begun", number, True) for number in (5, 6)),
    *(("save published", number, after) for number in (5, 6) for after in (False, True)),
    ("beginning of rows", 2, False), ("beginning of rows", 2, True), ("prune", 4, False),
    ("row", 6, False), ("row", 6, True), ("row", 24, True), ("row", 22 + LASTING, True),
]  # fmt: skip


@pytest.mark.thorough
def test_what_the_undisturbed_run_goes_through(undisturbed, make_config):
    out, calls = undisturbed("guard", make_config(**CONFIGS["guard"]))
    text = events(out).decode()
    assert text.count('"rollback"') == 2 and text.count('"move"') >= 2 and "taken back" in text
    assert calls["state put"] == 2 and calls["removal"] >= 4 and calls["beginning of rows"] == 3
    out, calls = undisturbed("fp16", make_config(**CONFIGS["fp16"]))
    assert events(out).decode().count('"loss_scale"') == 1
    assert sum(row[-1] for row in curve(out)) == len(OVERFLOWS)


KILLS = [
    *(slow("guard", [kill]) for kill in GUARD_KILLS), slow("guard", ["half", "half", "half"]),
    # After an event and before anything is saved, and in what follows.
    ("guard", [("event", 2, True), ("removal", 1, True), ("save published", 1, False)]),
    ("fp16", [("row", 6, True), ("row", 9, False)]), ("fp16", [("save published", 4, True), ("event", 1, False)]),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kills"), KILLS, ids=str)
def test_killed_at_one_point_after_the_other_and_resumed_to_the_end(name, kills, undisturbed, make_config, tmp_path):
    config, out = make_config(**CONFIGS[name]), tmp_path / "out"
    whole, _ = undisturbed(name, config)
    for kill in (*kills, None):
        try:
            with faults(), ExitStack() as stack:
                if kill == "half":
                    stack.enter_context(mock.patch.object(retention, "shutil", SimpleNamespace(rmtree=remove_half)))
                elif kill is not None:
                    stack.enter_context(killed_at(*kill))
                run(config, out=out, resume=out.exists())
                assert kill is None, "not killed"
        except Killed:
            assert kill is not None
    assert_same(whole, out)
    assert events(out) == events(whole) and names(out) == names(whole)
    assert not list((out / "checkpoints").glob(".*"))
