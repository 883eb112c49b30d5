"""Rows of the table of runs, and of its groups, as runs.js draws them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cloudtrain.console import history, text, widgets
from cloudtrain.events import State
from cloudtrain.history import table
from cloudtrain.history.columns import find_column, format_cell
from cloudtrain.history.records import RunRecord
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.job.units import format_number
from cloudtrain.runs import listing
from cloudtrain.runs.run import Run
from cloudtrain.runs.watching import pace

PAGE_SIZE = 50
MOST_DIFFERING = 4  # hyperparameters that are columns of a list without chosen ones
MOST_STARRED = 20  # on top of the first page
SETTLED_NS = 1_000_000_000
LONGEST_CSV = 10_000  # runs
WIDE = "ct-wide"  # not shown on a narrow screen
USUAL = ("created", "took", "loss", "target")  # columns of a list without chosen ones
_HIDDEN = ("title", "star", "tags", "short")  # drawn in the column of the run
Cell = tuple[str, str, str, str, tuple[str, ...], str]


@dataclass(frozen=True)
class Head:
    """A header: its text, look and the column by which a click sorts, "" for none."""

    text: str
    look: str = ""
    column: str = ""


@dataclass(frozen=True)
class Line:
    """A row: the run's id, None for a group; its cells as in runs.js."""

    key: str
    run_id: str | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Shown:
    """What the table shows; `total` counts all runs that the filter selects."""

    heads: tuple[Head, ...]
    lines: tuple[Line, ...]
    total: int
    outages: str = ""
    live: bool = False


def read(store: Store, query: Query, offset: int) -> Shown:
    """Return what the table shows. Blocking: live runs without a watcher are refreshed. Raises BadRequest."""
    if query.group:
        return _groups(store, query)
    names = query.names or [*(name for name in USUAL if name != "loss"), "user"]
    wanted = replace(query, columns=",".join([*names, *(name for name in _HIDDEN if name not in names)]))
    rows, total = _page(store, wanted, offset)
    records = [row.record for row in rows]
    unwatched = [each.run_id for each in records if not each.status.state.final and not store.watched(each.run_id)]
    refreshed = [run_id for run_id in unwatched if history.refresh(Run(run_id, store))]
    if refreshed:
        rows, total = _page(store, wanted, offset)
    ids = [row.record.run_id for row in rows]
    differing = {} if query.names else _differing(table.values_of(store, ids), ids)
    losses = {} if query.names else store.curves.last([row.record.run_id for row in rows])
    usual = (*USUAL[:-1], *differing, USUAL[-1], *(("user",) if any(record.attached for record in records) else ()))
    shown = query.names or usual
    lines = []
    for row in rows:
        record, values = row.record, dict(zip(wanted.names, row.values, strict=True))
        loss = losses.get(record.run_id)
        values["loss"] = format_number(loss.last) if loss else ""
        values |= {name: of.get(record.run_id) for name, of in differing.items()}
        title = ("★ " if values["star"] else "") + text.clean(values["title"] or record.run_id, 120)
        tags = tuple(text.clean(tag, 60) for tag in json.loads(values["tags"] or "[]"))
        cells: list[Cell] = [
            ("", title, run_link(record.run_id), "", tags, text.clean(values["short"] or "", 80)),
            (
                "",
                record.status.state.value,
                "",
                widgets.state_class(record.status.state) or "ct-other",
                (),
                _reason(record),
            ),
            *((_look(name, bool(query.names)), _text(name, values[name]), "", "", (), "") for name in shown),
        ]
        lines.append(Line(record.run_id, record.run_id, tuple(cells)))
    heads = [
        Head("choose", "ct-pick"), Head("run", "", "run"), Head("state", "", "state"),
        *(Head(name, _look(name, bool(query.names)), "" if name in ("loss", "eta") else name) for name in shown),
    ]  # fmt: skip
    live = any(not row.record.status.state.final for row in rows)
    return Shown(tuple(heads), tuple(lines), total, _outages(store, rows), live)


def _differing(values: Mapping[str, Mapping[str, str]], ids: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """Return the first hyperparameters in which runs differ, with the text of each run."""
    given = {name: of for name, of in values.items() if name.startswith("hp.")}
    return dict(
        [(name, of) for name, of in given.items() if len({of.get(run_id) for run_id in ids}) > 1][:MOST_DIFFERING]
    )


def _page(store: Store, query: Query, offset: int) -> tuple[list[table.Row], int]:
    """Return one page of runs and the count of all; on the first one the starred runs are on top."""
    rows, total = listing.read(store, query, limit=PAGE_SIZE, offset=offset)
    if offset:
        return rows, total
    starred = replace(query, filter=f"{query.filter} is:starred".strip())
    top = listing.with_live(store, table.first_rows(store, starred, limit=MOST_STARRED), query.names)
    ids = {row.record.run_id for row in top}
    return [*top, *(row for row in rows if row.record.run_id not in ids)], total


def _reason(record: RunRecord) -> str:
    """Return why a run has not started yet, "" where it has."""
    return text.clean(record.status.reason or "", 160) if record.status.state is State.QUEUED else ""


def _groups(store: Store, query: Query) -> Shown:
    """Return the groups of a query: how many runs each has, and the mean and the extremes of the columns."""
    groups = table.groups(store, query)
    lines = []
    for number, group in enumerate(groups):
        name = text.clean(format_cell(query.group, group.key) or "–", 120)
        term = f'{query.filter} {query.group}:"{group.key}"'.strip()
        link = "/?" + replace(query, filter=term, group="").address() if _filterable(query.group, group.key) else ""
        values = [
            "" if of is None else f"{_text(column, of[0])} ({_text(column, of[1])} to {_text(column, of[2])})"
            for column, of in zip(query.names, group.values, strict=True)
        ]
        look = "ct-number"
        cells = [("", name, link, "", (), ""), (look, f"{group.count:,}", "", "", (), "")]
        lines.append(Line(str(number), None, (*cells, *((look, value, "", "", (), "") for value in values))))
    means = (Head(f"{name}: mean (min to max)", "ct-number") for name in query.names)
    heads = (Head(query.group), Head("runs", "ct-number"), *means)
    return Shown(heads, tuple(lines), sum(group.count for group in groups))


def to_csv(store: Store, query: Query) -> str:
    """Return the runs that a query selects as CSV, with its columns."""
    names = query.names or [name for name in USUAL if name != "loss"]
    rows, _ = listing.read(store, replace(query, columns=",".join(names)), limit=LONGEST_CSV)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("run", "state", *names))
    for row in rows:
        cells = map(text.spreadsheet_cell, row.values)
        writer.writerow((row.record.run_id, row.record.status.state.value, *cells))
    return stream.getvalue()


def changed(store: Store) -> tuple[int, ...]:
    """Return what is another when the history has changed.

    A file's time has steps of milliseconds, and SQLite writes over old parts of the -wal file: a second change within one step
    changes neither time nor size. So what is younger than SETTLED_NS counts as changed at each call.
    """
    paths = [store.database.path, Path(f"{store.database.path}-wal")]
    stats = [path.stat() for path in paths if path.exists()]
    now_ns = int(store.clock.now() * 1e9)
    young = any(0 <= now_ns - stat.st_mtime_ns < SETTLED_NS for stat in stats)
    return (*(value for stat in stats for value in (stat.st_mtime_ns, stat.st_size)), now_ns if young else 0)


def run_link(run_id: str) -> str:
    """Return the address of a run's page."""
    return f"/runs/{quote(run_id, safe='')}"


def selects(lines: Sequence[Line], chosen: Container[str]) -> tuple[object, ...]:
    """Return the prop `rows` of runs.js."""
    return tuple(
        (line.key, f"compare {line.run_id}" if line.run_id else "", line.run_id in chosen, line.cells) for line in lines
    )


def _filterable(name: str, key: object) -> bool:
    """Return whether a filter can name the runs of a group."""
    column = find_column(name)
    return key is not None and '"' not in str(key) and column is not None and column.kind in ("text", "value")


def _look(name: str, chosen: bool) -> str:
    column = find_column(name)
    number = column is None or column.kind in ("number", "seconds", "value")
    wide = "" if chosen or name == "loss" else WIDE
    return " ".join(
        filter(None, ("ct-number" if number else "ct-whole ct-dim" if column and column.kind == "time" else "", wide))
    )


def _text(name: str, value: object) -> str:
    return text.clean(value if name == "loss" else format_cell(name, value), 120)


def _outages(store: Store, rows: Sequence[table.Row]) -> str:
    """Return a sentence for each target that does not answer, for the runs of a page."""
    outages: dict[str, str] = {}
    for record in (row.record for row in rows):
        if (
            not record.status.state.final
            and (answer := pace.last_contact(store.home, record.run_id, store.clock))
            and answer.error
        ):
            outages.setdefault(record.target or record.backend, answer.outage)
    return "; ".join(f"{text.clean(target, 60)}: {text.clean(outage, 300)}" for target, outage in outages.items())
