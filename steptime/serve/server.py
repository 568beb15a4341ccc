"""The server of the what-if page: standard library only, for one person on this machine.

It listens on the loopback address by default, answers only requests that name its own address (other names that resolve to this
machine are refused: DNS rebinding), reads no file for a request, and limits the size and duration of a request, the time for it
to arrive, and the number of connections.
"""

from __future__ import annotations

import ctypes
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any

from steptime.base.config import ConfigError
from steptime.serve import whatif
from steptime.serve.what_if_page import page

MOST_BYTES = 200_000
"""Largest request [B]."""
MOST_SECONDS = 10.0
"""Time limit of an estimate, and of a silent connection [s]."""
SEARCH_SECONDS = 60.0
"""Time limit of a search [s]."""
AT_ONCE = 4
"""Requests handled at once; further ones are asked to retry."""
CONNECTIONS = 64
"""Connections at once; further ones are closed unread."""
ARRIVAL_SECONDS = 30.0
"""Time limit for a request to arrive completely [s]."""
EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104  compared, not listened on
"""Addresses that mean all interfaces."""


class OverTimeError(Exception):
    """An estimate takes too long."""


class Server(ThreadingHTTPServer):
    """The server with its configuration."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, start: dict[str, Any], files: frozenset[str]) -> None:
        """`start`: plan to start from; `files`: machine files that it names."""
        super().__init__((host, port), Handler)
        self.start, self.files = start, files
        self.slots = threading.BoundedSemaphore(AT_ONCE)
        self.room = threading.BoundedSemaphore(CONNECTIONS)
        self.everywhere = host in {*EVERYWHERE, ""}
        own = self.server_address[1]
        names = {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host.lower()}
        self.hosts = {f"{name}:{own}" for name in names} | (names if own == 80 else set())
        """Accepted values of a request's Host header."""
        self.first = page(start).encode()

    def accepts(self, host: str) -> bool:
        """Whether a Host header, in lower case, names this server.

        For a server that listens on all addresses: any numeric address, which cannot be a rebound name.
        """
        if host in self.hosts:
            return True
        name, _, port = host.rpartition(":")
        return self.everywhere and port == str(self.server_address[1]) and _in_digits(name)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, while the limit allows."""
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Release the slot at the end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Suppress the error of a browser that disconnected before it had its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """The address of the page."""
        host, port = str(self.server_address[0]), self.server_address[1]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _in_digits(name: str) -> bool:
    """Whether it is an IP address, an IPv6 one in brackets."""
    bare = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return (ip_address(bare).version == 6) == (bare != name)
    except ValueError:
        return False


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "steptime"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = MOST_SECONDS

    def handle_one_request(self) -> None:
        """As the base class, but a slow request is cut off."""
        self.arriving = threading.Timer(ARRIVAL_SECONDS, self.cut)
        self.arriving.daemon = True
        self.arriving.start()
        try:
            super().handle_one_request()
        finally:
            self.arriving.cancel()

    def cut(self) -> None:
        """End the connection from another thread: a read that waits for it ends."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self) -> None:
        """Serve the page, the only document."""
        if not self.known():
            return
        path = self.path.partition("?")[0]
        if path == "/":
            self.reply(HTTPStatus.OK, self.server.first, "text/html; charset=utf-8")
        elif path == "/favicon.ico":
            self.reply(HTTPStatus.NO_CONTENT, b"", "image/x-icon")
        else:
            self.refuse(HTTPStatus.NOT_FOUND, "not found: only the page itself is served")

    def do_POST(self) -> None:
        """An estimate of the plan in the request."""
        if not self.known():
            return
        raw = self.body()
        self.arriving.cancel()
        if raw is None:
            self.close_connection = True
            return
        if not self.server.slots.acquire(timeout=MOST_SECONDS):
            self.refuse(HTTPStatus.SERVICE_UNAVAILABLE, "busy with other requests; try again")
            return
        try:
            status, found = self.estimate(raw)
        finally:
            self.server.slots.release()
        self.close_connection |= status != HTTPStatus.OK
        self.reply(status, json.dumps(found, allow_nan=False).encode(), "application/json")

    def estimate(self, raw: bytes) -> tuple[HTTPStatus, dict[str, Any]]:
        """The report, or the problems."""
        try:
            asked = whatif.read_request(json.loads(raw))
        except ConfigError as error:
            return HTTPStatus.BAD_REQUEST, problem(error.problems[0])
        except (ValueError, RecursionError):
            return HTTPStatus.BAD_REQUEST, problem("the request is not JSON")
        most = SEARCH_SECONDS if asked.best else MOST_SECONDS
        try:
            with deadline(most):
                return HTTPStatus.OK, whatif.answer(asked, self.server.files)
        except OverTimeError:
            line = f"this plan takes longer than {most:g} s; use fewer stages or micro-batches, or the command line"
            return HTTPStatus.OK, problem(line)

    def known(self) -> bool:
        """Whether the request names this server and comes from its own page."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if not self.server.accepts(host.lower()):
            self.refuse(HTTPStatus.MISDIRECTED_REQUEST, "the Host header names a different server")
            return False
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            self.refuse(HTTPStatus.FORBIDDEN, "the request comes from a different page")
            return False
        return True

    def body(self) -> bytes | None:
        """The request's body; None where it is refused."""
        if self.path != "/estimate":
            self.refuse(HTTPStatus.NOT_FOUND, "plans are accepted at /estimate only")
        elif self.headers.get_content_type() != "application/json":
            self.refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send a plan as application/json")
        elif "Transfer-Encoding" in self.headers or not self.headers.get("Content-Length", "").isdecimal():
            self.refuse(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        elif len(self.headers["Content-Length"]) > 9 or (length := int(self.headers["Content-Length"])) > MOST_BYTES:
            self.refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a plan may have at most {MOST_BYTES:,} bytes")
        else:
            raw = self.rfile.read(length)
            return raw if len(raw) == length else None
        return None

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Errors of the base class: not HTTP, unknown method. The answer repeats nothing of the request."""
        del message, explain
        self.refuse(HTTPStatus(code), HTTPStatus(code).phrase)

    def refuse(self, status: HTTPStatus, why: str) -> None:
        """Refuse in one line and close the connection, since its body was not read."""
        self.close_connection = True
        self.reply(status, json.dumps(problem(why)).encode(), "application/json")

    def reply(self, status: HTTPStatus, raw: bytes, kind: str) -> None:
        """Send an answer that other pages may not frame, read or keep."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the base class's name
        """Requests are not logged."""


def problem(line: str) -> dict[str, Any]:
    """What the page shows for a request without a report."""
    return {"ok": False, "errors": [{"path": "", "line": line}]}


HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise `OverTimeError` in this thread if the block takes longer.

    The work is pure Python, and a thread of the interpreter can be sent an exception (PyThreadState_SetAsyncExc).
    """
    thread, done, lock = threading.get_ident(), False, threading.Lock()

    def late() -> None:
        with lock:
            if not done:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OverTimeError))

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            done = True
        timer.cancel()
