"""The processes of a watcher that have another environment than itself.

SDKs, kubectl's plugins and ssh read their credentials from the environment of their process, so that runs of two profiles
cannot share one. Such a process (`serve` in watch_all.py) gets its environment and messages as JSON lines on standard input.
One that watches has the credentials of a shell and ends when its input closes; one that sends an attempt has all variables.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import Status
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment

HANGS_S = 30.0  # after which a process is killed whose runs have lost their leases
Message = dict[str, Any]


class Worker:
    """A process that watches runs with another environment. What it finds is in the history."""

    def __init__(self, home: Path, environ: Mapping[str, str], clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.environ = environment.select(environ, (*environment.credentials(), *environment.BASE))
        self.runs: set[str] = set()
        self.used_at = self.alive_at = self._clock.monotonic()
        self._out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        base = environment.select(environ, environment.BASE)
        self._process = subprocess.Popen(_command(home), env=base, stdin=subprocess.PIPE, cwd="/")
        self.send(self.environ)
        threading.Thread(target=self._write, name="worker", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def serves(self, environ: Mapping[str, str], patterns: tuple[str, ...]) -> bool:
        """Return whether calls of a run with this environment may be made here."""
        return environment.select(self.environ, patterns) == environment.select(environ, patterns)

    def send(self, message: Message) -> None:
        """Send a message; returns at once."""
        self._out.put(message)

    def is_alive(self, orphans: Collection[str]) -> bool:
        """Return whether the process watches its runs, of which some are without a lease now; one that hangs is killed."""
        moment = self._clock.monotonic()
        if self.runs:
            self.used_at = moment
        if self.runs.isdisjoint(orphans):
            self.alive_at = moment
        if moment - self.alive_at > HANGS_S:
            self._process.kill()
            self._process.wait()
        return self._process.poll() is None

    def close(self) -> None:
        """Let the process end."""
        self._out.put(None)

    def _write(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError), self._process.stdin as pipe:
            while (message := self._out.get()) is not None:
                pipe.write(_line(message))
                pipe.flush()


def run_sender(
    home: Path, run_id: str, me: Process, environ: Mapping[str, str], end: tuple[str, Status] | None = None
) -> int:
    """Look at a run in a process that may send its next attempt, and return its exit code; blocking. Raises OSError.

    `end` is the id of the newest attempt and how it was seen to end.
    """
    message = {"do": "send", "run": run_id, "watcher": str(me), "end": [end[0], asdict(end[1])] if end else None}
    base = environment.select(environ, environment.BASE)
    lines = _line(dict(environ)) + _line(message)
    return subprocess.run(_command(home), input=lines, env=base, cwd="/", check=False).returncode


def _command(home: Path) -> list[str]:
    return [sys.executable, "-m", "cloudtrain.runs.watching.watch_all", str(home), "--worker"]


def _line(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
