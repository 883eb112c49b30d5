"""Tests of tier 0 decide: they start no process but git, connect to nothing but loopback, and sleep for nothing.

Where one does, it fails at that line and says which tier it needs. A thread that an earlier test left behind is not its doing.
A fixture of several tests that starts a process is of tier 1 for each of them, whichever comes first.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest

LONGEST_S = 0.2  # of one sleep: a wait for a thread of the test polls in shorter steps
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "os.exec"}
HINT = "It needs tier 1: name it in tests/tiers.txt. A test that only waits takes a clock instead."


class Watch:
    """What this process does, and the test of tier 0 that must not do it."""

    def __init__(self) -> None:
        self.starts = 0
        self.is_on = False
        self._earlier: set[int | None] = set()
        self._broken: list[str] = []
        self._fixtures: set[object] = set()
        self._sleep = time.sleep
        time.sleep = self.sleep
        sys.addaudithook(self._hear)

    @contextmanager
    def over(self, item: pytest.Item) -> Iterator[None]:
        """Fail a test of tier 0 for what it does, though the code under test catches the error."""
        before = self._earlier, self._broken, self.is_on
        self._earlier = {thread.ident for thread in threading.enumerate()} - {threading.main_thread().ident}
        broken: list[str] = []
        self._broken, self.is_on = broken, True
        try:
            for name, found in item._fixtureinfo.name2fixturedefs.items():
                if found[-1] in self._fixtures:
                    pytest.fail(f"the fixture {name} starts a process. {HINT}", pytrace=False)
            yield
        finally:
            self._earlier, self._broken, self.is_on = before
            if broken:
                pytest.fail(f"this test of tier 0 {broken[0]}. {HINT}", pytrace=False)

    def sleep(self, seconds: float) -> None:
        """Sleep, but not in a test of tier 0; its threads may, as servers do."""
        if self.is_on and seconds >= LONGEST_S and threading.current_thread() is threading.main_thread():
            self._refuse(f"sleeps {seconds:g} s")
        self._sleep(seconds)

    @contextmanager
    def fixture(self, definition: pytest.FixtureDef) -> Iterator[None]:
        """Remember a fixture of several tests that starts a process."""
        before = self.starts
        yield
        if self.starts > before and definition.scope != "function":
            self._fixtures.add(definition)

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event in STARTS:
            program = _program(event, args)
            if os.path.basename(program) != "git":
                self.starts += 1
                if self.is_on:
                    self._refuse(f"starts a process ({program[:60]})")
        elif event == "socket.connect" and self.is_on and (host := _host_elsewhere(args[1])):
            self._refuse(f"connects to {host}")

    def _refuse(self, what: str) -> None:
        if threading.get_ident() not in self._earlier:
            self._broken.append(what)
            pytest.fail(f"this test of tier 0 {what}. {HINT}")


def _program(event: str, args: tuple[object, ...]) -> str:
    if event == "subprocess.Popen":
        words = args[1]
        return os.fsdecode(words[0]) if isinstance(words, list | tuple) else os.fsdecode(words).split()[0]
    return os.fsdecode(args[0]) if event in ("os.posix_spawn", "os.exec") else event


def _host_elsewhere(address: object) -> str:
    if not isinstance(address, tuple):
        return ""  # a Unix socket
    host = str(address[0]).partition("%")[0]
    try:
        return "" if ip_address(host).is_loopback else host
    except ValueError:
        return "" if host in ("localhost", "") else host
