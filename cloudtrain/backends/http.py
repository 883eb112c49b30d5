"""Call HTTP APIs: retries with backoff, downloads that continue, redirects without credentials, errors with a request id.

It uses the standard library only: Kubernetes needs no extra, and google-auth alone brings no HTTP library.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, NoService, Unreachable

TIMEOUT_S = 60.0  # between two pieces of an answer
ANSWER_S = 300.0  # for a whole answer that is not a stream: a list of many pages has a call for each
ANSWER_BYTES = 256 << 20  # the same
TRIES = 5
PAUSE_S = 0.25  # doubled after each try
MAX_BACKOFF_S = 8.0
MAX_PAUSE_S = 30.0  # upper limit for a server's Retry-After
RETRYABLE = (408, 429, 500, 502, 503, 504)  # HTTP statuses after which the same call may succeed later
CHUNK_BYTES = 1 << 20  # read at a time
NO_SECRETS = {
    "Accept",
    "Content-type",
    "Range",
    "User-agent",
}  # headers that another host gets too, as urllib names them
# HeaderAuditID in k8s.io/apiserver/pkg/apis/audit/types.go; Cloud Storage's name for it; the common one (2026-11-23)
REQUEST_IDS = ("audit-id", "x-guploader-uploadid", "x-request-id")


class Answer(NamedTuple):
    """An HTTP response: status, headers with lowercase names, body. google-auth takes it as a transport.Response."""

    status: int
    headers: Mapping[str, str]
    data: bytes = b""

    @property
    def json(self) -> Any:
        """The body parsed as JSON; raises Unreachable where a proxy answered instead of the API."""
        try:
            return json.loads(self.data or b"null")
        except ValueError:
            start = " ".join(self.data[:100].decode("utf-8", "replace").split())
            raise Unreachable(
                f"the answer of the API is not JSON: {start}",
                "check whether a proxy answers in its place (HTTPS_PROXY)",
            ) from None


class HttpError(BackendError):
    """The server answered with an error; a failure of the server's own is named with its request id, for its support."""

    def __init__(self, message: str, hint: str, answer: Answer) -> None:
        request_id = next((answer.headers[name] for name in REQUEST_IDS if name in answer.headers), "")
        super().__init__(f"{message} (request {request_id})" if request_id and answer.status >= 500 else message, hint)
        self.answer, self.status, self.request_id = answer, answer.status, request_id


class Http:
    """Sends requests to one service. Every call blocks; raises BackendError, Unreachable.

    Args:
        address: Returns the URL of a path and the headers with the credentials. It is called before every try.
        error: Returns the exception for an error answer. Its second argument begins the message.
        hint: Returns what to do when the server is not reached.
        handlers: Returns urllib's handlers: TLS, proxies.
        renew: Drops a token that the server answered with 401; returns whether a new one can be obtained.
    """

    def __init__(
        self,
        address: Callable[[str], tuple[str, Mapping[str, str]]],
        error: Callable[[Answer, str], HttpError],
        hint: Callable[[object], str],
        handlers: Callable[[], Iterable[urllib.request.BaseHandler]] = tuple,
        renew: Callable[[], bool] = lambda: False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self._address, self._error, self._hint, self._handlers, self._renew = address, error, hint, handlers, renew

    def call(
        self,
        method: str,
        path: str,
        failure: str,
        *,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int | None = None,
        timeout_s: float = TIMEOUT_S,
        accept: tuple[int, ...] = (),
        retryable: tuple[int, ...] = RETRYABLE,
    ) -> Answer:
        """Return an answer of 2xx or of a status in `accept`; `failure` begins the error's message.

        Raises Unreachable, also if an earlier try may have been carried out although the last one was refused.
        """
        maybe_applied = False  # whether an earlier try may have changed something
        tries = tries or TRIES
        for attempt in range(tries):
            try:
                with self._send(method, path, failure, data, headers or {}, timeout_s) as response:
                    return Answer(response.status, _lowercase_names(response.headers), _read_all(response, self._clock))
            except (BackendError, OSError, http.client.HTTPException) as error:
                status = error.status if isinstance(error, HttpError) else None
                if isinstance(error, HttpError) and status in accept:
                    return error.answer
                if attempt == tries - 1 or not self._may_retry(error, retryable):
                    final = self._final(error, path, failure)
                    if maybe_applied and (isinstance(final, NoService) or not isinstance(final, Unreachable)):
                        final = Unreachable(final.message, final.hint)
                    raise final from None
                unclear = (status is None or status >= 500) and not is_refused_connection(error)
                maybe_applied = maybe_applied or (method != "GET" and unclear)
                self._clock.sleep(_retry_delay(attempt, error))
        raise AssertionError("the last try returns or raises")

    def stream(
        self,
        path: str,
        failure: str,
        headers: Mapping[str, str] | None = None,
        first: int = 0,
        last: int | None = None,
    ) -> Iterator[bytes]:
        """Yield a body in chunks, or its bytes from `first` to `last`; continues where the connection breaks off."""
        begin = partial(self._body, path, failure, headers or {}, first, last)
        try:
            yield from resume(begin, lambda error: self._may_retry(error, RETRYABLE), self._clock)
        except (OSError, http.client.HTTPException) as error:
            raise self._final(error, path, failure) from None

    def _body(
        self, path: str, failure: str, headers: Mapping[str, str], first: int, last: int | None, received: int
    ) -> Iterator[bytes]:
        start = first + received
        span = {"Range": f"bytes={start}-{'' if last is None else last}"} if start or last is not None else {}
        with self._send("GET", path, failure, None, {**headers, **span}, TIMEOUT_S) as response:
            skip = start if response.status != 206 else 0  # a server that knows no Range sends everything
            left = sys.maxsize if last is None else last + 1 - start
            while left and (chunk := response.read(CHUNK_BYTES)):
                fresh, skip = chunk[skip : skip + left], max(skip - len(chunk), 0)
                left -= len(fresh)
                if fresh:
                    yield fresh
            if left and response.length:  # what is missing of Content-Length
                raise http.client.IncompleteRead(b"", response.length)

    def _send(
        self, method: str, path: str, failure: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> Any:
        """Send one request and return the open response; raises HttpError for a status other than 2xx, OSError."""
        url, credentials = self._address(path)
        try:
            request = urllib.request.Request(url, data, {**credentials, **headers}, method=method)
            return self._opener.open(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise self._error(_read_error(error), failure) from None

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(_Redirects, *self._handlers())

    def _may_retry(self, error: Exception, retryable: tuple[int, ...]) -> bool:
        if isinstance(error, HttpError):
            return error.status in retryable or (error.status == 401 and self._renew())
        return isinstance(error, OSError | http.client.HTTPException)  # a BackendError: no credentials any more

    def _final(self, error: Exception, path: str, failure: str) -> BackendError:
        if isinstance(error, BackendError):
            return error
        reason, parts = getattr(error, "reason", None) or error, urlsplit(self._address(path)[0])
        message = f"{failure}: {parts.scheme}://{parts.netloc} cannot be reached: {reason}"
        return (NoService if is_refused_connection(error) else Unreachable)(message, self._hint(reason))


def is_refused_connection(error: BaseException) -> bool:
    """Return whether a request was not sent: the connection was refused, or the host's name has no address."""
    reason = getattr(error, "reason", None) or error
    return isinstance(reason, ConnectionRefusedError | socket.gaierror)


CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")  # what Python's ssl and requests read


def network_hint(reason: str, variables: Sequence[str] = CERTIFICATES) -> str:
    """Return what to do where a server of a cloud was not reached; it names the proxy, and the file of certificates.

    `variables` name the file for the client that was used.
    """
    proxies = urllib.request.getproxies()
    proxy = re.sub(r"//[^/@]*@", "//", proxies.get("https") or proxies.get("http") or "")
    if "certificate" in reason.lower():
        whose = f"the proxy {proxy}" if proxy else "the proxy or of your organisation"
        named = ((name, os.environ.get(name)) for name in variables)
        absent = ", which does not exist"
        now = next((f"; {name} is {file}{'' if Path(file).exists() else absent}" for name, file in named if file), "")
        return f"export {' '.join(f'{name}=FILE' for name in variables)}, with the certificates of {whose}{now}"
    if proxy:
        return f"check the proxy {proxy} (HTTPS_PROXY), or name the host in NO_PROXY"
    return "check the network"


def read_body(read: Callable[[int], bytes], url: str, clock: Clock = SYSTEM) -> bytes:
    """Read a whole answer; raises Unreachable where it is longer or takes longer than an API's may, and what `read` raises."""
    pieces, size, end = [], 0, clock.monotonic() + ANSWER_S
    while piece := read(CHUNK_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > ANSWER_BYTES or clock.monotonic() > end:
            limit = f"{ANSWER_BYTES >> 20} MiB" if size > ANSWER_BYTES else f"{ANSWER_S:.0f} s"
            message = f"the answer of {urlsplit(url).netloc} is over the limit of {limit} ({size} bytes were read)"
            raise Unreachable(message, "check the address, and whether a proxy answers in its place (HTTPS_PROXY)")
    return b"".join(pieces)


def _read_all(response: Any, clock: Clock = SYSTEM) -> bytes:
    """Read an answer of urllib; raises Unreachable, OSError, HTTPException."""
    data = read_body(response.read1, response.url, clock)
    if response.length:  # what is missing of Content-Length
        raise http.client.IncompleteRead(data, response.length)
    return data


def resume(
    begin: Callable[[int], Iterator[bytes]], may_retry: Callable[[Exception], bool], clock: Clock = SYSTEM
) -> Iterator[bytes]:
    """Yield the chunks of `begin(0)`; if it fails, continue with those of `begin(<bytes received>)`, after a pause.

    Gives up after TRIES failures without a byte in between, and raises the last one.
    """
    attempt = received = 0
    while True:
        try:
            for chunk in begin(received):
                received, attempt = received + len(chunk), 0
                yield chunk
            return
        except Exception as error:
            if attempt == TRIES - 1 or not may_retry(error):
                raise
            clock.sleep(_retry_delay(attempt, error))
            attempt += 1


def ask(method: str, url: str, data: bytes | None, headers: Mapping[str, str], timeout_s: float | None) -> Answer:
    """Send one request and return the answer, whatever its status; blocking. Raises OSError."""
    request = urllib.request.Request(url, data, dict(headers), method=method)
    try:
        with urllib.request.build_opener(_Redirects).open(request, timeout=timeout_s) as response:
            return Answer(response.status, _lowercase_names(response.headers), _read_all(response))
    except urllib.error.HTTPError as error:
        return _read_error(error)


def _read_error(error: urllib.error.HTTPError) -> Answer:
    """Return an error's answer, with the part of the body that arrived if the connection broke off."""
    with error:
        try:
            body = _read_all(error)
        except http.client.IncompleteRead as broken:
            body = broken.partial
        except (OSError, http.client.HTTPException, Unreachable):
            body = b""
    return Answer(error.code, _lowercase_names(error.headers), body)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, without tokens and keys when the host changes; urllib itself would send them there."""

    def redirect_request(self, req: urllib.request.Request, *rest: Any) -> urllib.request.Request | None:
        redirected = super().redirect_request(req, *rest)
        if redirected is not None and urlsplit(redirected.full_url)[:2] != urlsplit(req.full_url)[:2]:
            redirected.headers = {name: redirected.headers[name] for name in NO_SECRETS & {*redirected.headers}}
        return redirected


def _retry_delay(attempt: int, error: Exception) -> float:
    """Return the seconds to wait before the next try; a server's Retry-After counts."""
    wanted = error.answer.headers.get("retry-after", "") if isinstance(error, HttpError) else ""
    backoff_s = min(2 * PAUSE_S * 2.0**attempt, MAX_BACKOFF_S)
    return max(backoff_s, min(float(wanted), MAX_PAUSE_S)) if wanted.isdigit() else backoff_s


def _lowercase_names(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
