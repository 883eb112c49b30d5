"""Futures of runs: `concurrent.futures.wait`, `as_completed` and asyncio take them. One thread waits for all of a process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from cloudtrain.errors import Unreachable
from cloudtrain.history.store import Store


class Waited(Protocol):
    """What a future needs of a run."""

    run_id: str
    store: Store
    watch: bool

    def done(self) -> bool: ...
    def result(self, timeout_s: float) -> Any: ...
    def cancel(self) -> Any: ...


SHORTEST_S, LONGEST_S = 0.02, 0.5  # between two looks at the open runs
AGAIN_S, UNREACHABLE_S = 10.0, 300.0  # between two tries to fetch a value, and of all of them until the error counts


class RunFuture(Future[Any]):
    """The future of a run's result; cancelling it cancels the run where `cancels` says so."""

    def __init__(self, run: Waited, cancels: bool = True) -> None:
        super().__init__()
        self._cancels = cancels
        self._settling = threading.RLock()  # a callback may cancel; a run that is being cancelled gives no result
        self._tries: list[float] = []  # when its value could not be fetched
        self._kind: type[Any] = type(run)
        self.run_id, self.home, self.clock, self.watch = run.run_id, run.store.home, run.store.clock, run.watch

    def cancel(self) -> bool:
        """Cancel the run; blocking. Return False where the future has a result already."""
        if not self._cancels:
            return super().cancel()
        with self._settling:
            if self.done():
                return self.cancelled()
            self.run(Store(self.home, self.clock)).cancel()
            return super().cancel()

    def run(self, store: Store) -> Any:
        """Return the run; a store is of one thread."""
        return self._kind(self.run_id, store, watch=self.watch)

    def settle(self, stores: dict[Path, Store]) -> None:
        """Take the run's result where it has ended; blocking. The stores are those of this thread, by their home."""
        now = self.clock.monotonic()
        with self._settling:
            if self.done() or (self._tries and now < self._tries[-1] + AGAIN_S):
                return
            try:
                if self.home not in stores:
                    stores[self.home] = Store(self.home, self.clock)
                if (run := self.run(stores[self.home])).done():
                    self.set_result(run.result(0))
            except BaseException as error:  # whatever a value raises that is loaded: the thread settles the others
                self._tries.append(now)
                if not isinstance(error, Unreachable) or now >= self._tries[0] + UNREACHABLE_S:
                    self.set_exception(error)


class _Waiter:
    """Settles futures in a thread, which lives as long as one is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[RunFuture] = []
        self._thread: threading.Thread | None = None

    def add(self, future: RunFuture) -> None:
        with self._lock:
            self._open.append(future)
            if self._thread is None or not self._thread.is_alive():  # it does not live on in a fork
                self._thread = threading.Thread(target=self._wait, name="cloudtrain-futures", daemon=True)
                self._thread.start()

    def _wait(self) -> None:
        stores: dict[Path, Store] = {}
        pause_s = SHORTEST_S
        while True:
            with self._lock:
                known = list(self._open)
            # Outside of the lock: who holds a future's condition, as `as_completed` does, may be adding another one.
            ended = {id(future) for future in known if future.done()}
            with self._lock:
                self._open = looked = [future for future in self._open if id(future) not in ended]
                if not looked:
                    self._thread = None
                    return
            for future in list(looked):
                with suppress(BaseException):  # of a callback of the future, or it was cancelled meanwhile
                    future.settle(stores)
            pause_s = SHORTEST_S if ended else min(pause_s * 1.2, LONGEST_S)
            known[0].clock.sleep(pause_s)


_WAITER = _Waiter()


def future_of(run: Waited, *, cancels: bool = True) -> RunFuture:
    """Return a future that is settled when the run has ended, and whose cancel cancels the run; returns at once."""
    future = RunFuture(run, cancels)
    _WAITER.add(future)
    return future


class Waiters:
    """Those of concurrent.futures that wait for a run itself: each gets the run where its future gives itself."""

    def __init__(self, run: Waited) -> None:
        self._run, self.future = run, future_of(run)
        self._relays: dict[int, Any] = {}  # by the waiter's id

    def append(self, waiter: Any) -> None:
        self._relays[id(waiter)] = SimpleNamespace(
            add_result=lambda _: waiter.add_result(self._run),
            add_exception=lambda _: waiter.add_exception(self._run),
            add_cancelled=lambda _: waiter.add_cancelled(self._run),
        )
        self.future._waiters.append(self._relays[id(waiter)])

    def remove(self, waiter: Any) -> None:
        self.future._waiters.remove(self._relays.pop(id(waiter)))
