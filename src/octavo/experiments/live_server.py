"""The web server of `octavo watch`: one page and its scripts, on this machine only.

A request must name this machine in its Host header, as `--host` or localhost do, or where it listens to others by any
address or its own name: another site could reach the page through a name of its own that points here (DNS rebinding).
"""

import errno
import ipaddress
import re
import socket
import sys
from collections.abc import Callable
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

from octavo.experiments.live_page import LivePage
from octavo.experiments.page import plotly_js, script

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
        self.names = {"localhost", host.lower(), address}
        self.only_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
        if not self.only_local:
            self.names.add(socket.gethostname().lower())
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
        if host not in self.server.names and (self.server.only_local or not _is_address(host)):
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
