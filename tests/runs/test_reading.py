"""Readers of a run on a shared platform: each line is fetched once, and no question is asked twice within seconds."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from pathlib import Path
from threading import Thread

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.console.logbook import Logbook
from cloudtrain.console.pages.overview import read_details
from cloudtrain.console.runrows import _outages
from cloudtrain.errors import Unreachable
from cloudtrain.events import State
from cloudtrain.history import table
from cloudtrain.history.spool import FRESH_S, OLD_FRESH_S, Spool, expire_contact, last_contact
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.nodes.process import Process
from cloudtrain.runs import reading
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching import watch as watch_module
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.runs.watching.watch_all import watch_run
from cloudtrain.testing.memory import MemoryBackend
from tests.conftest import WAIT_S, wait_for


class Platform(MemoryBackend):
    """A platform whose log costs calls; it counts what it is asked, and is `down` as the test says."""

    name = "shared"
    poll_s = 5.0
    follow_s = 0.02
    down = False
    calls: Counter[str] = Counter()

    def _call(self, what: str, number: int = 1) -> None:
        self.calls[what] += number
        if self.down:
            raise Unreachable("no route to host")

    def status(self, handle):
        self._call("status")
        return super().status(handle)

    def logs(self, handle, *, follow=False, after=None):
        self._call("logs")
        for line in self.attempts[handle].lines[int(after or 0) :]:
            self._call("lines")
            yield line


@pytest.fixture(autouse=True)
def platform(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr(Platform, "attempts", {})
    monkeypatch.setattr(Platform, "calls", Counter())
    monkeypatch.setattr(Platform, "down", False)
    monkeypatch.setattr("cloudtrain.runs.sending.handover.start", lambda *_, **__: None)
    Platform.install()
    return Platform


@pytest.fixture
def run(tmp_path: Path) -> Run:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    job = Job.from_dict({"name": "mine", "source": str(folder), "entrypoint": "train.py"})
    return Submitter("shared", watch=False).submit(job)


def handle(run: Run) -> str:
    return run.attempts[-1].handle


def watch(run: Run) -> Thread:
    """Watch a run in a thread, as the detached process does, with a lease of its own."""

    def work() -> None:
        watch_run(Store(run.store.home), run.run_id)

    thread = Thread(target=work, daemon=True)
    thread.start()
    wait_for(lambda: run.store.watched(run.run_id), "a watcher")
    return thread


def follow(run: Run, after: str | None = None) -> list[tuple[int, str]]:
    own = Run(run.run_id, Store(run.store.home), watch=True)
    return [(line.node, line.text) for line in own.logs(follow=True, after=after)]


class Follower(Thread):
    """Follows a run's log; `seen` has the lines so far."""

    def __init__(self, run: Run) -> None:
        super().__init__(daemon=True)
        self.home, self.run_id = run.store.home, run.run_id
        self.seen: list[str] = []
        self.start()

    def run(self) -> None:
        for line in Run(self.run_id, Store(self.home)).logs(follow=True):
            self.seen.append(line.text)


def test_a_follower_reads_the_rest_of_a_log_whose_run_has_succeeded(run: Run, monkeypatch):
    monkeypatch.setattr(watch_module, "REST_S", 0.0)
    Platform.say(handle(run), *(f"line {number}" for number in range(7000)))
    Platform.finish(handle(run))
    followers: list[Follower] = []

    def lease() -> bool:
        if run.store.is_unread(run.run_id) and not followers:
            followers.append(Follower(run))
            wait_for(lambda: len(followers[0].seen) >= 4000, "the lines so far")
            followers[0].join(0.5)  # one that takes them for all has ended by then
        return True

    assert run.store.lease(run.run_id, Process.here(), 60)
    Watcher(run.store, run.run_id, lease=lease).look()
    followers[0].join(WAIT_S)
    assert followers[0].seen == [f"line {number}" for number in range(7000)]


def test_a_line_is_fetched_once_for_the_watcher_and_all_followers(run, platform):
    watcher, followers = watch(run), [Follower(run) for _ in range(3)]
    texts = [f"line {number}" for number in range(300)]
    for begin in range(0, 300, 50):
        platform.say(handle(run), *texts[begin : begin + 50], node=begin // 50 % 2)
        wait_for(lambda seen=begin + 50: all(len(f.seen) >= seen for f in followers), "the lines")
    platform.finish(handle(run), exit_code=0)
    Spool(run.store.home, run.run_id, 1).follow()
    watcher.join(WAIT_S)
    for follower in followers:
        follower.join(WAIT_S)
        assert follower.seen == texts
    assert platform.calls["lines"] == 300
    assert [text for _, text in follow(run)] == texts, "when it is over, from the copy"
    assert [line.text for line in run.logs()] == texts and platform.calls["lines"] == 300


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_watcher_that_dies_between_copy_and_history_loses_and_doubles_nothing(run, platform, monkeypatch, moment):
    platform.say(handle(run), *(f"loss={number}.5" for number in range(40)), '::cloudtrain::{"kind":"world","nodes":1}')
    if moment == "before":
        Watcher(run.store, run.run_id).refresh()
        platform.say(handle(run), "more", "and more")

    class Killed(BaseException):
        pass

    def killed(*_: object, **__: object) -> None:
        raise Killed

    Spool(run.store.home, run.run_id, 1).follow()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Store, "record", killed)
        Watcher(run.store, run.run_id).refresh()
    read = platform.calls["lines"]
    spool = Spool(run.store.home, run.run_id, 1)
    copied = [line.text for line in spool.lines()]
    assert len(copied) == read == len(platform.attempts[handle(run)].lines), "the copy is ahead of the history"
    expire_contact(run.store.home, run.run_id)
    Watcher(run.store, run.run_id).refresh()
    assert platform.calls["lines"] == read, "what is in the copy is not fetched again"
    assert run.attempts[0].cursor == list(spool.lines())[-1].cursor
    assert [event.kind for event in run.store.events(run.run_id)] == ["world"]
    platform.say(handle(run), "the last")
    platform.finish(handle(run), exit_code=0)
    watch_run(run.store, run.run_id)
    assert [line.text for line in spool.lines()] == [*copied, "the last"]


def test_a_follower_goes_on_at_the_platform_where_the_copy_is_gone(run, platform):
    thread, follower = watch(run), Follower(run)
    platform.say(handle(run), "one", "two")
    wait_for(lambda: len(follower.seen) == 2, "two lines")
    Spool(run.store.home, run.run_id, 1).path.unlink()
    platform.say(handle(run), "three", "four")
    wait_for(lambda: len(follower.seen) == 4, "the others")
    platform.finish(handle(run), exit_code=0)
    thread.join(WAIT_S)
    follower.join(WAIT_S)
    assert follower.seen == ["one", "two", "three", "four"]


def test_a_full_disk_ends_the_copy_and_not_the_watching(run, platform, monkeypatch):
    platform.say(handle(run), "one")
    Watcher(run.store, run.run_id).refresh()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Spool, "append", full)
    platform.say(handle(run), "two")
    platform.finish(handle(run), exit_code=0)
    watch_run(run.store, run.run_id)
    assert run.record.status.state is State.SUCCEEDED
    assert [line.text for line in run.logs()] == ["one", "two"]


def test_where_nobody_watches_readers_ask_once_in_five_seconds(run, platform, monkeypatch):
    assert run.refresh().state is State.RUNNING
    platform.finish(handle(run), exit_code=0)
    began = time.monotonic()
    others = [Run(run.run_id, Store(run.store.home), watch=False) for _ in range(20)]
    for reader in others:
        reader.refresh()
    assert platform.calls["status"] <= 1 + (time.monotonic() - began) / FRESH_S
    age(run, FRESH_S + 1)
    assert others[0].refresh().state is State.SUCCEEDED and platform.calls["status"] == 2


def test_an_old_run_is_asked_for_once_in_thirty_seconds(run, platform):
    with run.store.database.write() as db:
        db.execute("UPDATE attempts SET created_at = '2026-01-01T00:00:00.000000Z'")
    run.refresh()
    age(run, FRESH_S + 1)
    run.refresh()
    assert platform.calls["status"] == 1
    age(run, OLD_FRESH_S + 1)
    run.refresh()
    assert platform.calls["status"] == 2


def test_a_request_to_cancel_is_asked_for_at_once(run, platform):
    assert run.refresh().state is State.RUNNING
    assert run.cancel(WAIT_S).state is State.CANCELLED


def age(run: Run, seconds: float) -> None:
    """Let the last question have been asked so long ago."""
    at = last_contact(run.store.home, run.run_id).at - seconds
    os.utime(run.store.home / "runs" / run.run_id / "asked", (at, at))


def test_ls_and_show_do_not_wait_for_a_platform_that_is_down(run, platform, capsys):
    run.refresh()
    platform.down = True
    Watcher(run.store, run.run_id, complain=lambda _: None).refresh()
    calls = platform.calls.total()
    age(run, 12)
    for words in (["ls"], ["show", run.run_id], ["ls"]):
        capsys.readouterr()
        assert main(words) == 0
        out, err = capsys.readouterr()
        (line,) = [line for line in (out + err).splitlines() if "no answer since" in line]
        asked = re.search(r"last asked (\d+) s ago: no answer since 20", line)
        assert asked and int(asked[1]) >= 12 and "no route to host" in line
        assert "RUNNING" in out
    assert platform.calls.total() == calls


def test_a_request_that_makes_the_answer_old_leaves_no_age_from_1970(run, platform):
    run.refresh()
    platform.down = True
    Watcher(run.store, run.run_id, complain=lambda _: None).refresh()
    expire_contact(run.store.home, run.run_id)
    said = last_contact(run.store.home, run.run_id).describe()
    assert said.startswith("no answer since 20") and "no route to host" in said


def test_an_outage_is_reported_once_and_its_end_too(run, platform, monkeypatch, capsys):
    monkeypatch.setattr(reading, "MARK_S", 0.02)
    monkeypatch.setattr("cloudtrain.runs.watching.watch.NOTED_S", 0.0)
    monkeypatch.setattr(Platform, "poll_s", 0.05)
    platform.say(handle(run), "before")
    watcher, follower = watch(run), Follower(run)
    waiter = Thread(target=lambda: Run(run.run_id, Store(run.store.home)).wait(), daemon=True)
    waiter.start()
    wait_for(lambda: follower.seen == ["before"], "the first line")
    platform.down = True
    error = ""

    def reported(what: str, times: int) -> bool:
        nonlocal error
        error += capsys.readouterr().err
        return error.count(what) >= times

    wait_for(lambda: reported("shared has not answered since", 2), "two sentences")
    failed = platform.calls.total()
    wait_for(lambda: platform.calls.total() > failed + 20, "more failures")
    assert follower.is_alive() and waiter.is_alive() and not run.record.status.state.final
    platform.down = False
    platform.say(handle(run), "after")
    wait_for(lambda: reported("shared answers again", 2), "two more")
    wait_for(lambda: follower.seen == ["before", "after"], "the line after the outage")
    platform.finish(handle(run), exit_code=0)
    for thread in (watcher, follower, waiter):
        thread.join(WAIT_S)
    reported("", 0)
    assert error.count("has not answered") == error.count("answers again") == 2
    assert run.record.status.state is State.SUCCEEDED


def test_follow_without_a_watcher_watches_itself(run, platform):
    platform.say(handle(run), "one")
    lines = Run(run.run_id, run.store, watch=False).logs(follow=True)
    assert next(lines).text == "one"
    assert run.store.watched(run.run_id), "another process need not start"
    platform.say(handle(run), "two", '::cloudtrain::{"kind":"result","code":0}')
    assert next(lines).text == "two"
    platform.finish(handle(run), exit_code=0)
    assert list(lines) == []
    assert run.record.status.state is State.SUCCEEDED and not run.store.watched(run.run_id)
    assert platform.calls["lines"] == 3


def test_the_console_reads_the_copy_and_says_that_there_is_no_answer(run, platform):
    book, store = Logbook(run.run_id), Store(run.store.home)
    watcher = watch(run)
    platform.say(handle(run), "one", "two")
    wait_for(lambda: book.read_on(store) or book.count == 2, "two lines")
    platform.down = True
    wait_for(lambda: dict(read_details(run).verdict)["platform"].startswith("no answer since"), "the outage")
    assert "shared: no answer since" in _outages(
        store, [row.record for row in table.page(store, table.Query(), limit=50)[0]]
    )
    book.read_on(store)
    assert book.count == 2 and not book.complete
    platform.down = False
    platform.say(handle(run), "three")
    platform.finish(handle(run), exit_code=0)
    watcher.join(WAIT_S)
    book.read_on(store)
    assert book.count == 3 and book.complete and platform.calls["lines"] == 3
    assert (
        dict(read_details(run).verdict)["platform"]
        == _outages(store, [row.record for row in table.page(store, table.Query(), limit=50)[0]])
        == ""
    )
