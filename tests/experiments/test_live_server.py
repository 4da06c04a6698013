"""The server of the live page answers GET for its few paths, to this machine, and nothing else."""

import http.client
import json
import socket
import struct
import threading

import pytest
from live_runs import ReplayedRun

from octavo.experiments.live_run import LiveRun
from octavo.experiments.live_server import LiveServer

EVIL = "</script><script>alert(1)</script>"


@pytest.fixture
def server(tmp_path):
    run = ReplayedRun(tmp_path / "run", tmp_path / "source", steps=10, name=EVIL, converted=EVIL)
    run.setup()
    run.step(1, 2)
    (tmp_path / "run" / "secret.txt").write_text("secret")
    with LiveServer(LiveRun(tmp_path / "run"), port=0) as server:
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


def test_the_page_and_its_parts(server):
    status, headers, page = ask(server)
    assert status == 200 and server.server_address[0] == "127.0.0.1"
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'; script-src 'self';" in policy and "frame-ancestors 'none'" in policy
    assert 'src="/live.js"' in page and "http:" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "plotly.js v" in ask(server, "/plotly.js")[2][:300] and "Plotly.react" in ask(server, "/live.js")[2]
    _, headers, text = ask(server, "/data.json")
    assert headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
    content = json.loads(text)
    assert content["title"] == EVIL and EVIL not in page  # names travel as data, and only there


@pytest.mark.parametrize(
    "path",
    ["/secret.txt", "/../run/secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/metrics.jsonl", "/?", "/data.json/..",
     "http://127.0.0.1/data.json", "*"],
)  # fmt: skip
def test_no_other_path_is_answered(path, server):
    status, _, text = ask(server, path)
    assert status == 404 and "secret" not in text and "root:" not in text


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_get_only(method, server):
    status, headers, _ = ask(server, "/data.json", method)
    assert status == 405 and headers["Allow"] == "GET" and "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8421", "127.0.0.1.evil.example:80", "", "[::1]:1"])
def test_another_name_of_this_machine_is_refused(host, server):
    assert ask(server, "/data.json", Host=host)[0] == 403
    assert ask(server, "/data.json", Host="localhost:1234")[0] == 200  # a tunnel has a port of its own


def test_a_damaged_run_is_an_answer(server, tmp_path):
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("nonsense\n")
    assert "metrics.jsonl, line 3" in json.loads(ask(server, "/data.json")[2])["error"]


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
        LiveServer(LiveRun(tmp_path / "run"), port=port)
    with LiveServer(LiveRun(tmp_path / "run")) as first, LiveServer(LiveRun(tmp_path / "run")) as second:
        assert 8421 <= first.server_address[1] < second.server_address[1]


def test_hosts_to_listen_on(tmp_path):
    run = LiveRun(tmp_path)
    for host, problem in (("", "--host is empty"), ("no.such.host.invalid", "no address of this machine")):
        with pytest.raises(ValueError, match=problem):
            LiveServer(run, host=host)
    for host, url in (("127.0.0.2", "http://127.0.0.2:"), ("::1", "http://[::1]:"), ("0.0.0.0", "http://0.0.0.0:")):
        try:
            server = LiveServer(run, host=host, port=0)
        except ValueError:
            assert host == "::1"  # a machine without IPv6
            continue
        with server:
            assert server.url.startswith(url) and server.only_local == (host != "0.0.0.0")
            assert "evil.example" not in server.names and host in server.names
