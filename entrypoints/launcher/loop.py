"""Event loop of the supervisor: one thread polls file descriptors and calls back."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from .clock import SYSTEM, Clock

OUTPUT_PAUSE_S = 0.004  # output is read at most so often: fewer, larger reads leave the processor to the ranks


class Loop:
    """Watches descriptors. Those of output wait a moment, so that many lines are read at once; others never do."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self._all = select.poll()
        self._urgent = select.poll()
        self._callbacks: dict[int, Callable[[], object]] = {}
        self._outputs: set[int] = set()
        self._rest_until = 0.0

    def watch(self, descriptor: int, callback: Callable[[], object], output: bool = False) -> None:
        """Call back whenever the descriptor can be read or has been closed by its other end."""
        self._callbacks[descriptor] = callback
        self._all.register(descriptor, select.POLLIN)
        if output:
            self._outputs.add(descriptor)
        else:
            self._urgent.register(descriptor, select.POLLIN)

    def watch_signals(self, callback: Callable[[bytes], object]) -> None:
        """Call back with the numbers of SIGTERM, SIGINT and SIGCHLD that came. SIGHUP is ignored from now on."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

        def take() -> None:
            try:
                numbers = os.read(read, 4096)
            except BlockingIOError:
                return
            callback(numbers)

        self.watch(read, take)

    def unwatch(self, descriptor: int) -> None:
        """Forget a descriptor; to be called before it is closed."""
        if self._callbacks.pop(descriptor, None) is not None:
            self._all.unregister(descriptor)
            if descriptor in self._outputs:
                self._outputs.discard(descriptor)
            else:
                self._urgent.unregister(descriptor)

    def wait(self, timeout_s: float) -> None:
        """Wait for at most so long until something can be read, and call back for all that can."""
        now = self.clock.monotonic()
        if now < self._rest_until:
            rest = min(timeout_s, self._rest_until - now)
            self._call(self._urgent.poll(rest * 1000))
            if self.clock.monotonic() < self._rest_until:
                return
            timeout_s = 0.0
        self._call(self._all.poll(max(0.0, timeout_s) * 1000))

    def _call(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, _ in ready:
            callback = self._callbacks.get(descriptor)  # an earlier callback may have forgotten it
            if callback is not None:
                callback()
                if descriptor in self._outputs:
                    self._rest_until = self.clock.monotonic() + OUTPUT_PAUSE_S
