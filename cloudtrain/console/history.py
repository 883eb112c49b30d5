"""Query the history in threads, off the event loop that all pages share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cloudtrain.console import text
from cloudtrain.errors import CloudtrainError, UnknownRun
from cloudtrain.history.spool import fresh_s
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run

T = TypeVar("T")
THREADS = 8  # queries of the store need one; calls to a platform may take long


class History:
    """The runs below a home, for a process with one event loop."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._thread_local = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, "history")

    @property
    def store(self) -> Store:
        """The store of this thread: an SQLite connection belongs to one thread."""
        store: Store | None = getattr(self._thread_local, "store", None)
        if store is None:
            store = self._thread_local.store = Store(self.home)
        return store

    async def query(self, function: Callable[[Store], T]) -> T:
        """Run a function with the store in a thread and return its result; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(self.store))

    async def query_run(self, run_id: str, function: Callable[[Run], T]) -> T:
        """Run a function with the run of an exact id; raises UnknownRun, and what the function raises."""

        def with_exact_id(store: Store) -> T:
            if store.get(run_id) is None:  # find() would accept a prefix
                raise UnknownRun(f"no run has the id {text.clean(run_id)}", "see the list of runs")
            return function(Run(run_id, store))

        return await self.query(with_exact_id)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


_open: list[History] = []  # global, as NiceGUI's pages are


def open_history(home: Path) -> History:
    """Open the history of this process's console, which `current` returns."""
    _open[:] = [History(home)]
    return _open[0]


def current() -> History:
    """Return the history that this process shows."""
    return _open[0]


_attached_read: dict[tuple[Path, str], float] = {}  # (home, run) -> when this process has read its output, monotonic


def refresh(run: Run) -> bool:
    """Refresh a live run for a page that is open, and return whether it was asked for; blocking.

    An attached run is read whole from its output, so as rarely as other runs' platforms are asked. Where there is no
    answer the stored state is shown.
    """
    record, key = run.record, (run.store.home, run.run_id)
    last = _attached_read.get(key)
    if record.attached and last is not None and run.store.clock.monotonic() - last < fresh_s(record.created_at):
        return False
    try:
        run.refresh(lambda _: None)
    except CloudtrainError:
        pass  # no answer
    _attached_read[key] = run.store.clock.monotonic()
    return True
