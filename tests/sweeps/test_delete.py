"""Runs of a sweep that were deleted: their results stay; and `rm` of a whole sweep."""

from __future__ import annotations

import json
import re

import pytest

from cloudtrain.cli import main
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import UnknownRun
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.sweeps import standing
from cloudtrain.sweeps.sweep import Sweep
from tests.conftest import WAIT_S, wait_for

AGE = re.compile(r"ended [\w ]+ ago")  # which has changed when a run is listed again


def test_results_stay_when_runs_are_deleted_and_rm_takes_the_sweep(start, home, capsys: pytest.CaptureFixture[str]):
    sweep = start([0.1, 0.3])
    sweep.wait(WAIT_S)
    first, best = (str(trial.run_id) for trial in sweep.trials)

    def call(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(list(words))
        return code, *capsys.readouterr()

    assert call("rm", best, "--yes")[0] == 0
    shown = call("sweep", "show", sweep.sweep_id)[1]
    assert "deleted: 1 run; their results are kept here" in shown and "not sent" not in shown
    assert "by trial 2" in shown and "its run was deleted" in shown and f"fetch {best}" not in shown
    assert "lr: 0.3" in call("sweep", "best", sweep.sweep_id)[1]
    trials = json.loads(call("sweep", "show", sweep.sweep_id, "--json")[1])["trials"]
    assert [trial["deleted"] for trial in trials] == [False, True]
    assert call("report", sweep.sweep_id, "-o", str(home / "x.html"))[0] == 0

    code, listed, _ = call("rm", sweep.sweep_id, "--dry-run")
    assert code == 0 and listed.splitlines()[-1].startswith("1 run, ") and f"and the sweep {sweep.sweep_id}" in listed
    assert first in listed and Sweep.find(sweep.sweep_id, home).trials
    assert call("rm", sweep.sweep_id)[0] == 2, "nobody was asked"
    listed, deleted = (AGE.sub("ended", text) for text in (listed, call("rm", sweep.sweep_id, "--yes")[1]))
    assert deleted.splitlines() == [*listed.splitlines()[:-1], f"deleted {first}", f"deleted {sweep.sweep_id}"]
    assert not Store(home).runs()
    with pytest.raises(UnknownRun):
        Sweep.find(sweep.sweep_id, home)


def test_a_live_sweep_is_not_removed_and_goes_on_without_a_deleted_run(start, home, tmp_path, capsys):
    sweep = start([0.1], gate=tmp_path / "gate")
    wait_for(lambda: sweep.trials and sweep.trials[0].state is State.RUNNING)
    assert main(["rm", sweep.sweep_id, "--yes"]) == 2
    assert f"cloudtrain sweep stop {sweep.sweep_id}" in capsys.readouterr().err
    sweep.pause()
    wait_for(lambda: not sweep.record.is_driven(SYSTEM))
    (tmp_path / "gate").touch()
    wait_for(lambda: sweep.trials[0].state is State.SUCCEEDED)
    assert main(["rm", str(sweep.trials[0].run_id), "--yes"]) == 0
    assert main(["sweep", "show", sweep.sweep_id]) == 0
    sweep.resume()
    assert sweep.wait(WAIT_S).state in ("SUCCEEDED", "FAILED") and sweep.trials[0].ended


def test_a_deleted_cancelled_run_is_not_the_best(start, home):
    sweep = start([0.1, 0.3])
    sweep.wait(WAIT_S)
    store, best = Store(home), str(sweep.trials[1].run_id)
    with store.database.write() as db:
        db.execute("UPDATE runs SET state = 'CANCELLED' WHERE run_id = ?", (best,))
    assert sweep.best and sweep.best.number == 1
    assert store.delete(best)
    assert sweep.best.number == 1 and not any(map(standing.failed, sweep.trials))
