"""What a colleague puts in the place of his run's files: each command answers, says what it does not read, and shows the rest."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cloudtrain.backends.local.backend import LocalBackend
from cloudtrain.backends.store import files as stored_files
from cloudtrain.console import artifacts, runrows
from cloudtrain.errors import BadRequest
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.runs.run import Run
from tests.backends.attached.test_hostile_output import AT, EVENT, RECORD, START, line
from tests.conftest import WAIT_S

GOOD, EVIL = "good-261120-101500-ab3d", "evil-261120-101500-ab3d"
SECRET = "not yours"
HISTORY, LOG = f"history/{EVIL}-a1/{START}", f"logs/{EVIL}-a1/node-0/{START}"
EVENT_FILE = "outputs/events.out.tfevents.1763633701.host.1.2"
PLACES = ("run.json", f"{HISTORY}/run.json", f"{LOG}/00000000", EVENT_FILE, "history", "logs", "outputs", "")


def write_run(output: Path, run_id: str) -> None:
    """Write a live run as its launcher does."""
    record = {**RECORD, "run_id": run_id, "state": "RUNNING", "exit_code": None, "updated_at": f"2126{AT[4:]}"}
    log = line(0, "hello") + line(1, EVENT)
    for name, data in {
        "run.json": json.dumps(record).encode(),
        HISTORY.replace(EVIL, run_id) + "/run.json": json.dumps(record).encode(),
        LOG.replace(EVIL, run_id) + "/00000000": log,
        LOG.replace(EVIL, run_id) + "/00000001": line(2, "more"),
        EVENT_FILE: b"",
    }.items():
        path = output / run_id / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def pipe(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def unix_socket(path: Path, elsewhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        folder = os.open(path.parent, os.O_RDONLY)
        listening.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path has 107 characters at most
        os.close(folder)


def folder(path: Path, elsewhere: Path) -> None:
    path.mkdir()


def sparse_file(path: Path, elsewhere: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


KINDS = {
    "a named pipe": pipe, "a link": link, "a socket": unix_socket, "a folder": folder, "bytes": sparse_file,
}  # fmt: skip


@pytest.fixture
def output(tmp_path: Path, home: Path, cli) -> Path:
    """A team's output with two runs, both attached."""
    for run_id in (GOOD, EVIL):
        write_run(tmp_path / "team", run_id)
    assert cli("attach", "--all", tmp_path / "team").code == 0
    assert [cli("attach", tmp_path / "team" / run_id).code for run_id in (GOOD, EVIL)] == [0, 0]
    stored_files._REPORTED.clear()
    return tmp_path / "team"


def replace(output: Path, place: str, make: Callable[[Path, Path], None]) -> Path:
    """Put something else in a place of the run, and what was there elsewhere, with a secret in it."""
    there, elsewhere = output / EVIL / place, output.parent / "elsewhere"
    there.rename(elsewhere)
    for path in [elsewhere, *elsewhere.rglob("*")]:
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(b"hello", SECRET.encode()).replace(b"more", SECRET.encode()))
    make(there, elsewhere)
    return there


@contextmanager
def answering(path: Path) -> Iterator[None]:
    """Fail where a command waits for a pipe: after a long while somebody writes into it."""
    done, freed = threading.Event(), threading.Event()

    def free() -> None:
        while not done.wait(0.2 if freed.is_set() else WAIT_S):
            freed.set()
            with suppress(OSError):
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    thread = threading.Thread(target=free, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    assert not freed.is_set(), f"something waited for {path}"


ALL = [(place, kind) for place in PLACES for kind in KINDS]
SAMPLE = list(
    zip(
        (*PLACES, PLACES[1], PLACES[1]),
        (
            "a named pipe",
            "a socket",
            "a named pipe",
            "a named pipe",
            "a folder",
            "bytes",
            "a socket",
            "a link",
            "a link",
            "bytes",
        ),
        strict=True,
    )
)


@pytest.mark.parametrize(
    ("place", "kind"), [pytest.param(*row, marks=[] if row in SAMPLE else [pytest.mark.long]) for row in ALL]
)
def test_commands_show_the_rest(place: str, kind: str, output: Path, home: Path, cli, caplog):
    there = replace(output, place, KINDS[kind])
    with answering(there):
        listed = cli("ls", "--columns", "run")
        assert listed.code == 0 and GOOD in listed.out and EVIL in listed.out
        attached_all = cli("attach", "--all", output, "--json")
        found = attached_all.json
        assert attached_all.code == 0 and GOOD in found["updated"]
        others = [
            cli(*words) for words in (("show", EVIL), ("logs", EVIL), ("metrics", EVIL), ("attach", output / EVIL))
        ]
        rows = runrows.read(Store(home), Query("", "", ""), 0)
        assert len(rows.lines) == 2
        whole = [cli(*words) for words in (("show", GOOD), ("logs", GOOD), ("metrics", GOOD))]
    assert [each.code for each in whole] == [0, 0, 0] and whole[1].out == "hello\nmore\n"
    said = "\n".join([listed.err, caplog.text, *found["unreadable"].values(), *(each.err for each in others)])
    assert SECRET not in said + "".join(each.out for each in [listed, *others])
    lacks = place in (PLACES[1], "history", "")  # what tells the run's state
    assert {each.code for each in others} == {0 if not lacks else 2 if kind == "a folder" else 5}, [
        each.err for each in others
    ]
    if kind != "a folder" and (kind, place) != (
        "bytes",
        EVENT_FILE,
    ):  # an empty folder is none that hides, a large file usual
        kind = "a file" if kind == "bytes" and "." not in place else kind
        assert kind in said and str(there) in said, said


def test_a_pipe_stops_no_command_line(output: Path, shell):
    """As processes: nobody but the time limit of the test can end them."""
    replace(output, f"{HISTORY}/run.json", pipe)
    listed, shown = shell("ls", "--columns", "run"), shell("show", EVIL)
    assert listed.code == 0 and f"warning: {EVIL}: " in listed.err and GOOD in listed.out
    assert shown.code == 5 and shown.err.count("run.json is a named pipe, not a regular file") == 1


def test_nested_records_are_none(output: Path, cli):
    """Deeper than json reads, and deeper than what checks it reads."""
    for depth in (70, 600, 5000, 100_000):
        record = {**RECORD, "run_id": EVIL, "about": "DEEP"}
        text = json.dumps(record).replace('"DEEP"', '{"job": ' + "[" * depth + "]" * depth + "}")
        for name in ("run.json", f"{HISTORY}/run.json"):
            (output / EVIL / name).write_text(text)
        assert cli("attach", "--all", output).code == 0
        refused = cli("show", EVIL)
        assert refused.code == 2 and "are not a run history that this version of cloudtrain can read" in refused.err


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize("name", ["request.json", "node-0/status.json", "node-0/log", "node-0/launcher.out"])
def test_what_a_job_of_ones_own_puts_in_the_place_of_its_files(name: str, project: Path, home: Path, cli, shell):
    run_id = shell("submit", "train.py", "--wait", "--json").rows[-1]["run_id"]
    there = home / "runs" / run_id / "a1" / name
    there.unlink()
    os.mkfifo(there)
    with answering(there):
        for words in (("ls",), ("show", run_id), ("logs", run_id), ("fetch", run_id, "-o", home / "got")):
            assert cli(*words).code in (0, 2, 5), words
        assert LocalBackend({}, home / "runs").status(str(there.parents["/" in name])).state.final


def test_the_console_lists_a_folder_without_an_end(output: Path, home: Path, monkeypatch):
    """Files that are found soon are shown; a pipe is none, and is not opened."""
    outputs = output / EVIL / "outputs"
    (outputs / "a").mkdir()
    (outputs / "a" / "fine").write_text("x")
    os.mkfifo(outputs / "pipe")
    run = Run(EVIL, Store(home))
    name = EVENT_FILE.partition("/")[2]
    assert [one.path for one in artifacts.list_artifacts(run)] == ["outputs/a/fine", f"outputs/{name}"]
    for path in ("outputs/pipe", "outputs/a", "outputs/a/../a/fine", "history/x"):
        with answering(outputs / "pipe"), pytest.raises(BadRequest, match="the run has no file at this address"):
            artifacts.open_artifact(run, path)
    os.close(artifacts.open_artifact(run, "outputs/a/fine"))
    for number in range(9):
        (outputs / str(number)).write_bytes(b"")
    assert len(artifacts.list_artifacts(run)) == 11
    monkeypatch.setattr(artifacts, "MAX_ENTRIES", 5)
    assert 1 <= len(artifacts.list_artifacts(run)) <= 5


NAMES = ("\x1b[2J\x1b]0;evil\x07", "a\nb", "\u202egnp.exe", "\x9b31m", "\udcff\udcfe")


def test_names_reach_no_terminal_as_they_are(output: Path, home: Path, cli, caplog, tmp_path: Path):
    """Of runs, of pieces of a log, of nodes and of outputs; what has a usual name is shown beside them."""
    for name in NAMES:
        write_run(output, f"{name}-261120-101500-ab3d")
        for place in ("outputs", "outputs/metrics", f"logs/{EVIL}-a1", LOG, f"history/{EVIL}-a1"):
            (output / EVIL / place).mkdir(parents=True, exist_ok=True)
            (output / EVIL / place / name).write_bytes(b"x")
        (output / EVIL / "outputs" / f"link {name}").symlink_to("/etc")
    commands = (
        ("attach", "--all", output), ("attach", output / EVIL), ("ls", "--columns", "run"), ("show", EVIL),
        ("logs", EVIL), ("metrics", EVIL), ("fetch", EVIL, "-o", tmp_path / "fetched"), ("ls", "--json"),
        ("show", EVIL, "--json"), ("ls",),
    )  # fmt: skip
    answers = [cli(*words) for words in commands]
    assert [each.code for each in answers] == [0] * len(commands), [each.err for each in answers]
    shown = caplog.text + "".join(each.out + each.err for each in answers)
    assert [letter for letter in "\x1b\x07\x9b\u202e" if letter in shown] == []
    assert answers[4].out == "hello\nmore\n" and GOOD in answers[2].out
    listed = [line.split()[0] for line in answers[2].out.splitlines()[1:]]
    assert {EVIL, GOOD} <= set(listed) and len(listed) == 2, "no such name is a run's"
