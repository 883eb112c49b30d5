"""A run with several candidates goes where there are machines, and never runs at two places."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from cloudtrain.cli.view.follow import Begun, begin
from cloudtrain.cli.view.options import Ending
from cloudtrain.errors import LogDenied, Unreachable
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.runs.fleet import NAMES, Fleet, Site, submit


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    return Fleet(monkeypatch)


def job_of(source: Path, **changes) -> dict:
    return {
        "name": "anywhere",
        "source": str(source),
        "entrypoint": "train.py",
        "target": list(NAMES),
        "output": "gs://bucket/out",
        "limits": {"max_wait": "30m"},
        **changes,
    }


def places(run: Run) -> list[str]:
    return [attempt.plan.target for attempt in run.attempts]


def test_a_refusal_goes_on_to_the_next_at_once_and_ends_after_the_last(fleet, source, home):
    fleet.refuses = {"east", "west", "lab"}
    run = submit(fleet, job_of(source), home)
    assert run.record.status.state is State.QUEUED and run.record.status.reason.endswith(
        "another attempt follows on west"
    )
    fleet.look(run)
    assert places(run) == ["east", "west", "lab"]
    assert run.record.status.state is State.FAILED and "lab has no such machines" in run.record.status.reason


def test_where_nothing_was_sent_the_next_has_it_at_once_and_the_last_ends_it(fleet, source, home):
    fleet.not_reached = {"east"}
    run = submit(fleet, job_of(source), home)
    fleet.look(run)
    assert places(run) == ["east", "west"] and fleet.live() == [f"{run.run_id}-a2"]
    fleet.not_reached = set(NAMES)
    run = submit(fleet, job_of(source, name="nowhere"), home)
    fleet.look(run)
    assert places(run) == ["east", "west", "lab"] and run.record.status.state is State.FAILED
    assert "lab refuses the connection" in run.record.status.reason


def test_a_refusal_names_the_gpus_of_the_next_where_the_target_stays(fleet, source, home):
    fleet.refuses = {"east"}
    gpus = {"accelerators": ["A100:1", "L4:1", "T4:1"]}
    run = submit(fleet, job_of(source, target="east", resources=gpus), home)
    assert run.record.status.reason.endswith("another attempt follows on east (L4:1)")
    fleet.look(run)
    assert [attempt.plan.job["resources"]["accelerators"] for attempt in run.attempts] == gpus["accelerators"]


def test_a_submit_names_the_target_that_refused_and_not_one_that_has_it(fleet, source, home, capsys):
    fleet.refuses = {"east"}
    run = submit(fleet, job_of(source), home)
    begin(run.store, lambda: Begun(run, "submitted to"), Ending())
    out, err = capsys.readouterr()
    assert out.startswith(f"{run.run_id}  was refused by east") and "another attempt follows on west" in err, out + err
    fleet.look(run)
    begin(run.store, lambda: Begun(run, "submitted to"), Ending())
    assert capsys.readouterr().out.startswith(f"{run.run_id}  submitted to west")


def test_a_second_round_begins_after_a_pause(fleet, source, home):
    fleet.refuses = {"east", "west", "lab"}
    run = submit(fleet, job_of(source, retry={"max_attempts": 2}), home)
    fleet.look(run)
    assert places(run) == ["east", "west", "lab"] and "another attempt in" in run.record.status.reason
    (seen,) = run.store.events(run.run_id, "capacity")  # the pause begins with it: another version must find it
    assert seen.attempt == f"{run.run_id}-a3" and seen.data["seconds"] > 0
    fleet.clock.sleep(3600)
    fleet.refuses = {"east"}
    fleet.look(run)
    assert places(run) == ["east", "west", "lab", "east", "west"]
    assert fleet.live() == [f"{run.run_id}-a5"]


@pytest.mark.parametrize("may_read_log", [True, False])
def test_a_request_that_stays_pending_is_gone_before_the_next_is_sent(fleet, source, home, monkeypatch, may_read_log):
    def refuse(*_, **__):
        raise LogDenied("your account may not get pods/log")

    if not may_read_log:
        monkeypatch.setattr(Site, "logs", refuse)
    run = submit(fleet, job_of(source), home)
    life = fleet.lives[f"{run.run_id}-a1"]
    life.starts_at, life.stops_s = float("inf"), 600
    fleet.look(run)
    fleet.clock.sleep(1700)
    fleet.look(run)
    assert not life.cancelled
    fleet.clock.sleep(200)
    fleet.look(run)
    assert life.cancelled and places(run) == ["east"]
    assert "no machines within 30m" in run.record.status.reason
    fleet.clock.sleep(300)
    fleet.look(run)
    assert places(run) == ["east"], "it has not ended yet"
    fleet.clock.sleep(301)
    fleet.look(run)
    assert places(run) == ["east", "west"] and fleet.live() == [f"{run.run_id}-a2"]
    assert run.attempts[0].status.event == "capacity" and run.attempts[0].status.state is State.FAILED


def test_a_platform_that_does_not_answer_keeps_the_run(fleet, source, home):
    """Nobody knows whether its request still waits there: nothing is sent elsewhere."""
    run = submit(fleet, job_of(source), home)
    fleet.lives[f"{run.run_id}-a1"].starts_at = float("inf")
    fleet.look(run)
    fleet.clock.sleep(3600)
    fleet.look(run)
    assert fleet.lives[f"{run.run_id}-a1"].cancelled
    fleet.unreachable = {"east"}
    fleet.clock.sleep(86400)
    fleet.look(run)
    assert places(run) == ["east"]
    fleet.unreachable = set()
    fleet.look(run)
    assert places(run) == ["east", "west"]


@pytest.mark.parametrize(("saves", "expected"), [(False, "west"), (True, "east")])
def test_spot_machines_that_are_lost_twice_without_headway(fleet, source, home, saves, expected):
    run = submit(fleet, job_of(source, resources={"use_spot": True}), home)
    for number in (1, 2):
        life = fleet.lives[f"{run.run_id}-a{number}"]
        life.saves, life.state = saves and number == 2, State.PREEMPTED
        fleet.clock.sleep(600)
        fleet.look(run)
        life.ends_at = fleet.now
        fleet.look(run)
    assert places(run) == ["east", "east", expected]


@pytest.mark.parametrize(("output", "expected"), [("gs://bucket/out", ["east", "west"]), (None, ["east", "east"])])
def test_checkpoints_come_along_where_the_output_is_reached(fleet, source, home, output, expected):
    changes = {"output": output} if output else {"output": None}
    run = submit(fleet, job_of(source, retry={"max_attempts": 2}, **changes), home)
    life = fleet.lives[f"{run.run_id}-a1"]
    life.saves, life.state, life.event = True, State.PREEMPTED, "capacity"
    fleet.clock.sleep(600)
    fleet.look(run)
    life.ends_at = fleet.now
    fleet.clock.sleep(7200)
    fleet.look(run)
    assert places(run) == expected
    assert run.attempts[1].plan.job["checkpoint"]["required"] is (output is not None)
    notes = " ".join(run.attempts[0].plan.notes)
    assert (
        "cannot read the checkpoints of east: the run can move there only before its first checkpoint" in notes
    ) is (output is None)


def test_a_cancel_ends_a_run_that_is_withdrawn(fleet, source, home):
    run = submit(fleet, job_of(source), home)
    life = fleet.lives[f"{run.run_id}-a1"]
    life.starts_at, life.stops_s = float("inf"), 600
    fleet.clock.sleep(3600)
    fleet.look(run)
    run.store.request_cancel(run.run_id)
    fleet.clock.sleep(601)
    fleet.look(run)
    assert (run.record.status.state, places(run), fleet.live()) == (State.CANCELLED, ["east"], [])


def test_a_lost_attempt_is_ended_before_its_run_is_cancelled(fleet, source, home, monkeypatch):
    run = submit(fleet, job_of(source), home)
    fleet.lives[f"{run.run_id}-a1"].lost_at = fleet.now
    run.store.request_cancel(run.run_id)
    with monkeypatch.context() as patch:
        patch.setattr(fleet, "cancel", lambda name: raise_unreachable())
        fleet.look(run)
    assert not run.record.status.state.final, "it may live on"
    fleet.look(run)
    assert (run.record.status.state, fleet.live()) == (State.CANCELLED, [])


def raise_unreachable() -> None:
    raise Unreachable("nobody answers")


def live_through(seed: int, folder: Path, source: Path) -> tuple[State, int]:
    """Go through a drawn sequence; at every submission the platforms assert that nothing else of the run lives."""
    draw = random.Random(f"failover {seed}")
    with pytest.MonkeyPatch.context() as patch:
        fleet = Fleet(patch, draw)
        spot, most = draw.random() < 0.7, draw.randint(1, 4)
        changes = {"resources": {"use_spot": spot}, "retry": {"max_attempts": most}}
        changes["output"] = draw.choice(["gs://bucket/out", None])
        fleet.kill_after = draw.choice([float("inf"), draw.randint(1, 12)])
        run = submit(fleet, job_of(source, **changes), folder / "home")
        for _ in range(150):
            if run.record.status.state.final:
                break
            fleet.kill_after = draw.choice([float("inf"), draw.randint(1, 12)])
            fleet.look(run)
            assert len(fleet.live()) <= 1
            fleet.clock.sleep(draw.choice([1.0, 400.0, 2500.0, 20_000.0]))
            if draw.random() < 0.01:
                run.store.request_cancel(run.run_id)
        if (
            not run.record.status.state.final
        ):  # the last candidate that it may try has not refused it, and has no machines
            assert fleet.live() == [run.attempts[-1].attempt_id], f"{seed}: {run.record.status}"
            run.store.request_cancel(run.run_id)
            while not run.record.status.state.final:
                fleet.look(run)
                fleet.clock.sleep(2500)
        state = run.record.status.state
        assert fleet.live() == [], f"{seed}: {state}, but {fleet.live()} goes on"
        begun = [attempt for attempt in run.attempts if attempt.status.event != "capacity"]
        assert len(begun) <= most and len(run.attempts) <= most * len(NAMES)
        return state, len({place for place, _ in fleet.sent})


def ends_of(seeds: range, folder: Path, source: Path) -> None:
    found = []
    for seed in seeds:
        found.append(live_through(seed, folder / str(seed), source))
        shutil.rmtree(folder / str(seed))
    states = {state for state, _ in found}
    assert {State.SUCCEEDED, State.FAILED} <= states, states
    assert sum(count > 1 for _, count in found) >= len(seeds) // 4, found


@pytest.mark.long
@pytest.mark.parametrize("block", range(20))
def test_six_hundred_runs_live_at_one_place_whatever_happens(quick_folder, source, block):
    ends_of(range(30 * block, 30 * (block + 1)), quick_folder, source)
