"""The SQLite file below the home: opened safely by many processes, brought to the newest schema, moved aside when damaged."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain.errors import StoreError
from cloudtrain.history.migrations import MIGRATIONS

BUSY_S = 60.0  # how long a writer waits for another one
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "9p",
        "afs",
        "fuse.sshfs",
        "fuse.gcsfuse",
        "fuse.s3fs",
    }
)
_HINTS = {
    "full": "free some disk space",
    "locked": "another process holds it; try again",
    "readonly": "set CLOUDTRAIN_HOME",
}


class Database:
    """A connection to `<home>/history.sqlite3`, opened on first use; one object for one process and thread."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "history.sqlite3"
        self.warnings: list[str] = []  # what a person should be told, such as a damaged file that was moved aside
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        _HERE.add(self)

    def __del__(self) -> None:
        # sqlite3's own connections are cycles of references: they stay open until Python looks for these. A Ctrl-C that
        # falls in here goes no further, whatever is done: Python would only print it, with a traceback.
        with suppress(KeyboardInterrupt):
            self.close()

    def close(self) -> None:
        """Close the connection; the next use opens another one. One that another thread uses, or another process, stays."""
        if self._connection is not None and self._pid == os.getpid():
            with suppress(sqlite3.ProgrammingError):  # another thread's
                if not self._connection.in_transaction:
                    self._connection.close()
                    self._connection = None

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Give the connection for reading; raises StoreError."""
        with self._mapped():
            yield self.open()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Give the connection inside one transaction, which is undone when the block raises; raises StoreError."""
        with self._mapped():
            db = self.open()
            try:
                db.execute("BEGIN IMMEDIATE")
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        """Turn SQLite's errors into ours, in this one place."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"the history {self.path} cannot be used: {error}", _hint(error)) from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the history {self.path} is damaged: {error}", "run the command again") from error

    def open(self) -> sqlite3.Connection:
        """Return the connection of this process."""
        if self._connection is None or self._pid != os.getpid():  # a connection must not cross a fork
            try:
                self._connection = self._connect()
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError):
                    raise
                self._move_aside(error)
                self._connection = self._connect()
            self._pid = os.getpid()
        return self._connection

    def _connect(self, *, locked: bool = False) -> sqlite3.Connection:
        try:
            self.home.mkdir(parents=True, exist_ok=True, mode=0o700)
            ignore = self.home / ".gitignore"
            if not self.path.exists() and not ignore.exists():
                ignore.write_text("*\n")  # a home inside a source is no part of it: neither git's nor ours
        except OSError as error:
            raise StoreError(
                f"the folder {self.home} cannot be made: {error.strerror}", "set CLOUDTRAIN_HOME"
            ) from None
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            self._prepare(db, locked)
        except BaseException:  # Ctrl-C in the middle of a migration must not leave its transaction open
            db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection, locked: bool) -> None:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA synchronous = FULL")  # an intent must survive a power cut
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version > len(MIGRATIONS):
            raise StoreError(
                f"the history {self.path} was written by a newer cloudtrain (schema {version}, this one reads {len(MIGRATIONS)})",
                "pip install -U cloudtrain, or set CLOUDTRAIN_HOME to another folder",
            )
        # WAL needs shared memory, which network file systems do not give (https://sqlite.org/wal.html, read 2026-11-20).
        to_wal = not on_network(self.home) and db.execute("PRAGMA journal_mode").fetchone()[0] != "wal"
        if to_wal or version < len(MIGRATIONS):
            # Under a lock of our own: SQLite refuses a change of the journal mode at once when another process is busy.
            with nullcontext() if locked else self._lock():
                if to_wal:
                    db.execute("PRAGMA journal_mode = WAL")
                migrate(db)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold what is not SQLite's to guard: making the file, and moving it aside."""
        with (self.home / "history.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _move_aside(self, error: Exception) -> None:
        """Keep a damaged file under another name and make room for a new one."""
        with self._lock():
            try:
                self._connect(locked=True).close()
                return  # another process was first
            except sqlite3.DatabaseError:
                pass
            aside = self.path.with_name(f"{self.path.name}.corrupt-{datetime.now(UTC):%y%m%d-%H%M%S}-{os.getpid()}")
            for suffix in ("", "-wal", "-shm"):
                part = Path(f"{self.path}{suffix}")
                if part.exists():
                    part.rename(f"{aside}{suffix}")
            self.warnings.append(f"the history was damaged ({error}); it was kept as {aside} and a new one was begun")


_HERE: weakref.WeakSet[Database] = weakref.WeakSet()


def _close_all() -> None:
    for found in list(_HERE):
        found.close()


# A connection that is open across a fork corrupts the file: the child takes the parent's locks for its own
# (https://sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_, read 2026-11-22).
os.register_at_fork(before=_close_all)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the migrations that are missing, each with its number in one transaction."""
    for number, statements in enumerate(MIGRATIONS, start=1):
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] < number:  # another process may have been first
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
        db.execute("COMMIT")


def on_network(folder: Path) -> bool:
    """Return whether a folder lies on a network file system; False where the system does not say."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return False
    best, kind = "", ""
    for line in mounts:
        point, name = line.split(" ", 3)[1:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, name
    return kind in NETWORK_FILE_SYSTEMS


def _hint(error: Exception) -> str:
    return next((hint for word, hint in _HINTS.items() if word in str(error)), "")
