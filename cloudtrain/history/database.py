"""Opens the SQLite history: safe for many processes, migrates the schema, moves a damaged file aside."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from cloudtrain.errors import StoreError
from cloudtrain.history.migrations import MIGRATIONS

BUSY_S = 60.0  # how long a writer waits for another writer
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
    """A connection to `<home>/history.sqlite3`, opened on first use. Each process and thread needs its own object."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "history.sqlite3"
        self.warnings: list[str] = []  # for the user, such as a damaged file that was moved aside
        self._connection: sqlite3.Connection | None = None
        self._pid = 0
        _OPEN.add(self)

    def __del__(self) -> None:
        # sqlite3's connections are in reference cycles: without this they stay open until the garbage collector runs.
        # Python cannot raise a Ctrl-C from here, it would only print a traceback.
        with suppress(KeyboardInterrupt):
            self.close()

    def close(self) -> None:
        """Close the connection; the next use opens a new one. A connection of another thread or process stays open."""
        if self._connection is not None and self._pid == os.getpid():
            with suppress(sqlite3.ProgrammingError):  # it belongs to another thread
                if not self._connection.in_transaction:
                    self._connection.close()
                    self._connection = None

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading; raises StoreError."""
        with self._translated_errors():
            yield self.open()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection inside one transaction, which is rolled back when the block raises; raises StoreError."""
        with self._translated_errors():
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
    def _translated_errors(self) -> Iterator[None]:
        """Turn SQLite's errors into StoreError."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise StoreError(f"the history {self.path} cannot be used: {error}", _hint(error)) from error
        except sqlite3.DatabaseError as error:
            raise StoreError(f"the history {self.path} is damaged: {error}", "run the command again") from error

    def open(self) -> sqlite3.Connection:
        """Return the connection of this process."""
        if self._connection is None or self._pid != os.getpid():  # a connection must not survive a fork
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
                ignore.write_text("*\n")  # a home inside a source folder belongs neither to git nor to the bundle
        except OSError as error:
            raise StoreError(
                f"the folder {self.home} cannot be made: {error.strerror}", "set CLOUDTRAIN_HOME"
            ) from None
        db = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)
        try:
            self._prepare(db, locked)
        except BaseException:  # Ctrl-C during a migration must not leave its transaction open
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
        # WAL needs shared memory, which network file systems lack (https://sqlite.org/wal.html, read 2026-11-20).
        to_wal = not on_network(self.home) and db.execute("PRAGMA journal_mode").fetchone()[0] != "wal"
        if to_wal or version < len(MIGRATIONS):
            # Under our own lock: SQLite does not wait for a busy process when it changes the journal mode.
            with nullcontext() if locked else self._lock():
                if to_wal:
                    db.execute("PRAGMA journal_mode = WAL")
                migrate(db)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock out other processes while the file is created or moved aside, which SQLite does not guard."""
        with (self.home / "history.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _move_aside(self, error: Exception) -> None:
        """Rename a damaged file, so that a new one can be created."""
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


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()


def _close_all() -> None:
    for database in list(_OPEN):
        database.close()


# A connection that is open across a fork corrupts the file: the child drops the parent's locks
# (https://sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_, read 2026-11-22).
os.register_at_fork(before=_close_all)


def migrate(db: sqlite3.Connection) -> None:
    """Apply the missing migrations, each one and its version number in one transaction."""
    for number, statements in enumerate(MIGRATIONS, start=1):
        db.execute("BEGIN IMMEDIATE")
        if db.execute("PRAGMA user_version").fetchone()[0] < number:  # another process may have been first
            for statement in statements:
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {number}")
        db.execute("COMMIT")


def placeholders(items: Sequence[object]) -> str:
    """Return SQL placeholders for as many values: `?, ?, ?`."""
    return ", ".join("?" for _ in items)


def on_network(folder: Path) -> bool:
    """Return whether a folder is on a network file system; False where /proc/mounts is missing."""
    try:
        mounts = Path("/proc/mounts").read_text().splitlines()
        real = os.path.realpath(folder)
    except OSError:
        return False
    longest, kind = "", ""
    for line in mounts:
        point, name = line.split(" ", 3)[1:3]
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):
            longest, kind = point, name
    return kind in NETWORK_FILE_SYSTEMS


def _hint(error: Exception) -> str:
    return next((hint for phrase, hint in _HINTS.items() if phrase in str(error)), "")
