"""The page of all runs over a long history, in a console of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.sync_api import expect

from cloudtrain.backends.api import Plan
from cloudtrain.console import runrows
from cloudtrain.events import State, Status
from cloudtrain.history import table
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process


@pytest.fixture(scope="module")
def store(console) -> Store:
    """A history of 123 runs that have ended, a third of them failed."""
    made = Store(console.home)
    fill(made, 123)
    return made


def test_a_long_history_is_paged_searched_and_filtered(store, console, page, seemly):
    page.goto(console.root)
    rows, told = page.locator("tbody tr"), page.get_by_text("of 123")
    expect(rows).to_have_count(50)
    expect(told).to_have_text("1 to 50 of 123")
    page.get_by_role("button", name="Older").click()
    expect(told).to_have_text("51 to 100 of 123")
    page.get_by_role("button", name="Older").click()
    expect(told).to_have_text("101 to 123 of 123")
    expect(rows).to_have_count(23)
    expect(page.get_by_role("button", name="Older")).to_have_count(0)
    search = page.get_by_label("Filter", exact=True)
    search.fill("OLD-007")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("old-007")
    search.fill("old_0%")  # no pattern
    expect(page.get_by_text("No run matches the filter.")).to_be_visible()
    search.fill("")
    expect(rows).to_have_count(50)
    search.fill("state:fai")
    expect(page.get_by_text("is not a state (did you mean failed?)")).to_be_visible()  # and where
    search.press("Tab")
    expect(search).to_have_value("state:failed ")
    expect(page.get_by_text("of 41")).to_be_visible()  # a third of them
    assert set(page.locator("tbody .ct-state").all_inner_texts()) == {"FAILED"}
    search.fill("state:live")
    expect(rows).to_have_count(0)
    hostile = "<img src=x onerror='window.pwned=1'>{{window.pwned=2}}"
    assert store.intend(replace(plan("now-1"), target=hostile), identity="i", owner=Process.here())
    store.accept("now-1-a1", "h")
    assert store.lease("now-1", Process.here(), 600)  # this process watches it, so that nobody asks its platform
    expect(rows).to_have_count(1)  # without a click
    expect(rows.locator(".ct-state")).to_have_text("QUEUED")
    expect(rows.locator("td").last).to_have_text(hostile)  # a name in a configuration, and text
    assert page.locator("main img").count() == 0 and page.evaluate("window.pwned") is None
    store.set_status("now-1", Status(State.RUNNING, started_at="2026-11-21T10:00:00Z"))
    expect(rows.locator(".ct-state")).to_have_text("RUNNING")
    page.keyboard.press("Escape")
    page.locator("main h1").click()
    page.keyboard.press("/")
    expect(search).to_be_focused()
    seemly(page)


def test_all_runs_that_a_filter_selects_are_chosen_tagged_and_exported(store, console, page):
    page.goto(f"{console.root}/?filter=run:old-*+state:succeeded")
    page.get_by_role("checkbox", name="choose all rows").check()
    expect(page.get_by_text("50 runs chosen")).to_be_visible()
    page.get_by_role("button", name="Choose all 82").click()
    expect(page.get_by_text("82 runs chosen")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of 82 runs").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert len(lines) == 1 + 82 and all(",SUCCEEDED," in line for line in lines[1:])
    page.get_by_label("Tag", exact=True).fill("good")
    page.get_by_role("button", name="Add tag").click()
    page.get_by_role("button", name="Choose none").click()
    expect(page.get_by_role("checkbox", name="choose all rows")).not_to_be_checked()
    page.get_by_label("Filter", exact=True).fill("tag:good")
    expect(page.get_by_text("1 to 50 of 82")).to_be_visible()


def test_a_change_in_the_same_tick_of_the_clock_is_seen(tmp_path):
    """Of two writes within one step of a file's time, the second one changes neither its time nor its size."""
    store = Store(tmp_path / "home")
    fill(store, 1)
    files = [file for file in store.home.iterdir() if file.name.startswith(store.database.path.name)]
    assert runrows.changed(store) != runrows.changed(store)
    for file in files:
        os.utime(file, (1, 1))
    assert runrows.changed(store) == runrows.changed(store)


def plan(run_id: str) -> Plan:
    job = {"name": "old", "hyperparameters": {}, "source": "."}
    return Plan("local", run_id, 1, {}, {"sha256": "0"}, {"secrets": {}, "nodes": 1}, job, "local")


def fill(store: Store, count: int) -> None:
    """Add runs of long ago, every third of them failed."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    for number in range(count):
        run_id = f"old-{number:03d}"
        assert store.intend(plan(run_id), identity="i", owner=Process.here())
        store.accept(f"{run_id}-a1", "h")
        state = State.FAILED if number % 3 == 0 else State.SUCCEEDED
        ended = Status(state, 0, "", began.isoformat(), (began + timedelta(minutes=1)).isoformat())
        store.record(f"{run_id}-a1", status=ended)
        store.set_status(run_id, ended)
        store.acknowledge(run_id)
    with store.database.write() as db:
        db.execute("UPDATE runs SET created_at = '2026-01-01T00:' || substr(run_id, -3) WHERE run_id LIKE 'old-%'")
    assert table.page(store, table.Query(), limit=1)[1] == count
