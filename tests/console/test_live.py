"""The page of a live run in a real browser: followed, cancelled, resumed."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.console.conftest import console_of, submit

LIVE = """
import json, os, sys, time
from pathlib import Path

rank, folder = int(os.environ["RANK"]), Path(sys.argv[-1])
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is here", flush=True)
step = 0
while not (folder / "end").exists():
    wanted = int((folder / "steps").read_text() or 0) if (folder / "steps").exists() else 0
    while step < wanted:
        if rank == 0:
            point = {"kind": "metric", "step": step, "loss": 1 / (step + 1), "rate": 0.1}
            print("::cloudtrain::" + json.dumps(point), flush=True)
        print(f"rank {rank} has done step {step}", flush=True)
        step += 1
    time.sleep(0.02)
"""


def wait_for_steps(page, *steps: int) -> None:
    """Wait until the first chart of the page draws these steps."""
    drawn = "document.querySelector('.ct-plots .js-plotly-plot')?.data?.at(-1).x"
    page.wait_for_function(f"JSON.stringify({drawn}) === '{json.dumps(steps, separators=(',', ':'))}'")


@pytest.fixture
def orders(tmp_path) -> Iterator[Path]:
    """The folder in which a live run finds what it shall do; it ends with the test."""
    folder = tmp_path / "orders"
    folder.mkdir()
    yield folder
    (folder / "end").touch()


def test_a_live_run_is_followed_cancelled_and_resumed(console, page, seemly, orders, tmp_path):
    run = submit(console, tmp_path / "project", LIVE, str(orders), num_nodes=2, hyperparameters={"lr": "1e-3"})
    page.goto(f"{console.root}/runs/{run.run_id}")
    expect(page.get_by_text(run.run_id, exact=True).first).to_be_visible()
    expect(page.locator(".ct-state").first).to_have_text("RUNNING")
    expect(page.locator(".ct-log")).to_contain_text("rank 1 of 2 is here")
    expect(page.get_by_text("no metrics yet")).to_be_visible()
    (orders / "steps").write_text("3")  # points that are emitted while the page is open
    page.wait_for_function("document.querySelectorAll('.ct-plots .js-plotly-plot .lines').length >= 2")
    expect(page.locator(".ct-log")).to_contain_text("rank 1 has done step 2")
    wait_for_steps(page, 0, 1, 2)
    (orders / "steps").write_text("5")
    wait_for_steps(page, 0, 1, 2, 3, 4)
    assert page.evaluate("document.querySelectorAll('.ct-plots .js-plotly-plot').length") == 2
    seemly(page)
    events = page.locator("details").filter(has=page.locator("summary", has_text=" events"))
    events.locator("summary").click()
    told = events.locator("summary").inner_text()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("dialog")).to_contain_text("This stops all")
    page.get_by_role("button", name="Keep it running").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert not Run(run.run_id, Store(console.home)).record.cancel_requested
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator(".ct-state").first).to_have_text("CANCELLED")
    assert Run(run.run_id, Store(console.home)).record.status.state.value == "CANCELLED"
    expect(events.locator("summary")).not_to_have_text(told)  # there are more of them
    expect(events.get_by_role("region", name="Events")).to_be_visible()  # still opened
    page.get_by_role("button", name="Resume").click()
    expect(page.locator(".ct-state").first).to_have_text("RUNNING")
    (orders / "end").touch()
    expect(page.locator(".ct-state").first).to_have_text("SUCCEEDED")
    attempts = page.get_by_role("region", name="Attempts").locator("tbody tr")
    expect(attempts).to_have_count(2)
    expect(attempts.nth(0)).to_contain_text("CANCELLED")
    expect(attempts.nth(1)).to_contain_text("SUCCEEDED")
    expect(page.get_by_role("button", name="Resume")).to_have_count(0)
    assert len(Store(console.home).attempts(run.run_id)) == 2


def test_several_live_runs_are_cancelled_and_resumed_together(console, page, orders, tmp_path):
    """From the list; and the page of one of them shows where its ranks are."""
    runs = [submit(console, tmp_path / "project", LIVE, str(orders), name="both") for _ in range(2)]
    page.goto(f"{console.root}/?filter=name:both")
    states = page.locator("tbody .ct-state")
    expect(states).to_have_text(["RUNNING"] * 2)
    page.get_by_role("checkbox", name="choose all rows").check()
    page.get_by_role("button", name="Cancel runs").click()
    page.get_by_role("button", name="Keep them running").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    expect(states).to_have_text(["RUNNING"] * 2)
    page.get_by_role("button", name="Cancel runs").click()
    page.get_by_role("button", name="Cancel them").click()
    expect(page.get_by_text("2 runs cancelled")).to_be_visible()
    expect(states).to_have_text(["CANCELLED"] * 2)
    page.get_by_role("button", name="Resume runs").click()
    expect(page.get_by_text("2 runs resumed")).to_be_visible()
    expect(states).to_have_text(["RUNNING"] * 2)
    assert [len(run.attempts) for run in runs] == [2, 2]
    page.goto(f"{console.root}/runs/{runs[0].run_id}")
    expect(page.locator(".ct-log")).to_contain_text("rank 0 of 1 is here")
    page.get_by_role("button", name="Add a log beside").click()
    beside = page.get_by_role("region", name="Lines of log 2")
    expect(beside).to_contain_text("rank 0 of 1 is here")
    page.get_by_label("Search").last.fill("no such text")
    expect(beside).not_to_contain_text("is here")
    expect(page.locator(".ct-log").first).to_contain_text("rank 0 of 1 is here")
    page.get_by_role("button", name="Show stacks").click()
    expect(page.get_by_role("region", name="Stacks")).to_contain_text("train.py")
    (orders / "end").touch()
    expect(page.locator(".ct-state").first).to_have_text("SUCCEEDED")
    expect(page.get_by_role("button", name="Show stacks")).to_be_hidden()


def test_elapsed_step_and_time_to_go_tick(console, page, orders, tmp_path):
    """In the list and on the run's page, without a change of state."""
    run = submit(console, tmp_path / "project", LIVE, str(orders), fit={"steps": 1000})
    (orders / "steps").write_text("100")
    facts = page.get_by_role("region", name="Run", exact=True)
    page.goto(f"{console.root}/runs/{run.run_id}")
    expect(facts).to_contain_text("elapsed")
    expect(facts).to_contain_text("10%")
    expect(facts.locator("dt:text-is('step') + dd")).to_have_text("99")
    elapsed = facts.locator("dt:text-is('elapsed') + dd")
    before = elapsed.inner_text()
    expect(elapsed).not_to_have_text(before)
    (orders / "steps").write_text("600")
    expect(facts).to_contain_text("60%")
    expect(facts).to_contain_text("to go")
    expect(facts.locator("dt:text-is('step') + dd")).to_have_text("599")
    page.goto(f"{console.root}/?filter=run:{run.run_id}&columns=took,step,eta")
    cells = page.locator("tbody tr td")
    expect(cells.nth(4)).to_have_text("599")
    expect(cells.nth(5)).not_to_have_text("")
    before = cells.nth(3).inner_text()
    expect(cells.nth(3)).not_to_have_text(before)
    (orders / "steps").write_text("700")
    expect(cells.nth(4)).to_have_text("699")


def test_the_next_page_is_announced_while_it_loads(console, page):
    page.goto(console.root)
    shown = "getComputedStyle(document.querySelector('.ct-bar'), '::after').content"
    assert page.evaluate(shown) == "none"
    page.evaluate(f"addEventListener('pagehide', () => sessionStorage.shown = {shown})")
    page.get_by_role("link", name="New job").click()
    expect(page.locator("main h1")).to_have_text("New job")
    assert page.evaluate(f"[sessionStorage.shown, {shown}]") == ['"Loading…"', "none"]


def test_a_page_without_its_console_says_where_to_go_and_looks_stale(browser, tmp_path, picture):
    context = browser.new_context()
    page = context.new_page()
    with console_of(tmp_path / "home") as ended:
        run = submit(ended, tmp_path / "project", "import time\ntime.sleep(600)")
        page.goto(ended.url)
        page.goto(f"{ended.root}/runs/{run.run_id}")
        live = "getComputedStyle(document.querySelector('.ct-live'), '::before').animationName"
        expect(page.locator(".ct-live").first).to_be_visible()
        page.wait_for_function(f"{live} === 'ct-pulse'")
        expect(page.get_by_text("The console does not answer")).to_be_hidden()
        ended.process.send_signal(signal.SIGINT)
        expect(page.get_by_text("run cloudtrain console and open the address that it prints")).to_be_visible()
        expect(page.locator(".ct-main")).to_have_css("opacity", "0.45")
        assert page.evaluate(live) == "none"
        picture(page, "console-ended")
    Run(run.run_id, Store(tmp_path / "home")).cancel()
    context.close()
