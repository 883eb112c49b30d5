"""Copy the history of an attached run from its output into this machine's store.

No watcher watches such a run; each command that shows it copies what is new.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cloudtrain import events
from cloudtrain.backends import registry
from cloudtrain.backends.store.files import NotRead, report
from cloudtrain.errors import BadRequest
from cloudtrain.events import Event, Point, Row
from cloudtrain.history import event_files
from cloudtrain.history.event_records import MOST_BYTES as MOST_FILE_BYTES
from cloudtrain.runs.sending import watch_log
from cloudtrain.runs.watching.collect import Collector

if TYPE_CHECKING:
    from cloudtrain.backends.attached.backend import AttachedBackend
    from cloudtrain.backends.plan import AttachedAttempt
    from cloudtrain.history.store import Store

MOST_BYTES = 512 << 20  # of all event files of a run together; those behind are left out

# (home, URI) -> what this process has read of a run's event files: `show -f` looks every few seconds.
_SIZES_READ: dict[tuple[str, str], dict[str, int]] = {}  # file -> bytes
_FOLDERS: dict[tuple[str, str], dict[str, event_files.TagPrefixes]] = {}  # attempt -> folders of event files


def refresh(store: Store, run_id: str, uri: str) -> None:
    """Copy what is new of an attached run into the store; blocking."""
    backend = registry.create_attached(store.home, store.clock)
    attempts = backend.attempts(uri)
    if attempts[0].plan.run_id != run_id:
        raise BadRequest(f"{attempts[0].uri} holds {attempts[0].plan.run_id} now, not {run_id}")
    copy(store, backend, attempts)


def copy(store: Store, backend: AttachedBackend, attempts: list[AttachedAttempt]) -> None:
    """Store attempts, then their logs and metrics, then their states: whoever sees an end finds all that was before it."""
    uri, run_id = attempts[0].uri, attempts[0].plan.run_id
    for attempt in attempts:
        store.attach(attempt.plan, attempt.handle, attempt.created_at, uri, attempts[0].provenance)
    collector = Collector(lambda: None, lambda text: watch_log.write(f"{run_id}: {text}", store.home))
    statuses = {attempt.plan.attempt_id: attempt.status for attempt in attempts}
    # Attempts that are gone from the output stay as they are stored.
    stored = [attempt for attempt in store.attempts(run_id) if attempt.attempt_id in statuses]
    for record in stored:
        collector.read_log(store, record, backend, ended=statuses[record.attempt_id].state.final)
    _copy_event_files(store, backend, uri, run_id)
    for record in stored:
        status = statuses[record.attempt_id]
        if status.state.final:
            collector.diagnose(store, record, status, backend)
        if status != record.status:
            store.overwrite_status(record.attempt_id, status)
    store.mark_read(run_id)


def _copy_event_files(store: Store, backend: AttachedBackend, uri: str, run_id: str) -> None:
    """Store the points of TensorBoard's and W&B's files, except metrics that a log has already.

    All attempts write into the same folder: a point belongs to the newest attempt of its time.
    """
    attempts = store.attempts(run_id)
    logged = {
        attempt.attempt_id: store.curves.metric_names(attempt.attempt_id, event_files.FIRST_SEQ) for attempt in attempts
    }
    sizes_read = _SIZES_READ.setdefault((str(store.home), uri), {})
    folders = _FOLDERS.setdefault((str(store.home), uri), {})
    for name, slot, content in _changed_event_files(backend, uri, sizes_read):
        rows: dict[str, list[Row]] = {}
        prefix: str | None = None
        for point in event_files.read_points(name, content, slot):
            begun = [attempt.attempt_id for attempt in attempts if attempt.created_at <= point.at]
            attempt_id = begun[-1] if begun else attempts[0].attempt_id
            if prefix is None:
                prefix = folders.setdefault(attempt_id, event_files.TagPrefixes()).prefix(name)
            event = Event(attempt_id, 0, point.seq, point.at, "metric")
            new_rows = events.rows(event, [Point(point.step, prefix + point.name, point.value, point.epoch)])
            rows.setdefault(attempt_id, []).extend(row for row in new_rows if row.name not in logged[attempt_id])
        for attempt_id, points in rows.items():
            store.record(attempt_id, metrics=points)
        sizes_read[name] = len(content)
    for attempt in attempts if sizes_read else ():
        store.curves.drop_doubles(attempt.attempt_id, event_files.FIRST_SEQ)


def _changed_event_files(
    backend: AttachedBackend, uri: str, sizes_read: Mapping[str, int]
) -> Iterator[tuple[str, event_files.Slot, bytes]]:
    """Yield name, slot and bytes of the event files in a run's outputs whose size has changed."""
    bytes_left = MOST_BYTES
    try:
        sizes = {name: size for name, size in backend.output_sizes(uri).items() if event_files.is_event_file(name)}
    except NotRead as refused:
        return report(refused)
    for name, slot in event_files.assign_slots(sorted(sizes, key=event_files.sort_key)[: event_files.FILES]).items():
        size = sizes[name]
        bytes_left -= size
        if sizes_read.get(name) != size and size <= MOST_FILE_BYTES and bytes_left >= 0:
            try:
                yield name, slot, backend.read_output(uri, name, MOST_FILE_BYTES) or b""
            except NotRead as refused:
                report(refused)


def forget(store: Store, uri: str) -> None:
    """Forget which event files of a run this process has read: the next copy reads all of them."""
    for cache in (_SIZES_READ, _FOLDERS):
        cache.pop((str(store.home), uri), None)
