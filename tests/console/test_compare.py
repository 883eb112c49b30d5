"""The page that compares runs, over a history of 200 runs with 40 metrics each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.events import Event, Row, State, Status
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from tests.console.test_history import plan

RUNS = 200
METRICS = ("train/loss", "train/tokens", *(f"eval/acc_{number}" for number in range(38)))
CHARTS = "[...document.querySelectorAll('.ct-plots .js-plotly-plot')].filter(chart => chart.data)"
SCATTER = "document.querySelector('[aria-label=scatter] .js-plotly-plot')"


@pytest.fixture(scope="module")
def ids(console) -> list[str]:
    """Ended runs: two have all metrics, the others one."""
    store, found = Store(console.home), [f"sgd-{number:03d}" for number in range(RUNS)]
    ended = Status(State.SUCCEEDED, 0, "", "2026-01-01T00:00:00+00:00", "2026-01-01T00:01:00+00:00")
    for number, run_id in enumerate(found):
        job = {"name": "sgd", "source": ".", "hyperparameters": {"lr": 10.0 ** -(number % 4), "bs": number}}
        assert store.intend(replace(plan(run_id), job=job), identity=run_id, owner=Process.here())
        store.accept(f"{run_id}-a1", "h")
        events = [Event(f"{run_id}-a1", 0, at, "2026-01-01T00:00:30Z", "metric") for at in range(3)]
        names = METRICS if number < 2 else METRICS[:1]
        points = [
            Row(
                event.node,
                event.seq,
                event.at,
                10 * event.seq,
                name,
                1e-5 * (number + event.seq + 1) if name != "train/tokens" else event.seq * 4096.0,
            )
            for event in events
            for name in names
        ]
        used = [
            Event(f"{run_id}-a1", node, 10 + at, f"2026-01-01T00:00:{10 * at:02d}Z", "usage", {
                "cpu_percent": 100.0 + number, "rss_bytes": 2e9, "gpus": [{"index": 0, "percent": 50.0 + number + node}]})
            for at in range(4) for node in range(2)
        ]  # fmt: skip
        store.record(f"{run_id}-a1", status=ended, metrics=points, events=used if number < 40 else ())
        store.set_status(run_id, ended)
        store.acknowledge(run_id)
    return found


def test_every_metric_of_two_runs_is_reached(console, page, ids, seemly):
    page.goto(f"{console.root}/compare?runs={','.join(ids[:2])}")
    expect(page.locator(".ct-legend a")).to_have_text(["bs 0, lr 1", "bs 1, lr 0.1"])
    page.wait_for_function(f"{CHARTS}.length === 24")
    expect(page.get_by_text("24 of 40 metrics are shown")).to_be_visible()
    page.get_by_role("button", name="Show all").press("Enter")
    page.wait_for_function(f"{CHARTS}.length === 40")
    expect(page.get_by_text("eval (38)")).to_be_visible()
    page.get_by_label("Metrics", exact=True).fill("train/")
    page.wait_for_function(f"{CHARTS}.length === 2")
    page.get_by_label("axis", exact=True).click()
    page.get_by_role("option", name="over tokens").click()
    page.wait_for_function(f"{CHARTS}[0].layout.xaxis.title.text === 'tokens'")
    assert page.evaluate(f"{CHARTS}[0].data.map(trace => [trace.name, ...trace.x])") == [
        ["bs 0, lr 1", 0, 4096, 8192], ["bs 1, lr 0.1", 0, 4096, 8192],
    ]  # fmt: skip
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[:2] == [
        "run,label,metric,attempt,step,epoch,at,value",
        f'{ids[0]},"bs 0, lr 1",train/loss,1,0,,2026-01-01T00:00:30Z,1e-05',
    ]
    assert {line.split(",")[3] for line in lines[1:]} == {"train/loss", "train/tokens"}
    with page.expect_download() as download:
        page.get_by_role("button", name="Share as one file").press("Enter")
    shared = Path(download.value.path()).read_text()
    assert download.value.suggested_filename == "comparison.html" and "2 runs compared" in shared
    assert '"bs 0, lr 1"' in shared and '"text":"tokens"' in shared.replace('": "', '":"')  # the page's axis
    camera = page.locator(".ct-plots [data-title='Download plot as a PNG']").first
    with page.expect_download() as download:
        camera.dispatch_event("click")
    assert Path(download.value.path()).read_bytes().startswith(b"\x89PNG")
    expect(page.locator(".notifier-note")).to_have_count(0)  # plotly's message about the picture goes after seconds
    seemly(page)


USE = "[...document.querySelectorAll('[aria-label=\"use of the nodes of each run\"] .js-plotly-plot')]"


def test_what_the_nodes_used_is_compared_and_a_column(console, page, ids, seemly):
    page.goto(f"{console.root}/compare?runs={','.join(ids[:2])}")
    page.wait_for_function(f"{USE}.filter(chart => chart.data).length === 3")
    titles = [chart.get_attribute("aria-label") for chart in page.get_by_role("group").filter(has_text="percent").all()]
    assert "GPUs (percent)" in titles
    drawn = page.evaluate(f"{USE}.at(-1).data.map(trace => [trace.name, [...trace.x], [...trace.y]])")
    assert drawn == [["bs 0, lr 1", [0, 10, 20, 30], [50.5] * 4], ["bs 1, lr 0.1", [0, 10, 20, 30], [51.5] * 4]]
    assert page.evaluate(f"{USE}.at(-1).layout.xaxis.title.text") == "time (s)"
    page.goto(f"{console.root}/compare?runs={','.join(ids[:40])}&y=system.gpu")
    page.wait_for_function(f"{SCATTER}?.layout?.yaxis.title.text === 'system.gpu'")
    page.get_by_role("button", name="Draw").press("Enter")  # of many runs at a click
    page.wait_for_function(f"{USE}.filter(chart => chart.data).length === 3 && {USE}.at(-1).data.length === 40")
    page.goto(f"{console.root}/?columns=system.gpu,system.gpu.max&sort=-system.gpu")
    cells = page.locator("tbody tr").first.locator("td")
    expect(cells.nth(1)).to_contain_text(ids[39])
    expect(cells.nth(3)).to_have_text("89.5")
    expect(cells.nth(4)).to_have_text("90")
    seemly(page)


def test_200_runs_are_compared(console, page, ids, picture):
    page.goto(f"{console.root}/compare?runs={','.join(ids)}&search=train/loss&x=hp.lr")
    page.wait_for_function(f"{CHARTS}.length === 1 && {CHARTS}[0].data.length === {RUNS}")
    assert page.evaluate(f"{CHARTS}[0].layout.hovermode") == "closest"
    expect(page.locator(".ct-legend a")).to_have_count(RUNS)
    page.wait_for_function(f"{SCATTER}?.data?.length === {RUNS}")
    titles = f"[{SCATTER}.layout.xaxis.title.text, {SCATTER}.layout.yaxis.title.text]"
    assert page.evaluate(titles) == ["hp.lr", "metric.train/loss"]
    assert page.evaluate(f"[{SCATTER}.data[1].x[0], {SCATTER}.data[1].name]") == [0.1, "bs 1, lr 0.1"]
    page.get_by_role("checkbox", name="log x axis").press("Space")
    page.wait_for_function(f"{SCATTER}.layout.xaxis.type === 'log'")
    page.get_by_label("y axis").first.click()
    page.keyboard.type("hp.bs")
    page.get_by_role("option", name="hp.bs").click()
    page.wait_for_function(f"{SCATTER}.layout.yaxis.title.text === 'hp.bs'")
    page.wait_for_url("**y=hp.bs")
    parallel = page.get_by_role("group", name="parallel coordinates")
    expect(parallel.locator(".axis-title")).to_have_text(["hp.bs", "hp.lr", "metric.train/loss"])
    parallel.scroll_into_view_if_needed()
    picture(page, "console-parallel")
    with page.expect_download() as download:
        page.get_by_role("button", name="Share as one file").press("Enter")
    assert Path(download.value.path()).stat().st_size < 10_000_000


def test_the_hyperparameter_that_decides_comes_first(console, page, ids, seemly):
    page.goto(f"{console.root}/compare?runs={','.join(ids[:40])}&search=train/loss")
    card = page.get_by_role("region", name="Importance of hyperparameters").first
    expect(card.get_by_label("importance for")).to_have_value("metric.train/loss")
    card.get_by_role("button", name="Compute").press("Enter")
    expect(card.locator("tbody tr td:first-child")).to_have_text(["hp.bs", "hp.lr"], timeout=60_000)
    seemly(page)


def test_the_smoothing_slider_is_dragged_by_mouse(console, page, ids):
    page.goto(f"{console.root}/compare?runs={','.join(ids[:2])}&search=train/loss")
    page.wait_for_function(f"{CHARTS}.length === 1")
    drawn = f"JSON.stringify({CHARTS}[0].data.map(trace => [...trace.y]))"
    before = page.evaluate(drawn)
    box = page.get_by_role("slider", name="smoothing").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 2, middle)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.8, middle, steps=5)
    page.mouse.up()
    page.wait_for_url("**smoothing=0.**")  # a slash follows, in the search
    page.wait_for_function(f"before => {drawn} !== before", arg=before)
