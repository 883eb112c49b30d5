"""The pages of sweeps, over a real sweep of this machine: followed, paused, ended, and one started from the form."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.report import sweep_figures
from cloudtrain.sweeps.sweep import Sweep, begin
from tests.conftest import WAIT_S

SCRIPT = """
import argparse, json, pathlib, time
parser = argparse.ArgumentParser()
for name, kind in (("lr", float), ("width", int), ("act", str), ("gate", str)):
    parser.add_argument("--" + name, type=kind)
given, _ = parser.parse_known_args()
print(json.dumps({"step": 1, "loss": abs(given.lr - 0.3) + given.width / 100}), flush=True)
while given.gate and not pathlib.Path(given.gate).exists():
    time.sleep(0.05)
"""
TRIALS = 9
MOST_PARALLEL = 3


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def sweep(console, project):
    """A sweep whose first trials wait for a file; it is stopped at the end of the module."""
    keys = {
        "job": {"name": "tune", "source": str(project), "entrypoint": "train.py", "environment": {"requirements": "none"}},
        "method": "grid",
        "metric": {"name": "loss", "goal": "minimize"},
        "max_parallel": MOST_PARALLEL,
        "parameters": {
            "lr": {"values": [0.1, 0.2, 0.3]},
            "width": {"values": [1, 2, 3]},
            "act": {"value": "<b>"},
            "gate": {"value": str(project / "gate")},
        },
    }  # fmt: skip
    found = begin(keys, project, home=console.home)
    yield found
    if found.record.live:
        found._history.set_state(found.sweep_id, "RUNNING", old=("PAUSED",))
        found.stop()
    found.wait(WAIT_S)


def points(page, chart: str) -> list[float]:
    """Return the values of the markers of the chart in a card."""
    return page.locator(f'section[aria-label="{chart}"] .js-plotly-plot').evaluate(
        "chart => chart.data.filter(one => one.mode === 'markers').flatMap(one => [...one.y])"
    )


def test_a_sweep_is_followed_paused_and_ended(console, page, sweep: Sweep, project: Path, seemly, picture):
    page.goto(f"{console.root}/")
    page.get_by_role("link", name="Sweeps").click()
    page.get_by_role("link", name=sweep.sweep_id).click()
    trials = page.get_by_role("region", name="All trials")
    expect(trials.get_by_role("row")).to_have_count(1 + MOST_PARALLEL)
    expect(page.get_by_text("no trial has a result yet")).to_be_visible()

    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_text("PAUSED", exact=True)).to_be_visible()
    (project / "gate").touch()
    expect(trials.get_by_text("SUCCEEDED")).to_have_count(MOST_PARALLEL)
    assert len(sweep.trials) == MOST_PARALLEL, "a paused sweep starts nothing"
    page.get_by_role("button", name="Resume").click()
    expect(trials.get_by_text("SUCCEEDED")).to_have_count(TRIALS)
    expect(page.get_by_text(f"all {TRIALS} trials have run")).to_be_visible()
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()

    best = sweep.best
    assert best is not None and best.params["lr"] == 0.3 and best.params["width"] == 1
    expect(page.get_by_text(f"loss 0.01 by trial {best.number}")).to_be_visible()
    expect(page.get_by_text(f"cloudtrain fetch {best.run_id} -o best")).to_be_visible()
    page.wait_for_function(
        f"document.querySelector('section[aria-label=\"Best so far\"] .js-plotly-plot')?.data[0].x.length === {TRIALS}"
    )
    assert sorted(points(page, "Best so far")) == pytest.approx(sorted(trial.result[0] for trial in sweep.trials))
    expect(page.locator('section[aria-label="Importance"] .js-plotly-plot')).to_be_visible()
    expect(page.locator('section[aria-label="Parallel coordinates"] .js-plotly-plot')).to_be_visible()
    picture(page, "sweep", whole=True)
    seemly(page)

    trials.get_by_role("link").first.click()
    page.get_by_role("link", name=sweep.sweep_id).click()  # a trial's page leads back
    expect(page.get_by_role("heading", name=sweep.sweep_id)).to_be_visible()


def test_the_list_and_an_unknown_sweep(console, page, sweep: Sweep, seemly):
    page.goto(f"{console.root}/sweeps")
    expect(page.get_by_role("link", name=sweep.sweep_id)).to_be_visible()
    seemly(page)
    page.goto(f"{console.root}/sweeps/{sweep.sweep_id[:5]}")
    expect(page.get_by_text("no sweep has the id")).to_be_visible()


def test_the_line_of_the_best_leaves_pruned_trials_out():
    results = [(1, 3.0, False), (2, 1.0, True), (3, 2.0, False), (4, 5.0, False)]
    trials, pruned, line = sweep_figures.best_so_far("loss", results, minimize=True).data
    assert list(trials.y) == [3.0, 2.0, 5.0] and list(pruned.y) == [1.0]
    assert list(zip(line.x, line.y, strict=True)) == [(1, 3.0), (3, 2.0), (4, 2.0)]
    line = sweep_figures.best_so_far("acc", results, minimize=False).data[2]
    assert list(zip(line.x, line.y, strict=True)) == [(1, 3.0), (4, 5.0), (4, 5.0)]


def test_a_sweep_is_started_from_the_form(page, tmp_path: Path, console):
    (tmp_path / "train.py").write_text(SCRIPT)
    keys = f"name: formed\nsource: {tmp_path}\nentrypoint: train.py\nenvironment: {{requirements: none}}\n"
    (console.home.parent / "formed.yaml").write_text(keys + "hyperparameters: {steps: 3, lr: 0.1}\n")
    page.goto(f"{console.root}/new?job=formed.yaml")
    page.wait_for_url("**/new?draft=*")
    page.locator("[data-step=review]").click()
    expect(page.get_by_text("This request will be sent.")).to_be_visible()
    page.get_by_text("Run a sweep of this job instead").click()
    keys = page.get_by_label("Sweep", exact=True).last
    expect(keys).to_have_value(re.compile("  lr: {distribution: log_uniform_values"))
    keys.fill("method: gird\nparameters: {lr: {values: [1]}}")
    page.get_by_role("button", name="Start the sweep").click()
    expect(page.get_by_text(re.compile("gird"))).to_be_visible()
    keys.fill("method: grid\nmetric: {name: loss}\nparameters: {lr: {values: [0.5, 0.3]}, width: {value: 1}}")
    page.get_by_role("button", name="Start the sweep").click()
    page.wait_for_url("**/sweeps/*")
    expect(page.get_by_text("all 2 trials have run")).to_be_visible()
    expect(page.get_by_text("loss 0.01 by trial 2")).to_be_visible()
    started = Sweep.find(page.url.rpartition("/")[2], console.home)
    assert [trial.params["lr"] for trial in started.trials] == [0.5, 0.3] and not started.record.live
