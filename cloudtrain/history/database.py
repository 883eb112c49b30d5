"""Opens the SQLite history: safe for many processes, migrates the schema, moves a damaged file aside."""

from __future__ import annotations

import errno
import os
import sqlite3
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import StoreError, upgrade_command
from cloudtrain.history import migrations, repair
from cloudtrain.history.file import (
    Entry,
    Journal,
    Repaired,
    describe_holders,
    find_holders,
    full_disk,
    identity,
    lock,
    make_private,
    on_network,
)
from cloudtrain.job.homes import make_home
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    import tempfile

    from cloudtrain.backends.api import Plan

BUSY_S = 60.0  # how long a writer waits for another process that holds a lock
UNHELD_S = 10.0  # how long for a lock that no process of this machine holds
LOOKS = 10  # for its holder in that time
MOST_OPEN = 8  # idle connections of a process: each takes three descriptors and 0.6 MB
CHECKED_BYTES = 4 << 20  # of a history that is checked whole whenever it is opened: 2 ms for each MiB
MOST_VERSIONS = 1000  # of the schema that this cloudtrain takes for those of a newer one
# What SQLite may also say of a damaged file, and of an error of ours: the file is checked.
_SUSPECT = ("no such table", "no such column", "already exists", "Could not decode", "malformed", "unsupported file")
_NO_SPACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
_HINTS = {
    "full": "free some disk space",
    "locked": "no process of this machine is known to hold it; try again",
    "readonly": "set CLOUDTRAIN_HOME",
}


class _NotPrepared(Exception):
    """The file is new, or of an older version: it is prepared under the exclusive lock."""


class Database:
    """A connection to `<home>/history.sqlite3`, opened on first use. Each process and thread needs its own object.

    A home that cannot be written is read from a copy, which is made again when the history has changed.
    """

    def __init__(self, home: Path, clock: Clock = SYSTEM) -> None:
        self.home, self._clock = home, clock
        self.path = home / "history.sqlite3"
        self.journal = Journal(home, clock)
        self.warnings: list[str] = []  # for the user, such as a damaged file that was moved aside
        self._connection: sqlite3.Connection | None = None
        self._opened: object = None  # identity of the file that the connection is to
        self._copy: tempfile.TemporaryDirectory[str] | None = None
        self._pid = self._readers = self._used = 0
        _OPEN.add(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():
            return  # the names of this module are None by now, and the process ends anyway
        # sqlite3's connections are in reference cycles: without this they stay open until the garbage collector runs.
        # Python cannot raise a Ctrl-C from here, it would only print a traceback.
        with suppress(KeyboardInterrupt):
            self.close()

    @property
    def read_only(self) -> bool:
        """Whether the home cannot be written."""
        return self.home.is_dir() and not os.access(self.home, os.W_OK)

    def close(self) -> None:
        """Close the connection; the next use opens a new one. A connection of another thread or process stays open."""
        db = self._connection  # another thread, whose it is, may close it meanwhile
        if db is not None and self._pid == os.getpid():
            with suppress(sqlite3.ProgrammingError):  # it belongs to another thread
                if not db.in_transaction:
                    moved = self._copy is None and self._is_replaced()
                    repair.leak(db) if moved else db.close()
                    self._connection = self._copy = None

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection for reading; raises StoreError."""
        with self.translated_errors():
            self._readers += 1
            try:
                yield self.open()
            finally:
                self._readers -= 1

    def write(self) -> sqlite3.Connection:
        """Begin a transaction and return its connection, for a `with` block that commits it, or rolls it back if it raises.

        Raises StoreError, and sqlite3.Error for `translated_errors`. It is no generator: Ctrl-C between its transaction and
        the block would leave that open.
        """
        if self.read_only:
            raise StoreError(f"the history {self.path} cannot be written: {self.home} is read-only", _HINTS["readonly"])
        if self._copy is not None:
            self.close()  # the disk was full
        db = self.open(writing=True)
        try:
            self._begin(db)
            if self._is_replaced():  # while we waited
                raise Repaired(f"the history {self.path} was repaired just now", "run the command again")
            return db
        except BaseException:
            if db.in_transaction:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
            raise

    def _begin(self, db: sqlite3.Connection) -> None:
        """Begin a transaction; waits while another process writes, and shortly where none is known to.

        Many writers hold the lock for a moment each, so that one look may see none of them.
        """
        deadline, unheld = self._clock.monotonic() + BUSY_S, 0
        while True:
            try:
                db.execute(f"PRAGMA busy_timeout = {UNHELD_S / LOOKS * 1000:.0f}")
                db.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                # On a network file system the other machines are not known.
                held = find_holders(*self._locked_files()) or on_network(self.home)
                unheld = 0 if held else unheld + 1
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or unheld == LOOKS:
                    raise
                if self._clock.monotonic() > deadline:
                    raise
            finally:
                db.execute(f"PRAGMA busy_timeout = {UNHELD_S * 1000:.0f}")

    def _locked_files(self) -> tuple[Path, ...]:
        return self.path, Path(f"{self.path}-shm")

    def record_attempt(self, plan: Plan, **columns: str | None) -> None:
        """Name a stored attempt in the journal, from which it is restored should its row be lost; raises StoreError."""
        try:
            self.journal.add(plan, **columns)
        except OSError as error:
            message = f"the file {self.journal.path} cannot be written: {error.strerror}"
            raise StoreError(message, _HINTS["full"]) from None

    def repair(self, error: Exception) -> bool:
        """Repair the history if an error came of its damage, and return whether it did; blocking."""
        if self.read_only or not self.path.exists():
            return False
        sentence = ""
        with self._lock():
            if self._connection is None or not self._is_replaced():
                if not (problem := self._find_problem(error)):
                    return False
                sentence = self._rebuild(problem)
        if sentence:
            self._restore(sentence)
        return True

    def _find_problem(self, error: Exception) -> str:
        """Return what is wrong with the file, "" where the error has another cause."""
        if repair.is_damage(error):
            return str(error)
        suspect = not isinstance(error, sqlite3.Error) or any(phrase in str(error) for phrase in _SUSPECT)
        return repair.find_problem(self.path) if suspect else ""

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn SQLite's errors into StoreError; repair a damaged file first."""
        try:
            yield
        except sqlite3.Error as error:
            if self.repair(error):
                raise Repaired(f"the history {self.path} was damaged: {error}", "run the command again") from error
            hint = next((hint for phrase, hint in _HINTS.items() if phrase in str(error)), "")
            if "locked" in str(error):
                hint = describe_holders(*self._locked_files()) or hint
            if (getattr(error, "sqlite_errorcode", None) or 0) & 0xFF in _NO_SPACE and (disk := full_disk(self.home)):
                message = f"the history {self.path} cannot be used: the disk at {disk} is full"
                raise StoreError(message, f"free some space below {disk}, or set CLOUDTRAIN_HOME") from error
            raise StoreError(f"the history {self.path} cannot be used: {error}", hint) from error

    def open(self, *, writing: bool = False) -> sqlite3.Connection:
        """Return the connection of this process; on a full disk, and not for `writing`, one to a copy of the history."""
        if self._connection is not None and self._pid == os.getpid() and self._is_replaced():
            self.close()
        if self._connection is None or self._pid != os.getpid():  # a connection must not survive a fork
            try:
                self._connect()
            except (sqlite3.OperationalError, OSError) as error:  # without space SQLite cannot even read
                no_space = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if writing or not (no_space or code in _NO_SPACE) or not self.path.is_file():
                    raise
                self._connection = self._connect_copy()
            self._pid = os.getpid()
            idle = [each for each in list(_OPEN) if each is not self and each._connection and not each._readers]
            for each in sorted(idle, key=lambda each: each._used)[: max(len(idle) - MOST_OPEN, 0)]:
                each.close()
        self._used = next(_USES)
        assert self._connection is not None
        return self._connection

    def _is_replaced(self) -> bool:
        """Return whether another file is in the place of the one that is open, as after a repair."""
        present = identity(self.path, content=self._copy is not None)
        return present is not None and present != self._opened

    def _connect(self) -> None:
        """Open the history, a new one where there is none, and repair it where it is damaged."""
        if self.read_only:
            self._connection = self._connect_copy()
            return
        try:
            make_home(self.home)
        except OSError as error:
            raise StoreError(
                f"the folder {self.home} cannot be created: {error.strerror}", "set CLOUDTRAIN_HOME"
            ) from None
        sentence = ""
        for exclusive in (False, True):
            with self._lock(exclusive), suppress(_NotPrepared):
                try:
                    self._open_file(exclusive)
                except sqlite3.DatabaseError as error:
                    if not (problem := self._find_problem(error)):
                        raise
                    if not exclusive:
                        continue
                    sentence = self._rebuild(problem)
                break
        newest = self.journal.newest()
        if sentence or (newest and not self._has(newest) and not self.repair(LookupError(newest))):
            self._restore(sentence or "the history had lost runs that its journal lists")

    def _connect_copy(self) -> sqlite3.Connection:
        """Open a copy of the history, so that nothing is written into the home."""
        import shutil
        import tempfile

        self._copy = tempfile.TemporaryDirectory(prefix="cloudtrain-")
        self._opened = identity(self.path, content=True)
        for suffix in ("", "-wal", "-journal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{self.path}{suffix}", f"{self._copy.name}/{self.path.name}{suffix}")
        return self._connect_file(Path(self._copy.name) / self.path.name)

    def _open_file(self, exclusive: bool = True) -> None:
        self._connection = self._connect_file(self.path, exclusive)
        self._pid, self._opened = os.getpid(), identity(self.path)

    def _has(self, attempt_id: str) -> bool:
        with self.read() as db:
            return db.execute("SELECT 1 FROM attempts WHERE attempt_id = ?", (attempt_id,)).fetchone() is not None

    def _connect_file(self, path: Path, exclusive: bool = True) -> sqlite3.Connection:
        wal = Path(f"{path}-wal")
        if path.exists() and not path.stat().st_size and wal.exists() and wal.stat().st_size:
            raise repair.Damaged("it is empty")  # SQLite would delete the -wal file
        db = sqlite3.connect(path, timeout=UNHELD_S, isolation_level=None)
        try:
            self._prepare(db, exclusive)
        except BaseException as error:  # Ctrl-C during a migration must not leave its transaction open
            repair.leak(db) if isinstance(error, sqlite3.Error) and repair.is_damage(error) else db.close()
            raise
        return db

    def _prepare(self, db: sqlite3.Connection, exclusive: bool) -> None:
        db.row_factory = sqlite3.Row
        db.create_function("regexp", 2, _matches, deterministic=True)  # of filters
        db.execute("PRAGMA synchronous = FULL")  # an intent must survive a power cut
        if self._copy is None:
            make_private(self.path)  # before there is a -wal: SQLite gives that one the mode of the database
        version, latest = db.execute("PRAGMA user_version").fetchone()[0], len(migrations.MIGRATIONS)
        if not 0 <= version <= latest + MOST_VERSIONS:
            raise repair.Damaged(f"its version is {version}")
        if version > latest:
            raise StoreError(
                f"the history {self.path} was written by a newer cloudtrain (schema {version}, this one reads {latest})",
                f"{upgrade_command()}, or set CLOUDTRAIN_HOME to another folder",
            )
        to_wal = db.execute("PRAGMA journal_mode").fetchone()[0] != "wal" and not on_network(self.home)
        if to_wal or version < latest:
            if not exclusive:  # SQLite does not wait for a busy process when it changes the journal mode
                raise _NotPrepared
            if to_wal:
                db.execute("PRAGMA journal_mode = WAL")
            migrations.migrate(db)
        # SQLite does not notice an index that lacks rows, as one in whose place another's page was written.
        small = self._copy is None and self.path.stat().st_size <= CHECKED_BYTES
        if small and (answer := db.execute("PRAGMA integrity_check(1)").fetchone()[0]) != "ok":
            raise repair.Damaged(answer)

    def _lock(self, exclusive: bool = True) -> IO[str]:
        return lock(self.home / "history.lock", exclusive, BUSY_S, self._clock)

    def _rebuild(self, problem: str) -> str:
        """Put what can be read of a damaged file in its place, and return what was done."""
        aside, copied = repair.rebuild(self.path)
        self.close()
        self._open_file()
        return f"the history was damaged ({problem}): it is kept as {aside}, and {copied} runs were copied from it"

    def _restore(self, sentence: str) -> None:
        """Add the runs that the journal lists and the history has lost; calls no platform."""
        with self.translated_errors(), self.write() as db:
            lost = repair.restore(db, self.home)
        if lost:
            runs = format_count(lost, "lost run")
            sentence += f"; {runs} added from the journal: run `cloudtrain doctor` to ask the platforms for them"
        self.warnings.append(sentence)

    def add_found(self, entries: Sequence[Entry]) -> int:
        """Add attempts that their platforms have, and return of how many runs; raises StoreError."""
        with self.translated_errors(), self.write() as db:
            for entry in entries:
                repair.insert(db, entry)
        for entry in entries:
            self.record_attempt(entry.plan, created_at=entry.created_at, handle=entry.handle)
        return len({entry.plan.run_id for entry in entries})

    def search(self) -> str:
        """Ask the platforms for the runs that were restored, and return in words what they answered; blocking."""
        with self.read() as db:
            return repair.search(db, self.home)


_OPEN: weakref.WeakSet[Database] = weakref.WeakSet()
_USES = count(1)


def _matches(pattern: str, text: object) -> bool:
    """Return whether the first 200 characters have a part that an expression describes; SQLite calls it for REGEXP."""
    import re

    return text is not None and re.search(pattern, str(text)[:200]) is not None


def _close_all() -> None:
    for database in list(_OPEN):
        database.close()


# A connection that is open across a fork corrupts the file: the child drops the parent's locks
# (https://sqlite.org/howtocorrupt.html#_carrying_an_open_database_across_a_fork_, read 2026-11-22).
os.register_at_fork(before=_close_all)


def placeholders(items: Sequence[object]) -> str:
    """Return SQL placeholders for as many values: `?, ?, ?`."""
    return ", ".join("?" for _ in items)
