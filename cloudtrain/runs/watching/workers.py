"""The watcher's processes for other credentials: one for each environment that differs from the watcher's own.

SDKs, kubectl's plugins and ssh read their credentials from the environment of their process, so that runs of two profiles
cannot share one. The child gets its environment and its runs as JSON lines on standard input, and ends when that closes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from cloudtrain.backends import registry
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment
from cloudtrain.runs.watching.scheduler import Multiplexer

ALIVE_S = 5.0  # how often a child reports that it does not hang
HANGS_S = 60.0  # without such a report it is killed
Message = dict[str, Any]


class Worker:
    """A child that watches runs with another environment.

    Args:
        heard: called with each message of the child, and with {"do": "died"} at its end, on a thread of its own.
    """

    def __init__(
        self,
        home: Path,
        environ: Mapping[str, str],
        heard: Callable[[Worker, Message], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self.environ = environment.select(environ, (*environment.credentials(), *environment.BASE))
        self.runs: set[str] = set()
        self.idle_since = self._clock.monotonic()
        self.alive_at = self._clock.monotonic()
        self._heard = heard
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cloudtrain.runs.watching.watch_all", str(home), "--worker"],
            env=environment.select(environ, environment.BASE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
        )
        self.send({"environ": self.environ})
        for target in (self._write, self._read):
            threading.Thread(target=target, name="worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def serves(self, environ: Mapping[str, str], patterns: tuple[str, ...]) -> bool:
        """Return whether calls of a run with this environment may be made here."""
        return environment.select(self.environ, patterns) == environment.select(environ, patterns)

    def send(self, message: Message) -> None:
        """Send a message; returns at once."""
        self._out.put(message)

    def close(self) -> None:
        """Let the child end."""
        self._out.put(None)

    def check(self) -> None:
        """Kill a child that hangs."""
        if self._clock.monotonic() - self.alive_at > HANGS_S:
            self._process.kill()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while (message := self._out.get()) is not None:
                pipe.write(json.dumps(message).encode() + b"\n")
                pipe.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for message in _messages(self._process.stdout):
            self._heard(self, message)
        self._process.wait()
        self._heard(self, {"do": "died"})


def patterns_of(backend: str) -> tuple[str, ...]:
    """Return the patterns of the variables that a backend's calls read."""
    patterns = registry.backend_class(backend).variables
    return environment.CALLS if patterns is None else patterns


def serve(home: Path) -> None:
    """Be a worker: watch the runs that come on standard input until it is closed; blocking."""
    out, lock = os.fdopen(os.dup(1), "wb"), threading.Lock()
    os.dup2(2, 1)  # what a library prints is no message
    messages = _messages(sys.stdin.buffer)
    os.environ.update(next(messages, {}).get("environ", {}))

    def report(message: Message) -> None:
        with lock, suppress(OSError):
            out.write(json.dumps(message).encode() + b"\n")
            out.flush()

    runs = Multiplexer(home, Process.here(), lambda run_id: report({"do": "ended", "run": run_id}))
    closed = threading.Event()

    def carry_out(message: Message) -> None:
        if message["do"] == "watch":
            runs.add(message["run"], message["environ"])
            runs.lease_new()
        elif message["do"] == "look":
            runs.look_now(message["run"])
        elif message["do"] == "forget":
            runs.forget(message["run"])

    def receive() -> None:
        for message in messages:
            runs.post(lambda message=message: carry_out(message))  # type: ignore[misc]
        closed.set()
        runs.post(lambda: None)

    threading.Thread(target=receive, daemon=True).start()
    store, reported_at = Store(home), -ALIVE_S
    while not closed.is_set():
        if store.clock.monotonic() - reported_at > ALIVE_S:
            report({"do": "alive"})
            runs.notice_cancelled(store.cancelled(Process.here()))
            reported_at = store.clock.monotonic()
        runs.safe_turn(1.0)


def _messages(stream: IO[bytes]) -> Iterator[Message]:
    for line in stream:
        with suppress(ValueError):
            yield json.loads(line)
