"""The page of `octavo watch`: the report of a run as its folder is now, below its state, progress and last figures.

Nothing is written. The lock of the folder, which tells a run that goes on from a killed one, is held for an instant.
"""

import errno
import ipaddress
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from octavo.experiments.compare_verdict import arm_name
from octavo.experiments.logged_run import LoggedRun, read_run
from octavo.experiments.page import plotly_js, render, script
from octavo.experiments.run_report import page_context
from octavo.numerics.suggestions import nearest
from octavo.train.disk import LOCK, is_locked
from octavo.train.record import metrics as records
from octavo.train.record.metrics import RunResult, RunSetup, run_of

FOLLOWED = (
    records.METRICS_FILE, records.EVENTS_FILE, records.STATISTICS_FILE, records.SETUP_FILE, records.RESULT_FILE,
    records.LAYERS_FILE, records.CONFIG_FILE,
)  # fmt: skip
STALLED = 60  # Seconds without a step after which a run is marked, or ten steps if they take longer
ENDED = {  # State and text by `RunResult.stopped`
    "done": ("done", ""),
    "early": ("done", "The held-out loss fell no more (eval.patience): the run ended early."),
    "sigterm": ("stopped", "The run was stopped and has saved; --resume goes on."),
    "non-finite": ("failed", "The run stopped: a loss or a gradient was not finite."),
}


def run_folder(path: Path) -> Path:
    """The output folder of a run, given that or a checkpoint; a folder without files may become one."""
    # Raises ValueError for another folder, with the runs in it.
    folder = run_of(path)
    if not folder.is_dir():
        beside = [str(path.parent / other.name) for other in folder.parent.glob("*") if other.is_dir()]
        remedy = f"To watch one that has not begun, make its folder first: mkdir -p {path}"
        problem = f"there is no folder {path}{nearest(str(path), beside)}"
        raise ValueError(f"{problem}; give the output folder of a run, as runs/demo. {remedy}")
    names = {child.name for child in folder.iterdir()}
    if not names or names & {*records.RUN_MARKERS, records.SETUP_FILE, LOCK}:
        return folder
    runs = [child.name for child in sorted(folder.iterdir()) if (child / records.METRICS_FILE).exists()]
    commands = ", ".join(f"octavo watch {path / name}" for name in runs[:6])
    hint = f"; it has runs: {commands}" if runs else "; give one, as runs/demo"
    lack = f"it has no {records.METRICS_FILE} and no {records.CONFIG_FILE}"
    raise ValueError(f"{path} is not the output folder of a run, {lack}{hint}")


class LivePage:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run: LoggedRun | None = None
        self._state = self._notice = self._html = ""
        self._seen: object = None
        self._silent_minutes = 0

    def html(self) -> str:
        """The page; the same text as before if nothing has changed."""
        seen: object = None
        try:
            locked = is_locked(self._folder / LOCK)
            seen = locked, [_stamp(self._folder / name) for name in FOLLOWED]
            if changed := seen != self._seen:
                with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of lines half written
                    self._run, self._state, self._notice = read_state(self._folder, locked)
        except (ValueError, OSError) as error:  # what was read before stays
            changed, self._state, self._notice = True, "damaged", str(error)
        silent_minutes = _silent_minutes(self._run) if self._run is not None and self._state == "training" else 0
        if changed or silent_minutes != self._silent_minutes:
            self._silent_minutes, self._html = silent_minutes, self._render(silent_minutes)
        self._seen = seen
        return self._html

    def _render(self, silent_minutes: int) -> str:
        state = f"no step for {silent_minutes} min" if silent_minutes else self._state
        header = {"state": state, "notice": self._notice, "folder": str(self._folder)}
        if (run := self._run) is None:
            return render("live.html.j2", title=self._folder.name, subtitle="", runs=[], steps=0, **header)
        result, steps = run.result, run.result.steps if run.setup is None else run.setup.steps
        context = page_context([run]) | {
            "title": result.name, "steps": steps, "percent": 100 * result.steps / max(steps, 1),
            "subtitle": f"{arm_name(result.precision)} · {result.parameters:,} parameters · {result.device}",
            "times": _times(run, steps, training=self._state == "training"),
        }  # fmt: skip
        return render("live.html.j2", **context, **header)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes with the content of a file; None without it."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_state(folder: Path, locked: bool | None) -> tuple[LoggedRun | None, str, str]:
    """The run as far as it got, its state, and a sentence about that."""
    setup = RunSetup.read(folder)
    ended = RunResult.read(folder) if (folder / records.RESULT_FILE).exists() else None
    summary = ended if setup is None else setup.summary
    if summary is None or (locked and setup is None):
        if locked:
            return None, "preparing", "The run reads its data and builds its model."
        return None, "waiting", "The run has not begun. This page shows it once it has."
    run = read_run(folder, summary)
    run = replace(run, events=run.events[::-1])  # the newest first
    totals = run.totals.fields()
    if ended is not None and not locked and ended.steps == totals["steps"]:
        state, notice = ENDED.get(ended.stopped, ("stopped", f"The run has stopped: {ended.stopped}."))
        return replace(run, result=ended), state, notice
    run = replace(run, result=replace(summary, **totals))
    if locked:
        return run, "training", ""
    if locked is None:
        return run, "training", "This file system has no locks: whether the run goes on is not known."
    text = f"The run was killed after step {run.result.steps:,}, before it could save; --resume goes on."
    return run, "killed", text


def _last_time(run: LoggedRun) -> float | None:
    """When the last step of this process ended, or training began; None if an earlier release wrote no times."""
    started = None if run.setup is None else run.setup.started
    last = run.recent[-1].time if run.recent else None
    return started if last is None else max(last, started or last)


def _silent_minutes(run: LoggedRun) -> int:
    """How long there was no step, if that is long; else 0."""
    seconds = time.time() - (_last_time(run) or time.time())
    return int(seconds / 60) if seconds > max(STALLED, 10 * (_seconds_per_step(run) or 0)) else 0


def _seconds_per_step(run: LoggedRun) -> float | None:
    """Mean seconds of the last steps of this process, with what lies between them."""
    recent, started = run.recent, 0.0 if run.setup is None else run.setup.started
    times = [row.time for row in recent if row.time is not None and row.time >= started]
    if len(times) > 1:
        return (times[-1] - times[0]) / (len(times) - 1)
    return recent[-1].step_s if recent else None


def _times(run: LoggedRun, steps: int, *, training: bool) -> dict[str, str]:
    times = {"step": f"{run.result.steps:,} of {steps:,}"}
    if run.setup is not None and (last := _last_time(run)) is not None:
        times["elapsed"] = str(timedelta(seconds=round(last - run.setup.started)))
    each, left = _seconds_per_step(run), steps - run.result.steps
    if training and left and each is not None:
        times["left"] = str(timedelta(seconds=round(left * each)))
    return times


# The web server of `octavo watch`: one page and its scripts, on this machine only.
#
# A request must name this machine in its Host header, by `--host`, localhost, its own name or any address: another site
# could reach the page through a name of its own that points here (DNS rebinding).


LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 8421, 50
"""Ports to try where none is given: the same at each start where it is free, so that a tunnel or a tab goes on."""
POLICY = (  # No scripts in the page itself: a name or value of a run cannot become one
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY, "Cache-Control": "no-store", "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
}  # fmt: skip
HTML, SCRIPT = "text/html; charset=utf-8", "text/javascript; charset=utf-8"


class LiveServer(ThreadingHTTPServer):
    """Serves the live page of a run; `serve_forever` runs it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, page: LivePage, *, host: str = LOOPBACK, port: int | None = None) -> None:
        self._page, self._lock = page, Lock()
        code, library = script("live"), plotly_js()
        self.contents: dict[str, tuple[str, Callable[[], str]]] = {
            "/": (HTML, self._html), "/live.js": (SCRIPT, lambda: code), "/plotly.js": (SCRIPT, lambda: library),
        }  # fmt: skip
        self.address_family, address = _address(host)
        self.names = {"localhost", host.lower(), socket.gethostname().lower()}
        for number in range(FIRST_PORT, FIRST_PORT + PORTS) if port is None else [port]:
            try:
                super().__init__((address, number), _Handler)
                return
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise ValueError(f"--host {host} is no address of this machine: {error.strerror}") from None
                problem = error
        where = f"port {port}" if port is not None else f"each of the ports {FIRST_PORT} to {FIRST_PORT + PORTS - 1}"
        raise ValueError(f"{where} of {host} cannot be used: {problem.strerror}; choose another with --port")

    @property
    def url(self) -> str:
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, unless it is a browser's that went away."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def _html(self) -> str:
        with self._lock:
            return self._page.html()


def _address(host: str) -> tuple[socket.AddressFamily, str]:
    """Family and address of a host to listen on. Raises ValueError for none, which would be all of the machine's."""
    if not host:
        remedy = f"give the address to listen on, as {LOOPBACK}; for all of this machine 0.0.0.0"
        raise ValueError(f"--host is empty: {remedy}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"--host {host} is no address of this machine: {error}") from None
    return family, str(address[0])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "octavo", ""
    timeout = 30

    def do_GET(self) -> None:
        host = re.sub(r":\d*$", "", self.headers.get("Host", "")).strip("[]").lower()
        if host not in self.server.names and not _is_address(host):
            self._answer(HTTPStatus.FORBIDDEN, "This server answers to addresses, localhost and its --host only.\n")
        elif (content := self.server.contents.get(self.path)) is None:
            self._answer(HTTPStatus.NOT_FOUND, "There is no such page.\n")
        else:
            self._answer(HTTPStatus.OK, content[1](), content[0])

    def _answer(self, status: HTTPStatus, text: str, kind: str = "text/plain; charset=utf-8") -> None:
        body = text.encode()
        stamp = f'"{sha256(body).hexdigest()}"'
        if status == HTTPStatus.OK and self.headers.get("If-None-Match") == stamp:
            status, body = HTTPStatus.NOT_MODIFIED, b""
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("ETag", stamp)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
