"""How far a run is, by its own speed: from the steps and times of its metrics, and the price of its plan."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from cloudtrain.cli import main
from cloudtrain.events import Event, Row, State, Status
from cloudtrain.job.job import Job
from cloudtrain.job.units import format_time
from cloudtrain.nodes.process import Process
from cloudtrain.runs import progress
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.testing.memory import MemoryBackend
from tests.runs.steps import newest, watch

SECONDS = 10  # of a step


@pytest.fixture
def run(memory, job: Job) -> Run:
    """A run of 3.6 USD an hour that has started an hour ago."""
    run = Submitter("memory", watch=False).submit(job.replace(resources={"usd_per_hour": 3.6}), new=True)
    run.acknowledge()
    started = Status(State.RUNNING, started_at=format_time(time.time() - 3600))
    MemoryBackend.attempts[newest(run)].status = started
    run.store.record(newest(run), status=started)
    run.store.set_status(run.run_id, started)
    return run


def trained(run: Run, steps: range, total: int | None = 200, pace=lambda step: SECONDS) -> None:
    """Store the world and the loss of steps, which took `pace` seconds each."""
    attempt, began = newest(run), time.time() - 3500
    events = [Event(attempt, 0, 1, format_time(began), "world", {"total_steps": total} if total else {})]
    at, rows = began, []
    for step in steps:
        at += pace(step)
        rows.append(Row(0, 100 + step, format_time(at), step, "loss", 1.0, 0))
    run.store.record(attempt, events=events, metrics=rows)


def test_the_runs_own_speed_says_the_rest(run: Run, capsys):
    trained(run, range(1, 125))
    found = progress.of_run(run.store, run.attempts)
    assert found and (found.step, found.steps) == (124, 200)
    assert found.left_s == pytest.approx((760, 760)), "76 steps of 10 s, every part as fast as the others"
    assert found.usd == pytest.approx(3.6, abs=0.1)
    assert found.usd_end and found.usd_end[0] == pytest.approx(found.usd + 0.76)
    assert found.line.startswith("62%, 12m 40s to go, 3.") and "USD so far, 4." in found.line
    capsys.readouterr()
    assert main(["show", run.run_id]) == 0
    assert "62%, 12m 40s to go" in capsys.readouterr().out
    assert main(["show", run.run_id, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["progress"]["step"] == 124 and shown["progress"]["left_s"] == pytest.approx([760, 760])


def test_nothing_is_said_of_the_rest_before_twenty_steps(run: Run):
    trained(run, range(1, 21))
    found = progress.of_run(run.store, run.attempts)
    assert found and found.left_s is None and found.usd_end is None and found.line.startswith("10%, 3.")
    trained(run, range(21, 22))
    found = progress.of_run(run.store, run.attempts)
    assert found and found.left_s


def test_an_uneven_pace_gives_a_range_around_the_mean(run: Run):
    trained(run, range(1, 102), pace=lambda step: 5 if step % 40 < 20 else 15)
    found = progress.of_run(run.store, run.attempts)
    assert found and found.left_s
    low, high = found.left_s
    assert low < 99 * SECONDS < high and low > 99 * 5 and high < 99 * 15


def test_a_long_curve_is_read_in_few_points(run: Run):
    trained(run, range(1, 3001), total=6000, pace=lambda step: 1)
    found = progress.of_run(run.store, run.attempts)
    assert found and found.left_s == pytest.approx((3000, 3000), rel=0.01)


def test_a_next_attempt_is_as_fast_as_itself(run: Run):
    trained(run, range(1, 101))
    first = run.attempts[0]
    plan = replace(first.plan, attempt=2)
    MemoryBackend.finish(newest(run), State.LOST)
    run.store.record(first.attempt_id, status=Status(State.LOST, ended_at=format_time(time.time() - 1800)))
    run.store.set_status(run.run_id, Status(State.LOST))
    assert run.store.next_attempt(plan, owner=Process.here(), resume=True)
    run.store.record(newest(run), status=Status(State.RUNNING, started_at=format_time(time.time() - 1700)))
    trained(run, range(91, 121), pace=lambda step: 2)
    found = progress.of_run(run.store, run.attempts)
    assert found and found.left_s == pytest.approx((160, 160))


def test_steps_that_are_not_known_give_no_progress(run: Run):
    trained(run, range(1, 50), total=None)
    assert progress.of_run(run.store, run.attempts) is None


def test_a_finished_run_keeps_forecast_and_actual(memory, job: Job, capsys):
    forecast = {"line": "50m 00s to 1h 30m (p10 to p90; x)", "seconds": [3000, 4000, 5400], "usd": None}

    class Forecasting(Submitter):
        def plan_of(self, *args):
            return replace(super().plan_of(*args), time=forecast)

    run = Forecasting("memory", watch=False).submit(job.replace(resources={"usd_per_hour": 3.6}), new=True)
    run.acknowledge()
    MemoryBackend.finish(newest(run), State.SUCCEEDED, 0, billable_s=3600)
    watch(run)
    now = time.time()
    run.store.overwrite_status(newest(run), Status(State.SUCCEEDED, 0, "", format_time(now - 3600), format_time(now)))
    capsys.readouterr()
    assert main(["show", run.run_id, "--json"]) == 0
    kept = json.loads(capsys.readouterr().out)["time"]
    assert kept["forecast"] == forecast and kept["took_s"] == pytest.approx(3600)
    assert main(["show", run.run_id]) == 0
    assert "50m 00s to 1h 30m; it took 1h" in capsys.readouterr().out
