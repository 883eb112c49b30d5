"""The pages of all runs and of some beside each other, over real runs; docs/console.md's pictures."""

from __future__ import annotations

from datetime import datetime

import pytest
from playwright.sync_api import expect

from cloudtrain.report import compare
from cloudtrain.runs.run import Run
from tests.console.conftest import submit

TRAINING = """
import argparse, json, math, os, random, time

parser = argparse.ArgumentParser()
parser.add_argument("--learning_rate", type=float, default=0.1)
parser.add_argument("--steps", type=int, default=240)
parser.add_argument("--labels", default="")
given = parser.parse_args()
rank = int(os.environ["RANK"])
random.seed(rank)
weights = [0.0] * 8
for step in range(given.steps):
    x = [random.gauss(0, 1) for _ in weights]
    error = sum(w * v for w, v in zip(weights, x)) - sum(x) - random.gauss(0, 0.3)
    weights = [w - given.learning_rate / 8 * error * v for w, v in zip(weights, x)]
    distance = math.sqrt(sum((w - 1) ** 2 for w in weights)) + 1e-3
    if rank == 0:
        print("::cloudtrain::" + json.dumps({"kind": "metric", "step": step, "loss": error * error + 0.09, "distance": distance}))
        if step % 60 == 59:
            print("::cloudtrain::" + json.dumps({"kind": "checkpoint", "step": step + 1, "path": "x", "size_bytes": 412_000}))
    if step % 20 == 0:
        print(f"step {step}: loss {error * error:.4f}", flush=True)
    if step == 80 and given.labels:
        labels = open(given.labels).read()
    time.sleep(0.002)
"""

PICTURES = """[...document.querySelectorAll('.ct-plots .js-plotly-plot')].map(plot => (
    {traces: plot.data.length, axis: plot.layout.yaxis.type, x: plot.data.at(-1).x.at(-1)}))"""


@pytest.fixture(scope="module")
def story(console, tmp_path_factory) -> list[Run]:
    """Real runs of a small training: two learning rates, and one that fails; the newest first."""
    folder = tmp_path_factory.mktemp("story") / "project"
    shape = {"num_nodes": 2, "processes_per_node": 1, "name": "least-squares"}
    given = [
        {"learning_rate": "0.3", "labels": "data/labels.json"},
        {"learning_rate": "0.3"},
        {"learning_rate": "0.05"},
    ]
    runs = [submit(console, folder, TRAINING, hyperparameters=hyper, **shape) for hyper in given]
    for run in runs:
        run.wait(240)
    assert [run.record.status.state.value for run in runs] == ["FAILED", "SUCCEEDED", "SUCCEEDED"]
    return runs[::-1]


def test_runs_are_chosen_and_compared(console, page, story, seemly, picture):
    page.goto(console.root)
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.get_by_role("button", name="Compare")).to_be_disabled()
    expect(page.locator("tbody tr").nth(2)).to_contain_text("FAILED")
    for run in story[:2]:
        page.get_by_role("checkbox", name=f"compare {run.run_id}").check()
    picture(page, "console-runs")
    seemly(page)
    page.get_by_role("button", name="Compare 2 runs").click()
    expect(page.locator("main h1")).to_have_text("Compare runs")
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 4")
    picture(page, "console-compare")
    seemly(page)
    rows = page.get_by_role("region", name="Hyperparameters").locator("tbody tr")
    expect(rows).to_have_count(1)
    expect(rows.locator("td")).to_have_text(["learning_rate", "0.05", "0.3"])
    results = [
        row.path for row in compare.among(story[0].store, [run.run_id for run in story[:2]]) if row.section == "results"
    ]
    assert "loss" in results
    expect(page.get_by_role("region", name="Results").locator("tbody td:first-child")).to_have_text(results)
    assert page.evaluate(f"{PICTURES}.map(last => [last.traces, last.axis, last.x])") == [[2, "linear", 239]] * 2
    page.get_by_label("smoothing").click()
    page.get_by_role("option", name="very smooth").click()
    page.wait_for_function(f"{PICTURES}.every(last => last.traces === 4)")  # the curve itself stays behind its mean
    page.get_by_role("checkbox", name="log scale").click()
    page.wait_for_function(f"{PICTURES}.every(last => last.axis === 'log')")
    page.get_by_label("axis", exact=True).click()
    page.get_by_role("option", name="over time").click()
    page.wait_for_function(f"{PICTURES}.every(last => last.x !== 239)")
    took = [(run.record.status.ended_at, run.record.status.started_at) for run in story[:2]]
    most = max((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() for end, begin in took)
    assert 0 < page.evaluate(f"Math.max(...{PICTURES}.map(last => last.x))") <= most
    assert page.evaluate(f"{PICTURES}.every(last => last.traces === 4 && last.axis === 'log')")  # what was chosen stays


def test_a_failed_run_says_why_and_a_good_one_shows_its_curves(console, page, story, picture):
    page.goto(f"{console.root}/runs/{story[2].run_id}")
    why = page.get_by_role("region", name="Why it failed")
    expect(why).to_contain_text("FileNotFoundError")
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 2")
    picture(page, "console-failed")
    page.goto(f"{console.root}/runs/{story[1].run_id}")
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 2")
    expect(page.get_by_role("region", name="Checkpoints", exact=True).locator("tbody tr")).to_have_count(4)
    expect(page.locator(".ct-log")).to_contain_text("step 220")
    picture(page, "console-run", whole=True)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body.body--dark")).to_have_count(1)
    picture(page, "console-dark")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 400")
    picture(page, "console-narrow")


def test_comparing_what_there_is_not_is_said_in_a_sentence(console, page, story, seemly):
    for asked in ("", story[0].run_id, f"{story[0].run_id},nobody", ",".join(f"r{n}" for n in range(20))):
        page.goto(f"{console.root}/compare?runs={asked}")
        expect(page.get_by_text("This cannot be shown")).to_be_visible()
    seemly(page)
