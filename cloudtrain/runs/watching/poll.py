"""Look at one of many runs in a thread: its log, its status, and whether an attempt is to be sent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.sending.clients import Clients
from cloudtrain.runs.watching.groups import Entry
from cloudtrain.runs.watching.watch import Look, Watcher


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
