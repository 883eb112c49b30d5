"""Questions to the history, asked in a thread: the event loop, which all pages share, waits for nobody."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cloudtrain.console import text
from cloudtrain.errors import UnknownRun
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run

T = TypeVar("T")
THREADS = 8  # a function to a platform may take long; those to the store need one


class History:
    """The runs below a home, for a process with one event loop."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._thread_local = threading.local()
        self._threads = ThreadPoolExecutor(THREADS, "history")

    @property
    def store(self) -> Store:
        """The store of this thread: SQLite's connections stay with theirs."""
        store: Store | None = getattr(self._thread_local, "store", None)
        if store is None:
            store = self._thread_local.store = Store(self.home)
        return store

    async def query(self, function: Callable[[Store], T]) -> T:
        """Return what a function finds in the store; raises what it raises."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(self.store))

    async def query_run(self, run_id: str, function: Callable[[Run], T]) -> T:
        """Return what a function finds of a run, whose exact id it is; raises UnknownRun, and what it raises."""

        def with_exact_id(store: Store) -> T:
            if store.get(run_id) is None:  # find() would take a prefix
                raise UnknownRun(f"no run has the id {text.clean(run_id)}", "the page of all runs shows them")
            return function(Run(run_id, store))

        return await self.query(with_exact_id)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


_open: list[History] = []  # NiceGUI's pages are global, and so is the home that they show


def open_history(home: Path) -> History:
    """Make the history of this process's console, the one that `current` returns."""
    _open[:] = [History(home)]
    return _open[0]


def current() -> History:
    """Return the history that this process shows."""
    return _open[0]
