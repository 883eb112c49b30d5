"""The page Compare: the charts of several runs in one, and their differences."""

from __future__ import annotations

from itertools import groupby
from urllib.parse import quote

from cloudtrain.console import charts, history, shell, text, widgets
from cloudtrain.console.polling import poll
from cloudtrain.errors import BadRequest, UnknownRun
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.report import compare, plots
from cloudtrain.report.compare import Row

MAX_RUNS = len(plots.COLOURS)
_TITLES = {
    "hyperparameters": "Hyperparameters",
    "results": "Results",
    "spec": "Job",
    "source": "Source",
    "request": "Request",
}


async def show(runs: str = "") -> None:
    """Show the runs of a comma-separated list of ids."""
    from nicegui import ui

    ids = list(dict.fromkeys(name for name in runs.split(",") if name))
    if not 1 < len(ids) <= MAX_RUNS:
        raise BadRequest(f"two to {MAX_RUNS} runs can be compared", "choose them on the page of all runs")
    rows, states = await history.current().query(lambda store: _read(store, ids))
    shell.heading("Compare runs")
    with widgets.card("Runs"), ui.element("ul").classes("ct-legend"):
        for number, run_id in enumerate(ids):
            with ui.element("li").classes("ct-row"):
                ui.element("i").classes("ct-swatch").style(f"background: {plots.COLOURS[number]}")
                widgets.element("a", run_id).props["href"] = f"/runs/{quote(run_id, safe='')}"
                widgets.state(states[number])
    with widgets.card("Curves"):
        curves = charts.Curves(ids)
        await curves.show()
    with widgets.card("Differences"):
        if not rows:
            ui.label("nothing differs").classes("ct-dim")
        for section in ("hyperparameters", "results", "spec", "source", "request"):
            for _, group in groupby((row for row in rows if row.section == section), key=lambda row: row.section):
                _section(section, list(group), ids)
    poll([curves.refresh])


def _section(section: str, rows: list[Row], ids: list[str]) -> None:
    if section == "request":
        with widgets.collapsible(f"{len(rows)} values of the native request"):
            _table("Request", rows, ids)
    else:
        shell.heading(_TITLES[section], 3)
        _table(_TITLES[section], rows, ids)


def _table(caption: str, rows: list[Row], ids: list[str]) -> None:
    heads = ("value", *(text.clean(run_id, 60) for run_id in ids))
    cells = [(row.path, *("–" if value is None else text.clean(value) for value in row.values)) for row in rows]
    widgets.table(heads, cells, caption=caption)


def _read(store: Store, ids: list[str]) -> tuple[list[Row], list[State]]:
    for run_id in ids:
        if store.get(run_id) is None:
            raise UnknownRun(f"no run has the id {text.clean(run_id)}", "the page of all runs shows them")
    return compare.among(store, ids), [store.find(run_id).status.state for run_id in ids]
