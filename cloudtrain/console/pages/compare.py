"""The page Compare: the charts of several runs in one, a scatter of two columns, parallel coordinates, the differences."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from cloudtrain.console import (
    charts,
    curvestyle,
    history,
    importance,
    lists,
    looks,
    nodeuse,
    relations,
    shell,
    text,
    widgets,
)
from cloudtrain.console.polling import poll
from cloudtrain.errors import BadRequest, CloudtrainError, UnknownRun
from cloudtrain.events import State
from cloudtrain.history import table, usage
from cloudtrain.history.store import Store
from cloudtrain.job.units import format_count
from cloudtrain.report import compare, comparison
from cloudtrain.report.compare import Row
from cloudtrain.runs.run import Run

MAX_RUNS = comparison.MAX_RUNS
_TITLES = {
    "hyperparameters": "Hyperparameters",
    "results": "Results",
    "spec": "Job",
    "source": "Source",
    "request": "Request",
}


async def show(
    runs: str = "",
    over: str = "step",
    smoothing: float = 0.0,
    log: bool = False,
    log_x: bool = False,
    search: str = "",
    x: str = "",
    y: str = "",
    axes: str = "",
    hide: str = "",
    baseline: str = "",
    colours: str = "",
    some: str = "",
) -> None:
    """Show the runs of a comma-separated list of ids; the address keeps axes, smoothing, search and the looks of runs."""
    from nicegui import ui

    ids = list(dict.fromkeys(name for name in runs.split(",") if name))
    if not 1 < len(ids) <= MAX_RUNS:
        raise BadRequest(f"two to {MAX_RUNS} runs can be compared", "select them in the list of runs")
    found = await history.current().query(lambda store: _read(store, ids))
    rows, states, labels, columns = found.rows, found.states, found.labels, found.columns
    style = curvestyle.of_address(over, smoothing, log, log_x, search)
    looks.of_address(style, ids, hide, baseline, colours, some)
    shown = {"x": x, "y": y, "axes": axes}

    def keep() -> None:
        query = {"runs": ",".join(ids), **style.address(), **looks.address(style, ids)}
        query |= {name: value for name, value in shown.items() if value}
        ui.navigate.history.replace("/compare?" + urlencode(query, safe=","))

    shell.heading("Compare runs")
    curves = charts.Curves(ids, project=found.project, labels=labels, style=style, on_style=keep)
    with widgets.card("Runs"):
        looks.Legend(
            curves, style, [(run_id, labels[run_id], found.shorts[run_id], states[run_id]) for run_id in ids]
        ).show()
    with widgets.card("Curves"):
        await curves.show()
        widgets.button("Share as one file", lambda: _share(ids, style), "ct-plain ct-foot", "download")
    used = nodeuse.UseOfRuns(ids, labels)
    await used.show()
    relations.Relations([labels[run_id] for run_id in ids], columns, shown, keep).show()
    importance.Importance(columns).show()
    with widgets.card("Differences"):
        if not rows:
            ui.label("nothing differs").classes("ct-dim")
        else:
            _differences(rows, [labels[run_id] for run_id in ids])
    # The curves of runs that have ended do not change.
    poll([] if all(state.final for state in states.values()) else [curves.refresh, used.refresh])


async def _share(ids: Sequence[str], style: curvestyle.CurveStyle) -> None:
    """Download the comparison as one HTML file, with curves as they are drawn on the page."""
    from nicegui import ui

    drawn = {name: getattr(style, name) for name in ("over", "rank", "smoothing", "log", "log_x")}
    ui.notify("the file is being written")
    try:
        content = await history.current().query(lambda store: comparison.render(store, ids, **drawn))
    except CloudtrainError as error:
        shell.notify_error(error)
    else:
        ui.download.content(content, "comparison.html", "text/html")


def _differences(rows: list[Row], labels: list[str]) -> None:
    """Draw the differences, and a field that leaves those rows whose name or a value contains its text."""
    from nicegui import ui

    area = ui.element("div")

    def draw(words: str) -> None:
        area.clear()
        found = [
            row for row in rows if any(words.lower() in text.clean(each).lower() for each in (row.path, *row.values))
        ]
        with area:
            if not found:
                ui.label("no row has this text").classes("ct-dim")
            for section in ("hyperparameters", "results", "spec", "source", "request"):
                if group := [row for row in found if row.section == section]:
                    _section(section, group, labels)

    search = ui.input(label="Filter rows", on_change=lambda event: draw(event.value or ""))
    search.props("outlined dense clearable debounce=250").classes("ct-choice").move(target_index=0)
    draw("")


def _section(section: str, rows: list[Row], labels: list[str]) -> None:
    if section == "request":
        with widgets.collapsible(f"{format_count(len(rows), 'value')} of the platform request"):
            _table("Request", rows, labels)
    else:
        shell.heading(_TITLES[section], 3)
        _table(_TITLES[section], rows, labels)


def _table(caption: str, rows: list[Row], labels: list[str]) -> None:
    """Draw a table of differences; the browser draws it from data, because it may have thousands of cells."""
    from nicegui import ui

    with ui.element("div").classes("ct-scroll").props('tabindex="0" role="region"') as region:
        region.props["aria-label"] = caption
        drawn = lists.runs_table()
    heads = ("value", *(text.clean(label, 60) for label in labels))
    looks = ["ct-whole", *("" for _ in labels)]
    drawn.props["heads"] = tuple((head, "", "", "none") for head in heads)
    cells = [(row.path, *("–" if value is None else text.clean(value) for value in row.values)) for row in rows]
    drawn.props["rows"] = tuple(
        (row[0], "", False, tuple((look, cell, "", "", ()) for look, cell in zip(looks, row, strict=True)))
        for row in cells
    )


@dataclass(frozen=True)
class _Found:
    """What the page shows of its runs: differences, states, names, and the columns in which they differ."""

    rows: list[Row]
    states: dict[str, State]
    labels: dict[str, str]
    shorts: dict[str, str]
    columns: dict[str, list[Any]]
    project: str


def _read(store: Store, ids: list[str]) -> _Found:
    """Return what the page shows of runs; raises UnknownRun."""
    for run_id in ids:
        if store.get(run_id) is None:
            raise UnknownRun(f"no run has the id {text.clean(run_id)}", "see the list of runs")
        if store.is_unread(run_id):
            with suppress(CloudtrainError):  # its output is gone: the comparison has no metrics of it
                Run(run_id, store).refresh(lambda _: None)
    named = table.rows_of(store, ids, ["short", "name"])
    states = {row.record.run_id: row.record.status.state for row in named}
    shorts = {row.record.run_id: str(row.values[0]) for row in named}
    labels, columns = compare.describe_runs(store, ids), _differing(store, ids)
    return _Found(compare.among(store, ids), states, labels, shorts, columns, str(named[0].values[1]))


def _differing(store: Store, ids: list[str]) -> dict[str, list[Any]]:
    """Return the columns in which runs differ, with their values: labels, hyperparameters, metrics."""
    metrics = list(dict.fromkeys(row.name for run_id in ids for row in store.curves.newest(run_id)))
    names = [
        *table.values_of(store, ids),
        *(f"metric.{name}{part}" for name in metrics for part in ("", ".min", ".max")),
        *(f"system.{name}" for name in usage.UNITS),
    ]
    rows = table.rows_of(store, ids, names)
    columns = {name: [row.values[at] for row in rows] for at, name in enumerate(names)}
    return {name: values for name, values in columns.items() if len(set(values)) > 1}
