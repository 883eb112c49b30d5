"""The state of a run: stored, asked of its platform, waited for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.spool import last_contact
from cloudtrain.history.store import Store
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.reading import Refresher
from cloudtrain.runs.sending import handover, outcomes

CARD_S = 1.0  # a notebook shows the card of a run that is waited for longer


class RunState:
    """A run's rows in the history and its state."""

    def __init__(self, run_id: str, store: Store, *, adopted: bool = False, watch: bool = True) -> None:
        self.run_id = run_id
        self.store = store
        self.adopted = adopted  # submit found this run half submitted and finished it, or the key was known
        self.watch = watch  # whether to start a detached watcher where none is alive
        self.notes: list[str] = []  # of its submit or last resume, one line each
        self.printed_reason = ""  # why it waits, as its caller has printed it: a reader does not repeat it

    @property
    def record(self) -> RunRecord:
        """The run's row in the history, as it is now."""
        return self.store.find(self.run_id)

    @property
    def attempts(self) -> list[AttemptRecord]:
        """The run's attempts, the oldest first."""
        return self.store.attempts(self.run_id)

    @property
    def state(self) -> State:
        """The state now; asks the platform when no watcher is alive."""
        return self.refresh().state

    def refresh(self, complain: Callable[[CloudtrainError], None] | None = None, *, may_send: bool = False) -> Status:
        """Return the status as the platform reported it not long ago.

        Where no watcher is alive it asks the platform (blocking), unless any process has asked in the last 5 s (30 s for a run
        older than 10 minutes), and starts a watcher. It starts no attempt itself, unless `may_send`. Where the platform
        did not answer it returns the last known status and calls `complain` (None: writes to standard error).
        From a home that cannot be written it returns the stored status. Of an attached run it copies the log and metrics that
        are not in the history yet.

        Args:
            complain: Called with each error instead of printing it.
            may_send: Start the next attempt when one is due.

        Returns:
            The status of the run.
        """
        record = self.record
        final = record.status.state.final
        if self.store.database.read_only or (final and not self.store.is_unread(self.run_id)):
            return record.status
        errors: list[CloudtrainError] = []
        if record.attached:
            from cloudtrain.runs.attached_history import refresh

            try:
                refresh(self.store, self.run_id, record.attached)
            except CloudtrainError as gone:
                if not final:
                    raise
                errors.append(gone)  # its end is known, though its output is gone
        elif not self.store.watched(self.run_id):
            self._look(errors, may_send)
        elif self.watch:
            handover.give_missing(self.store, self.run_id)
        if not errors and (sentence := self.unanswered()):
            errors.append(Unreachable(sentence))
        for error in errors:
            complain(error) if complain else print(f"{self.run_id}: {error}", file=sys.stderr)  # noqa: T201 - as promised
        return self.record.status

    def read_rest(self) -> None:
        """Block until the log and the metrics of a run that has ended are in the history; of a live run look once."""
        ended = self.refresh().state.final
        while ended and self.store.is_unread(self.run_id) and self.store.watched(self.run_id):
            self.store.clock.sleep(0.1)
        self.refresh()  # where its watcher has died meanwhile

    def unanswered(self) -> str:
        """Return when the platform was last asked and since when it gives no answer; "" where it answered."""
        answer = last_contact(self.store.home, self.run_id, self.store.clock)
        return answer.describe() if answer and answer.error and not self.record.status.state.final else ""

    def _look(self, errors: list[CloudtrainError], may_send: bool) -> None:
        """Ask the platform once, unless it was asked a moment ago, and start a watcher.

        Where the platform did not answer, only the watcher waits for it.
        """
        newest = self.attempts[-1]
        answer = last_contact(self.store.home, self.run_id, self.store.clock)
        outage = self.watch and answer is not None and answer.shared and bool(answer.error)
        if not (outage and outcomes.needs_watcher(self.record, newest, self.store.clock)) and not (
            answer and answer.is_fresh(newest)
        ):
            from cloudtrain.runs.watching.watch import Watcher  # who finds a living watcher needs none

            Watcher(self.store, self.run_id, complain=errors.append, may_send=may_send).refresh()
            newest = self.attempts[-1]
        if (
            self.watch
            and not self.record.status.state.final
            and outcomes.needs_watcher(self.record, newest, self.store.clock)
        ):
            handover.start(self.store, newest.plan, instead=True)

    def _refresher(self) -> Refresher:
        return Refresher(
            self.store,
            self.run_id,
            lambda: self.refresh(lambda _: None, may_send=not self.watch),
            watch=self.watch or self.record.attached is not None,
            reason=self.printed_reason,
        )

    def wait(self, timeout_s: float | None = None, *, tick: Callable[[RunRecord], None] | None = None) -> Status:
        """Block until the run is final and return its status. In a notebook the run's card is shown meanwhile.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.
            tick: Called with the run's record at every look, several times a second at first.

        Returns:
            The final status.

        Raises:
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        began, card = self.store.clock.monotonic(), None
        with closing(self._refresher()) as refresher:
            while True:
                record = self.record
                if tick:
                    tick(record)
                if record.status.state.final:
                    if card:
                        card.join()
                    return record.status
                age_s = self.store.clock.monotonic() - began
                if timeout_s is not None and age_s > timeout_s:
                    raise TimeoutError(f"{self.run_id} is still {record.status.state} after {timeout_s:g} s")
                if card is None and tick is None and age_s > CARD_S and "IPython" in sys.modules:
                    from cloudtrain.runs.live_card import live_card

                    card = live_card(self)
                refresher.tick()
                self.store.clock.sleep(attempts.pause(age_s, 0.02))  # a look is one row of a local file
