"""Read the metric points of one attempt from trackers' files, where these are on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.events import OFF, Event, Point, Row
from cloudtrain.history import event_files
from cloudtrain.history.event_search import find_files, resumed_step
from cloudtrain.job.units import unix_time

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

EVERY_S = 10.0
BEGAN = ".cloudtrain/began"  # the launcher writes it when the ranks start: entrypoints/launcher/output/keep.py
SHARE = 0.02  # of a processor that the search may take


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
