"""The console without a mouse: every key is pressed where Tab has brought the focus, or opens a page."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.console.test_workspace import CHARTS, RUNS, ids, sweep  # noqa: F401 - fixtures


def tab_to(page, role: str, name: str) -> None:
    """Move the focus with the Tab key to a control, as a person without a mouse does."""
    wanted = page.get_by_role(role, name=name, exact=True).first
    expect(wanted).to_be_visible()
    for _ in range(200):
        page.keyboard.press("Tab")
        if wanted.evaluate("wanted => wanted.contains(document.activeElement)"):
            return
    raise AssertionError(f"Tab does not reach the {role} {name}")


def press(page, role: str, name: str, key: str = "Enter") -> None:
    tab_to(page, role, name)
    page.keyboard.press(key)


def test_keyboard_alone_arranges_charts_chooses_runs_compares_and_sorts_trials(console, page, ids, sweep):  # noqa: F811
    page.goto(f"{console.root}/runs/{ids[0]}")
    page.wait_for_function(f"{CHARTS}.length === 5")
    press(page, "button", "Hide eval/loss")
    expect(page.locator(".ct-chart")).to_have_count(4)
    press(page, "button", "Pin train/acc")
    expect(page.locator(".ct-chart").first).to_have_attribute("aria-label", "curve of train/acc")
    press(page, "button", "Resize train/acc", "ArrowDown")
    page.wait_for_function(f"{CHARTS}[0].querySelector('.main-svg').getBoundingClientRect().height === 290")
    press(page, "button", "Show eval/loss")
    expect(page.locator(".ct-chart")).to_have_count(5)

    page.keyboard.press("r")  # the page of all runs
    page.wait_for_url(console.root + "/")
    page.keyboard.press("/")
    expect(page.get_by_label("Filter", exact=True)).to_be_focused()
    page.keyboard.type("name:l")
    rows, completion = page.locator("tbody tr"), page.locator(".q-field__shadow")
    expect(completion).to_have_text("name:lm")
    page.keyboard.press("Tab")  # completes, and then leaves the field
    expect(page.get_by_label("Filter", exact=True)).to_have_value("name:lm ")
    expect(completion).to_have_count(0)
    expect(rows).to_have_count(RUNS)
    press(page, "button", "hp.lr")
    expect(page.get_by_role("columnheader", name="hp.lr")).to_have_attribute("aria-sort", "ascending")
    press(page, "checkbox", "choose all rows", "Space")
    press(page, "button", "Star")
    expect(rows.last).to_contain_text("★")
    press(page, "button", f"Compare {RUNS} runs")

    page.wait_for_function(f"{CHARTS}[0]?.data.length === {RUNS}")
    label = page.locator(".ct-legend a").first.inner_text()
    press(page, "button", f"hide {label}")
    page.wait_for_function(f"{CHARTS}[0].data.length === {RUNS - 1}")
    page.keyboard.press("Enter")
    page.wait_for_function(f"{CHARTS}[0].data.length === {RUNS}")
    press(page, "button", f"baseline {label}")
    page.wait_for_function(f"{CHARTS}[0].data[0].y.every(value => value === 0)")
    tab_to(page, "textbox", "Filter rows")
    page.keyboard.type("eval/")
    expect(page.get_by_role("region", name="Results").locator("tbody tr")).to_have_count(1)

    page.goto(f"{console.root}/sweeps/{sweep}")
    first = page.get_by_role("region", name="All trials").locator("tbody td:first-child")
    expect(first).to_have_text(["3", "2", "1"])
    press(page, "button", "loss")
    expect(first).to_have_text(["3", "1", "2"])
