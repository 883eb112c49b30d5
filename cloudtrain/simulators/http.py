"""HTTP server of the simulators: routes, injected faults, and a record of all requests.

A server that executes what it receives has a secret path in its URL, so that other users of the machine cannot use it.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from cloudtrain.clock import SYSTEM

STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND",
          409: "ALREADY_EXISTS", 412: "FAILED_PRECONDITION", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL",
          501: "UNIMPLEMENTED", 503: "UNAVAILABLE", 504: "DEADLINE_EXCEEDED"}  # fmt: skip


@dataclass
class Request:
    """An HTTP request. `path` is still percent-encoded; a route's groups are decoded."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    base: str  # the server's own URL, with its secret path

    @property
    def json(self) -> dict[str, Any]:
        """The body as a JSON object; raises ApiError."""
        try:
            parsed = json.loads(self.body or b"{}")
        except ValueError as error:
            raise ApiError(400, f"Invalid JSON payload received: {error}") from None
        if not isinstance(parsed, dict):
            raise ApiError(400, "Invalid JSON payload received: not an object")
        return parsed


@dataclass
class Response:
    """An HTTP response; a body that is not bytes is sent as JSON. After a 101 `serve` gets the connection, and blocks."""

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    serve: Callable[[socket.socket, BufferedIOBase], None] | None = None


class ApiError(Exception):
    """An error of the simulated API, with the body of Google's APIs; other APIs override `response`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message

    @property
    def response(self) -> Response:
        return _error(self.status, self.message)


@dataclass
class Fault:
    """An injected fault: the next matching requests get an error, instead of or after being carried out."""

    method: str
    path: str  # a regular expression, searched in the path
    status: int = 503  # 0: the connection is closed without a response; 200: only the delay
    message: str = "The service is currently unavailable."
    times: int = 1
    after: bool = False  # the request is carried out and its response is lost
    delay_s: float = 0.0
    skip: int = 0  # so many matching requests pass first
    then: Sequence[Fault] = ()  # begin when this one has met a request
    headers: Mapping[str, str] = field(default_factory=dict)  # of the error response


Route = tuple[str, str, Callable[..., Response]]  # method, pattern of the whole path, function(request, *groups)


class Server:
    """Serves routes on 127.0.0.1 until `close`; port 0 is any free port."""

    def __init__(self, routes: Sequence[Route], *, secret: str = "", port: int = 0) -> None:
        self._routes = [(method, re.compile(pattern), function) for method, pattern, function in routes]
        self._lock = threading.Lock()
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []  # method and path with query, in the order of arrival
        self.responses: list[tuple[Request, int]] = []  # requests with their status; 0: closed without a response
        self.request_bodies: list[tuple[str, str, bytes]] = []  # method, path and body of requests that had one
        self.received_bytes = 0  # bytes of all bodies
        self.active_at = SYSTEM.monotonic()
        prefix = f"/{secret}" if secret else ""
        self._http = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, self._handle_request, prefix))
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}{prefix}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def count_requests(self, method: str, part: str) -> int:
        """Count the requests of a method whose path matches the regular expression `part`."""
        return sum(seen_method == method and re.search(part, path) is not None for seen_method, path in self.requests)

    def _handle_request(self, request: Request) -> Response | None:
        response = self._respond(request)
        with self._lock:
            self.responses.append((request, response.status if response else 0))
        return response

    def _respond(self, request: Request) -> Response | None:
        self.active_at = SYSTEM.monotonic()
        with self._lock:
            self.requests.append((request.method, request.path))
            self.received_bytes += len(request.body)
            if request.body:
                self.request_bodies.append((request.method, request.path, request.body))
            fault = self._take_fault(request)
        if fault is not None:
            SYSTEM.sleep(fault.delay_s)
            if not fault.after and fault.status != 200:
                return replace(_error(fault.status, fault.message), headers=fault.headers) if fault.status else None
        response = self._call_route(request)
        if fault is not None and fault.after:
            return _error(fault.status, fault.message) if fault.status else None
        return response

    def _take_fault(self, request: Request) -> Fault | None:
        for fault in self.faults:
            if fault.times and fault.method == request.method and re.search(fault.path, request.path):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                self.faults.extend(fault.then)
                fault.then = ()
                return fault
        return None

    def _call_route(self, request: Request) -> Response:
        path = request.path.partition("?")[0]
        try:
            for method, pattern, function in self._routes:
                match = pattern.fullmatch(path) if method == request.method else None
                if match is not None:
                    return function(request, *(unquote(group) for group in match.groups()))
            raise ApiError(404, f"{request.method} {path} is nothing that this simulator knows")
        except ApiError as error:
            return error.response
        except Exception as error:
            return _error(500, f"the simulator broke: {type(error).__name__}: {error}")


def _error(status: int, message: str) -> Response:
    return Response({"error": {"code": status, "message": message, "status": STATUS.get(status, "UNKNOWN")}}, status)


def paginate(key: str, items: Sequence[Any], token: str, size: int) -> Response:
    """Return one page of a list as Google's APIs do: `key` only where it has items, nextPageToken where more follow."""
    first = int(token or 0)
    end = first + size
    page = {key: items[first:end]} if items[first:end] else {}
    return Response(page | ({"nextPageToken": str(end)} if end < len(items) else {}))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(self, respond: Callable[[Request], Response | None], prefix: str, *connection: Any) -> None:
        self._respond, self._prefix = respond, prefix
        super().__init__(*connection)  # serves the connection

    def _handle(self) -> None:
        body = self._body()
        if not self.path.startswith(f"{self._prefix}/"):
            self._send(_error(403, "the address lacks the simulator's secret path"))
            return
        path = self.path[len(self._prefix) :]
        query = dict(parse_qsl(urlsplit(path).query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        address, port = self.connection.getsockname()
        base = f"http://{address}:{port}{self._prefix}"
        response = self._respond(Request(self.command, path, query, headers, body, base))
        if response is None:
            self.close_connection = True
            return
        self._send(response)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _handle

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def _send(self, response: Response) -> None:
        data = (
            response.body
            if isinstance(response.body, bytes)
            else b""
            if response.body is None
            else json.dumps(response.body).encode()
        )
        headers = {
            "Content-Type": "application/json; charset=UTF-8",
            "Content-Length": str(len(data)),
            **response.headers,  # the answer to a HEAD says how long that to a GET is
        }
        if response.serve is not None:
            headers = dict(response.headers)
        try:
            self.send_response(response.status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)
            if response.serve is not None:
                self.close_connection = True
                response.serve(self.connection, self.rfile)
        except OSError:
            self.close_connection = True  # the client has gone

    def log_message(self, format: str, *args: object) -> None: ...
