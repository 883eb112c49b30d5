"""The locks of the history: what Ctrl-C leaves of them, who holds one, and how long a command waits."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest

from cloudtrain.errors import StoreError
from cloudtrain.history import database
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process

WATCHED = ("history/database.py", "history/file.py", "contextlib.py")
ME = Process.here()


class Interrupt:
    """Raises KeyboardInterrupt at the Nth moment at which Python handles a signal: a call, or the return of a C function."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, frame, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(WATCHED):
            self.number -= 1
            if self.number == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt


def held(home: Path) -> list[str]:
    """Return which locks of a home are held."""
    found = []
    if (home / "history.lock").exists():
        with (home / "history.lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append("history.lock")
    with closing(sqlite3.connect(home / "history.sqlite3", timeout=0.0, isolation_level=None)) as other:
        try:
            other.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "old"])
def test_ctrl_c_at_any_moment_leaves_no_lock_to_its_handler(tmp_path, is_new):
    left = {}
    for number in range(1, 2000):
        home = tmp_path / f"{number}" if is_new else tmp_path / "home"
        home.mkdir(exist_ok=True)
        if not is_new:
            Store(home).names()
        store = Store(home)
        sys.setprofile(Interrupt(number))
        try:
            store.offer("run")
            break
        except KeyboardInterrupt:  # as a handler, or a notebook, that keeps the interrupted frames
            sys.setprofile(None)
            if found := held(home):
                left[number] = found
        finally:
            sys.setprofile(None)
    assert 50 < number < 1999
    assert not left


def test_who_holds_the_lock_is_named(home, monkeypatch):
    Store(home).names()
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with (home / "history.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StoreError, match="history.lock is locked") as caught:
            Store(home).names()
    words = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    command = " ".join(Path(word).name for word in words[:3] if word)
    assert f"process {os.getpid()} ({command}, since 20" in caught.value.hint


def test_who_writes_is_named(home, monkeypatch):
    store = Store(home)
    store.names()
    monkeypatch.setattr(database, "UNHELD_S", 0.02)
    monkeypatch.setattr(database, "BUSY_S", 0.05)
    with closing(sqlite3.connect(home / "history.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked") as caught:
            Store(home).offer("run")
    assert f"process {os.getpid()} (" in caught.value.hint and ", since 20" in caught.value.hint


def test_the_rest_of_a_command_may_hold_a_secret(home, monkeypatch):
    from cloudtrain.nodes.process import describe

    words = Path("/proc/self/cmdline").read_bytes().decode().split("\0")
    assert all(word not in describe(os.getpid()) for word in words[3:] if len(word) > 3)
    assert describe(2**22 + 1) == f"process {2**22 + 1}"


def test_a_lock_that_no_process_holds_is_waited_for_only_shortly(home, monkeypatch):
    assert database.UNHELD_S <= 10 and database.BUSY_S > 50
    looks: list[tuple[Path, ...]] = []
    monkeypatch.setattr(database, "UNHELD_S", 0.02)
    monkeypatch.setattr(database, "BUSY_S", 5.0)
    monkeypatch.setattr(database, "find_holders", lambda *paths: looks.append(paths) or [])
    Store(home).names()
    with closing(sqlite3.connect(home / "history.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            Store(home).offer("run")
    assert len(looks) == database.LOOKS


def test_a_holder_that_most_looks_do_not_see_is_waited_for(home, monkeypatch):
    """As with many writers, each of which holds the lock for a moment."""
    monkeypatch.setattr(database, "UNHELD_S", 0.02)
    Store(home).names()
    with closing(sqlite3.connect(home / "history.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        looks = []

        def find(*paths):
            looks.append(paths)
            if len(looks) == 2 * database.LOOKS:
                other.execute("ROLLBACK")
            return [os.getpid()] if len(looks) % (database.LOOKS - 1) == 0 else []

        monkeypatch.setattr(database, "find_holders", find)
        Store(home).offer("run")
    assert len(looks) == 2 * database.LOOKS


def test_a_log_that_was_cut_under_an_open_history_is_damage(home):
    """Seen as `disk I/O error`, from every command, until the watcher had ended."""
    first, second = Store(home), Store(home)
    first.names()
    second.names()
    first.elect(ME, "1", "socket", 30.0)
    os.truncate(home / "history.sqlite3-wal", 0)
    assert second.watcher() is None or second.watcher().owner == str(ME)
    second.offer("run")
    assert list(home.glob("*.corrupt-*"))


def test_many_runs_that_are_held_keep_few_connections(tmp_path):
    """A program that holds 1,000 runs would run out of descriptors and memory; what is being read stays open."""
    held = [Store(tmp_path) for _ in range(3 * database.MOST_OPEN)]
    reader = held[0].database
    with reader.read() as connection:
        rows = connection.execute("SELECT 1 UNION SELECT 2")
        for store in held[1:]:
            assert store.runs() == []
        assert [row[0] for row in rows] == [1, 2]
    opened = [store for store in held if store.database._connection is not None]
    assert opened == [held[0], *held[-database.MOST_OPEN - 1 :]], "the last that were used"
    assert held[1].runs() == []


def test_a_connection_that_its_own_thread_closes_meanwhile_is_closed(tmp_path: Path):
    """Another thread closes what is idle, to have few of them."""
    found = Store(tmp_path).database

    class Closing:
        @property
        def in_transaction(self) -> bool:
            found._connection = None  # what the thread whose it is does at this moment
            return False

        def close(self) -> None:
            raise sqlite3.ProgrammingError("it belongs to another thread")

    found._connection, found._pid = Closing(), os.getpid()  # type: ignore[assignment]
    found.close()
    assert found._connection is None
