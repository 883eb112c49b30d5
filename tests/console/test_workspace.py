"""The console as a workspace: charts that are arranged, runs that are hidden, compared and opened from their curves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from tests.console.test_history import plan

METRICS = (
    "throughput/tokens_per_s", *(f"layers/{number}/grad_norm" for number in range(14)), "eval/loss", "train/acc", "train/loss",
)  # fmt: skip
RUNS = 4
ENDED = Status(State.SUCCEEDED, 0, "", "2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00")
CHARTS = "[...document.querySelectorAll('.ct-plots .js-plotly-plot')].filter(chart => chart.data)"
NAMES = f"JSON.stringify({CHARTS}[0]?.data.map(trace => trace.name))"


def add(store: Store, run_id: str, **job) -> None:
    """Add a run that its platform has accepted."""
    base = plan(run_id)
    shape = {"processes_per_node": 1, "argv": ["train.py"], "max_runtime_s": 60}
    whole = replace(base, job={**base.job, **job}, manifest={**base.manifest, **shape})
    assert store.intend(whole, identity=run_id, owner=Process.here())
    store.accept(f"{run_id}-a1", "h")


@pytest.fixture(scope="module")
def ids(console) -> list[str]:
    """Ended runs of the job `lm`, the oldest first; the learning rate of each is another."""
    store, found = Store(console.home), [f"lm-{number:06x}" for number in range(RUNS)]
    for number, run_id in enumerate(found):
        add(store, run_id, name="lm", hyperparameters={"lr": 10.0**-number, "bs": 8})
        points = [
            Row(0, step, "2026-01-01T00:00:30Z", step, name, (1 + number) * math.exp(-step / 10))
            for step in range(30)
            for name in METRICS
        ]
        store.record(f"{run_id}-a1", status=ENDED, metrics=points)
        store.set_status(run_id, ENDED)
        store.acknowledge(run_id)
    return found


def titles(page) -> list[str]:
    """Return the titles of the charts, from the top."""
    return [
        each.removeprefix("curve of ")
        for each in page.locator(".ct-chart").evaluate_all("all => all.map(one => one.ariaLabel)")
    ]


def test_the_loss_is_first_and_charts_are_closed_pinned_moved_and_hidden(console, page, ids, seemly, picture):
    page.goto(f"{console.root}/runs/{ids[0]}")
    page.wait_for_function(f"{CHARTS}.length === 5")
    assert titles(page) == ["train/loss", "train/acc", "eval/loss", "layers/0..13/grad_norm", "throughput/tokens_per_s"]
    sections = page.locator(".ct-sections > details > summary")
    expect(sections).to_have_text(["train (2)", "eval (1)", "layers (1)", "throughput (1)"])
    assert page.evaluate(f"{CHARTS}[3].data.map(trace => trace.name)") == [str(number) for number in range(14)]
    expect(page.locator("main h1")).to_have_text("lm-1")
    picture(page, "workspace-run")

    sections.nth(2).click()
    page.wait_for_function(f"{CHARTS}.length === 4")
    handle = page.locator("[data-chart='train/acc']")
    page.get_by_role("group", name="curve of train/acc").hover()
    handle.drag_to(page.get_by_role("group", name="curve of train/loss"))
    page.wait_for_function("document.querySelector('.ct-chart')?.ariaLabel === 'curve of train/acc'")
    page.get_by_role("button", name="Hide eval/loss").press("Enter")
    expect(sections).to_have_text(["train (2)", "layers (1)", "throughput (1)"])  # each press draws all buttons anew
    page.get_by_role("button", name="Pin throughput/tokens_per_s").press("Enter")
    expect(sections).to_have_text(["Pinned (1)", "train (2)", "layers (1)"])
    page.wait_for_function(f"{CHARTS}.length === 3")
    seemly(page)
    page.goto(f"{console.root}/runs/{ids[1]}")  # another run of the project
    expect(sections).to_have_text(["Pinned (1)", "train (2)", "layers (1)"])
    page.wait_for_function(f"{CHARTS}.length === 3")
    assert titles(page) == ["throughput/tokens_per_s", "train/acc", "train/loss"]
    page.get_by_role("button", name="Show eval/loss").press("Enter")
    expect(sections).to_have_text(["Pinned (1)", "train (2)", "eval (1)", "layers (1)"])
    page.get_by_role("button", name="Unpin throughput/tokens_per_s").press("Enter")
    expect(sections).to_have_text(["train (2)", "eval (1)", "layers (1)", "throughput (1)"])
    page.get_by_role("button", name="Move up train/loss").press("Enter")
    page.wait_for_function("document.querySelector('.ct-chart')?.ariaLabel === 'curve of train/loss'")
    sections.nth(2).press("Enter")
    page.wait_for_function(f"{CHARTS}.length === 5")


def test_runs_are_hidden_isolated_coloured_and_compared_with_a_baseline(console, page, ids, seemly, picture):
    page.goto(f"{console.root}/compare?runs={','.join(ids)}&search=loss")
    page.wait_for_function(f"{CHARTS}.length === 2 && {CHARTS}[0].data.length === {RUNS}")
    labels = page.evaluate(f"{CHARTS}[0].data.map(trace => trace.name)")
    page.get_by_role("button", name=f"hide {labels[0]}", exact=True).click()
    page.wait_for_function(f"{CHARTS}.every(chart => chart.data.length === {RUNS - 1})")
    page.get_by_role("button", name=f"only {labels[2]}", exact=True).click()
    page.wait_for_function(f"{NAMES} === '{chr(91)}\"{labels[2]}\"{chr(93)}'")
    page.get_by_role("button", name=f"only {labels[2]}", exact=True).press("Enter")
    page.wait_for_function(f"{CHARTS}[0].data.length === {RUNS}")
    page.get_by_label(f"colour of {labels[1]}").fill("#ff00aa")
    page.wait_for_function(f"{CHARTS}[0].data[1].line.color === '#ff00aa'")
    page.get_by_role("button", name=f"baseline {labels[0]}", exact=True).press("Enter")
    page.wait_for_function(f"{CHARTS}[0].data[0].y.every(value => value === 0)")
    assert page.evaluate(f"{CHARTS}[0].data[1].y[0]") == pytest.approx(1.0)
    page.get_by_role("button", name=f"hide {labels[3]}", exact=True).press("Enter")
    page.wait_for_url("**hide=3&baseline=0&colours=1-ff00aa")
    page.reload()  # the address keeps it
    page.wait_for_function(f"{CHARTS}[0]?.data.length === {RUNS - 1} && {CHARTS}[0].data[0].y[0] === 0")
    assert page.evaluate(f"{CHARTS}[0].data[1].line.color") == "#ff00aa"
    picture(page, "workspace-compare")
    seemly(page)


def test_one_chart_shows_some_of_the_runs(console, page, ids, seemly):
    page.goto(f"{console.root}/compare?runs={','.join(ids)}&search=loss")
    page.wait_for_function(f"{CHARTS}.length === 2 && {CHARTS}[0].data.length === {RUNS}")
    labels = page.evaluate(f"{CHARTS}[0].data.map(trace => trace.name)")
    page.get_by_role("button", name="Runs of train/loss").press("Enter")
    dialog = page.get_by_role("dialog", name="Runs of train/loss")
    dialog.get_by_label("Runs in this chart").click()
    for label in (labels[3], labels[1]):
        page.get_by_role("option", name=label, exact=True).click()
    page.keyboard.press("Escape")  # closes the list of options
    dialog.get_by_role("button", name="Show these").click()
    page.wait_for_function(f"{NAMES} === '{json.dumps([labels[1], labels[3]], separators=(',', ':'))}'")
    assert page.evaluate(f"{CHARTS}[1].data.length") == RUNS  # the other chart
    expect(page.get_by_role("group", name="curve of train/loss")).to_contain_text("2 of the 4 runs")
    seemly(page)
    page.reload()  # the address keeps it
    page.wait_for_function(f"{CHARTS}.length === 2 && {CHARTS}[0].data.length === 2")
    page.get_by_role("button", name="Runs of train/loss").press("Enter")
    dialog.get_by_role("button", name="Show all").click()
    page.wait_for_function(f"{CHARTS}[0].data.length === {RUNS}")


def test_the_rows_of_a_comparison_are_searched(console, page, ids):
    page.goto(f"{console.root}/compare?runs={','.join(ids[:2])}")
    rows = page.get_by_role("region", name="Results").locator("tbody td:first-child")
    expect(rows).to_have_count(len(METRICS))
    page.get_by_label("Filter rows").fill("eval/")
    expect(rows).to_have_text(["eval/loss"])
    expect(page.get_by_role("region", name="Hyperparameters")).to_have_count(0)


def test_a_click_on_a_curve_opens_its_run(console, page, ids):
    page.goto(f"{console.root}/compare?runs={','.join(ids)}&search=train/loss")
    page.wait_for_function(f"{CHARTS}[0]?.querySelectorAll('.scatterlayer .lines path').length === {RUNS}")
    place = page.evaluate(
        f"""(() => {{ const chart = {CHARTS}[0], box = chart.getBoundingClientRect(), full = chart._fullLayout;
        const across = full.xaxis._offset + full.xaxis.d2p(10), down = full.yaxis._offset + full.yaxis.d2p(chart.data[2].y[10]);
        return [box.x + across, box.y + down]; }})()"""
    )
    page.mouse.move(*place)
    expect(page.locator(".hoverlayer .legend")).to_be_visible()  # plotly has found the curves below the pointer
    page.mouse.click(*place)
    page.wait_for_url(f"**/runs/{ids[2]}")
    page.go_back()
    expect(page.locator("main h1")).to_have_text("Compare runs")


def test_a_saved_title_is_the_heading_at_once_and_a_short_name_finds_the_run(console, page, ids):
    page.goto(f"{console.root}/runs/{ids[3]}")
    expect(page.locator("main h1")).to_have_text("lm-4")
    page.get_by_label("Title").fill("<b>best</b> so far")
    page.get_by_role("button", name="Save", exact=True).click()
    expect(page.locator("main h1")).to_have_text("<b>best</b> so far")
    assert Store(console.home).find("lm-4").run_id == ids[3]


def test_runs_are_chosen_all_at_once_or_with_shift_and_pinned_on_top(console, page, ids, seemly, picture):
    page.goto(console.root)
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(RUNS)
    expect(page.get_by_role("columnheader", name="hp.lr")).to_be_visible()  # it differs; the batch size does not
    expect(page.get_by_role("columnheader", name="hp.bs")).to_have_count(0)
    page.get_by_role("checkbox", name="choose all rows").check()
    expect(page.get_by_role("button", name=f"Compare {RUNS} runs")).to_be_visible()
    page.get_by_role("checkbox", name="choose all rows").uncheck()
    expect(page.get_by_role("button", name="Compare", exact=True)).to_be_visible()
    boxes = page.get_by_role("checkbox", name="compare lm")
    boxes.nth(1).click()
    boxes.nth(3).click(modifiers=["Shift"])
    expect(page.get_by_role("button", name="Compare 3 runs")).to_be_visible()
    picture(page, "workspace-runs")
    seemly(page)
    page.get_by_role("checkbox", name="choose all rows").check()
    expect(page.get_by_role("button", name=f"Compare {RUNS} runs")).to_be_visible()
    page.get_by_role("checkbox", name="choose all rows").uncheck()
    expect(
        page.get_by_role("button", name="Compare", exact=True)
    ).to_be_visible()  # the server has answered: no box is checked
    page.get_by_role("checkbox", name=f"compare {ids[0]}").check()  # the oldest, at the end
    expect(page.get_by_text("1 run chosen")).to_be_visible()
    page.get_by_role("button", name="Star", exact=True).click()
    expect(rows.first).to_contain_text("★")
    expect(rows.first).to_contain_text("lm-1")
    page.get_by_role("button", name="Cancel runs").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.get_by_text("1 run cancelled").or_(page.get_by_text(ids[0] + ":"))).to_be_visible()


def test_axes_of_the_parallel_coordinates_are_chosen_and_dragged(console, page, ids):
    page.goto(
        f"{console.root}/compare?runs={','.join(ids)}&search=train/loss&axes=hp.lr,metric.train/loss,metric.eval/loss"
    )
    parallel = page.get_by_role("group", name="parallel coordinates")
    names = parallel.locator(".axis-title")
    expect(names).to_have_text(["hp.lr", "metric.train/loss", "metric.eval/loss"])
    parallel.scroll_into_view_if_needed()
    first, last = names.first.bounding_box(), names.last.bounding_box()
    page.mouse.move(first["x"] + first["width"] / 2, first["y"] + first["height"] / 2)
    page.mouse.down()
    page.mouse.move(last["x"] + last["width"], last["y"] + last["height"] / 2, steps=12)
    page.mouse.up()
    titles = "[...document.querySelectorAll('[aria-label=\"parallel coordinates\"] .axis-title')]"
    across = "(one, other) => one.getBoundingClientRect().x - other.getBoundingClientRect().x"
    page.wait_for_function(f"{titles}.sort({across}).at(-1).textContent === 'hp.lr'")
    page.get_by_label("Axes", exact=True).click()
    page.get_by_role("option", name="metric.eval/loss", exact=True).click()
    kept = "axes=hp.lr,metric.train%2Floss"  # the console writes the slash so; the address that was opened does not
    page.wait_for_url(lambda url: url.endswith(kept))
    expect(names).to_have_text(["metric.train/loss", "hp.lr"])  # where it was dragged


def test_charts_are_resized_and_the_layout_is_shared_as_a_file(console, page, ids, tmp_path):
    page.goto(f"{console.root}/runs/{ids[0]}")
    page.wait_for_function(f"{CHARTS}.length === 5")
    chart, handle = (
        page.get_by_role("group", name="curve of train/loss"),
        page.get_by_role("button", name="Resize train/loss"),
    )
    page.get_by_role("group", name="curve of train/loss").hover()
    before, place = chart.bounding_box(), handle.bounding_box()
    page.mouse.move(place["x"] + 5, place["y"] + 5)
    page.mouse.down()
    page.mouse.move(place["x"] + before["width"], place["y"] + 105, steps=8)
    page.mouse.up()
    height = "document.querySelector('[aria-label=\"curve of train/loss\"] .main-svg')?.getBoundingClientRect().height"
    page.wait_for_function(f"{height} === 350")
    page.wait_for_function("document.querySelector('.ct-chart.ct-spread')?.ariaLabel === 'curve of train/loss'")
    assert chart.bounding_box()["width"] > 1.8 * before["width"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Save layout").click()
    download.value.save_as(tmp_path / "layout.json")
    handle.press("ArrowUp")
    page.wait_for_function(f"{height} === 310")
    handle.press("ArrowLeft")
    page.wait_for_function("!document.querySelector('.ct-spread')")
    page.goto(f"{console.root}/runs/{ids[1]}")  # another run of the project
    page.wait_for_function(f"{height} === 310")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Load layout").press("Enter")
    chooser.value.set_files(tmp_path / "layout.json")
    page.wait_for_function(f"{height} === 350 && document.querySelector('.ct-spread')")
    (tmp_path / "other.json").write_text("[1]")
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Load layout").click()
    chooser.value.set_files(tmp_path / "other.json")
    expect(page.get_by_text("this file has no layout of charts")).to_be_visible()


def test_a_chart_that_is_removed_while_plotly_loads_is_left_alone(console, page, ids):
    """Else plotly.js fails: `Resize must be passed a displayed plot div element`, which the fixture `page` would see."""
    held = []
    page.route("**/esm/**/index.js", lambda route: held.append(route))
    page.goto(f"{console.root}/runs/{ids[0]}", wait_until="domcontentloaded")
    expect(page.locator(".ct-chart")).to_have_count(5)
    page.get_by_label("Metrics", exact=True).fill("eval/loss")
    expect(page.locator(".ct-chart")).to_have_count(1)
    assert held and page.evaluate(f"{CHARTS}.length") == 0
    for route in held:
        route.continue_()
    page.wait_for_function(f"{CHARTS}[0]?.querySelector('.lines path')")
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def test_a_live_run_shows_what_its_nodes_use_now(console, page, ids):
    store = Store(console.home)
    add(store, "live-1", name="live")
    assert store.lease("live-1", Process.here(), 600)  # nobody asks its platform
    store.set_status("live-1", Status(State.RUNNING, started_at="2026-01-01T00:00:00Z"))
    used = {"cpu_percent": 250.0, "rss_bytes": 2e9, "gpus": [{"index": 0, "percent": 50.0}]}
    store.record("live-1-a1", events=[Event("live-1-a1", 0, 1, "2026-01-01T00:00:10Z", "usage", used)])
    page.goto(f"{console.root}/runs/live-1")
    expect(page.get_by_role("region", name="Nodes now").locator("tbody td").nth(2)).to_have_text("250%")
    ended = Status(State.SUCCEEDED, 0, "", "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z")
    store.record("live-1-a1", status=ended)
    store.set_status("live-1", ended)
    expect(page.get_by_role("region", name="Nodes now")).to_be_hidden()
    Run("live-1", store).mark(archive=True)


@pytest.fixture(scope="module")
def sweep(console, ids) -> str:
    """A sweep whose trials are all runs but the oldest."""
    sweeps = SweepHistory(console.home)
    keys = {"job": {"name": "lm", "source": ".", "entrypoint": "train.py"}, "method": "grid", "metric": {"name": "loss"},
            "parameters": {"lr": {"values": [0.1, 0.2, 0.3]}}}  # fmt: skip
    sweeps.add(
        "lm-sweep-1", "lm", {"document": keys, "folder": ".", "given": "arguments", "targets": ["local"], "bundle": "0"}
    )
    for number, (rate, loss) in enumerate(((0.2, 0.5), (0.1, 0.9), (0.3, 0.1)), 1):
        sweeps.add_trial("lm-sweep-1", number, {"lr": rate}, {}, "local")
        sweeps.submitted("lm-sweep-1", number, ids[number])
        sweeps.end_trial("lm-sweep-1", number, [loss])
    assert sweeps.set_state("lm-sweep-1", "SUCCEEDED")
    return "lm-sweep-1"


def test_a_sweep_is_one_row_that_stands_for_its_runs(console, page, ids, sweep, seemly, picture):
    Run(ids[0], Store(console.home)).mark(star=True)
    page.goto(console.root)
    rows, names = page.locator("tbody tr"), page.locator("tbody td:nth-child(2) a")
    expect(names).to_have_text([f"★ {ids[0]}", sweep])
    expect(rows.nth(1)).to_contain_text("3/3 ok")
    expect(page.get_by_role("columnheader", name="loss/best")).to_be_visible()
    expect(rows.nth(1).get_by_role("cell", name="0.1", exact=True)).to_be_visible()
    expect(page.get_by_text("1 to 2 of 2, 4 runs")).to_be_visible()
    page.get_by_role("checkbox", name=f"choose the runs of {sweep}").check()
    expect(page.get_by_text("3 runs chosen")).to_be_visible()
    page.get_by_label("Tag", exact=True).fill("tuned")
    page.get_by_role("button", name="Add tag").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of 3 runs").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert {line.split(",")[0] for line in lines} == {"run", *ids[1:]}
    heads, first = (line.split(",") for line in lines[:2])
    assert float(first[heads.index("metric.train/loss")]) > 0  # what is shown
    picture(page, "workspace-sweep-row")
    seemly(page)
    page.get_by_role("button", name="Archive").click()
    expect(names).to_have_text([f"★ {ids[0]}"])
    page.get_by_label("Filter", exact=True).fill("is:archived tag:tuned")
    expect(rows).to_have_count(3)
    page.get_by_role("checkbox", name="choose all rows").check()
    page.get_by_role("button", name="Restore").click()
    expect(rows).to_have_count(0)
    page.get_by_label("Filter", exact=True).fill("")
    expect(names).to_have_text([f"★ {ids[0]}", sweep])
    page.get_by_role("checkbox", name=f"choose the runs of {sweep}").check()
    page.get_by_role("button", name="Compare 3 runs").click()
    expect(page.locator(".ct-legend a")).to_have_count(3)
    page.go_back()
    names.nth(1).click()
    page.wait_for_url(f"**/sweeps/{sweep}")


def test_the_trials_of_a_sweep_are_sorted(console, page, sweep, seemly):
    page.goto(f"{console.root}/sweeps/{sweep}")
    trials = page.get_by_role("region", name="All trials")
    first = trials.locator("tbody td:first-child")
    expect(first).to_have_text(["3", "2", "1"])
    trials.get_by_role("button", name="loss").click()
    expect(first).to_have_text(["3", "1", "2"])
    trials.get_by_role("button", name="lr").click()
    trials.get_by_role("button", name="lr").press("Enter")
    expect(first).to_have_text(["3", "1", "2"])
    expect(trials.get_by_role("columnheader", name="lr")).to_have_attribute("aria-sort", "descending")
    seemly(page)
