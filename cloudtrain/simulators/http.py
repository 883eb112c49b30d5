"""A small HTTP server on loopback: routes as data, faults on command, and a record of what it was asked.

Where the server executes what it is sent, its address ends in a secret word that every request has to bring, so that
other users of the machine cannot use it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          409: "ALREADY_EXISTS", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL",
          501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}  # fmt: skip


@dataclass
class Request:
    """What a client asks; `path` is decoded only in what a route's groups give."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    base: str  # the server's own address, with its secret word

    @property
    def json(self) -> dict[str, Any]:
        """The body as an object; raises Refusal."""
        try:
            found = json.loads(self.body or b"{}")
        except ValueError as error:
            raise Refusal(400, f"Invalid JSON payload received: {error}") from None
        if not isinstance(found, dict):
            raise Refusal(400, "Invalid JSON payload received: not an object")
        return found


@dataclass
class Answer:
    """What the server says: an object that becomes JSON, or bytes."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class Refusal(Exception):
    """An error as Google's APIs tell it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


@dataclass
class Fault:
    """What goes wrong with the next requests that fit: an error instead of the answer, or after the work was done."""

    method: str
    path: str  # searched for, as a regular expression
    status: int = 503  # 0: the connection is closed without an answer; 200: only the delay
    message: str = "The service is currently unavailable."
    times: int = 1
    after: bool = False  # the work is done, and its answer is lost
    delay_s: float = 0.0
    skip: int = 0  # so many that fit pass before
    headers: Mapping[str, str] = field(default_factory=dict)  # of the error


Route = tuple[str, str, Callable[..., Answer]]  # method, pattern of the whole path, function(request, *groups)


class Server:
    """Serves routes on a free port of 127.0.0.1, or a given one, until `close`."""

    def __init__(self, routes: Sequence[Route], *, word: str = "", port: int = 0) -> None:
        self._routes = [(method, re.compile(pattern), function) for method, pattern, function in routes]
        self._lock = threading.Lock()
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str]] = []  # method and path with its query, in the order of arrival
        self.answered: list[tuple[str, str, int]] = []  # the same with the status; 0: closed without an answer
        self.bodies: list[tuple[str, str, bytes]] = []  # of requests that had one
        self.received = 0  # bytes of all bodies
        self.busy_at = time.monotonic()
        server = self

        class Handler(_Handler):
            def answer(self, request: Request) -> Answer | None:
                return server._answer(request)

        Handler.prefix = f"/{word}" if word else ""
        self._http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}{Handler.prefix}"
        Handler.base = self.url
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def asked(self, method: str, part: str) -> int:
        """Return how many requests of a method had a part in their path."""
        return sum(known == method and re.search(part, path) is not None for known, path in self.seen)

    def _answer(self, request: Request) -> Answer | None:
        found = self._outcome(request)
        with self._lock:
            self.answered.append((request.method, request.path, found.status if found else 0))
        return found

    def _outcome(self, request: Request) -> Answer | None:
        self.busy_at = time.monotonic()
        with self._lock:
            self.seen.append((request.method, request.path))
            self.received += len(request.body)
            if request.body:
                self.bodies.append((request.method, request.path, request.body))
            fault = self._fault(request)
        if fault is not None:
            time.sleep(fault.delay_s)
            if not fault.after and fault.status != 200:
                return replace(_error(fault.status, fault.message), headers=fault.headers) if fault.status else None
        found = self._work(request)
        if fault is not None and fault.after:
            return _error(fault.status, fault.message) if fault.status else None
        return found

    def _fault(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == request.method and re.search(fault.path, request.path):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _work(self, request: Request) -> Answer:
        path = request.path.partition("?")[0]
        try:
            for method, pattern, function in self._routes:
                found = pattern.fullmatch(path) if method == request.method else None
                if found is not None:
                    return function(request, *(unquote(group) for group in found.groups()))
            raise Refusal(404, f"{request.method} {path} is nothing that this simulator knows")
        except Refusal as refusal:
            return _error(refusal.status, refusal.message)
        except Exception as error:
            return _error(500, f"the simulator broke: {type(error).__name__}: {error}")


def _error(status: int, message: str) -> Answer:
    return Answer({"error": {"code": status, "message": message, "status": STATUS.get(status, "UNKNOWN")}}, status)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    prefix = ""
    base = ""

    def answer(self, request: Request) -> Answer | None:
        raise NotImplementedError

    def _handle(self) -> None:
        body = self._body()
        if not self.path.startswith(f"{self.prefix}/"):
            self._send(_error(403, "the address lacks the simulator's word"))
            return
        path = self.path[len(self.prefix) :]
        query = dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        found = self.answer(Request(self.command, path, query, headers, body, self.base))
        if found is None:
            self.close_connection = True
            return
        self._send(found)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, found: Answer) -> None:
        data = (
            found.body
            if isinstance(found.body, bytes)
            else b""
            if found.body is None
            else json.dumps(found.body).encode()
        )
        headers = {"Content-Type": "application/json; charset=UTF-8", **found.headers, "Content-Length": str(len(data))}
        try:
            self.send_response(found.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None: ...
