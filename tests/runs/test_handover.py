"""How a run gets to the watcher: messages over its socket, and what a new process is started with. None is started."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudtrain.history.store import Store
from cloudtrain.runs.planning import environment
from cloudtrain.runs.sending import handover
from cloudtrain.runs.sending.handover import Mailbox, call
from cloudtrain.runs.submit import Submitter

Message = dict[str, Any]


@pytest.fixture
def box(quick_folder: Path):
    """A mailbox that keeps its messages, and answers with the number of each; "fail" makes it fail."""
    got: list[Message] = []

    def handle(message: Message) -> Message:
        got.append(message)
        if message.get("do") == "fail":
            raise OSError(28, "No space left on device")
        return {"number": len(got), "text": message.get("text")}

    made = Mailbox(quick_folder / "watcher", "socket", handle)
    yield SimpleNamespace(path=made.path, got=got, close=made.close)
    made.close()


def test_variables_are_selected_as_by_the_patterns_of_a_shell():
    names = ("AWS", "AWS_PROFILE", "HTTP_PROXY", "PROXY", "KUBE", "KUBE1", "KUBECONFIG", "B_KEY_ID")
    for patterns in (("AWS_*",), ("*_PROXY", "KUBE"), ("KUBE?",), ("B_*_ID", "[AH]*"), ("*",), ("*X_*", "KUBE*"), ()):
        wanted = [name for name in names if any(fnmatchcase(name, each) for each in patterns)]
        assert [*environment.select(dict.fromkeys(names, "value"), patterns)] == wanted, patterns


def test_a_message_has_its_answer_and_only_the_user_may_send_one(box):
    assert call(str(box.path), {"do": "look"}) == {"number": 1, "text": None}
    long = "é" * 300_000
    assert call(str(box.path), {"text": long}) == {"number": 2, "text": long}, "in many pieces"
    assert box.got == [{"do": "look"}, {"text": long}]
    assert box.path.stat().st_mode & 0o777 == 0o600 and box.path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("sent", [b"{", b"[1]\n", b"no JSON\n", b"\xff\n", b""])
def test_what_is_no_message_gets_no_answer_and_ends_nothing(box, monkeypatch, sent: bytes):
    fell: list[object] = []
    monkeypatch.setattr(threading, "excepthook", fell.append)  # it would print a traceback into the watcher's log
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(box.path))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert connection.recv(100) == b""
    assert call(str(box.path), {"do": "fail"}) is None
    assert [each for each in box.got if each != {"do": "fail"}] == []
    assert call(str(box.path), {"do": "look"}) == {"number": 2, "text": None} and not fell


def test_no_answer_comes_after_the_end(box):
    box.close()
    assert not box.path.exists() and call(str(box.path), {"do": "look"}) is None


def test_another_users_process_gets_no_answer(box, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert call(str(box.path), {"do": "look"}) is None and box.got == []


def test_elsewhere_than_on_linux_the_mode_of_its_folder_says_whose_a_mailbox_is(box, monkeypatch):
    monkeypatch.delattr(socket, "SO_PEERCRED")
    assert call(str(box.path), {"do": "look"}) == {"number": 1, "text": None}


def test_a_watcher_that_does_not_answer_is_waited_for_seconds_only(memory, job, home, monkeypatch):
    bounds: list[float] = []
    monkeypatch.setattr(handover, "call", lambda _, message, timeout_s: bounds.append(timeout_s) or {"ok": True})
    holder = SimpleNamespace(address="socket", is_valid=lambda clock: clock.now() > 0, version="0")
    monkeypatch.setattr(Store, "watcher", lambda _: holder)
    lacking = SimpleNamespace(lacking=["HOME"])
    monkeypatch.setattr(Store, "environments", lambda _, ids: dict.fromkeys(ids, lacking))
    monkeypatch.setattr(handover, "own_version", lambda: "0")
    run = Submitter("memory").submit(job)
    handover.look_now(run.store, run.run_id)
    handover.give_missing(run.store, run.run_id)
    assert len(bounds) == 3 and all(1 <= bound_s <= 10 for bound_s in bounds)


def test_a_folder_deeper_than_an_address_may_be(quick_folder):
    folder = quick_folder / ("deep" * 30)
    made = Mailbox(folder, "socket", lambda message: message)
    try:
        assert made.path == folder / "socket" and call(str(made.path), {"a": 1}) == {"a": 1}
    finally:
        made.close()


def test_a_watcher_that_lives_is_told_and_gets_what_it_lacks(memory, job, home, box, monkeypatch):
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)
    run = Submitter("memory", watch=True).submit(job)
    valid = SimpleNamespace(address=str(box.path), is_valid=lambda clock: clock.now() > 0, version="0")
    monkeypatch.setattr(Store, "watcher", lambda _: valid)
    monkeypatch.setattr(
        Store, "environments", lambda _, ids: {ids[0]: SimpleNamespace(lacking=["PLANTED", "NOT_HERE"])}
    )
    monkeypatch.setenv("PLANTED", "of the shell")
    store = Store(home)
    handover.look_now(store, run.run_id)
    handover.give_missing(store, run.run_id)
    both = [
        {"do": "look", "run": run.run_id},
        {"do": "fill", "run": run.run_id, "environ": {"PLANTED": "of the shell"}},
    ]
    assert box.got == both
    monkeypatch.delenv("PLANTED")
    handover.give_missing(store, run.run_id)
    valid.is_valid = lambda _: False
    handover.look_now(store, run.run_id)
    assert box.got == both, "nothing to give, or no watcher that lives"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    found: list[SimpleNamespace] = []
    monkeypatch.setattr(
        handover, "detach", lambda command, **given: found.append(SimpleNamespace(command=command, **given))
    )
    monkeypatch.setenv("PLANTED", "of the shell")
    return found


def test_a_watcher_is_started_with_the_run_on_its_standard_input(memory, job, home, started, monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "a secret's source")
    run = Submitter("memory").submit(job.replace(secrets={"TOKEN": ["env:PLANTED"]}))
    (process,) = started
    assert process.command == [sys.executable, "-m", "cloudtrain.runs.watching.watch_all", str(home)]
    (message,) = json.loads(process.given)
    assert (message["do"], message["run"], message["own"]) == ("watch", run.run_id, True)
    assert message["environ"] == dict(os.environ) and message["sources"] == ["PLANTED"]
    assert process.env.items() <= os.environ.items() and "PLANTED" not in process.env and "PATH" in process.env
    assert process.cwd == Path("/") and process.log.parent == home and (home / "watch.starting").exists()


def test_a_reader_starts_no_watcher_while_one_may_be_coming_up_and_a_submit_waits_for_it(
    memory, job, home, started, clock, monkeypatch
):
    submitter = Submitter("memory", watch=False, clock=clock)
    plan = submitter.submit(job).attempts[0].plan
    store = submitter.store
    (home / "watch.starting").touch()
    handover.start(store, plan, instead=True)
    assert started == [] and clock.slept == []
    handover.start(store, plan)
    assert len(started) == 1 and 1.9 < sum(clock.slept) < 2.2
    clock.jump(40)
    handover.start(store, plan, instead=True)
    assert len(started) == 2 and json.loads(started[1].given)[0]["own"] is False


def test_a_sweeps_process_has_the_shells_variables_on_its_standard_input(home, started):
    home.mkdir()
    shell = {"PATH": "/bin", "HOME": "/home/me", "TOKEN": "a secret"}
    assert handover.drive(home, "s1", shell) and not handover.drive(home, "s1", shell)
    (process,) = started
    words = [sys.executable, "-m", "cloudtrain.sweeps.drive", str(home), "s1"]
    assert process.command == ["nice", "-n", "5", *words]
    assert json.loads(process.given) == shell and process.cwd == Path("/") and process.log == home / "watch.log"
    assert process.env == {"PATH": "/bin", "HOME": "/home/me"}
