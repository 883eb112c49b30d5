"""Run the measurement of this node in the supervisor's loop, for a limited time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

from .. import processes
from ..log import Log
from ..loop import Loop
from . import figures

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

LIMIT_S = 20.0
MOST = 1 << 20  # bytes of output that are kept


class NodeCheck:
    """The measurement of this node; `done` is called once with the figures, {} where there are none."""

    def __init__(self, loop: Loop, log: Log, name: str, done: Callable[[dict[str, Any]], object]) -> None:
        self._loop, self._log, self._name, self._done = loop, log, name, done
        self._output = b""
        self._pipe = self._pid = -1
        self._end_at = 0.0

    def start(self, python: str, env: Mapping[str, str], folder: str) -> None:
        """Start the program that measures; it does not block."""
        self._end_at = self._loop.clock.monotonic() + LIMIT_S
        program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "measure.py")
        self._pipe, write = os.pipe()
        try:
            self._pid = processes.spawn([python, program, f"{LIMIT_S:g}"], dict(env), folder, write)
        except OSError:
            pass  # the end of the pipe is the end of the check
        finally:
            os.close(write)
        os.set_blocking(self._pipe, False)
        self._loop.watch(self._pipe, self._read)

    def look(self) -> None:
        """End the measurement where its time is over."""
        if self._pipe >= 0 and self._loop.clock.monotonic() >= self._end_at:
            self._finish()

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, 65536)
        except BlockingIOError:
            return
        self._output = (self._output + data)[-MOST:]
        if not data:
            self._finish()

    def _finish(self) -> None:
        """Report, and leave nothing running that holds a GPU or the ranks' port."""
        self._loop.unwatch(self._pipe)
        os.close(self._pipe)
        self._pipe = -1
        if self._pid > 0:
            processes.kill_group(self._pid, signal.SIGKILL)
        try:
            measured = figures.read(self._output)
        except figures.UNREADABLE:
            measured = {}
        self._log.event("health", **{**measured, "name": self._name})
        self._done(measured)
