"""The pages of all runs and of some beside each other, over real runs; docs/console.md's pictures."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.backends.api import Plan
from cloudtrain.events import State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
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

PICTURES = """[...document.querySelectorAll('.ct-plots .js-plotly-plot')].filter(plot => plot.data).map(plot => (
    {traces: plot.data.length, axis: plot.layout.yaxis.type, x: plot.data.at(-1).x.at(-1), name: plot.data.at(-1).name,
     title: plot.layout.xaxis.title.text, along: plot.layout.xaxis.type}))"""


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
    assert page.evaluate(f"{PICTURES}.map(last => [last.name, last.title])") == [["learning_rate 0.3", "step"]] * 2
    expect(page.locator(".ct-legend a")).to_have_text(["learning_rate 0.05", "learning_rate 0.3"])
    slider = page.get_by_role("slider", name="smoothing")
    slider.press("ArrowRight")
    page.wait_for_function(f"{PICTURES}.every(last => last.traces === 4)")  # the curve itself stays behind its mean
    page.get_by_role("checkbox", name="log y", exact=True).click()
    page.wait_for_function(f"{PICTURES}.every(last => last.axis === 'log')")
    page.get_by_role("checkbox", name="log x", exact=True).click()
    page.wait_for_function(f"{PICTURES}.every(last => last.along === 'log')")
    page.wait_for_url("**smoothing=0.01&log=True&log_x=True**")
    page.reload()  # the address keeps the view
    page.wait_for_function(
        f"{PICTURES}.length === 2 && {PICTURES}.every(last => last.traces === 4 && last.axis === 'log')"
    )
    page.get_by_role("checkbox", name="log x", exact=True).click()
    page.wait_for_function(f"{PICTURES}.every(last => last.along !== 'log')")
    page.get_by_label("axis", exact=True).click()
    page.get_by_role("option", name="over time").click()
    page.wait_for_function(f"{PICTURES}.every(last => last.x !== 239)")
    took = [(run.record.status.ended_at, run.record.status.started_at) for run in story[:2]]
    most = max((datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() for end, begin in took)
    assert 0 < page.evaluate(f"Math.max(...{PICTURES}.map(last => last.x))") <= most
    assert page.evaluate(f"{PICTURES}.every(last => last.traces === 4 && last.axis === 'log')")  # what was chosen stays


def test_runs_are_filtered_sorted_grouped_and_marked(console, page, story, seemly, picture):
    """The address keeps what the page shows: after a reload, in a copy, on the way back."""
    ids = [run.run_id for run in story]
    page.goto(console.root)
    field, rows, links = page.get_by_label("Filter", exact=True), page.locator("tbody tr"), page.locator("tbody td a")
    field.fill("hp.learning_r")
    page.wait_for_function("document.querySelector('.q-field__shadow')?.textContent.length > 0")
    field.press("Tab")
    expect(field).to_have_value("hp.learning_rate:")
    field.fill("hp.learning_rate>=0.1 state:succeeded")
    expect(links).to_have_text([ids[1]])
    field.fill("least-squares")
    expect(rows).to_have_count(3)
    heads, columns = page.locator("thead th"), page.locator(".q-select").filter(has=page.get_by_label("Columns"))
    page.get_by_label("Columns").click()
    page.keyboard.type("metric.loss.min")
    page.get_by_role("option", name="metric.loss.min", exact=True).click()
    usual = ["", "run", "state", "created", "took", "metric.loss", "hp.labels", "hp.learning_rate", "target"]
    expect(heads).to_have_text([*usual, "metric.loss.min"])  # it is added to what is shown
    page.keyboard.press("Escape")
    columns.locator(".q-field__focusable-action").click()
    expect(heads).to_have_text([*usual[:5], "loss", *usual[6:]])
    page.get_by_label("Columns").click()
    columns.locator(".q-field__focusable-action").click()
    for column in ("hp.learning_rate", "metric.loss.min", "took"):
        page.keyboard.type(column)
        page.get_by_role("option", name=column, exact=True).click()
        page.get_by_label("Columns").fill("")
    page.keyboard.press("Escape")
    head = page.locator("thead th").filter(has_text="hp.learning_rate")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(links.first).to_have_text(ids[0])
    page.wait_for_url("**sort=hp.learning_rate**")
    head.get_by_role("button").click()
    expect(head).to_have_attribute("aria-sort", "descending")
    page.wait_for_url("**sort=-hp.learning_rate**")
    page.reload()
    expect(page.locator("thead th")).to_have_text(["", "run", "state", "hp.learning_rate ↓", "metric.loss.min", "took"])
    expect(field).to_have_value("least-squares")
    page.go_back()
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("button", name="Save view").click()
    page.get_by_label("Name of the view").fill("by rate")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("saved").wait_for()
    for run_id in ids[1:]:
        page.get_by_role("checkbox", name=f"compare {run_id}").check()
    page.get_by_label("Tag", exact=True).fill("baseline")
    page.get_by_role("button", name="Add tag").click()
    expect(page.locator(".ct-tag")).to_have_text(["baseline"] * 2)
    page.get_by_label("Title or note").fill("half price")
    page.get_by_role("button", name="Set note").click()
    page.get_by_role("button", name="Star", exact=True).click()
    expect(page.get_by_role("link", name="★")).to_have_count(2)
    assert [run.mark().note for run in story] == ["", "half price", "half price"]
    page.get_by_role("button", name="Remove star").click()
    expect(page.get_by_role("link", name="★")).to_have_count(0)
    page.get_by_role("button", name="Set title").click()
    expect(page.get_by_role("link", name="half price")).to_have_count(2)
    page.get_by_label("Title or note").fill("")
    page.get_by_role("button", name="Set title").click()
    expect(page.get_by_role("link", name="half price")).to_have_count(0)
    picture(page, "console-columns")
    seemly(page)
    page.get_by_role("button", name="Choose none").click()  # else the file has the chosen ones
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV", exact=True).click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "run,state,hp.learning_rate,metric.loss.min,took" and lines[1].startswith(
        f"{ids[0]},SUCCEEDED,0.05,"
    )
    page.get_by_label("Group by").click()
    page.keyboard.type("hp.learning_rate")
    page.get_by_role("option", name="hp.learning_rate", exact=True).click()
    expect(rows).to_have_count(2)
    expect(rows.first.locator("td").nth(1)).to_have_text("2")
    expect(rows.first.locator("td").nth(2)).to_have_text("0.3 (0.3 to 0.3)")
    seemly(page)
    rows.first.get_by_role("link").click()
    expect(links).to_have_count(2)
    page.goto(console.root)
    page.get_by_label("View", exact=True).click()
    page.get_by_role("option", name="by rate").click()
    expect(head).to_have_attribute("aria-sort", "ascending")


def test_what_is_written_to_a_run_is_shown_in_lists(console, page, story, seemly):
    page.goto(f"{console.root}/runs/{story[0].run_id}")
    page.get_by_label("Title").fill("slow one")
    page.get_by_label("Tags, separated by commas").fill("best, first")
    page.get_by_label("Note", exact=True).fill("half the rate")
    page.get_by_role("button", name="Save", exact=True).click()
    page.get_by_text("saved").wait_for()
    page.get_by_role("checkbox", name="Star").click()
    page.goto(f"{console.root}/?filter=note~half+is:starred")
    expect(page.locator("tbody td a")).to_have_text(["★ slow one"])
    assert story[0].mark().tags[-2:] == ("best", "first")
    assert story[0].mark(archive=True).archived
    expect(page.locator("tbody tr")).to_have_count(0)
    story[0].mark(archive=False, star=False, title="", untag=["best", "first"])


def test_a_failed_run_says_why_and_a_good_one_shows_its_curves(console, page, story, picture):
    page.goto(f"{console.root}/runs/{story[2].run_id}")
    why = page.get_by_role("region", name="Why it failed")
    expect(why).to_contain_text("FileNotFoundError")
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 2")
    picture(page, "console-failed")
    expect(page.locator(".ct-log")).to_contain_text("FileNotFoundError")
    why.get_by_role("button", name="Show it in the log").press("Enter")
    expect(page.locator(".ct-found")).to_contain_text("FileNotFoundError")
    expect(page.get_by_role("region", name="Lines of the log")).to_be_focused()
    page.goto(f"{console.root}/runs/{story[1].run_id}")
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 2")
    expect(page.get_by_role("region", name="Checkpoints", exact=True).locator("tbody tr")).to_have_count(4)
    expect(page.locator(".ct-log")).to_contain_text("step 220")
    picture(page, "console-run", whole=True)
    with page.expect_download() as download:
        page.get_by_role("button", name="Report").press("Enter")
    shared = Path(download.value.path()).read_text()
    assert download.value.suggested_filename == f"{story[1].run_id}.html" and "Plotly.newPlot" in shared
    page.get_by_role("slider", name="smoothing").press("ArrowRight")
    page.wait_for_url("**smoothing=0.01")
    page.get_by_role("checkbox", name="log y", exact=True).press("Space")
    page.wait_for_url("**smoothing=0.01&log=True")
    page.reload()  # the address keeps how curves are drawn
    page.wait_for_function(
        f"{PICTURES}.length === 2 && {PICTURES}.every(last => last.traces === 2 && last.axis === 'log')"
    )
    page.emulate_media(color_scheme="dark")
    expect(page.locator("body.body--dark")).to_have_count(1)
    picture(page, "console-dark")
    page.set_viewport_size({"width": 400, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 400")
    picture(page, "console-narrow")


def test_comparing_what_there_is_not_is_said_in_a_sentence(console, page, story, seemly):
    for asked in ("", story[0].run_id, f"{story[0].run_id},nobody", ",".join(f"r{n}" for n in range(201))):
        page.goto(f"{console.root}/compare?runs={asked}")
        expect(page.get_by_text("Error")).to_be_visible()
    seemly(page)


def test_a_printed_report_keeps_the_last_lines_of_a_failure(visitor, story, tmp_path):
    file = story[2].report(tmp_path / "failed.html")
    page = visitor.new_page()
    page.goto(file.as_uri())
    page.emulate_media(media="print")
    last = page.locator("pre.last")
    expect(last).to_contain_text("FileNotFoundError")
    assert last.evaluate("box => box.scrollHeight <= box.clientHeight && box.scrollWidth <= box.clientWidth")
    page.close()


def test_the_timeline_is_whole_at_every_width(console, page, tmp_path, seemly):
    """Of a run that has moved between priced targets: its table has the most columns."""
    store, job = Store(console.home), {"name": "moved", "source": "."}
    price = {"usd_per_hour": 32.77, "as_of": "2026-11-01", "source": "list"}
    for number, target in enumerate(("a-cluster-with-a-long-name", "sagemaker-us-east-1"), 1):
        manifest = {"secrets": {}, "nodes": 2, "processes_per_node": 8, "argv": ["train.py"], "max_runtime_s": 86400}
        plan = Plan("local", "moved-1", number, {}, {"sha256": "0"}, manifest, job, target, price=price)
        if number == 1:
            assert store.intend(plan, identity="moved", owner=Process.here())
        else:
            assert store.next_attempt(plan, owner=Process.here())
        store.accept(plan.attempt_id, "h")
        state = State.PREEMPTED if number == 1 else State.SUCCEEDED
        store.record(
            plan.attempt_id, status=Status(state, 0, "", f"2026-01-0{number}T00:00:00Z", f"2026-01-0{number}T20:00:00Z")
        )
    store.set_status("moved-1", Status(State.SUCCEEDED, 0, "", "2026-01-01T00:00:00Z", "2026-01-02T20:00:00Z"))
    page.goto(f"{console.root}/runs/moved-1")
    table = page.get_by_role("region", name="Attempts")
    expect(table.locator("thead th")).to_have_text(["attempt", "on", "state", "took", "USD", "when"])
    for width in (1024, 1100, 1101, 1180, 1440, 1920):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function("document.querySelector('[aria-label=Attempts]').scrollWidth <= "
                               "document.querySelector('[aria-label=Attempts]').clientWidth")  # fmt: skip
        assert table.locator(".ct-bar-track").first.bounding_box()["width"] > 40, width
    seemly(page)


def test_one_flow_by_keyboard_alone(console, page, story):
    """Filter with completion, sort, choose, compare, change the axis, smooth, go back, open a run, jump to its failure's line."""

    def reach(target) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(120):
            if target.evaluate("element => element === document.activeElement"):
                return
            page.keyboard.press("Tab")
        raise AssertionError(f"Tab does not reach {target}")

    page.goto(f"{console.root}/?columns=hp.learning_rate,took")
    rows, links = page.locator("tbody tr"), page.locator("tbody td a")
    expect(rows.first).to_be_visible()
    page.keyboard.press("/")
    field = page.get_by_label("Filter", exact=True)
    expect(field).to_be_focused()
    page.keyboard.type("hp.learning_r")
    page.wait_for_function("document.querySelector('.q-field__shadow')?.textContent.length > 0")
    page.keyboard.press("Tab")
    expect(field).to_have_value("hp.learning_rate:")
    page.keyboard.type("0.05,0.3")
    expect(rows).to_have_count(3)
    page.wait_for_url("**filter=**")
    head = page.locator("thead th").filter(has_text="hp.learning_rate")
    reach(head.get_by_role("button"))
    page.keyboard.press("Enter")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(links.first).to_have_text(story[0].run_id)
    for run in story[:2]:
        reach(page.get_by_role("checkbox", name=f"compare {run.run_id}"))
        page.keyboard.press("Space")
    reach(page.get_by_role("link", name="cloudtrain", exact=True))  # round the page, to what is above the table
    reach(page.get_by_role("button", name="Compare 2 runs"))
    page.keyboard.press("Enter")
    expect(page.locator("main h1")).to_have_text("Compare runs")
    page.wait_for_function(f"{PICTURES}.length === 2")
    reach(page.get_by_label("axis", exact=True))
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("option", name="over time")).to_be_visible()
    while page.get_by_role("option", name="over time").get_attribute("aria-selected") != "true":
        if "q-manual-focusable--focused" in (page.get_by_role("option", name="over time").get_attribute("class") or ""):
            page.keyboard.press("Enter")
            break
        page.keyboard.press("ArrowDown")
    page.wait_for_url("**over=time**")
    page.wait_for_function(f"{PICTURES}.every(last => last.title === 'time (s)')")
    reach(page.get_by_role("slider", name="smoothing"))
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**smoothing=0.01**")
    page.go_back()  # headless Chromium has no Alt+Left
    expect(page.locator("main h1")).to_have_text("Runs")
    expect(head).to_have_attribute("aria-sort", "ascending")
    expect(field).to_have_value("hp.learning_rate:0.05,0.3")
    reach(page.get_by_role("link", name=story[2].run_id))
    page.keyboard.press("Enter")
    why = page.get_by_role("region", name="Why it failed")
    expect(why).to_contain_text("FileNotFoundError")
    expect(page.locator(".ct-log")).to_contain_text("FileNotFoundError")
    reach(why.get_by_role("button", name="Show it in the log"))
    page.keyboard.press("Enter")
    expect(page.locator(".ct-found")).to_contain_text("FileNotFoundError")
    expect(page.get_by_role("region", name="Lines of the log")).to_be_focused()
