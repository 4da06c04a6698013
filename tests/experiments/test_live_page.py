"""The page of `octavo watch` in whatever state its run is, and while its files are being written."""

import json
import os
import re
import shutil
import time
import tracemalloc

import pytest
from live_runs import ReplayedRun
from test_run_report import charts_of, parse, text_of

from octavo.experiments import live_page
from octavo.experiments.live_page import LivePage, read_state, run_folder
from octavo.experiments.run_report import write_report


@pytest.fixture
def run(tmp_path):
    return ReplayedRun(tmp_path / "run", tmp_path / "source", steps=40)


class Shown:
    """A page read as people read it."""

    def __init__(self, html):
        parse(html)
        self.text = text_of(html)
        self.charts = {chart["title"]: chart for chart in charts_of(html)}
        (self.state,) = re.findall(r'role="status">(.*?)</span>', html)
        self.tiles = [text_of(tile) for tile in re.findall(r'<div class="tile">.*?</div>', html, flags=re.S)]

    @property
    def last_step(self):
        return int(re.search(r" step ([\d,]+) of 40 ", self.text)[1])


def test_a_run_from_its_folder_to_its_end(run):
    page = LivePage(run_folder(run.folder))

    def shown():
        return Shown(page.html())

    assert shown().state == "waiting"
    descriptor = run.lock()
    assert shown().state == "preparing"
    run.begin()
    before = shown()
    assert (before.state, before.last_step, before.charts) == ("no step for 61 min", 0, {})
    assert "– tokens/s, median, 1,100 predicted" in before.tiles
    run.step(*range(1, 21))
    half = shown()
    titles = ["Loss", "Tokens per second", "Gradient norm", "Learning rate", "MFU", "Peak memory"]
    assert [*half.charts] == titles and "demo" in half.text
    assert re.search("step 20 of 40 elapsed 1:01:[01]. left 0:00:30 ", half.text)
    for tile in (
        "40.0% MFU, of the bf16 peak; 20.0% of the FP8 peak", "44.0 GiB peak memory, 45.0 predicted",
        "0.08 epochs: 5,120 tokens; the data has 256,001 in 70 documents",
    ):  # fmt: skip
        assert tile in half.tiles
    run.step(*range(21, 41), held_out={"loss": 3.25})
    assert "3.2500 held-out loss" in shown().tiles
    run.end()
    assert shown().state == "training"  # its lock is held: it may be saving
    os.close(descriptor)
    assert shown().state == "done" and " left " not in shown().text


@pytest.mark.parametrize(
    ("stopped", "more", "state", "notice"),
    [("done", [], "done", ""), ("early", [], "done", "eval.patience"), ("sigterm", [], "stopped", "--resume goes on"),
     ("non-finite", [], "failed", "was not finite"), ("other", [], "stopped", "has stopped: other"),
     (None, [], "killed", "killed after step 7"), ("done", [8, 9], "killed", "killed after step 9")],
)  # fmt: skip
def test_how_a_run_ended_that_may_have_gone_on_past_its_end(stopped, more, state, notice, run):
    run.begin(7)
    if stopped is not None:
        run.end(stopped, steps=7)
    run.step(*more)
    shown = Shown(LivePage(run.folder).html())
    assert shown.state == state and notice in shown.text


def test_a_folder_that_cannot_be_read_is_damaged(run):
    run.begin()
    page = LivePage(run.folder)
    page.html()
    shutil.rmtree(run.folder)
    run.folder.write_text("")
    assert Shown(page.html()).state == "damaged"


def test_an_ended_run_is_shown_as_its_report(run, tmp_path):
    run.begin(40)
    run.end()
    report, page = write_report([run.folder], tmp_path).read_text(), LivePage(run.folder).html()
    content = re.compile(r'<section class="tiles">.*(?=<footer>)', re.S)
    assert content.search(page)[0] == content.search(report)[0]
    assert charts_of(page) == charts_of(report)


def test_a_run_of_an_earlier_release(run):
    run.step(*range(1, 41), time=None, epoch=None, mfu=None, peak_memory=None)
    run.end()
    (run.folder / "config.toml").write_text("")
    shown = Shown(LivePage(run.folder).html())
    assert shown.state == "done" and shown.last_step == 40 and "elapsed" not in shown.text


def test_a_half_written_line_waits_for_its_end(run):
    run.begin(2)
    page, line = LivePage(run.folder), run.line(3)
    for part, step in ((line[:10], 2), (line[10:], 2), ("\n", 3)):
        run.append(part)
        assert Shown(page.html()).last_step == step


def test_a_resumed_run_takes_steps_back(run):
    run.begin(19)
    page = LivePage(run.folder)
    assert Shown(page.html()).last_step == 19
    (run.folder / "metrics.jsonl").unlink()
    run.step(*range(1, 11))
    assert Shown(page.html()).last_step == 10


def test_files_that_have_not_changed_cost_nothing(run, monkeypatch):
    reads = []
    whole = live_page.read_state
    monkeypatch.setattr(live_page, "read_state", lambda *args: reads.append(args) or whole(*args))
    run.begin(19)
    page = LivePage(run.folder)
    assert page.html() is page.html() and len(reads) == 1
    run.step(20)
    assert Shown(page.html()).last_step == 20 and len(reads) == 2


def test_a_damaged_line_that_is_mended(run):
    run.begin(2)
    page = LivePage(run.folder)
    page.html()
    run.append("nonsense\n")
    run.step(4)
    for _ in range(2):
        shown = Shown(page.html())
        assert shown.state == "damaged" and "metrics.jsonl, line 3 is not a step" in shown.text
        assert shown.last_step == 2  # what was there stays
    path = run.folder / "metrics.jsonl"
    path.write_text(path.read_text().replace("nonsense", run.line(3)))
    assert Shown(page.html()).last_step == 4


def test_a_run_that_takes_no_step_is_marked(run, monkeypatch):
    descriptor = run.lock()
    run.begin()
    run.step(*range(1, 5), time=None)
    page, now = LivePage(run.folder), time.time()
    run.append(run.line(5, time=now) + "\n")
    assert Shown(page.html()).state == "training"
    for seconds, state in ((59, "training"), (150, "no step for 2 min"), (200, "no step for 3 min")):
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        assert Shown(page.html()).state == state
    os.close(descriptor)
    assert Shown(page.html()).state == "killed"


def test_events_come_newest_first(run):
    run.begin(1)
    lines = [json.dumps({"step": n, "event": "move", "text": f"<b>{n}</b>"}) + "\n" for n in range(1, 151)]
    (run.folder / "events.jsonl").write_text("".join(lines))
    text = Shown(LivePage(run.folder).html()).text
    assert "150 move <b>150</b> 149 move <b>149</b>" in text and "And 90 more, in events.jsonl." in text


def test_heat_maps_follow_the_statistics(run):
    run.begin(10)
    page = LivePage(run.folder)

    def columns():
        charts = Shown(page.html()).charts
        return len(charts["SQNR"]["data"][0]["z"][0]) if "SQNR" in charts else 0

    assert columns() == 0
    run.sample(10)
    assert columns() == 1
    run.sample(20, sqnr=12.0)
    assert columns() == 2 and "8 figures crossed a limit." in Shown(page.html()).text
    path = run.folder / "statistics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:8]))  # a resumed run goes back
    assert columns() == 1
    run.append("nonsense\n", "statistics.jsonl")
    assert "statistics.jsonl, line 9 is not a row of statistics" in Shown(page.html()).text


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


@pytest.mark.thorough
def test_a_run_of_weeks_is_read_in_little_memory(run):
    run.begin()
    row = json.loads(run.line(1))
    run.append("".join(json.dumps(row | {"step": step}) + "\n" for step in range(1, 20_001)))
    tracemalloc.start()
    try:
        read, *_ = read_state(run.folder, locked=True)
        assert tracemalloc.get_traced_memory()[1] < 500 * 20_000  # the steps themselves are 1,200 bytes each
    finally:
        tracemalloc.stop()
    assert len(read.curves.step) == 20_000 and [row.step for row in read.recent] == [*range(19_951, 20_001)]


def test_a_gradient_that_is_not_finite_is_said(run):
    run.begin()
    run.append(json.dumps(json.loads(run.line(1)) | {"grad_norm": None, "loss": None, "skipped": True}) + "\n")
    assert "not finite gradient norm" in Shown(LivePage(run.folder).html()).text
