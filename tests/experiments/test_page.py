"""A report in a real browser: everything is drawn, whatever the names and values, and the console stays empty."""

import re
from html import unescape

import fake_runs
import pytest
from benchmarks import browser
from test_heatmap import KINDS, run_of
from test_run_report import charts_of, unpack

from octavo.experiments.logged_run import read_run
from octavo.experiments.page import pack, render
from octavo.experiments.run_report import page_context, write_report
from octavo.train.record.metrics import RunResult

needs_browser = pytest.mark.skipif(browser.find() is None, reason=f"no Chromium is installed: {browser.INSTALL}")
NAMES = ("<script>alert(1)</script>", "</script>", "$x$ & <b>bold</b>", "🐙" * 3, "n" * 200)


def test_packing_loses_nothing():
    text = "".join(NAMES)
    assert unpack(pack(text)) == text and not re.search("[<>&\"']", pack(text))


def opened(path, *options):
    document, messages = browser.run(path, *options)
    for payload in ("plotly", "charts"):
        document = re.sub(rf'(id="{payload}">)[^<]*', r"\1", document)
    return re.sub(r"<script>/\*\*\n\* plotly\.js.*?</script>", "", document, flags=re.S), messages


@needs_browser
@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("--window-size=390,844", "--blink-settings=preferredColorScheme=0")])
def test_a_browser_draws_every_chart_and_reports_no_error(tmp_path, options):
    """Five runs with names from outside: one stops before its first step and one after it, one has a NaN."""
    nothing = {"stopped": "non-finite", "losses": None, "tokens_per_s": None, "steps": 0, "saved_bytes_per_token": None}
    changes = [{"steps": 40}, nothing, {"steps": 1}, {"steps": 40}, {"steps": 40}]
    runs = [
        fake_runs.folder(tmp_path / str(n), "fp8 rowwise", **{"name": name, **change})
        for n, (name, change) in enumerate(zip(NAMES, changes, strict=True))
    ]
    (runs[1] / "metrics.jsonl").write_text("")
    lines = (runs[3] / "metrics.jsonl").read_text().splitlines()
    lines[7] = re.sub(r'"loss": [\d.]+', '"loss": null', lines[7])
    (runs[3] / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    rows = run_of(changed={(2, 1, KINDS[0], "w"): {"nonfinite": 2}})
    fake_runs.sample(runs[0], *rows)
    logged = [read_run(run, RunResult.read(run), slot) for slot, run in enumerate(runs)]
    (page := tmp_path / "report.html").write_text(render("report.html.j2", **page_context(logged)), encoding="utf-8")
    count = len(charts_of(page.read_text(encoding="utf-8")))
    document, messages = opened(page, *options)
    assert messages == []
    assert f'data-charts="{count}"' in document and count == 8
    assert document.count("js-plotly-plot") == document.count('class="modebar-container"') == count
    assert len(re.findall(r'<g class="trace scatter', document)) >= 2 * 5 + 3 * 5
    assert document.count('<image class="heatmap') == 0 and document.count('<g class="hm">') == 3 * 4
    legend = " ".join(map(unescape, re.findall(r'class="legendtext"[^>]*>([^<]*)<', document)))
    assert "🐙🐙🐙" in legend and "<b>bold</b>" in legend and "$x$" in legend and "alert(1)" in legend


@needs_browser
@pytest.mark.thorough
def test_a_browser_that_cannot_draw_says_so(tmp_path):
    page = write_report([fake_runs.folder(tmp_path / "run", steps=5)], tmp_path / "report")
    page.write_text(page.read_text().replace("DecompressionStream(", "NoSuchStream("))
    document, messages = opened(page)
    assert "This chart needs a browser from 2023" in document and any("NoSuchStream" in line for line in messages)
