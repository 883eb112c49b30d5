"""A backend object in another process, where clock, locale, umask and working directory change with every call."""

from __future__ import annotations

import locale
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple


class Surroundings(NamedTuple):
    """What a call must not depend on."""

    clock_s: float  # how far the clock (time.time) is off
    zone: str
    locale: str
    umask: int


SURROUNDINGS = (
    Surroundings(0, "UTC", "C", 0o022),
    Surroundings(86400, "Asia/Kolkata", "tr_TR.UTF-8", 0o077),
    Surroundings(-3600, "America/St_Johns", "de_DE.UTF-8", 0o000),
)


class Elsewhere:
    """Makes calls on a backend that another process has constructed.

    Args:
        kind: The backend's class; the other process imports it.
        options: What the class is constructed with.
        workdir: What the class is constructed with.
        folder: Gets a working directory for every call.
        wait_s: Bound for a call in seconds.
    """

    def __init__(self, kind: type, options: Any, workdir: Path, folder: Path, wait_s: float) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), _connect, (kind.__module__, kind.__qualname__, options, workdir, folder)
        )
        self._wait_s, self._pid = wait_s, self._pool.submit(os.getpid).result(wait_s)

    def __call__(self, method: str, *args: Any, **named: Any) -> Any:
        """Call a method there and return its result, an iterator's items as a list; raises what it raises."""
        return self._pool.submit(_call, method, args, named).result(self._wait_s)

    def close(self) -> None:
        """End the process, which may hang in a call."""
        os.kill(self._pid, signal.SIGKILL)
        self._pool.shutdown()


_process: dict[str, Any] = {}  # of the other process


def _connect(module: str, name: str, options: Any, workdir: Path, folder: Path) -> None:
    real = time.time
    _process.update(clock_s=0.0, folder=folder, surroundings=cycle(enumerate(SURROUNDINGS)))
    time.time = lambda: real() + _process["clock_s"]
    time.time_ns = lambda: int(time.time() * 1e9)
    _process["backend"] = getattr(import_module(module), name)(options, workdir)


def _call(method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    number, surroundings = next(_process["surroundings"])
    folder = _process["folder"] / f"directory-{number}"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    os.umask(surroundings.umask)
    os.environ |= {"TZ": surroundings.zone, "LC_ALL": surroundings.locale, "LANG": surroundings.locale}
    time.tzset()
    with suppress(locale.Error):  # not installed here; programs that a backend starts get the variables
        locale.setlocale(locale.LC_ALL, surroundings.locale)
    _process["clock_s"] = surroundings.clock_s
    result = getattr(_process["backend"], method)(*args, **named)
    return list(result) if isinstance(result, Iterator) else result
