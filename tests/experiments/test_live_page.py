"""The live page in a real browser: it follows a run from an empty folder to its end, and somebody clicks in it."""

import json
import os
import threading

import pytest
import webdriver
from live_runs import ReplayedRun

from octavo.experiments.live_run import LiveRun
from octavo.experiments.live_server import LiveServer

NAME = "<img src=x onerror=alert(1)> $x$ & <b>bold</b>"
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture
def run(tmp_path):
    return ReplayedRun(tmp_path / "run", tmp_path / "source", steps=40, name=NAME)


@pytest.fixture
def url(run):
    with LiveServer(LiveRun(run.folder), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.url
        server.shutdown()
        thread.join()


@pytest.mark.slow
@pytest.mark.skipif(webdriver.missing() is not None, reason=f"{webdriver.missing()}")
@pytest.mark.parametrize("options", [(), ("--window-size=420,900", DARK)])
def test_a_browser_follows_a_run(options, run, url):
    with webdriver.Driver(*options) as page:
        page.open(url)
        page.wait("document.getElementById('state').innerText === 'waiting'")
        assert "has not begun" in page.text("#notice")
        descriptor = run.lock()
        page.wait("document.getElementById('state').innerText === 'preparing'")
        run.setup()
        run.step(*range(1, 21))
        page.wait("document.querySelectorAll('.js-plotly-plot').length === 6")
        assert page.text("h1") == NAME and page.run("return document.querySelectorAll('h1 *').length") == 0
        assert page.text("#steps") == "step 20 of 40" and page.text("#state") == "training"
        assert page.text("#elapsed").startswith("elapsed 1 h 01 min") and page.text("#left").startswith("left ")
        assert "44.0 GiB" in page.text("#tiles") and "MFU" in page.text("#tiles")

        run.sample(20, layers=["layers.0.q_proj", "<img src=x onerror=alert(1)>.down_proj"], sqnr=11.5)
        page.wait("document.querySelectorAll('#maps .js-plotly-plot').length === 3")
        titles = page.run("return [...document.querySelectorAll('#maps h3')].map(each => each.innerText)")
        assert titles == ["SQNR", "Underflow", "Largest magnitude"]
        axis = "document.querySelector('#large .plot').layout.yaxis.type"
        page.click("#large figcaption button")
        page.wait(f"{axis} === 'log'")
        run.append(run.line(21)[:30])  # half a line
        event = {"step": 21, "event": "move", "text": f"step 21: autopilot, {NAME}"}
        run.append(json.dumps(event) + "\n", "events.jsonl")
        page.wait("document.querySelector('#events tbody').innerText.includes('autopilot')")
        assert page.text("#steps") == "step 20 of 40" and page.text("#events td span") == "move"
        run.append(run.line(21)[30:] + "\n")
        page.wait("document.getElementById('steps').innerText === 'step 21 of 40'")
        assert page.run(f"return {axis}") == "log"  # what the reader chose stays

        page.click("#pause")
        run.step(*range(22, 41), held_out={"loss": 3.25})
        assert page.text("#steps") == "step 21 of 40"
        page.click("#pause")
        page.wait("document.getElementById('tiles').innerText.includes('3.2500')")
        run.end()
        os.close(descriptor)
        page.wait("document.getElementById('state').innerText === 'done'")
        assert page.run("return [...document.querySelectorAll('#large h2')].map(each => each.innerText)") == [
            "Loss",
            "Held-out loss",
        ]
        page.click("#config summary")
        assert "hidden_size" in page.text("#config pre")
        assert page.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.run("return document.querySelectorAll('img').length") == 0
        assert page.messages() == []


@pytest.mark.slow
@pytest.mark.skipif(webdriver.missing() is not None, reason=f"{webdriver.missing()}")
def test_a_browser_shows_what_went_wrong(run, url):
    run.setup()
    run.step(1, 2, 3)
    with webdriver.Driver() as page:
        page.open(url)
        page.wait("document.getElementById('state').innerText === 'killed'")
        assert "killed after step 3" in page.text("#notice")
        run.append("nonsense\n")
        page.wait("document.getElementById('notice').innerText.includes('line 4')")
        assert page.text("#steps") == "step 3 of 40"  # what was there stays
