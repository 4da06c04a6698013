"""What the live page is given of a folder, whatever state its run is in, and while its files are being written."""

import json
import os

import pytest
from live_runs import ReplayedRun

from octavo.experiments.live_run import LiveRun, run_folder


@pytest.fixture
def replayed(tmp_path):
    return ReplayedRun(tmp_path / "run", tmp_path / "source", steps=40)


def tile(content, label):
    (value,) = [tile["value"] for tile in content["tiles"] if label in tile["label"]]
    return value


def test_a_run_from_its_folder_to_its_end(replayed):
    live = LiveRun(run_folder(replayed.folder))

    def content():
        return json.loads(live.read())

    assert content()["state"] == "waiting"
    descriptor = replayed.lock()
    assert content()["state"] == "preparing"
    replayed.setup()
    before = content()
    assert (before["state"], before["step"], before["steps"], before["title"]) == ("training", 0, 40, "demo")
    assert before["charts"] == {"large": [], "small": [], "maps": []} and before["tiles"] == []
    replayed.step(*range(1, 21))
    half = content()
    assert half["step"] == 20 and half["seconds_per_step"] == pytest.approx(1.5, abs=0.01)
    titles = [chart["title"] for group in half["charts"].values() for chart in group]
    assert titles == ["Loss", "Tokens per second", "Gradient norm", "Learning rate", "MFU", "Peak memory"]
    assert tile(half, "MFU") == "40.0%" and tile(half, "peak memory, 45.0 predicted") == "44.0 GiB"
    assert tile(half, "256,001 in 70 documents") == "0.08"
    replayed.step(*range(21, 41), held_out={"loss": 3.25})
    assert tile(content(), "held-out loss, step 40") == "3.2500"
    replayed.end()
    assert content()["state"] == "training"  # its lock is held: it may be saving
    os.close(descriptor)
    assert content()["state"] == "done"


@pytest.mark.parametrize(
    ("stopped", "state"), [("done", "done"), ("sigterm", "stopped"), ("non-finite", "failed"), (None, "killed")]
)
def test_how_a_run_ended(stopped, state, replayed):
    replayed.setup()
    replayed.step(*range(1, 8))
    if stopped is not None:
        replayed.end(stopped, steps=7)
    assert json.loads(LiveRun(replayed.folder).read())["state"] == state


def test_a_half_written_line_waits_for_its_end(replayed):
    replayed.setup()
    replayed.step(1, 2)
    live, line = LiveRun(replayed.folder), replayed.line(3)
    for part, step in ((line[:10], 2), (line[10:], 2), ("\n", 3)):
        replayed.append(part)
        content = json.loads(live.read())
        assert content["step"] == step and "error" not in content


def test_a_resumed_run_takes_steps_back(replayed):
    replayed.setup()
    replayed.step(*range(1, 20))
    live = LiveRun(replayed.folder)
    assert json.loads(live.read())["step"] == 19
    (replayed.folder / "metrics.jsonl").unlink()
    replayed.step(*range(1, 11))
    assert json.loads(live.read())["step"] == 10
    kept = (replayed.folder / "metrics.jsonl").read_text()
    (replayed.folder / "metrics.jsonl").write_text(kept.replace('"step": 10', '"step": 11') + replayed.line(12) + "\n")
    content = json.loads(live.read())  # the same file, and longer than before
    assert content["step"] == 12 and 11 in content["charts"]["large"][0]["data"][-1]["x"]


def test_only_what_is_new_is_read(replayed, monkeypatch):
    replayed.setup()
    replayed.step(*range(1, 20))
    live = LiveRun(replayed.folder)
    first = live.read()
    assert live.read() is first
    from octavo.train.record import json_lines

    read = []
    whole = json_lines.read_record
    monkeypatch.setattr(json_lines, "read_record", lambda text, *more: read.append(text) or whole(text, *more))
    replayed.step(20)
    assert json.loads(live.read())["step"] == 20 and len(read) == 1


def test_a_damaged_line_that_is_mended(replayed):
    live = LiveRun(replayed.folder)
    replayed.setup()
    replayed.step(1, 2)
    live.read()
    replayed.step(3)
    replayed.append("nonsense\n")
    replayed.step(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="line 4"):
            live.read()
    path = replayed.folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("nonsense", replayed.line(4)))
    live.read()
    assert list(live._steps.curves.step) == [1, 2, 3, 4, 5]


def test_a_run_of_an_earlier_release(replayed):
    replayed.step(*range(1, 41), time=None, epoch=None, mfu=None, peak_memory=None)
    replayed.end()
    content = json.loads(LiveRun(replayed.folder).read())
    assert content["state"] == "done" and content["steps"] == 40 and content["started"] is None


def test_events_come_newest_first(replayed):
    replayed.setup()
    replayed.step(1)
    lines = [json.dumps({"step": n, "event": "finding", "text": f"<b>{n}</b>"}) + "\n" for n in range(1, 151)]
    (replayed.folder / "events.jsonl").write_text("".join(lines))
    content = json.loads(LiveRun(replayed.folder).read())
    assert content["events_in_all"] == 150 and [each["step"] for each in content["events"]] == [*range(150, 50, -1)]


def test_heat_maps_follow_the_statistics(replayed, monkeypatch):
    from octavo.experiments import live_run

    drawn = []
    whole = live_run.heatmaps
    monkeypatch.setattr(live_run, "heatmaps", lambda rows: drawn.append(len(rows)) or whole(rows))
    replayed.setup()
    replayed.step(*range(1, 11))
    live = LiveRun(replayed.folder)

    def maps():
        return json.loads(live.read())["charts"]["maps"]

    assert maps() == []
    replayed.sample(10)
    assert [chart["title"] for chart in maps()] == ["SQNR", "Underflow", "Largest magnitude"]
    assert [title for title, _ in maps()[2]["keys"]] == ["x", "w", "G for dgrad", "G for wgrad"]
    assert maps()[0]["keys"][0][1][0] == {"colour": "var(--bad0)", "text": "≥ 30"}
    replayed.step(11)
    maps()
    assert drawn == [8]  # a step without a sample draws none anew
    replayed.sample(20, sqnr=12.0)
    assert [[len(line) for line in trace["z"]] for trace in maps()[0]["data"]] == [[2, 2]] * 4
    assert drawn == [8, 16]
    path = replayed.folder / "statistics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))  # a resumed run goes back
    assert [len(line) for line in maps()[0]["data"][0]["z"]] == [1, 1]
    replayed.append("nonsense\n", "statistics.jsonl")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"statistics\.jsonl, line 9 is not a row of statistics"):
            live.read()


def test_folders_without_a_run(tmp_path):
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"there is no folder .*dem .did you mean .*demo.*mkdir -p"):
        run_folder(tmp_path / "runs" / "dem")
    other = tmp_path / "other"
    (other / "bf16").mkdir(parents=True)
    (other / "notes.txt").write_text("")
    with pytest.raises(ValueError, match=r"it has no metrics.jsonl and no config.toml; give one, as runs/demo$"):
        run_folder(other)
    (other / "bf16" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"it has runs: octavo watch .*other/bf16$"):
        run_folder(other)
    checkpoint = other / "bf16" / "checkpoints" / "step-000010"
    checkpoint.mkdir(parents=True)
    assert run_folder(checkpoint) == (other / "bf16").resolve()
