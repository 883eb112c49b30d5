"""A damaged history: drawn damages, each with the commands that come after it."""

from __future__ import annotations

import fcntl
import json
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cloudtrain
from cloudtrain.backends.api import Plan
from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.cli import main
from cloudtrain.errors import StoreError, Unreachable
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history import database, repair
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from tests import disks
from tests.conftest import WAIT_S
from tests.seed import first_seed

PAGE = 4096
RUNS = [f"tiny-lm-261120-1015{number:02}-ab3d" for number in range(12)]
YESTERDAY = 8  # of them were there when the backup was made


def add_run(store: Store, run_id: str) -> None:
    """Store a run of `local` that has succeeded, with its folder, as a submit and its watcher leave them."""
    folder = store.home / "runs" / run_id / "a1"
    node = folder / "node-0"
    node.mkdir(parents=True)
    request = {"nodes": [{"folder": str(node), "argv": [], "env": {"CLOUDTRAIN_RUN_DIR": str(folder.parent)}}]}
    (folder / "request.json").write_text(json.dumps(request))
    times = {"started_at": "2026-11-20T10:15:01Z", "ended_at": "2026-11-20T10:16:01Z", "at": "2026-11-20T10:16:01Z"}
    (node / "status.json").write_text(json.dumps({"state": "SUCCEEDED", "exit_code": 0, "reason": "", **times}))
    (node / "log").write_text(f"0 0 2026-11-20T10:15:02.000000Z hello from {run_id}\n")
    job = {"name": "tiny-lm", "description": run_id * 200}  # longer than a page
    plan = Plan(
        "local",
        run_id,
        1,
        request,
        {"sha256": "0"},
        {"secrets": {}, "nodes": 1, "processes_per_node": 1, "gpus_per_node": 0},
        job,
        "local",
    )
    assert store.intend(plan, identity=run_id, owner=Process.here())
    store.accept(plan.attempt_id, str(folder))
    store.acknowledge(run_id)
    events = [Event(plan.attempt_id, 0, number, "2026-11-20T10:15:03Z", "metric") for number in range(200)]
    store.record(
        plan.attempt_id,
        cursor="1",
        metrics=[Row(event.node, event.seq, event.at, event.seq, "loss", 0.5) for event in events],
    )
    status = Status(State.SUCCEEDED, 0, "", times["started_at"], times["ended_at"])
    store.record(plan.attempt_id, status=status)
    store.set_status(run_id, status)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home as a killed machine leaves it, with what is not in the -wal file yet; beside it yesterday's backup."""
    folder = tmp_path_factory.mktemp("sound")
    store = Store(folder / "made" / "home")
    for run_id in RUNS[:YESTERDAY]:
        add_run(store, run_id)
    store.database.open().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    shutil.copy(store.database.path, folder / "backup")
    for run_id in RUNS[YESTERDAY:]:
        add_run(store, run_id)
    shutil.copytree(store.home, folder / "home")  # while it is open
    store.database.close()
    yield folder


def empty_wal(path: Path) -> None:
    """Move all that the -wal file holds into the history's file."""
    db = sqlite3.connect(path)
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()


def damage(home: Path, backup: Path, draw: random.Random) -> str:
    """Damage the history in a drawn way and return which."""
    path, wal = home / "history.sqlite3", home / "history.sqlite3-wal"
    if draw.random() < 0.5:
        empty_wal(path)
    target = wal if wal.exists() and draw.random() < 0.3 else path
    kind = draw.choice(["page"] * 6 + ["pages", "bytes", "truncated", "truncated", "empty", "no wal", "backup"])
    data = bytearray(target.read_bytes())
    if kind in ("page", "pages"):
        for _ in range(1 if kind == "page" else draw.randint(2, 20)):
            at = draw.randrange(len(data) // PAGE) * PAGE
            other = draw.randrange(len(data) // PAGE) * PAGE
            data[at : at + PAGE] = draw.choice(
                [draw.randbytes(PAGE), bytes(PAGE), b"\xff" * PAGE, data[other : other + PAGE]]
            )
    elif kind == "bytes":
        for _ in range(draw.randint(1, 50)):
            data[draw.randrange(len(data))] = draw.randrange(256)
    elif kind == "truncated":
        del data[draw.randrange(len(data)) :]
    elif kind == "empty":
        data.clear()
    target.write_bytes(data)
    if kind == "no wal":
        wal.unlink(missing_ok=True)
    elif kind == "backup":
        shutil.copy(backup, path)
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
    return f"{target.name} {kind}"


def fresh(sound: Path, home: Path) -> Path:
    """Make the home anew and return its history."""
    shutil.rmtree(home, ignore_errors=True)
    shutil.copytree(sound / "home", home)
    for path in home.glob("runs/*/a1/request.json"):  # it was made in another place
        path.write_text(path.read_text().replace(str(sound / "made" / "home"), str(home)))
    return home / "history.sqlite3"


def kept_bytes(home: Path) -> dict[str, bytes]:
    """Return the history and its -wal file, by the ends of their names."""
    path = home / "history.sqlite3"
    return {end: Path(f"{path}{end}").read_bytes() for end in ("", "-wal") if Path(f"{path}{end}").exists()}


def asides(home: Path) -> list[Path]:
    return [file for file in home.glob("*.corrupt-*") if not file.name.endswith(("-wal", "-shm"))]


def endure(sound: Path, home: Path, seed: int, command: Callable[..., str]) -> bool:
    """Damage a home and give the commands that a person would, each of which does its work; whether it was repaired."""
    fresh(sound, home)
    drawn = seed, damage(home, sound / "backup", random.Random(seed))
    shows = [("show", run_id, "--json") for run_id in RUNS]
    for words in [("ls", "--json"), ("doctor",), *shows[::4], ("metrics", RUNS[0]), ("ls", "--json"), *shows]:
        before, had = kept_bytes(home), len(asides(home))
        said = command(*words)
        if words[0] == "ls":
            assert {run["run_id"] for run in json.loads(said)} == set(RUNS), drawn
        elif words[0] == "show":
            assert json.loads(said)["state"] == "SUCCEEDED", drawn
        if len(asides(home)) > had:
            assert had == 0, (drawn, "it was repaired twice")
            (aside,) = asides(home)
            assert {end: Path(f"{aside}{end}").read_bytes() for end in before} == before, (drawn, "bytes are lost")
    return bool(asides(home))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that gives a command, which must do its work (doctor may find problems)."""

    def run(*words: str) -> str:
        capsys.readouterr()
        code = main(words)
        shown = capsys.readouterr()
        assert code == 0 or words[0] == "doctor", (words, shown.err)
        assert "run the command again" not in shown.err
        return shown.out

    return run


def endure_all(sound: Path, home: Path, seeds: range, command: Callable[..., str], figure: Callable) -> None:
    repaired = [endure(sound, home, seed, command) for seed in seeds]
    assert any(repaired)
    figure("drawn damages, after each of which every run is shown and no byte is gone", len(seeds))


def test_a_few_drawn_damages_are_repaired(sound, home, command, figure):
    endure_all(sound, home, range(1000, 1005), command, figure)


@pytest.mark.timeout(600)
def test_drawn_damages_are_repaired(sound, home, command, figure):
    first = first_seed()
    endure_all(sound, home, range(first, first + 50), command, figure)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_drawn_damages_are_repaired(sound, home, command, figure):
    endure_all(sound, home, range(50, 550), command, figure)


def test_what_can_be_read_is_copied(sound, home):
    path = fresh(sound, home)
    (home / "history.journal").unlink()
    shutil.rmtree(home / "runs")  # nothing else knows of the runs
    empty_wal(path)
    with sqlite3.connect(path) as db:
        points = db.execute("SELECT count(*) FROM metrics").fetchone()[0]
    spoil(path, at=(metrics_page(path) - 1) * PAGE)
    store = Store(home)
    assert 0 < len(store.metrics(RUNS[5])) < 200 and len(asides(home)) == 1
    assert [run.run_id for run in store.runs()] == RUNS[::-1]
    with store.database.read() as db:
        left = db.execute("SELECT count(*) FROM metrics").fetchone()[0]
    assert points * 0.9 < left < points
    assert sum(len(store.metrics(run_id)) for run_id in RUNS) == left


def metrics_page(path: Path) -> int:
    """Return a page that holds points of the sixth run, none of which is the root."""
    with sqlite3.connect(path) as db:
        root = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'metrics'").fetchone()[0]
    data, marker = path.read_bytes(), f"{RUNS[5]}-a1".encode()
    pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
    leaf_of_index = 0x0A  # the type of a leaf page of a table without rowid
    return next(
        number
        for number, page in enumerate(pages, 1)
        if number != root and page[0] == leaf_of_index and page.count(marker) > 20 and b"loss" in page
    )


def spoil(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * PAGE)


def test_a_home_without_a_journal_finds_its_runs_by_their_folders(home, command):
    run = cloudtrain.Submitter("local", home=home, watch=False)
    folder = home.parent / "source"
    folder.mkdir()
    (folder / "train.py").write_text("print('done')\n")
    job = {"name": "n", "source": str(folder), "entrypoint": "train.py", "environment": {"requirements": "none"}}
    sent = run.submit(job)
    assert str(sent.wait(WAIT_S).state) == "SUCCEEDED"
    sent.store.database.close()
    for path in (*home.glob("history.sqlite3*"), home / "history.journal"):
        path.unlink()
    (home / "history.sqlite3").write_bytes(b"no database " * 500)
    assert [run["run_id"] for run in json.loads(command("ls", "--json"))] == [sent.run_id]
    assert "1 of 1 lost attempts were found on their platforms" in command("doctor")
    assert json.loads(command("show", sent.run_id, "--json"))["state"] == "SUCCEEDED"
    assert "done" in command("logs", sent.run_id)


def test_opening_asks_no_platform_and_doctor_asks_until_it_answers(sound, home, command, monkeypatch):
    path = fresh(sound, home)
    path.write_bytes(b"")
    Path(f"{path}-wal").unlink()
    real, asked = LocalBackend.find, []

    def no_answer(self: LocalBackend, attempt_id: str) -> str | None:
        asked.append(attempt_id)
        raise Unreachable("no route to host")

    def only(store: Store) -> tuple[State, str]:
        (status,) = {(run.status.state, run.status.reason) for run in store.runs()}
        return status

    monkeypatch.setattr(LocalBackend, "find", no_answer)
    store = Store(home)
    assert only(store) == (State.LOST, repair.RESTORED)
    assert asked == [] and len(store.warnings) == 1
    assert f"{len(RUNS)} lost runs added from the journal: run `cloudtrain doctor`" in store.warnings[0]
    assert f"0 of {len(RUNS)} lost attempts were found" in command("doctor") and len(asked) == len(RUNS)
    reason = "the history was damaged and is repaired; local gives no answer about this job: no route to host"
    assert only(Store(home)) == (State.LOST, reason)
    monkeypatch.setattr(LocalBackend, "find", real)
    assert f"{len(RUNS)} of {len(RUNS)} lost attempts were found" in command("doctor")
    assert json.loads(command("show", RUNS[3], "--json"))["state"] == "SUCCEEDED"


def test_an_attempt_that_was_accepted_after_the_repair_is_asked_for_too(sound, home, command):
    fresh(sound, home).unlink()
    store = Store(home)
    (attempt,) = store.attempts(RUNS[0])
    store.accept(attempt.attempt_id, str(home / "runs" / RUNS[0] / "a1"))
    command("doctor")
    assert json.loads(command("show", RUNS[0], "--json"))["state"] == "SUCCEEDED"


def test_a_run_that_its_platform_does_not_have_is_never_sent_again(sound, home):
    fresh(sound, home).unlink()
    shutil.rmtree(home / "runs" / RUNS[0])
    store = Store(home)
    store.check()
    (attempt,) = store.attempts(RUNS[0])
    assert attempt.status.state is State.LOST and attempt.handle is None
    assert attempt.status.reason.startswith("the history was damaged and is repaired; local does not know this job")
    assert RUNS[0] not in {attempt.run_id for attempt in store.unsettled()}


def test_who_has_the_file_open_goes_on_in_the_new_one(sound, home):
    path = fresh(sound, home)
    empty_wal(path)
    other, store = Store(home), Store(home)
    assert len(other.names()) == len(RUNS)  # its connection is open
    spoil(path, at=(metrics_page(path) - 1) * PAGE)
    store.metrics(RUNS[5])
    assert len(asides(home)) == 1
    other.request_cancel(RUNS[2])  # in the file of the present, not in the one that was moved
    other.database.close()
    assert store.find(RUNS[2]).cancel_requested and Store(home).find(RUNS[2]).cancel_requested


def test_a_read_only_home_is_read(sound, home, tmp_path, command, monkeypatch):
    fresh(sound, home)
    with disks.read_only(home, tmp_path / "shown") as shown:
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(shown))
        assert len(json.loads(command("ls", "--json"))) == len(RUNS)
        assert json.loads(command("show", RUNS[9], "--json"))["state"] == "SUCCEEDED"
        assert "200" in command("metrics", RUNS[9])
        assert f"hello from {RUNS[9]}" in command("logs", RUNS[9])
        command("wait", RUNS[9])
        store = Store(shown)
        with pytest.raises(StoreError, match="is read-only"):
            store.request_cancel(RUNS[9])
        add_run(Store(home), "tiny-lm-261121-101500-ab3d")  # somebody else may write there
        assert len(store.names()) == len(RUNS) + 1


def test_by_the_real_command_line(sound, home):
    path = fresh(sound, home)
    empty_wal(path)
    path.write_bytes(path.read_bytes()[: 3 * PAGE + 100])
    words = [sys.executable, "-m", "cloudtrain.cli", "ls", "--json"]
    first, second = (subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert len(json.loads(first.stdout)) == len(json.loads(second.stdout)) == len(RUNS)
    assert first.stderr.startswith("warning: the history was damaged (") and first.stderr.count("\n") == 1
    assert second.stderr == ""


def roots(path: Path) -> dict[str, int]:
    """Return where the first page of each table and index begins."""
    with sqlite3.connect(path) as db:
        return {name: (page - 1) * PAGE for name, page in db.execute("SELECT name, rootpage FROM sqlite_master")}


@pytest.mark.parametrize(
    "index, other",
    [
        ("runs_by_age", "events"),  # `ls` would show no run
        ("runs_by_age", "sqlite_autoindex_runs_1"),  # `ls` would show numbers for ids
        ("sqlite_autoindex_attempts_2", "runs_by_age"),  # `show` would find no attempt
    ],
)
def test_another_page_in_the_place_of_an_index_is_damage(sound, home, command, index, other):
    path = fresh(sound, home)
    empty_wal(path)
    data, begins = bytearray(path.read_bytes()), roots(path)
    data[begins[index] : begins[index] + PAGE] = data[begins[other] : begins[other] + PAGE]
    path.write_bytes(data)
    assert {run["run_id"] for run in json.loads(command("ls", "--json"))} == set(RUNS)
    assert "200" in command("metrics", RUNS[0])
    assert json.loads(command("show", RUNS[0], "--json"))["state"] == "SUCCEEDED"
    assert len(asides(home)) == 1


def test_a_changed_letter_in_an_index_is_damage(sound, home, command):
    path = fresh(sound, home)
    empty_wal(path)
    data, at = bytearray(path.read_bytes()), roots(path)["sqlite_autoindex_attempts_1"]
    changed = data[at : at + PAGE].replace(f"{RUNS[0]}-a1".encode(), f"{RUNS[0]}-a0".encode())
    assert changed != data[at : at + PAGE]
    data[at : at + PAGE] = changed
    path.write_bytes(data)
    assert "200" in command("metrics", RUNS[0])  # else it has ranks, but no curve of any of them
    assert len(asides(home)) == 1


def test_a_damaged_header_is_damage(sound, home):
    path = fresh(sound, home)
    empty_wal(path)
    with path.open("r+b") as file:
        file.seek(44)  # the schema format number, https://sqlite.org/fileformat2.html#schema_format_number
        file.write(b"\0\0\0\x2a")
    assert len(Store(home).names()) == len(RUNS) and len(asides(home)) == 1


def test_a_lost_table_is_damage(sound, home):
    path = fresh(sound, home)
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE provenance")
    store = Store(home)
    assert store.provenance(RUNS[0]) == {}
    assert len(asides(home)) == 1 and "no such table: provenance" not in store.warnings[0]
    assert "it lacks provenance" in store.warnings[0] and f"{len(RUNS)} runs were copied" in store.warnings[0]


def test_a_stopped_process_does_not_keep_others_from_a_sound_history(sound, home, monkeypatch):
    fresh(sound, home)
    Store(home).names()
    with (home / "history.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # it was stopped while it opened the file
        assert len(Store(home).names()) == len(RUNS)
        monkeypatch.setattr(database, "BUSY_S", 0.1)
        fcntl.flock(lock, fcntl.LOCK_EX)  # while it replaced the file
        with pytest.raises(StoreError, match="is locked"):
            Store(home).names()
