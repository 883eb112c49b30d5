"""Read a public list over HTTP, within bounds of time, size and line length, and without following redirects."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from cloudtrain.backends.http import network_hint
from cloudtrain.errors import BackendError, CloudtrainError, Unreachable

T = TypeVar("T")
LONGEST_S = 600.0  # of one list
SILENCE_S = 30.0  # without a byte
# The size of SageMaker's file for a region is reported as 16 MB by some and as hundreds of MB by others (2026-11-23).
MAX_BYTES = 1 << 30
MAX_PAGE_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 16


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: none of the addresses has any, and an API key must not go elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def lines(url: str) -> Iterator[str]:
    """Yield the lines of a text; blocking. Raises BackendError, Unreachable."""
    with _Answer(url, {}) as answer:
        count = 0
        while line := answer.response.readline(MAX_LINE_BYTES):
            count += len(line)
            if count > MAX_BYTES:
                raise BackendError(f"{url} is longer than {MAX_BYTES >> 20} MiB")
            if len(line) == MAX_LINE_BYTES:
                raise BackendError(f"{url} has a line of more than {MAX_LINE_BYTES} bytes")
            yield line.decode("utf-8")
        if answer.response.length:  # bytes that are missing of Content-Length
            raise Unreachable(f"the connection was lost after {count} bytes of {url}", "try again")


def page(url: str, headers: Mapping[str, str]) -> Any:
    """Return a JSON answer; blocking. Raises BackendError, Unreachable."""
    with _Answer(url, headers) as answer:
        text = answer.response.read(MAX_PAGE_BYTES + 1)
        if len(text) > MAX_PAGE_BYTES:
            raise BackendError(
                f"{url} answered with more than {MAX_PAGE_BYTES >> 20} MiB, too much for a list of prices"
            )
        return json.loads(text)


def content(url: str, most: int) -> bytes:
    """Return a file of at most so many bytes; blocking. Raises BackendError, Unreachable."""
    with _Answer(url, {}) as answer:
        found: bytes = answer.response.read(most + 1)
        if len(found) > most:
            raise BackendError(f"{url} is longer than {most >> 10} KiB")
        if answer.response.length:
            raise Unreachable(f"the connection was lost after {len(found)} bytes of {url}", "try again")
        return found


class _Answer:
    """An open answer; what goes wrong while it is read becomes an error of ours, without a header of the request."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers = url, headers
        self.response: Any = None

    def __enter__(self) -> _Answer:
        opener = urllib.request.build_opener(_NoRedirects)
        try:
            request = urllib.request.Request(self._url, headers=dict(self._headers))
            self.response = opener.open(request, timeout=SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                moved = " (a redirect, which cloudtrain does not follow)" if 300 <= error.code < 400 else ""
                raise BackendError(f"{self._url} answered with status {error.code}{moved}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise Unreachable(f"{self._url} cannot be reached: {reason}", network_hint(str(reason))) from None
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.response.close()
        if isinstance(error, OSError | http.client.HTTPException):
            raise Unreachable(f"{self._url} was cut off: {error!r}", "try again") from None
        if isinstance(error, ValueError | RecursionError):
            raise BackendError(
                f"{self._url} is not a price list that this version of cloudtrain can read: {error}"
            ) from None


def within(seconds: float, work: Callable[[], T], what: str) -> T:
    """Return what `work` returns; raises Unreachable after some seconds, and leaves its thread behind.

    A server that sends a byte now and then is never silent: only a clock outside the reading ends that.
    """
    results: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    Thread(target=run, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except Empty:
        raise Unreachable(f"{what} was not downloaded within {seconds:g} s", "try again") from None
    if isinstance(error, CloudtrainError):
        raise error.with_traceback(None)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]
