"""A comparison of a sweep's runs: its id stands for them, and what cloudtrain itself set names none of them."""

from __future__ import annotations

import pytest

from cloudtrain.cli import main
from cloudtrain.history.store import Store
from cloudtrain.report import compare
from tests.conftest import WAIT_S


def test_a_sweeps_id_stands_for_its_runs(start, home, tmp_path, capsys: pytest.CaptureFixture[str]):
    sweep = start([0.1, 0.3])
    sweep.wait(WAIT_S)
    runs = [trial.run_id for trial in sweep.trials]
    page = tmp_path / "comparison.html"
    assert main(["report", sweep.sweep_id, "-o", str(page)]) == 0, capsys.readouterr()
    text = page.read_text()
    assert len(runs) == 2 and all(run_id in text for run_id in runs)
    store = Store(home)
    assert sorted(compare.describe_runs(store, runs).values()) == ["lr 0.1", "lr 0.3"]
    paths = {row.path for row in compare.among(store, runs)}
    assert "lr" in paths and not any("SWEEP_TRIAL" in path or "digest" in path for path in paths), paths


def test_show_says_why_a_trial_failed(start, capsys: pytest.CaptureFixture[str]):
    sweep = start([-1.0, 0.3])
    sweep.wait(WAIT_S)
    capsys.readouterr()
    assert main(["sweep", "show", sweep.sweep_id]) == 0
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line and "-1" in line]
    assert failed and all("exit code 1" in line or "exited with" in line for line in failed), failed
