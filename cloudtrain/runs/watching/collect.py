"""Collect what an attempt writes into the store: its log, the events and metrics in it, and other tools' files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from cloudtrain import events
from cloudtrain.backends.api import Backend
from cloudtrain.diagnosis.tail import Tail
from cloudtrain.events import Event, LogLine, Row, Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.store import Store
from cloudtrain.runs.planning import advice
from cloudtrain.runs.watching.metric_files import MetricFiles
from cloudtrain.runs.watching.metric_lines import MetricLines
from cloudtrain.runs.watching.spool import Spool, SpoolTaken

BATCH = 2000  # lines in one transaction


class Collector:
    """Collects the output of one run's attempts. Each call takes the store of its thread.

    Args:
        lease: called after each batch; reading may take long.
        log: called with a sentence on what could not be done.
    """

    def __init__(self, lease: Callable[[], object], log: Callable[[str], object]) -> None:
        self._lease, self._log = lease, log
        self._metrics: dict[str, MetricLines] = {}
        self._files: dict[str, MetricFiles] = {}
        self._tails: dict[str, Tail] = {}  # of attempts that were watched from their first line on
        self._spools: dict[str, Spool | None] = {}
        self.idle: set[str] = set()  # attempts that have reported idle GPUs

    def read_log(self, store: Store, attempt: AttemptRecord, backend: Backend, *, ended: bool = False) -> bool:
        """Store what is new in an attempt's log; blocking. Return whether the launcher said that its state changes.

        `ended`: nothing more will come.
        """
        changes = False
        if attempt.cursor is None:
            self._tails.setdefault(attempt.attempt_id, Tail())
        tail = self._tails.get(attempt.attempt_id)
        if attempt.attempt_id not in self._metrics:
            self._metrics[attempt.attempt_id] = MetricLines(store, attempt)
        metrics = self._metrics[attempt.attempt_id]
        for batch in self._new_lines(store, attempt, backend):
            others: list[Event] = []
            points: list[Row] = []
            for line in batch:
                marked = events.MARK in line.text  # a call for every line would cost as much as looking for metrics
                if marked and (parsed := events.parse(line.text)):
                    event = Event(attempt.attempt_id, line.node, line.seq, line.at, *parsed)
                    if event.kind == "metric":
                        points += metrics.event_rows(event, line.rank)
                    else:
                        others.append(event)
                if not (marked and line.text.startswith(events.MARK)):
                    if tail:
                        tail.add(line)
                    points += metrics.rows(line)
            store.record(attempt.attempt_id, cursor=batch[-1].cursor, events=others, metrics=points)
            self._lease()
            changes = changes or any(event.kind in ("state", "result") for event in others)
            if any(event.kind == "alarm" and event.data.get("idle") for event in others):
                self.idle.add(attempt.attempt_id)
        if ended and (points := metrics.rest()):
            store.record(attempt.attempt_id, metrics=points)
        if spool := self._spools.get(attempt.attempt_id):
            spool.touch()
        return changes

    def _new_lines(self, store: Store, attempt: AttemptRecord, backend: Backend) -> Iterator[list[LogLine]]:
        """Yield the lines of a log that are not in the history yet, in batches; what is spooled is so before it is yielded.

        The end of the spool says what was read. It is behind the history's cursor where a watcher was killed in between.
        """
        assert attempt.handle is not None
        if attempt.attempt_id not in self._spools:
            self._spools[attempt.attempt_id] = Spool.open(store.home, attempt, backend, store.clock)
        spool, cursor = self._spools[attempt.attempt_id], attempt.cursor
        if spool and spool.cursor != cursor:
            lines = spool.lines(cursor)
            while batch := list(islice(lines, BATCH)):
                yield batch
            cursor = spool.cursor
        lines = iter(backend.logs(attempt.handle, after=cursor))
        while batch := list(islice(lines, BATCH)):
            try:
                if spool:
                    spool.append(batch)
            except SpoolTaken:
                del self._spools[attempt.attempt_id]
                raise
            except OSError as error:  # the disk is full: readers ask the platform from now on
                self._log(f"the log cannot be stored: {error}")
                spool.remove() if spool else None
                spool = self._spools[attempt.attempt_id] = None
            yield batch

    def read_files(self, store: Store, attempt: AttemptRecord, *, at_once: bool) -> None:
        """Store what trackers' files have that the log has not."""
        if attempt.attempt_id not in self._files:
            self._files[attempt.attempt_id] = MetricFiles(store.home, attempt)
        self._files[attempt.attempt_id].read(store, self._lease, at_once=at_once)

    def diagnose(self, store: Store, attempt: AttemptRecord, status: Status, backend: Backend) -> None:
        """Store why an attempt failed, from the last lines of each rank; blocking. An error is only logged."""
        if not status.failed:
            return  # a successful run needs no diagnosis, and importing the rules takes time
        from cloudtrain.diagnosis import record

        try:
            tail = self._tails.get(attempt.attempt_id)
            if tail is None:
                tail, spool = Tail(), self._spools.get(attempt.attempt_id)
                for line in spool.lines() if spool else backend.logs(attempt.handle) if attempt.handle else ():
                    tail.add(line)
            record.judge_attempt(store, attempt, status, tail.lines(), advice.complete)
        except Exception as error:
            self._log(f"cloudtrain could not determine why the run failed: {error}")
