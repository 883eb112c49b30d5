"""One thread with an event loop for all SSH connections of this process, and calls of it from other threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

_T = TypeVar("_T")
_LOCK = threading.Lock()
_LOOPS: list[asyncio.AbstractEventLoop] = []


def begin(work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Schedule a coroutine on the event loop's thread."""
    return asyncio.run_coroutine_threadsafe(work, running())


def wait_result(future: Future[_T]) -> _T:
    """Wait for a scheduled coroutine; Ctrl-C cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def run_blocking(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the event loop's thread and wait for its result."""
    return wait_result(begin(work))


def running() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process's connections; its thread ends with the process."""
    with _LOCK:
        if not _LOOPS:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="cloudtrain-ssh", daemon=True).start()
            _LOOPS.append(loop)
        return _LOOPS[0]
