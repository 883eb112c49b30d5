"""Sweeps on this machine: every trial becomes one run, whatever is killed, paused, stopped, pruned or repeated."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.sweeps.sweep import Sweep
from tests.conftest import WAIT_S, wait_for
from tests.seed import first_seed
from tests.sweeps.conftest import Start, command, drivers, kill_clients, starts

pytestmark = pytest.mark.timeout(900)


def test_a_sweep_by_the_command_line(project: Path, tmp_path: Path, census: Path):
    (project / "sweep.yaml").write_text(
        "job: job.yaml\nmethod: grid\nmetric: {name: loss, goal: minimize}\nmax_parallel: 2\n"
        "parameters: {lr: {values: [0.1, 0.4, 0.8]}, steps: {value: 2}}\n"
    )
    said = command(project, "sweep", "sweep.yaml", "--wait")
    assert "SUCCEEDED: all 3 trials have run" in said and "best: loss 0.6 by trial 2 (lr 0.4)" in said
    assert "loss 0.6 by trial 2 (lr 0.4)" in Sweep.find()._repr_html_()
    command(project, *re.search(r"cloudtrain (fetch .*)", said)[1].split())
    assert [path.read_text() for path in (project / "best").rglob("rate")] == ["0.4"]
    shown = json.loads(command(project, "sweep", "show", "--json"))
    assert sorted(start["lr"] for start in starts(tmp_path)) == [0.1, 0.4, 0.8]
    assert [trial["result"] for trial in shown["trials"]] == [[pytest.approx(loss)] for loss in (0.9, 0.6, 0.8)]
    assert shown["best"]["number"] == 2 and shown["state"] == "SUCCEEDED"
    assert shown["sweep_id"] in command(project, "sweep", "ls")
    keyed = [json.loads(command(project, "sweep", "sweep.yaml", "--key", "a/b", "--wait", "--json")) for _ in range(2)]
    assert keyed[0] == keyed[1] and len(keyed[0]["trials"]) == 3 and len(starts(tmp_path)) == 6
    (project / "sweep.yaml").write_text((project / "sweep.yaml").read_text().replace("0.8", "0.7"))
    command(project, "sweep", "sweep.yaml", "--key", "a/b", code=2)
    assert "lr: 0.4" in command(project, "sweep", "best")
    (project / "best.yaml").write_text(command(project, "sweep", "best"))
    assert "--lr 0.4" in command(project, "plan", "best.yaml")


def test_a_job_file_with_a_sweep_in_it_and_a_goal(project: Path, census: Path):
    text = (project / "job.yaml").read_text()
    (project / "job.yaml").write_text(
        text + "sweep: {method: grid, metric: {name: loss, target: 0.7}, max_parallel: 1, parameters: {lr: {values: "
        "[0.1, 0.5, 0.8, 0.9]}}}\n"
    )
    assert "the goal was reached: loss 0.333333 by trial 2" in command(project, "sweep", "job.yaml", "--wait")
    assert len(json.loads(command(project, "sweep", "show", "--json"))["trials"]) <= 3


def test_a_failed_trial_is_repeated_once_and_too_many_end_the_sweep(start: Start, tmp_path: Path):
    sweep = start([0.2, -1, -2, 0.3], "max_failed: 1\nmax_parallel: 1")
    record = sweep.wait(5 * WAIT_S)
    assert record.state == "FAILED"
    assert re.fullmatch(
        r"2 trials failed twice \(max_failed: 1\); trial \d: .*code 1 \(cloudtrain logs tune-\w+\)", record.reason
    ), record.reason
    assert [(trial.params["lr"], trial.retry_of) for trial in sweep.trials][:3] == [(0.2, None), (-1, None), (-1, 2)]
    rates = [given["lr"] for given in starts(tmp_path)]
    assert rates.count(-1) == rates.count(-2) == 2 and rates.count(0.2) == 1
    assert sweep.best and sweep.best.params["lr"] in (0.2, 0.3)
    assert [sweep.rerun_failed(), sweep.rerun_failed()] == [2, 0], "the second call finds them repeated"
    assert sweep.wait(5 * WAIT_S).reason.startswith("2 trials failed twice (max_failed: 1); trial ")
    again = [trial for trial in sweep.trials if trial.params["lr"] < 0][4:]
    assert [trial.state for trial in again] == [State.FAILED] * 2, "they were not cancelled for the failures before"


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            "metric: {name: los}\nparameters: {lr: {values: [0.1, 0.2, 0.3]}}",
            "trial 1 SUCCEEDED without the sweep's metric los; it reported loss: did you mean loss?",
        ),
        (
            "metric: {name: loss}\nparameters: {lrr: {values: [0.1, 0.2, 0.3]}}",
            "trial 1 failed, as every other would: train.py: error: unrecognized arguments: --lrr 0.1",
        ),
    ],
    ids=["metric", "argument"],
)
def test_what_every_trial_would_meet_ends_the_sweep_at_the_first(project: Path, census: Path, keys: str, reason: str):
    (project / "sweep.yaml").write_text(f"job: job.yaml\nmethod: grid\nmax_parallel: 1\n{keys}\n")
    said = command(project, "sweep", "sweep.yaml", "--wait", code=1)
    assert f"FAILED: {reason}" in said, said
    assert len(Sweep.find().trials) == 1, "the others were not paid for"
    page = (Path(__file__).parents[2] / "docs" / "how" / "sweep.md").read_text()
    assert f"`{reason}`" in page or "metric" not in reason


def test_a_trial_that_others_have_beaten_is_cancelled_with_the_reason(start: Start, tmp_path: Path):
    gate = tmp_path / "gate"
    sweep = start(
        [0.5, 0.6, 0.9], "max_parallel: 3\nearly_terminate: {type: hyperband, min_iter: 2, eta: 2}\n", gate=gate
    )
    wait_for(lambda: any(trial.ended for trial in sweep.trials), "the end of the worse one", 2 * WAIT_S)
    gate.touch()
    assert sweep.wait(2 * WAIT_S).state == "SUCCEEDED"
    good, fair, bad = sweep.trials
    assert (good.state, fair.state, bad.state) == (State.SUCCEEDED, State.SUCCEEDED, State.CANCELLED)
    assert bad.reason.startswith("pruned: ") and bad.reason == sweep.run(bad).record.status.reason
    assert sweep.best == good and bad.result


def test_paused_resumed_extended_and_stopped(start: Start, tmp_path: Path):
    gate = tmp_path / "gate"
    sweep = start([0.1, 0.2, 0.3, 0.4], "max_parallel: 1\nrun_cap: 2\n", gate=gate)
    wait_for(lambda: [trial.state for trial in sweep.trials] == [State.RUNNING], "its first trial", 2 * WAIT_S)
    sweep.pause()
    wait_for(lambda: not drivers(sweep), "the end of its process")
    gate.touch()
    assert sweep.run(sweep.trials[0]).wait(WAIT_S).state is State.SUCCEEDED
    assert len(sweep.trials) == 1
    with pytest.raises(BadRequest, match="is PAUSED"):
        sweep.pause()
    sweep.resume()
    assert sweep.wait(2 * WAIT_S).reason == "the budget of trials is spent: 2 trials"
    gate.unlink()
    sweep.extend(2)
    wait_for(lambda: len(sweep.trials) == 3 and sweep.trials[2].state is State.RUNNING, "its third trial", 2 * WAIT_S)
    sweep.stop()
    record = sweep.wait(2 * WAIT_S)
    assert (record.state, record.reason) == ("CANCELLED", "stopped")
    assert sweep.trials[2].state is State.CANCELLED and len(sweep.trials) == 3


def test_the_watcher_starts_the_process_of_a_sweep_again(start: Start, tmp_path: Path, home: Path):
    gate = tmp_path / "gate"
    sweep = start([0.1, 0.2], "max_parallel: 1", gate=gate)
    wait_for(lambda: [trial.state for trial in sweep.trials] == [State.RUNNING], "its first trial", 2 * WAIT_S)
    (first,) = drivers(sweep)
    os.kill(first, 9)
    wait_for(lambda: drivers(sweep) not in ([], [first]), "another process", 2 * WAIT_S)
    gate.touch()
    wait_for(lambda: not sweep.record.live, "its end without any command", 2 * WAIT_S)
    assert [trial.state for trial in sweep.trials] == [State.SUCCEEDED] * 2


@pytest.mark.parametrize(
    "kills", [5, *(pytest.param(many, marks=[pytest.mark.long, pytest.mark.timeout(3600)]) for many in (20, 100))]
)
def test_kills_neither_lose_nor_double_a_trial(start: Start, home: Path, tmp_path: Path, kills: int, figure):
    choose = random.Random(first_seed())
    rates = [round(0.1 + at / 100, 2) for at in range(2 * kills)]
    sweep = start(rates, "max_parallel: 3")
    for _ in range(kills):
        before = len(sweep.trials)
        wait_for(lambda before=before: len(sweep.trials) > before or not sweep.record.live, "progress", 2 * WAIT_S)
        wait_for(lambda moment=choose.random(): choose.random() > moment, "a drawn moment")
        kill_clients(sweep, home)
        sweep.ensure_driven()
    record = sweep.wait(20 * WAIT_S)
    assert (record.state, record.reason) == ("SUCCEEDED", f"all {len(rates)} trials have run")
    assert sorted(trial.params["lr"] for trial in sweep.trials) == rates
    assert sorted(given["lr"] for given in starts(tmp_path)) == rates, "each was started once"
    assert len({trial.run_id for trial in sweep.trials}) == len(rates)
    figure("kills of a sweep's processes, no trial lost or doubled", kills)
