"""Look at one of many runs in a thread: its log, its status, and whether an attempt is to be sent."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import environment
from cloudtrain.runs.watching.groups import Entry
from cloudtrain.runs.watching.watch import Look, Watcher

MOST = 64  # that are kept: a client of an SDK takes megabytes
RENEW_S = 60.0  # between two renewals of one
Key = tuple[str, str]


class Result(NamedTuple):
    """What a look has found; after an error `attempt` is None."""

    found: Look
    attempt: AttemptRecord | None = None  # the newest
    error: Exception | None = None
    log_was_read: bool = False  # though the platform has not said the status


class Looks:
    """Looks at runs of one home, in any thread: each thread has its own connection to the history."""

    def __init__(self, home: Path, me: Process, clock: Clock = SYSTEM) -> None:
        self.clients = Clients(home, clock)
        self._home, self._me, self._clock = home, me, clock
        self._threads = threading.local()

    def look(self, entry: Entry, given: Status | None, ended: Callable[[], None]) -> Result:
        """Look at a run, with the status that its platform has just reported; blocking.

        `ended` is called when its attempt has ended, before the rest of the log is read.
        """
        try:
            watcher = self.watcher_of(entry)
            watcher.store = store = self._store()
            found = watcher.look(given, log_only=entry.log_only, ended=ended)
            attempt = store.attempts(entry.run_id)[-1]
            entry.pace = watcher.pace(attempt, self.clients.get(attempt.plan))
            return Result(found, attempt)
        except Exception as error:
            return Result(Look.SAME, None, error, entry.watch is not None and entry.watch.log_was_read)

    def watcher_of(self, entry: Entry) -> Watcher:
        """Return what remembers a run between two looks."""
        if entry.watch is None:
            entry.watch = Watcher(
                self._store(),
                entry.run_id,
                self._me,
                may_send=False,
                backend=lambda attempt: self.clients.get(attempt.plan),
                environ=entry.environ,
                lease=lambda: True,
            )
        return entry.watch

    def _store(self) -> Store:
        store: Store | None = getattr(self._threads, "store", None)
        if store is None:
            store = self._threads.store = Store(self._home, self._clock)
        return store


class Clients:
    """Backends by their options, for all threads; at most MOST."""

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self._home, self._clock = home, clock
        self._backends: dict[Key, Backend] = {}
        self._renewed: dict[Key, float] = {}  # monotonic

    def get(self, plan: Plan) -> Backend:
        """Return the backend of a plan."""
        key = _key(plan)
        backend = self._backends.get(key)
        if backend is None:
            backend = registry.create_for(plan, self._home, self._clock)
            while len(self._backends) >= MOST:
                self._backends.pop(next(iter(self._backends)), None)
            backend = self._backends.setdefault(key, backend)
        return backend

    def renew(self, plan: Plan) -> Backend | None:
        """Make a new backend after a refusal, since credentials may have been renewed; None within RENEW_S."""
        key, moment = _key(plan), self._clock.monotonic()
        if moment - self._renewed.get(key, -RENEW_S) < RENEW_S:
            return None
        self._renewed[key] = moment
        self._backends.pop(key, None)
        return self.get(plan)


def _key(plan: Plan) -> Key:
    options = (plan.job.get("options") or {}).get(plan.backend) or {}
    return plan.backend, json.dumps(options, sort_keys=True, default=str)


def run_sender(
    home: Path, run_id: str, me: Process, environ: Mapping[str, str], end: tuple[str, Status] | None = None
) -> int:
    """Look at a run in a process that may send its next attempt, and return its exit code; blocking. Raises OSError.

    `end` is the id of the newest attempt and how it was seen to end.
    """
    command = [sys.executable, "-m", "cloudtrain.runs.watching.watch", run_id, str(home), str(me)]
    done = subprocess.run(
        command,
        input=f"{json.dumps(dict(environ))}\n{json.dumps([end[0], asdict(end[1])] if end else None)}".encode(),
        env=environment.select(environ, environment.BASE),
        cwd="/",
        check=False,
    )
    return done.returncode
