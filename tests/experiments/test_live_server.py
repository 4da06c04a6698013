"""The server of the live page answers GET for its few paths, to this machine; a real browser follows a run."""

import http.client
import json
import os
import socket
import struct
import subprocess
import sys
import threading

import pytest
import webdriver
from live_runs import ReplayedRun

from octavo.experiments.live_page import LivePage, LiveServer

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)> $x$ & <b>bold</b>"
DARK = "--blink-settings=preferredColorScheme=0"
needs_browser = pytest.mark.skipif(webdriver.missing() is not None, reason=f"{webdriver.missing()}")


@pytest.fixture
def run(tmp_path):
    return ReplayedRun(tmp_path / "run", tmp_path / "source", steps=40, name=EVIL, converted=EVIL)


@pytest.fixture
def server(run):
    with LiveServer(LivePage(run.folder), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    return response.status, dict(response.headers), response.read().decode()


def test_the_page_and_its_parts(server, run):
    run.begin(2)
    status, headers, page = ask(server)
    assert status == 200 and server.server_address[0] == "127.0.0.1"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert 'src="/live.js"' in page and "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "plotly.js v" in ask(server, "/plotly.js")[2][:300] and "Plotly.react" in ask(server, "/live.js")[2]
    assert "<img" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    stamp = {"If-None-Match": headers["ETag"]}
    assert ask(server, **stamp)[::2] == (304, "")
    run.step(3)
    assert ask(server, **stamp)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/../run/secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/metrics.jsonl", "/?", "/live.js/..",
     "http://127.0.0.1/live.js", "*"],
)  # fmt: skip
def test_no_other_path_is_answered(path, server, run):
    (run.folder / "secret.txt").write_text("secret")
    status, _, text = ask(server, path)
    assert status == 404 and "secret" not in text and "root:" not in text


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_get_only(method, server):
    status, headers, text = ask(server, "/", method)
    assert status == 501 and "Octavo" not in text and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8421", "127.0.0.1.evil.example:80", ""])
def test_another_name_of_this_machine_is_refused(host, server):
    assert ask(server, "/", Host=host)[0] == 403
    for name in ("localhost:1234", "[::1]:1"):  # a tunnel has a port of its own
        assert ask(server, "/", Host=name)[0] == 200


def test_a_browser_that_goes_away_prints_nothing(server, capfd):
    for _ in range(5):  # a reset instead of an end, in the middle of a large answer
        with socket.create_connection(("127.0.0.1", server.server_address[1])) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(b"GET /plotly.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            connection.recv(100)
    assert ask(server)[0] == 200
    for thread in threading.enumerate():
        if "process_request_thread" in thread.name:
            thread.join()
    assert capfd.readouterr().err == ""


def test_other_errors_are_printed(server, capfd):
    server.contents["/"] = "text/html", lambda: str(1 // 0)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(server)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_port_that_is_taken(server, tmp_path):
    port = server.server_address[1]
    with pytest.raises(ValueError, match=rf"port {port} of 127.0.0.1 cannot be used: .*--port"):
        LiveServer(LivePage(tmp_path), port=port)
    with LiveServer(LivePage(tmp_path)) as first, LiveServer(LivePage(tmp_path)) as second:
        assert 8421 <= first.server_address[1] < second.server_address[1]


def test_hosts_to_listen_on(tmp_path):
    page = LivePage(tmp_path)
    for host, problem in (("", "--host is empty"), ("no.such.host.invalid", "no address of this machine")):
        with pytest.raises(ValueError, match=problem):
            LiveServer(page, host=host)
    for host, url in (("127.0.0.2", "http://127.0.0.2:"), ("::1", "http://[::1]:"), ("0.0.0.0", "http://0.0.0.0:")):
        try:
            server = LiveServer(page, host=host, port=0)
        except ValueError:
            assert host == "::1"  # a machine without IPv6
            continue
        with server:
            assert server.url.startswith(url)
            assert "evil.example" not in server.names and host in server.names


def test_a_page_without_statistics_needs_no_torch(run):
    """PyTorch alone takes 180 MB."""
    run.begin(2)
    code = (
        "import sys; from octavo.experiments.live_page import LivePage; from octavo.experiments.live_page import "
        f"LiveServer; from pathlib import Path; page = LivePage(Path({str(run.folder)!r})); "
        "LiveServer(page, port=0).server_close(); assert 'step <b>2 of 40' in page.html(); "
        "print(sorted({'torch', 'transformers', 'triton', 'tokenizers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
@needs_browser
@pytest.mark.parametrize("options", [(), ("--window-size=420,900", DARK)])
def test_a_browser_follows_a_run(options, run, server):
    with webdriver.Driver(*options) as page:

        def wait_for(text, place="main"):
            # A page that takes long to draw, as beside other tests, asks less often.
            page.wait(f"document.querySelector({place!r}).innerText.includes({text!r})", 120)

        page.open(server.url)
        wait_for("has not begun")
        descriptor = run.lock()
        wait_for("preparing", ".state")
        run.begin(20)
        page.wait("document.querySelectorAll('.js-plotly-plot').length === 6")
        assert page.text("h1") == EVIL and page.run("return document.querySelectorAll('h1 *').length") == 0
        assert page.text(".progress").startswith("step 20 of 40") and page.text(".state") == "training"
        run.sample(20, layers=["layers.0.q_proj", "<img src=x onerror=alert(1)>.down_proj"], sqnr=11.5)
        page.wait("document.querySelectorAll('.js-plotly-plot').length === 9")

        axis = "document.querySelector('.plot').layout.yaxis"
        page.run("document.querySelector('figcaption button').click()")
        page.wait(f"{axis}.type === 'log'")
        page.run("document.querySelectorAll('.plot')[1].mark = 5")
        page.run("document.querySelectorAll('summary')[0].click(); scrollTo(0, 300)")
        run.append(run.line(21)[:30])  # half a line
        event = {"step": 21, "event": "move", "text": f"step 21: autopilot, {EVIL}"}
        run.append(json.dumps(event) + "\n", "events.jsonl")
        wait_for("autopilot")
        assert page.text(".progress").startswith("step 20 of 40")
        run.append(run.line(21)[30:] + "\n")
        wait_for("step 21 of 40")
        # What the reader chose stays.
        assert page.run(f"return {axis}.type") == "log" and page.run("return scrollY") == 300
        assert page.run("return document.querySelector('figcaption button').ariaPressed") == "true"
        assert page.run("return document.querySelectorAll('.plot')[1].mark") == 5  # the same figure, with its zoom
        assert "hidden_size" in page.text("details[open]")

        run.step(*range(22, 41), held_out={"loss": 3.25})
        wait_for("3.2500", ".tiles")
        run.end()
        os.close(descriptor)
        wait_for("done", ".state")
        assert page.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert page.run("return document.querySelectorAll('img').length") == 0
        assert page.messages() == []
        server.shutdown()
        server.server_close()
        wait_for("octavo watch has ended", ".state")
