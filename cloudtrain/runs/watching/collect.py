"""Collect what an attempt writes into the store: its log, the events and metrics in it, and other tools' files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from cloudtrain import events
from cloudtrain.backends.api import Backend
from cloudtrain.diagnosis.tail import Tail
from cloudtrain.events import OFF, Event, LogLine, Point, Row, Status
from cloudtrain.history import event_files
from cloudtrain.history.event_files import find_files, resumed_step
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.spool import Spool, SpoolTaken
from cloudtrain.history.store import Store
from cloudtrain.job.units import unix_time
from cloudtrain.metrics.parser import MetricParser
from cloudtrain.report import notify
from cloudtrain.runs.planning import advice

BATCH = 2000  # lines in one transaction
RANK = "_rank"  # in a metric event: the rank that logged it, where several print through one process
EVERY_S = 10.0
BEGAN = ".cloudtrain/began"  # the launcher writes it when the ranks start: entrypoints/launcher/output/keep.py
SHARE = 0.02  # of a processor that the search may take


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
        self.alarms: set[tuple[str, str]] = set()  # attempts and the notifications that their nodes' alarms ask for

    def read_log(
        self,
        store: Store,
        attempt: AttemptRecord,
        backend: Backend,
        *,
        ended: bool = False,
        events_only: bool = False,
        go_on: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Store what is new in an attempt's log; blocking. Return whether the launcher said that its state changes.

        Args:
            ended: nothing more will come.
            events_only: the metrics are left to a second reading, which takes much longer.
            go_on: asked after each batch that is no last one. Where it is False the rest is left, and more is to come soon.
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
                of_service = line.node in metrics.services
                marked = events.MARK in line.text  # a call for every line would cost as much as looking for metrics
                if marked and (parsed := events.parse(line.text)):
                    event = Event(attempt.attempt_id, line.node, line.seq, line.at, *parsed)
                    if event.kind != "metric":
                        others.append(event)
                    elif not events_only and not of_service:
                        points += metrics.event_rows(event, line.rank)
                if not (marked and line.text.startswith(events.MARK)):
                    if tail:
                        tail.add(line)
                    if not events_only and not of_service:
                        points += metrics.rows(line)
            cursor = None if events_only else batch[-1].cursor
            store.record(attempt.attempt_id, cursor=cursor, events=others, metrics=points)
            self._lease()
            changes = changes or any(event.kind in ("state", "result") for event in others)
            for event in others:
                if event.kind == "alarm" and (name := notify.event_of_alarm(event.data)):
                    self.alarms.add((attempt.attempt_id, name))
            if len(batch) == BATCH and not go_on():
                return True
        if ended and not events_only and (points := metrics.rest()):
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
            if record.load_verdict(store, attempt):
                return
            tail = self._tails.get(attempt.attempt_id)
            if tail is None:
                tail, spool = Tail(), self._spools.get(attempt.attempt_id)
                for line in spool.lines() if spool else backend.logs(attempt.handle) if attempt.handle else ():
                    tail.add(line)
            record.judge_attempt(store, attempt, status, tail.lines(), advice.complete)
        except Exception as error:
            self._log(f"cloudtrain could not determine why the run failed: {error}")


class MetricLines:
    """Finds metrics in the lines of one attempt; counts continue from the steps that the history has."""

    def __init__(self, store: Store, attempt: AttemptRecord) -> None:
        self._attempt_id = attempt.attempt_id
        if attempt.cursor is not None:
            store.complete_curves(attempt.attempt_id)
        steps = store.curves.last_steps(attempt.run_id)
        epochs = store.curves.last_epochs(attempt.run_id)
        seen = steps.pop(attempt.number, {})
        earlier: dict[tuple[int, str], int] = {}
        per_epoch: dict[tuple[int, str], float] = {}
        for number in sorted(number for number in steps if number < attempt.number):
            earlier |= steps[number]
            per_epoch |= {
                key: steps[number][key] / epoch for key, epoch in epochs[number].items() if epoch and epoch > 0
            }
        first_epoch = store.curves.first_epoch(attempt.run_id) if earlier else None
        patterns = dict(attempt.plan.job.get("metrics") or {})
        self._parser = MetricParser(patterns, seen, earlier, first_epoch, per_epoch)
        self._patterns = patterns
        self._shared_trainer = bool(attempt.plan.job.get("trainer"))  # it logs every number that it prints
        self._logged = set[tuple[int, str]]()  # rank and name of what the script logs by metric events
        self._last: dict[int, LogLine] = {}  # of each rank
        # Nodes whose metrics are not the run's: those of the main role are.
        self.services = range(attempt.plan.main_nodes, int(attempt.plan.manifest["nodes"]))

    def rows(self, line: LogLine) -> list[Row]:
        """Return the points that an ordinary line holds or completes, without what the script logs by metric events."""
        rank = max(line.rank, 0)
        self._last[rank] = line
        points = list(self._parser.metrics(line.text, rank))
        return self._rows(line, points) if points else []

    def rest(self) -> list[Row]:
        """Return the points that waited for another line: the log has ended."""
        return [row for rank, points in self._parser.flush() for row in self._rows(self._last[rank], points)]

    def _rows(self, line: LogLine, points: list[Point]) -> list[Row]:
        if self._shared_trainer or self._logged:
            rank = max(line.rank, 0)
            points = [point for point in points if self._is_wanted(rank, point.name)]
        return events.rows(line, points, line.rank)

    def _is_wanted(self, rank: int, name: str) -> bool:
        if name in self._patterns:
            return True
        return not self._shared_trainer and (rank, name) not in self._logged

    def event_rows(self, event: Event, rank: int) -> list[Row]:
        """Return the points of a metric event of a rank: every number but step and epoch is a point of a curve."""
        told = event.data.get(RANK)
        rank = told if isinstance(told, int) and 0 <= told < 1 << 31 else rank
        points = list(_event_points(event))
        self._logged.update((rank, point.name) for point in points)
        return events.rows(event, points, rank)


def _event_points(event: Event) -> Iterable[Point]:
    step, epoch = event.data.get("step", 0), event.data.get("epoch")
    at = step if isinstance(step, (int, float)) else 0
    for name, value in event.data.items():
        if name not in ("step", "epoch", RANK) and (number := _number(value)) is not None:
            yield Point(at, name, number, _number(epoch))


def _number(value: object) -> float | None:
    """Return a number as a float, None where there is none or no float can be made of it."""
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 1000 else None


class MetricFiles:
    """Finds files of TensorBoard, W&B, MLflow and Trainer in outputs, checkpoints and the working directory of node 0.

    A metric that the log has is not taken from a file, and of those that several tools wrote one tool's is taken.
    """

    def __init__(self, home: Path, attempt: AttemptRecord) -> None:
        self._attempt_id = attempt.attempt_id
        self._since = unix_time(attempt.created_at)
        output = str(attempt.plan.job.get("output") or "")
        folders = [home / "runs", *([Path(output)] if output.startswith("/") else [])]
        # The source last: of a file that `keep` mirrors in the outputs the script's own is read.
        self._roots = [folder / attempt.run_id / part for folder in folders for part in ("outputs", "checkpoints")]
        self._source = home / "runs" / attempt.run_id / f"a{attempt.number}" / "node-0" / "source"
        self._is_off = dict(attempt.plan.job.get("metrics") or {}).get("*") == OFF
        self._slots = event_files.SlotTable()  # a curve keeps its name
        self._readers: dict[str, event_files.Reader] = {}
        self._owners: dict[str, event_files.Kind] = {}  # of each metric, who wrote it first
        self._due = 0.0

    def read(self, store: Store, beat: Callable[[], object], *, at_once: bool) -> None:
        """Store new points, where it is time or at once; `beat` is called in between. Blocking."""
        if self._is_off or (not at_once and store.clock.monotonic() < self._due):
            return
        began = time.thread_time()
        found = [(root, self._since) for root in self._roots]
        try:
            found.append((self._source, (self._source / BEGAN).stat().st_mtime))  # what is older came with the source
        except OSError:
            pass  # the ranks have not started
        paths: dict[str, tuple[Path, float]] = {}
        for root, since in found:
            paths |= {name: (path, since) for name, path in find_files(root, since).items()}
        self._due = store.clock.monotonic() + max(EVERY_S, (time.thread_time() - began) / SHARE)

        def prefix_before(name: str, seq: int) -> str | None:
            kept = store.curves.first(self._attempt_id, seq, seq + event_files.MOST_RECORDS)
            return event_files.former_prefix(paths[name][0], seq, kept) if kept else None

        slots = self._slots.assign(paths, prefix_before)
        for name in sorted(slots, key=event_files.Kind.of):
            reader = self._reader(name, *paths[name], slots[name])
            while points := reader.read():
                logged_names = store.curves.metric_names(self._attempt_id, event_files.FIRST_SEQ)
                rows = [row for point in points if self._is_owner(name, point.name) for row in self._rows(point)]
                store.record(self._attempt_id, metrics=[row for row in rows if row.name not in logged_names])
                beat()
        if slots:  # a line of the log may come after a file that has the same metric was read
            store.curves.drop_doubles(self._attempt_id, event_files.FIRST_SEQ)

    def _reader(self, name: str, path: Path, since: float, slot: event_files.Slot) -> event_files.Reader:
        """Return the reader of a file; Trainer's newest state has another path than the one before."""
        if name not in self._readers:
            after = resumed_step(path, since) if path.name == event_files.TRAINER_STATE else 0
            self._readers[name] = event_files.Reader(path, slot, after)
        self._readers[name].path = path
        return self._readers[name]

    def _is_owner(self, file: str, metric: str) -> bool:
        """Return whether a metric's points come from files of this kind."""
        kind = event_files.Kind.of(file)
        return self._owners.setdefault(metric, kind) is kind

    def _rows(self, point: event_files.Point) -> list[Row]:
        event = Event(self._attempt_id, 0, point.seq, point.at, "metric")
        return events.rows(event, [Point(point.step, point.name, point.value, point.epoch)])
