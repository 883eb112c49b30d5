"""What a reader does while it waits for a run: read the log, keep the history current, say when there is no answer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cloudtrain.backends.api import Backend
from cloudtrain.errors import Unreachable
from cloudtrain.events import LogLine, State, Status, without_event
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.spool import Spool, last_contact
from cloudtrain.history.store import Store
from cloudtrain.nodes.logs import TAIL_S
from cloudtrain.runs.planning.attempts import backend_of

if TYPE_CHECKING:
    from cloudtrain.runs.watching.watch import Watcher

LOOK_S = 2.0  # how often a waiting reader makes sure that somebody watches the run
OWN_LOOK_S = 0.1  # how often it looks at what is due where it watches the run itself
MARK_S = 1.0  # how often it says that it follows
NEWER_S = 10.0  # how long a reader waits until a watcher has read the log once more


class Refresher:
    """Keeps the history of a run current while a reader waits.

    It makes sure that somebody watches the run. With `watch=False` it watches the run itself, and may start its next
    attempt. Call `tick` often and `close` at the end.
    """

    def __init__(
        self, store: Store, run_id: str, refresh: Callable[[], Status], *, watch: bool, reason: str = ""
    ) -> None:
        self._store, self._run_id, self.refresh, self._watch = store, run_id, refresh, watch
        self._watcher: Watcher | None = None
        began = self._store.clock.monotonic()
        self._next_look, self._next_mark = began + (LOOK_S if watch else 0.0), began
        self._without_answer = False
        self._reason = _without_tries(reason)  # that was printed last

    def tick(self) -> None:
        """Do what is due; blocks for a look at the platform where nobody else watches the run."""
        moment = self._store.clock.monotonic()
        if moment >= self._next_mark:
            self._next_mark = moment + MARK_S
            self._report_answers()
            self._report_wait()
        if moment >= self._next_look:
            self._look()

    def close(self) -> None:
        """Let another process watch the run."""
        if self._watcher is not None:
            self._store.release(self._run_id, self._watcher.me)
            self._watcher = None

    def _look(self) -> None:
        self._next_look = self._store.clock.monotonic() + LOOK_S
        if self._watch:
            self.refresh()
        elif self._watcher is not None or not self._store.watched(self._run_id):
            from cloudtrain.runs.watching.watch import Watcher

            self._watcher = self._watcher or Watcher(self._store, self._run_id, complain=lambda _: None)
            if self._watcher.refresh(hold=True) is None:
                self._watcher = None  # another process was faster
            elif self._is_shared:
                self._next_look = self._store.clock.monotonic() + OWN_LOOK_S

    @property
    def _is_shared(self) -> bool:
        answer = last_contact(self._store.home, self._run_id, self._store.clock)
        return answer is not None and answer.shared

    def _report_answers(self) -> None:
        answer = last_contact(self._store.home, self._run_id, self._store.clock)
        if answer and answer.shared:
            Spool(self._store.home, self._run_id, 1, self._store.clock).follow()
        if (without_answer := bool(answer and answer.error)) == self._without_answer:
            return
        self._without_answer = without_answer
        backend = self._store.find(self._run_id).backend
        if answer and answer.error:
            if answer.unreachable:
                _say(f"{self._run_id}: {backend} has not answered since {answer.since} ({answer.error}); retrying")
            else:
                _say(f"{self._run_id}: {backend} reports an error since {answer.since}: {answer.error}")
        else:
            _say(f"{self._run_id}: {backend} answers again")

    def _report_wait(self) -> None:
        """Say why the run waits, when the platform gives another reason."""
        status = self._store.find(self._run_id).status
        reason = _without_tries(status.reason) if status.state is State.QUEUED else ""
        if reason and reason != self._reason:
            _say(f"{self._run_id} is QUEUED: {reason}")
        self._reason = reason


def _without_tries(reason: str) -> str:
    """Return a reason without the number of tries, which alone is nothing new."""
    return re.sub(r", tried \d+ times", "", reason, count=1)


def read_run(
    store: Store, run_id: str, refresher: Refresher, number: int, cursor: str | None, *, follow: bool, raw: bool
) -> Iterator[LogLine]:
    """Yield the lines of a run from an attempt's cursor on, with `follow` until the run is final; blocking.

    Marked lines (metrics, states) are left out, unless `raw`.
    """
    while True:
        attempt = next((candidate for candidate in store.attempts(run_id) if candidate.number == number), None)
        if attempt is not None and attempt.handle is not None:
            backend = backend_of(attempt.plan, store.home, attempt.handle, store.clock)
            try:
                for line in read_attempt(store, attempt, backend, refresher, follow=follow, after=cursor):
                    cursor = line.cursor
                    if (shown := line.text if raw else without_event(line.text)) is not None:
                        yield line._replace(text=shown, cursor=f"{number}/{line.cursor}")
            except Unreachable:
                if not follow:
                    raise
                refresher.tick()
                store.clock.sleep(LOOK_S)  # the job goes on without us
                continue
            number, cursor = number + 1, None
            continue
        if attempt is not None and attempt.status.state.final:  # refused, or ended before it began: it has no log
            number, cursor = number + 1, None
            continue
        if not follow or (refresher.refresh().state.final and len(store.attempts(run_id)) < number):
            return
        refresher.tick()
        store.clock.sleep(0.05)


def read_attempt(
    store: Store,
    attempt: AttemptRecord,
    backend: Backend,
    refresher: Refresher,
    *,
    follow: bool,
    after: str | None,
) -> Iterator[LogLine]:
    """Yield the lines of an attempt after a cursor, with `follow` until the attempt is final; blocking.

    They come from the spool that a watcher writes, and from the platform where there is none. Raises BackendError.
    """
    assert attempt.handle is not None
    if backend.follow_s is None:
        yield from backend.logs(attempt.handle, follow=follow, after=after)
        return
    spool, spooled = Spool(store.home, attempt.run_id, attempt.number, store.clock), backend.follow_s > 0
    if spooled and not follow:
        _wait_for_newer(store, attempt, spool, backend.follow_s, refresher)
    reader, idle = None, 0
    while True:
        state, known_cursor = store.progress(attempt.attempt_id)
        before = after
        if spooled and reader is None:
            reader = spool.reader(after)
            spooled = reader is not None or (follow and known_cursor is None and not state.final and not spool.exists())
        if reader is not None:
            try:
                for line in reader.read():
                    after = line.cursor
                    yield line
            except FileNotFoundError:
                reader, spooled = None, False
        lost = state is State.LOST and reader is not None  # its last lines may come when its machines are back
        if lost or not spooled:
            try:
                for line in backend.logs(attempt.handle, after=after):
                    after = line.cursor
                    yield line
            except Unreachable:
                if not lost:
                    raise
        if not follow or (state.final and not store.is_unread(attempt.run_id)):  # else more comes into the spool
            _raise_without_answer(store, attempt, state)
            return
        refresher.tick()
        idle = 0 if after != before else idle + 1
        store.clock.sleep(TAIL_S * min(1 + idle // 10, 5) if spooled or not backend.follow_s else backend.follow_s)


def _wait_for_newer(store: Store, attempt: AttemptRecord, spool: Spool, follow_s: float, refresher: Refresher) -> None:
    """Wait until the log was read not long ago; not where the attempt has ended, or its platform does not answer."""
    refresher.refresh()
    began, wall = store.clock.monotonic(), store.clock.now()
    while store.clock.monotonic() - began < NEWER_S and not store.progress(attempt.attempt_id)[0].final:
        answer = last_contact(store.home, attempt.run_id, store.clock)
        if spool.read_at() > wall - follow_s - MARK_S or (answer and answer.error):
            return
        if not store.watched(attempt.run_id):
            return
        spool.follow()
        store.clock.sleep(TAIL_S)


def _raise_without_answer(store: Store, attempt: AttemptRecord, state: State) -> None:
    answer = last_contact(store.home, attempt.run_id, store.clock)
    if answer and answer.error and not state.final:
        raise Unreachable(f"the log may be incomplete: {answer.describe()}", "try again when it answers")


def _say(line: str) -> None:
    erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # a status line, or the panel below a log
    print(erase + line, file=sys.stderr, flush=True)  # noqa: T201 - for whoever waits
