from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.errors import StoreError, UnknownRun
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history import database, file, migrations
from cloudtrain.history.database import on_network
from cloudtrain.history.records import delete_rows
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process

ME = Process.here()


def plan(run_id="run-1", attempt=1, **changes):
    return Plan(**{"backend": "local", "run_id": run_id, "attempt": attempt, "request": {}, "bundle": {"sha256": "0"},
                   "manifest": {"secrets": {}}, "job": {"name": "n"}, "target": "local", **changes})  # fmt: skip


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


@pytest.fixture
def run(store: Store) -> str:
    assert store.intend(plan(), identity="i", owner=ME)
    return "run-1"


def test_an_intent_is_there_before_a_handle(store, run):
    (attempt,) = store.attempts(run)
    assert attempt.handle is None and attempt.plan == plan() and attempt.owner == str(ME)
    store.accept("run-1-a1", "handle")
    assert store.attempts(run)[0].handle == "handle"


def test_a_run_is_intended_once(store, run):
    assert not store.intend(plan(), identity="i", owner=ME)
    assert len(store.runs()) == 1


def test_unsettled_until_accepted_and_acknowledged(store, run):
    assert [a.attempt_id for a in store.unsettled()] == ["run-1-a1"]
    store.accept("run-1-a1", "h")
    assert [a.attempt_id for a in store.unsettled()] == ["run-1-a1"]
    store.acknowledge(run)
    assert store.unsettled() == []


def test_claim_is_a_compare_and_swap(store, run):
    other, third = replace(ME, pid=1, started="1"), replace(ME, pid=2, started="2")
    assert store.change_owner("run-1-a1", old=str(ME), new=other)
    assert not store.change_owner("run-1-a1", old=str(ME), new=third)


def test_next_attempt_is_a_compare_and_swap(store, run):
    assert not store.next_attempt(plan(attempt=2), owner=ME), "attempt 1 is not over"
    store.record("run-1-a1", status=Status(State.PREEMPTED, 75))
    store.set_status(run, Status(State.PREEMPTED, 75))
    assert store.next_attempt(plan(attempt=2), owner=ME)
    assert not store.next_attempt(plan(attempt=2), owner=ME)
    assert not store.next_attempt(plan(attempt=4), owner=ME)
    assert store.find(run).status.state is State.QUEUED
    assert [a.number for a in store.attempts(run)] == [1, 2]
    assert store.attempts(run)[0].status.exit_code is None, (
        "the code of a run that was asked to stop is not the script's"
    )


def test_a_cancelled_run_gets_no_attempt_unless_resumed(store, run):
    store.request_cancel(run)
    store.record("run-1-a1", status=Status(State.LOST))
    assert not store.next_attempt(plan(attempt=2), owner=ME)
    assert store.next_attempt(plan(attempt=2), owner=ME, resume=True)
    assert not store.find(run).cancel_requested


def test_a_final_state_is_never_rewritten(store, run):
    store.record("run-1-a1", status=Status(State.FAILED, 3, "why"))
    store.record("run-1-a1", status=Status(State.SUCCEEDED, 0))
    store.set_status(run, Status(State.FAILED, 3, "why"))
    store.set_status(run, Status(State.CANCELLED))
    assert store.attempts(run)[0].status.exit_code == 3
    assert (store.find(run).status.state, store.find(run).status.reason) == (State.FAILED, "why")


def test_seeing_the_same_lines_again_changes_nothing(store, run):
    event = Event("run-1-a1", 0, 7, "t", "metric", {"loss": 1.0})
    for _ in range(2):
        points = [Row(0, event.seq, "t", 5, "loss", 1.0), Row(0, event.seq, "t", 5, "lr", float("nan"))]
        store.record("run-1-a1", cursor="9", metrics=points,
                     events=[replace(event, seq=8, kind="world", data={"world_size": 2})])  # fmt: skip
    rows = store.metrics(run)
    assert [(r.step, r.name, r.seq) for r in rows] == [(5, "loss", 7), (5, "lr", 7)]
    assert rows[1].value != rows[1].value  # not a number, and kept as that
    assert [r.name for r in store.metrics(run, "loss")] == ["loss"]
    assert [e.data for e in store.events(run, "world")] == [{"world_size": 2}]
    assert store.attempts(run)[0].cursor == "9"


# -- finding ----------------------------------------------------------------------------------------------------------


def test_find_by_prefix(store):
    for name in ("alpha-1", "alpha-2", "beta-1"):
        store.intend(plan(name), identity=name, owner=ME)
    assert store.find("beta").run_id == "beta-1"
    assert store.find("alpha-1").run_id == "alpha-1"
    assert store.find(None).run_id == "beta-1"
    with pytest.raises(UnknownRun, match="several runs start with 'alpha'"):
        store.find("alpha")
    with pytest.raises(UnknownRun, match="'gamma'"):
        store.find("gamma")
    with pytest.raises(UnknownRun):
        store.find("%")  # a prefix, no pattern


def test_no_runs_yet(store):
    with pytest.raises(UnknownRun, match="no runs yet"):
        store.find(None)
    assert store.runs() == [] and store.get("x") is None


def test_filters(store, run):
    store.set_status(run, Status(State.RUNNING))
    assert [r.run_id for r in store.runs(states=[State.RUNNING])] == [run]
    assert store.runs(states=[State.FAILED]) == []
    assert [r.run_id for r in store.runs(name="n")] == [run]
    assert store.runs(name="other") == []


# -- leases -----------------------------------------------------------------------------------------------------------


def test_a_lease_is_held_by_one_living_process(store, run):
    parent = replace(ME, pid=os.getppid(), started=started(os.getppid()))
    dead = replace(ME, pid=2**22 - 1)
    elsewhere = replace(ME, host="elsewhere")
    assert store.lease(run, dead, 60) and not store.watched(run)
    assert store.lease(run, ME, 60) and store.watched(run), "a dead process holds nothing"
    assert store.lease(run, ME, 60), "renewed"
    assert not store.lease(run, parent, 60)
    store.release(run, parent)
    assert store.watched(run), "only the holder gives it back"
    store.release(run, ME)
    assert store.lease(run, elsewhere, 60) and not store.lease(run, ME, 60), "another machine's holder is believed"
    store.release(run, elsewhere)
    assert store.lease(run, elsewhere, -1) and store.lease(run, ME, 60), "until its lease runs out"


def started(pid):
    from cloudtrain.nodes.process import start_time

    return start_time(pid)


# -- the file ---------------------------------------------------------------------------------------------------------


def test_a_newer_version_is_refused_and_untouched(store, run, home):
    with sqlite3.connect(store.database.path) as db:
        db.execute("PRAGMA user_version = 999")
    with pytest.raises(StoreError, match="newer cloudtrain") as error:
        Store(home).runs()
    assert "pip install" in error.value.hint
    with sqlite3.connect(store.database.path) as db:
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (1,)


def test_a_corrupt_file_is_moved_aside_and_kept(home):
    home.mkdir()
    (home / "history.sqlite3").write_bytes(b"this is no database " * 100)
    store = Store(home)
    assert store.runs() == []
    (aside,) = home.glob("history.sqlite3.corrupt-*")
    assert aside.read_bytes().startswith(b"this is no database")
    assert "was damaged" in store.warnings[0] and str(aside) in store.warnings[0]
    assert store.intend(plan(), identity="i", owner=ME)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be created"):
        Store(tmp_path / "file" / "home").runs()


def test_a_full_disk_is_one_sentence_and_loses_nothing(store, run):
    db = store.database.open()
    pages = db.execute("PRAGMA page_count").fetchone()[0]
    db.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own "disk is full"
    with pytest.raises(StoreError, match="full") as error:
        for n in range(1000):
            store.intend(plan(f"more-{n}", job={"name": "n", "pad": "x" * 4000}), identity="i", owner=ME)
    assert error.value.hint == "free some disk space"
    assert store.find(run).run_id == run


def test_all_migrations_lead_to_the_same_schema(tmp_path, monkeypatch):
    def schema(path):
        with sqlite3.connect(path) as db:
            return sorted(row[0] for row in db.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL"))

    Store(tmp_path / "new").runs()
    for version in range(len(migrations.MIGRATIONS) + 1):
        with monkeypatch.context() as patch:
            patch.setattr(migrations, "MIGRATIONS", migrations.MIGRATIONS[:version])
            Store(tmp_path / f"v{version}").names() if version else (tmp_path / "v0").mkdir()
        Store(tmp_path / f"v{version}").runs()
        assert schema(tmp_path / f"v{version}" / "history.sqlite3") == schema(tmp_path / "new" / "history.sqlite3")


def test_network_file_systems_are_known(tmp_path):
    assert not on_network(tmp_path)
    assert "nfs4" in file.NETWORK_FILE_SYSTEMS


def test_without_shared_memory_there_is_no_wal(home, monkeypatch):
    monkeypatch.setattr(database, "on_network", lambda folder: True)
    store = Store(home)
    assert store.database.open().execute("PRAGMA journal_mode").fetchone()[0] == "delete"
    assert store.intend(plan(), identity="i", owner=ME)


def _writer(home, number, count):
    store = Store(home)
    for n in range(count):
        name = f"w{number}-{n}"
        assert store.intend(plan(name), identity=name, owner=Process.here())
        event = Event(f"{name}-a1", 0, n, "t", "metric")
        store.record(f"{name}-a1", cursor=str(n), metrics=[Row(event.node, event.seq, event.at, n, "loss", float(n))])


def test_many_processes_write_at_once(home):
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_writer, args=(home, number, 20)) for number in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [writer.exitcode for writer in writers] == [0] * 6
    store = Store(home)
    assert len(store.runs(limit=1000)) == 120
    assert all(len(store.metrics(f"w{number}-{n}")) == 1 for number in range(6) for n in range(20))


def _opener(home, go, ends):
    go.wait(120)
    try:
        ends.put(len(Store(home).runs()))
    except StoreError as error:
        ends.put(str(error))


def test_many_processes_make_the_file_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    for number in range(10):
        go, ends = context.Event(), context.Queue()
        openers = [context.Process(target=_opener, args=(tmp_path / str(number), go, ends)) for _ in range(8)]
        for opener in openers:
            opener.start()
        go.set()
        assert [ends.get(timeout=120) for _ in openers] == [0] * 8
        for opener in openers:
            opener.join(120)


def test_a_forked_child_opens_its_own_connection(store, run):
    store.runs()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, store.find("run-1").run_id.encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 100) == b"run-1"
    os.waitpid(child, 0)
    os.close(read)


def held(home: Path) -> list[str]:
    """Return what this process has open of a history."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return [link for link in links if link.startswith(f"{home}/history.sqlite3")]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux lists a process's open files")
def test_no_connection_is_open_across_a_fork(store, run, home):
    """A child would take locks that it inherits for its own, and two writers be in the file at once."""
    assert held(home)
    child = os.fork()
    if child == 0:
        os._exit(len(held(home)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.find("run-1").run_id == "run-1", "the parent opens another one"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux lists a process's open files")
def test_a_store_that_is_dropped_is_closed_at_once(home):
    Store(home).runs()
    assert held(home) == []


def test_ctrl_c_while_a_dropped_store_is_closed_prints_nothing(home, monkeypatch):
    class Closing:
        """A connection that is interrupted while it closes, by a real signal."""

        in_transaction = False

        def close(self) -> None:
            signal.raise_signal(signal.SIGINT)
            closed.append(True)

    closed: list[bool] = []
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    opened = database.Database(home)
    opened._connection, opened._pid = Closing(), os.getpid()
    del opened
    assert (closed, printed) == ([], [])  # it was interrupted, and Python had nothing to say of it


def test_a_history_that_outlives_its_modules_says_nothing_at_exit(tmp_path: Path):
    script = (  # modules that something still holds are emptied at the exit, the newest first
        "import colorsys, pathlib, sys\nfrom cloudtrain.history import database, store\n"
        "sys.kept = [colorsys, database]\ncolorsys.kept = store.Store(pathlib.Path(sys.argv[1]))\ncolorsys.kept.runs()\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_home_and_its_history_are_readable_for_their_owner_alone(home: Path):
    def modes() -> dict[str, str]:
        paths = [home, *(home / f"history.sqlite3{suffix}" for suffix in ("", "-wal", "-shm"))]
        return {path.name: oct(path.stat().st_mode & 0o777) for path in paths}

    private = {"home": "0o700"} | {f"history.sqlite3{suffix}": "0o600" for suffix in ("", "-wal", "-shm")}
    before = os.umask(0o022)
    try:
        home.mkdir()  # as storing a package does, before the history is opened
        store = Store(home)
        assert store.intend(plan(), identity="i", owner=ME)
        assert modes() == private
        for path in (home, *home.glob("history.sqlite3*")):  # as an earlier version left them
            path.chmod(0o755 if path is home else 0o644)
        assert Store(home).runs() and modes() == private
        (home / ".gitignore").write_text("*.log\n")  # of a project
        home.chmod(0o755)
        assert Store(home).runs() and modes() == private | {"home": "0o755"}
    finally:
        os.umask(before)


def test_a_short_name_is_the_runs_own_for_ever(store: Store):
    """A number is unique in the home, and is used for no other run when its own was deleted."""
    for run_id in ("aa", "bb"):
        assert store.intend(plan(run_id), identity="i", owner=ME)
    assert [store.find(name).run_id for name in ("n-1", "n-2")] == ["aa", "bb"]
    with store.database.write() as db:
        delete_rows(db, "bb")
    assert store.intend(plan("cc"), identity="i", owner=ME)
    assert store.find("n-3").run_id == "cc"
    for wrong in ("n-2", "other-1", "n-1x"):
        with pytest.raises(UnknownRun):
            store.find(wrong)
