"""Why a run waits: a platform's reason that changes is stored with its time, as an event, and shown."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cloudtrain.backends import registry
from cloudtrain.cli import main
from cloudtrain.console.pages.overview import read_details
from cloudtrain.events import PLATFORM, REASON_CHARS, State, Status, short_reason
from cloudtrain.history import store as stores
from cloudtrain.runs import reading
from cloudtrain.runs.run import Run
from cloudtrain.runs.sending import handover
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from cloudtrain.testing.memory import MemoryBackend


@pytest.fixture
def run(home, tmp_path, monkeypatch) -> Run:
    """A run that nobody watches; `at` sets what its platform says."""
    monkeypatch.setattr(registry, "BUILT_IN", dict(registry.BUILT_IN))
    monkeypatch.setattr(handover, "start", lambda *_, **__: None)  # of commands: this process alone has the backend
    MemoryBackend.install()
    (tmp_path / "train.py").write_text("print(1)\n")
    return Submitter("memory", watch=False).submit({"name": "x", "source": str(tmp_path), "entrypoint": "train.py"})


def at(run: Run, state: State, reason: str = "") -> None:
    """Let the platform report a state and reason, and a watcher look once."""
    (attempt,) = MemoryBackend.attempts.values()
    attempt.status = Status(state, reason=reason)
    assert Watcher(run.store, run.run_id).refresh() is not None


def reasons(run: Run) -> list[tuple[str, str]]:
    events = run.store.events(run.run_id, "status")
    assert {event.node for event in events} <= {PLATFORM} and len({event.seq for event in events}) == len(events)
    return [(event.data["state"], event.data["reason"]) for event in events]


def test_a_changed_reason_is_stored_as_an_event(run: Run):
    at(run, State.QUEUED, "Slurm: Priority")
    at(run, State.QUEUED, "Slurm: Priority")
    at(run, State.QUEUED, "Slurm: Resources")
    assert run.record.status.reason == run.attempts[0].status.reason == "Slurm: Resources"
    at(run, State.RUNNING)
    assert run.record.status.reason == ""
    at(run, State.RUNNING)
    assert reasons(run) == [("QUEUED", "Slurm: Priority"), ("QUEUED", "Slurm: Resources"), ("RUNNING", "")]


def test_a_final_reason_is_no_event_and_is_kept_whole(run: Run):
    at(run, State.QUEUED, "Slurm: Priority")
    whole = "line 1\nline 2 " + "x" * 1000
    at(run, State.FAILED, whole)
    assert run.record.status.reason == whole and reasons(run) == [("QUEUED", "Slurm: Priority")]


def test_since_when_is_the_time_of_that_reason(run: Run, monkeypatch: pytest.MonkeyPatch):
    at(run, State.QUEUED, "one")
    first = run.store.reason_since(run.record)
    monkeypatch.setattr(stores, "now", lambda _clock: "2031-01-01T00:00:00.000000Z")
    at(run, State.QUEUED, "one")
    assert run.store.reason_since(run.record) == first
    at(run, State.STARTING, "two")
    assert run.store.reason_since(run.record) == "2031-01-01T00:00:00.000000Z"
    other = replace(run.record, status=replace(run.record.status, reason="another attempt in 2 min"))
    assert run.store.reason_since(other) is None, "the event is of another reason"


def test_hostile_and_long_reasons_become_one_short_line(run: Run, capsys):
    at(run, State.STARTING, "\x1b]0;title\x07Back-off\n\tpulling\x00 \x9b2J" + "x" * 10_000)
    stored = run.record.status.reason
    assert stored.startswith("Back-off pulling") and len(stored) == REASON_CHARS and stored.isprintable()
    at(run, State.STARTING, "\x1b]0;title\x07Back-off\n\tpulling\x00 \x9b2J" + "x" * 10_000)
    assert len(reasons(run)) == 1, "what was shortened has not changed"
    assert main(["show", run.run_id]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert short_reason("a  b\n") == "a b" and short_reason("") == ""


def test_an_attempt_keeps_a_limited_number_of_reasons(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stores, "MOST_REASONS", 5)
    for n in range(9):
        at(run, State.QUEUED, f"{n} nodes are free")
    assert reasons(run) == [("QUEUED", f"{n} nodes are free") for n in range(4, 9)]


def test_commands_and_the_console_show_why_a_run_waits(run: Run, capsys):
    at(run, State.QUEUED, "Slurm: Resources")
    assert main(["show", run.run_id]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].startswith(f"{run.run_id}  QUEUED (Slurm: Resources) for ")
    assert "a1 platform  status QUEUED (Slurm: Resources)" in shown
    assert main(["ls"]) == 0
    assert "  x-1: QUEUED (Slurm: Resources) for " in capsys.readouterr().out
    details = read_details(run)
    assert dict(details.verdict)["reason"] == "Slurm: Resources" and dict(details.verdict)["since"].endswith(" UTC")
    at(run, State.RUNNING, "SageMaker: Training")
    assert main(["ls"]) == 0
    assert "SageMaker" not in capsys.readouterr().out, "a run that runs waits for nothing"


def test_a_reader_repeats_nothing_for_the_number_of_tries(run: Run, capsys, monkeypatch):
    monkeypatch.setattr(reading, "MARK_S", 0.0)
    run.printed_reason = "not sent yet: refused; another attempt follows on west"
    refresher = run._refresher()
    for text in ("not sent yet: refused; another attempt follows on west", "not sent yet, tried 2 times: closed",
                 "not sent yet, tried 3 times: closed"):  # fmt: skip
        at(run, State.QUEUED, text)
        refresher.tick()
    assert capsys.readouterr().err == f"{run.run_id} is QUEUED: not sent yet: closed\n"


def test_a_reader_that_waits_says_why_once(run: Run, capsys, monkeypatch):
    monkeypatch.setattr(reading, "MARK_S", 0.0)
    refresher = reading.Refresher(run.store, run.run_id, run.refresh, watch=True)
    for state, reason in [
        (State.QUEUED, "Slurm: Priority"),
        (State.QUEUED, "Slurm: Resources"),
        (State.RUNNING, "busy"),
    ]:
        at(run, state, reason)
        refresher.tick()
        refresher.tick()
    assert (
        capsys.readouterr().err
        == f"{run.run_id} is QUEUED: Slurm: Priority\n{run.run_id} is QUEUED: Slurm: Resources\n"
    )
