"""Upload a run's history and logs to its output, for `cloudtrain attach`.

    <output>/<run>/run.json                                 the newest start, for people and other tools
    <output>/<run>/history/<attempt id>/<start>/run.json    one start of an attempt, written by its node 0
    <output>/<run>/logs/<attempt id>/node-<rank>/<start>/<number>    a node's log in pieces: lines as log.py writes them
    <output>/<run>/source/<digest>.tar.gz                   the job's own files (source.py), with which the run can resume

Written when a start begins, again while it runs, and when it has ended. No start writes where another one does, so that a
replaced one that is still alive overwrites nothing. Events travel in the log as marked lines. On SageMaker, which copies
/opt/ml/checkpoints to S3 while a job runs, all of it lies in `.cloudtrain` there. `cloudtrain attach` reads it.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping

from ..errors import Refused
from ..log import CHUNK, MARK, Log
from ..manifest import Manifest
from ..status import FINAL, now
from ..world.cluster import SAGEMAKER_OURS, Cluster, sagemaker_base
from . import index, source, store

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from typing import Any

VERSION = 1
FIRST_S = 1.0  # until the second look; later ones come at a sixtieth of the start's age
EVERY_S, PLATFORM_S = 120.0, 30.0  # at most; where the log has no other copy
ALIVE_S = 60.0  # how often node 0 writes that it is alive
PIECE = 16 * CHUNK  # bytes of a piece
MOST = 256 << 20  # bytes of a start's log; behind them only events and the launchers' own lines
TRIES = 3
LAST_S = 30.0  # how long the end may wait for a store that does not answer
STATUS_FIELDS = ("state", "exit_code", "by", "failed_rank", "reason", "world_size", "started_at", "ended_at")


class Folder:
    """Files below a folder, by names relative to it; as much of store.Store as is needed here. Raises OSError."""

    def __init__(self, path: str) -> None:
        self.uri = path

    def read(self, name: str) -> bytes | None:
        try:
            with open(os.path.join(self.uri, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def list(self, below: str) -> list[str]:
        path = os.path.join(self.uri, below)
        return os.listdir(path) if os.path.isdir(path) else []

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which appears or is replaced when it is whole."""
        path = os.path.join(self.uri, name)
        half = f"{path}.{os.getpid()}-{threading.get_ident()}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            with open(half, "wb") as file:
                file.write(data)
            os.replace(half, path)
        except OSError:
            if os.path.exists(half):
                os.unlink(half)
            raise

    def delete(self, name: str) -> None:
        """Remove a file; one that is gone is no error."""
        try:
            os.unlink(os.path.join(self.uri, name))
        except FileNotFoundError:
            pass


def index_place(manifest: Manifest, cluster: Cluster, run: Folder | store.Store) -> Folder | store.Store | None:
    """Return the output above a run's folder, which has an index of its runs; None where nothing can be written there.

    On SageMaker the service copies a run's folder, and nothing else.
    """
    if not manifest.output or (cluster.does.copies_folders and isinstance(run, Folder)):
        return None
    if isinstance(run, Folder):
        return Folder(os.path.dirname(os.path.abspath(run.uri)))
    return store.Store(str(manifest.output).rstrip("/"), "the output")


def place(manifest: Manifest, cluster: Cluster, environ: Mapping[str, str]) -> Folder | store.Store | None:
    """Return where a run's history is written, None where no output is named; raises Refused without the store's client."""
    run = environ.get("CLOUDTRAIN_RUN_DIR")
    if cluster.does.copies_folders and not run:
        return Folder(os.path.join(sagemaker_base(environ), SAGEMAKER_OURS))
    if not manifest.output:
        return None
    if store.scheme(str(manifest.output)) != "file":
        return store.Store(f"{str(manifest.output).rstrip('/')}/{manifest.run_id}", "the output")
    return Folder(run) if run else None


class History:
    """Uploads this node's part of a start's history in a thread of its own; nothing waits for it."""

    def __init__(self, where: Folder | store.Store, manifest: Manifest, cluster: Cluster, log: Log) -> None:
        self._place, self._manifest, self._cluster, self._log = where, manifest, cluster, log
        moment = now(log.clock).replace("-", "").replace(":", "")
        self.start = f"{moment}-{os.environ.get('CLOUDTRAIN_START') or os.urandom(2).hex()}"
        self.epoch = 0  # of this start, where node 0 has claimed one
        self._logs = f"logs/{manifest.attempt_id}/node-{cluster.node_rank}/{self.start}"
        self._fields: Mapping[str, object] = {}
        self._written: dict[str, object] = {}
        self._written_at = 0.0
        self._began = log.clock.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._offset = 0  # in the log's copy
        self._brought = self._pieces = 0
        self._source_name, self._source = "", b""
        self._every_s = float(os.environ.get("CLOUDTRAIN_SYNC_EVERY_S") or 0)

    def begin(self, fields: Mapping[str, object], folder: str = "") -> None:
        """Bring what there is from now on; `fields` are status.py's, looked at again and again.

        `folder` is the job's source, which no rank has changed yet. Raises OSError.
        """
        self._fields = fields
        self._source_name = (
            source.name_of(self._manifest.about or {}) if self._cluster.node_rank == 0 and folder else ""
        )
        if self._source_name:
            self._source = source.pack(folder)
            if not self._source:
                self._log.say(f"the source has more than {source.MOST >> 20} MiB: it is not uploaded to the output")
        self._offset = self._log.copy[1] if self._log.copy else 0
        self._follows = False  # whether the run has had an earlier start
        self._thread.start()

    def finish(self, last: Mapping[str, object]) -> None:
        """Upload what is left and how the start ended, after the last log line; blocking, at most LAST_S."""
        self._fields = {**self._fields, **last}
        self._over.set()
        last = threading.Thread(target=self._last, daemon=True)
        last.start()
        last.join(LAST_S)

    def _run(self) -> None:
        if self._cluster.node_rank == 0:
            try:
                self._follows = self._place.read("run.json") is not None
            except (store.Failed, Refused, OSError):
                self._follows = True
        if self._turn() and self._follows:
            self._add_to_index("begin")
        while not self._log.clock.wait(self._over, self._pause()):
            self._turn()

    def _pause(self) -> float:
        most = PLATFORM_S if os.environ.get("CLOUDTRAIN_KEEP_LOG") else EVERY_S
        return self._every_s or min(max(FIRST_S, (self._log.clock.monotonic() - self._began) / 60), most)

    def _last(self) -> None:
        self._thread.join()
        for attempt in range(TRIES):
            if attempt:
                self._log.clock.sleep(1.0)
            if self._turn():
                self._add_to_index("end")
                return

    def _add_to_index(self, mark: str) -> None:
        """Add this start to the index of the output; without it the run is read from its own folder."""
        if self._cluster.node_rank != 0:
            return
        try:
            where = index_place(self._manifest, self._cluster, self._place)
            if where is not None:
                record = self._masked(self._record(self._written))
                index.add(where, json.dumps(record).encode(), mark)
        except (store.Failed, Refused, OSError, ValueError):
            pass  # no permission there, or no answer

    def _turn(self) -> bool:
        """Bring the log up to date, then what node 0 says of the start; False where it could not be done."""
        try:
            while self._piece():
                pass
            if self._cluster.node_rank == 0:
                self._write_source()
                self._write_record()
            return True
        except (store.Failed, Refused, OSError):
            return False  # the same bytes, and what has come by then, go again

    def _piece(self) -> bool:
        """Bring what is new of the log as one piece; False where nothing is."""
        if not self._log.copy:
            return False
        data = os.pread(self._log.copy[0], PIECE, self._offset)
        whole = data.rfind(b"\n") + 1
        if not whole:
            return False
        kept = data[:whole] if self._brought < MOST else _events(data[:whole])
        if kept:
            self._place.write(f"{self._logs}/{self._pieces:08d}", kept)
            self._pieces += 1
        self._offset += whole
        if self._brought < MOST <= self._brought + whole:
            self._log.say(
                f"the log is longer than {MOST >> 20} MiB: "
                "of the lines after this one, only metrics and states are copied to the job's output"
            )
        self._brought += whole
        return True

    def _write_source(self) -> None:
        """Write the job's source, unless an earlier start has."""
        if self._source and os.path.basename(self._source_name) not in self._place.list(source.FOLDER):
            self._place.write(self._source_name, self._source)
        self._source = b""

    def _write_record(self) -> None:
        """Write the state of this start, where it has changed or the last write is too old."""
        current = {**{name: self._fields.get(name) for name in STATUS_FIELDS}, "epoch": self.epoch or None}
        fresh = self._log.clock.monotonic() - self._written_at < ALIVE_S
        if current == self._written and fresh:
            return
        data = json.dumps(self._masked(self._record(current))).encode()
        self._place.write(f"history/{self._manifest.attempt_id}/{self.start}/run.json", data)
        if current != self._written and self._is_newest():
            self._place.write("run.json", data)
        self._written, self._written_at = current, self._log.clock.monotonic()

    def _record(self, current: Mapping[str, object]) -> dict[str, object]:
        manifest = self._manifest
        return {
            "version": VERSION,
            "run_id": manifest.run_id,
            "attempt": manifest.attempt,
            "start": self.start,
            **current,
            "final": current["state"] in FINAL,
            "updated_at": now(self._log.clock),
            "platform": self._cluster.platform,
            "manifest": {name: value for name, value in manifest.fields.items() if name != "about"},
            "about": manifest.about or {},
        }

    def _is_newest(self) -> bool:
        """Return whether the run's own file is of no later start than this one."""
        try:
            record = json.loads(self._place.read("run.json") or b"{}")
            return (int(record.get("attempt", 0)), str(record.get("start", ""))) <= (self._manifest.attempt, self.start)
        except (ValueError, TypeError, AttributeError):
            return True

    def _masked(self, value: Any) -> Any:
        """Return plain data with every secret in its texts replaced."""
        if isinstance(value, str):
            return self._log.masks.apply(value.encode("utf-8", "backslashreplace")).decode()
        if isinstance(value, dict):
            return {self._masked(name): self._masked(inner) for name, inner in value.items()}
        return [self._masked(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _events(data: bytes) -> bytes:
    """Return the lines that hold an event, or are the launcher's own."""
    mark = MARK.encode()
    lines = (line for line in data.splitlines(keepends=True))
    return b"".join(
        line for line in lines if (parts := line.split(b" ", 3))[1:2] == [b"-1"] or parts[-1].startswith(mark)
    )
