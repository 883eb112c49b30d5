"""Futures of runs: `concurrent.futures.wait`, `as_completed` and asyncio take them. One thread waits for all of a process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.history.store import Store

if TYPE_CHECKING:
    from cloudtrain.runs.state import RunState

SHORTEST_S, LONGEST_S = 0.02, 0.5  # between two looks at the open runs


class RunFuture(Future[Any]):
    """The future of a run's result; cancelling it cancels the run."""

    def __init__(self, run: RunState) -> None:
        super().__init__()
        self._settling = threading.RLock()  # a callback may cancel; a run that is being cancelled gives no result
        self._kind: type[Any] = type(run)
        self.run_id, self.home, self.clock, self.watch = run.run_id, run.store.home, run.store.clock, run.watch

    def cancel(self) -> bool:
        """Cancel the run; blocking. Return False where the future has a result already."""
        with self._settling:
            if self.done():
                return self.cancelled()
            self.run(Store(self.home, self.clock)).cancel()
            return super().cancel()

    def run(self, store: Store) -> Any:
        """Return the run; a store is of one thread."""
        return self._kind(self.run_id, store, watch=self.watch)

    def settle(self, store: Store) -> None:
        """Take the run's result where it has ended; blocking."""
        with self._settling:
            if self.done():
                return
            try:
                if (run := self.run(store)).done():
                    self.set_result(run.result(0))
            except Exception as error:
                # whatever it is, such as a value whose class cannot be imported: the thread settles the others
                self.set_exception(error)


class _Waiter:
    """Settles futures in a thread, which lives as long as one is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[RunFuture] = []

    def add(self, future: RunFuture) -> None:
        with self._lock:
            self._open.append(future)
            if len(self._open) == 1:
                threading.Thread(target=self._wait, name="cloudtrain-futures", daemon=True).start()

    def _wait(self) -> None:
        stores: dict[Path, Store] = {}
        pause_s = SHORTEST_S
        while True:
            with self._lock:
                before = len(self._open)
                self._open = [future for future in self._open if not future.done()]
                looked = list(self._open)
            if not looked:
                return
            for future in looked:
                if future.home not in stores:
                    stores[future.home] = Store(future.home, future.clock)
                future.settle(stores[future.home])
            pause_s = SHORTEST_S if len(looked) < before else min(pause_s * 1.2, LONGEST_S)
            looked[0].clock.sleep(pause_s)


_WAITER = _Waiter()


def future_of(run: RunState) -> RunFuture:
    """Return a future that is settled when the run has ended; returns at once."""
    future = RunFuture(run)
    _WAITER.add(future)
    return future
