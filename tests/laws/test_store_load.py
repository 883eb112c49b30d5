"""The store under load: many writers at once, writers that are killed, a disk that is full, a network file system."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.api import Plan
from cloudtrain.errors import StoreError
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history import database, file
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from tests.conftest import WAIT_S, wait_for
from tests.seed import first_seed

FORK = multiprocessing.get_context("fork")
POINTS = 5  # in one transaction, with a cursor that says how many there are
LIFE_S = 300.0


def plan(run_id: str, attempt: int = 1) -> Plan:
    return Plan(
        "local", run_id, attempt, {}, {"sha256": "0"}, {"secrets": {}}, {"name": "n", "pad": "x" * 500}, "local"
    )


def write_run(store: Store, name: str, batches: int = 3) -> None:
    """Do all that a run's life writes: intent, handle, batches of points with their cursor, two attempts, the end."""
    me = Process.here()
    assert store.intend(plan(name), identity=name, owner=me)
    store.accept(f"{name}-a1", "handle")
    assert store.lease(name, me, 60)
    for batch in range(batches):
        events = [Event(f"{name}-a1", 0, batch * POINTS + n, "t", "metric") for n in range(POINTS)]
        points = [Row(event.node, event.seq, event.at, event.seq, "loss", float(event.seq)) for event in events]
        store.record(f"{name}-a1", cursor=str((batch + 1) * POINTS), metrics=points)
    store.record(f"{name}-a1", status=Status(State.PREEMPTED, 75, ended_at="t"))
    assert store.next_attempt(plan(name, 2), owner=me)
    store.record(f"{name}-a2", status=Status(State.SUCCEEDED, 0, ended_at="t"))
    store.set_status(name, Status(State.SUCCEEDED, 0, ended_at="t"))
    store.release(name, me)


def whole(home: Path) -> dict[str, int]:
    """Check that the file is sound and that every transaction in it is whole; return how many rows there are."""
    store = Store(home)
    with store.database.read() as db:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        one = lambda query: db.execute(query).fetchone()[0]  # noqa: E731
        assert one("SELECT count(*) FROM runs WHERE run_id NOT IN (SELECT run_id FROM attempts)") == 0
        assert one("SELECT count(*) FROM attempts WHERE run_id NOT IN (SELECT run_id FROM runs)") == 0
        halves = db.execute(
            "SELECT attempt_id, cursor, (SELECT count(*) FROM metrics m WHERE m.attempt_id = a.attempt_id) AS points"
            " FROM attempts a WHERE points != CAST(coalesce(cursor, '0') AS INTEGER)"
        ).fetchall()
        assert halves == [], "points and cursor are written together"
        gaps = "SELECT count(*) FROM (SELECT run_id FROM attempts GROUP BY run_id HAVING max(number) != count(*))"
        assert one(gaps) == 0
        assert store.warnings == [] and not list(home.glob("*.corrupt-*"))
        return {table: one(f"SELECT count(*) FROM {table}") for table in ("runs", "attempts", "metrics")}


def _write(home: Path, number: int, count: int, go: object, mode: str = "") -> None:
    signal.alarm(int(LIFE_S))  # whatever happens to the test, no writer outlives it for long
    if mode == "network":
        database.on_network = lambda folder: True
    go.wait(LIFE_S)
    store = Store(home)
    for n in range(count):
        write_run(store, f"w{number}-{os.getpid()}-{n}")
        with done(home).open("ab") as file:
            file.write(b".")


def done(home: Path) -> Path:
    """Return the file that holds a byte for every run that a writer has written whole."""
    return home.with_name("written")


@contextlib.contextmanager
def writers(home: Path, many: int, count: int, mode: str = "") -> Iterator[list]:
    go = FORK.Event()
    made = [FORK.Process(target=_write, args=(home, number, count, go, mode), daemon=True) for number in range(many)]
    try:
        for writer in made:
            writer.start()
        go.set()
        yield made
    finally:
        for writer in made:
            if writer.is_alive():
                writer.kill()
            writer.join(WAIT_S)


@pytest.mark.parametrize("mode", ["", "network"])
def test_a_dozen_writers_at_once(home, figure, mode, monkeypatch):
    write_at_once(home, figure, mode, 12, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["", "network"])
def test_fifty_writers_at_once(home, figure, mode, monkeypatch):
    write_at_once(home, figure, mode, 50, monkeypatch)


def write_at_once(home, figure, mode, many, monkeypatch):
    count = 2
    with writers(home, many, count, mode) as started:
        for writer in started:
            writer.join(LIFE_S)
        assert [writer.exitcode for writer in started] == [0] * many
    if mode:
        monkeypatch.setattr(database, "on_network", lambda folder: True)
    found = whole(home)
    assert found == {"runs": many * count, "attempts": 2 * many * count, "metrics": many * count * 3 * POINTS}
    journal = sqlite3.connect(home / "history.sqlite3").execute("PRAGMA journal_mode").fetchone()[0]
    assert journal == ("delete" if mode else "wal")
    figure(f"writers at once{' without WAL, as on a network file system' if mode else ''}", many)


def kill_writers(home: Path, kills: int, mode: str) -> None:
    choose = random.Random(first_seed())
    write_run(Store(home), "before")
    killed = 0
    written = lambda: done(home).stat().st_size if done(home).exists() else 0  # noqa: E731
    while killed < kills:
        with writers(home, 5, 10_000, mode) as started:
            for writer in started:
                before = written()
                wait_for(lambda before=before: written() > before, "a run that is written")
                time.sleep(choose.random() * 0.15)
                os.kill(writer.pid, signal.SIGKILL)
            for writer in started:
                writer.join(WAIT_S)
            assert [writer.exitcode for writer in started] == [-signal.SIGKILL] * len(started)
        killed += len(started)
        whole(home)
    assert whole(home)["runs"] > written() >= kills
    write_run(Store(home), "after")


@pytest.mark.parametrize("mode", ["", "network"])
def test_killed_writers_leave_nothing_half_written(home, figure, mode):
    kill_writers(home, 50, mode)
    figure("writers killed with SIGKILL, no half transaction", 50)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["", "network"])
def test_many_killed_writers_leave_nothing_half_written(home, figure, mode):
    kill_writers(home, 1000, mode)
    figure("writers killed with SIGKILL, no half transaction", 1000)


FILL = """
import resource, signal, sys
from pathlib import Path
from cloudtrain.errors import StoreError
from cloudtrain.history.store import Store
from tests.laws.test_store_load import write_run
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))  # the kernel lets no file grow further
store = Store(Path(sys.argv[1]))
try:
    for n in range(10_000):
        write_run(store, f"fill-{sys.argv[2]}-{n}")
        print(n, flush=True)
except StoreError as error:
    print("refused", error.message)
"""


def test_files_that_can_grow_no_further_lose_nothing(home, figure):
    """What a full disk or a quota does, by the kernel's hand: every write beyond a limit fails."""
    write_run(Store(home), "before")
    size = (home / "history.sqlite3").stat().st_size
    rooms = [size + room for room in (0, 4096, 20_000, 65_000, 140_000)]
    for room in rooms:
        done = subprocess.run(
            [sys.executable, "-c", FILL, str(home), str(room)],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            cwd=Path(__file__).parents[2],
        )
        assert done.returncode == 0, done.stderr
        *told, last = done.stdout.splitlines()
        assert last.startswith("refused the history ") and "Traceback" not in done.stderr
        kept = {run.run_id for run in Store(home).runs(limit=10**6)}
        assert {f"fill-{room}-{n}" for n in told} <= kept and "before" in kept
        whole(home)
    write_run(Store(home), "after")
    figure("full disks, at different moments", len(rooms))


def test_a_full_disk_is_said_in_one_sentence(home, monkeypatch):
    store = Store(home)
    write_run(store, "before")
    db = store.database.open()
    db.execute(f"PRAGMA max_page_count = {db.execute('PRAGMA page_count').fetchone()[0]}")
    with pytest.raises(StoreError, match="full") as refused:
        for n in range(1000):
            write_run(store, f"more-{n}")
    assert refused.value.hint == "free some disk space"
    db.execute("PRAGMA max_page_count = 1000000")
    whole(home)
    write_run(store, "after")

    def no_room(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "mkdir", no_room)
    with pytest.raises(StoreError, match="cannot be created: No space left on device"):
        Store(home / "new").runs()


@pytest.mark.parametrize("kind", sorted(file.NETWORK_FILE_SYSTEMS))
def test_every_network_file_system_is_known_by_its_mount(home, kind, monkeypatch):
    """The kernel's list of mounts is what decides; here it says that the home is such a mount."""
    real: Callable[..., str] = Path.read_text
    mounts = f"/dev/root / ext4 rw 0 0\nserver:/export {home.parent} {kind} rw 0 0\ntmpfs {home.parent}x tmpfs rw 0 0\n"
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: mounts if str(path) == "/proc/mounts" else real(path, *a, **k)
    )
    store = Store(home)
    write_run(store, "r")
    assert store.database.open().execute("PRAGMA journal_mode").fetchone()[0] == "delete"
    assert not (home / "history.sqlite3-wal").exists()


def test_no_question_reads_every_run(home):
    """That 100,000 runs take no more than 0.2 s is measured by benchmarks/history.py; here the way to it: an index."""
    from benchmarks import history

    history.fill(home, 2000)
    store = Store(home)
    assert [run.run_id for run in store.runs(limit=3)] == [history.name(n) for n in (1999, 1998, 1997)]
    live = [state for state in State if not state.final]
    asked: list[str] = []
    with store.database.read() as db:
        db.set_trace_callback(asked.append)
        assert len(store.runs(limit=50)) == 50
        assert len(store.runs(limit=50, states=live)) == 2
        assert store.runs(limit=50, states=[State.LOST]) == [] == store.runs(limit=50, name="no-such")
        assert store.find(history.name(700)[:-1]).run_id == history.name(700)
        assert store.unsettled() == []
        store.names()
        db.set_trace_callback(None)
        assert len(asked) >= 7
        for query in asked:
            steps = [row["detail"] for row in db.execute(f"EXPLAIN QUERY PLAN {query}")]
            if "substr(run_id" in query or " name = " in query:
                continue
            # Going through one of these is right: they hold what is unsettled alone, or end with the LIMIT.
            fine = ("attempts_unsettled", "runs_unacknowledged", "runs_by_age")
            read = [step for step in steps if step.startswith("SCAN") and ("runs" in step or "attempts" in step)]
            assert not [step for step in read if not step.endswith(fine)], (query, steps)
