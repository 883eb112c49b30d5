"""Rows of the table of runs, and of its groups, as runs.js draws them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cloudtrain.console import history, text, widgets
from cloudtrain.events import State
from cloudtrain.history import overview, table
from cloudtrain.history.columns import find_column, format_cell
from cloudtrain.history.overview import Fold, runs_of
from cloudtrain.history.records import RunRecord
from cloudtrain.history.spool import last_contact
from cloudtrain.history.store import Store
from cloudtrain.history.table import Query
from cloudtrain.job.units import format_number
from cloudtrain.runs import listing
from cloudtrain.runs.run import Run

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
    """A row: the id of a run or a sweep, or the number of a group; the name of its box, "" for none; its cells as in runs.js."""

    key: str
    box: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Shown:
    """What the table shows; `total` counts all runs that the filter selects, `rows` the rows of all pages."""

    heads: tuple[Head, ...]
    lines: tuple[Line, ...]
    total: int
    rows: int = 0
    sweeps: Mapping[str, Sequence[str]] = field(default_factory=dict)  # the runs of each sweep that is a row
    outages: str = ""
    live: bool = False


def read(store: Store, query: Query, offset: int) -> Shown:
    """Return what the table shows. Blocking: live runs without a watcher are refreshed. Raises BadRequest."""
    if query.group:
        return _groups(store, query)
    names = query.names or [*(name for name in USUAL if name != "loss"), "user"]
    wanted = replace(query, columns=",".join([*names, *(name for name in _HIDDEN if name not in names)]))
    folded = query == Query()  # as `ls` does
    entries, total, count = _page(store, wanted, offset, folded=folded)
    records = [row.record for entry in entries for row in runs_of(entry)]
    unwatched = [each.run_id for each in records if not each.status.state.final and not store.watched(each.run_id)]
    refreshed = [run_id for run_id in unwatched if history.refresh(Run(run_id, store))]
    if refreshed:
        entries, total, count = _page(store, wanted, offset, folded=folded)
    rows = [entry for entry in entries if not isinstance(entry, Fold)]
    folds = [entry.sweep_id for entry in entries if isinstance(entry, Fold)]
    ids = [row.record.run_id for row in rows]
    differing = {} if query.names else _differing(table.values_of(store, ids), ids)
    losses = {} if query.names else store.curves.last(ids)
    usual = (*USUAL[:-1], *differing, USUAL[-1], *(("user",) if any(record.attached for record in records) else ()))
    shown = query.names or usual
    looks = {name: _look(name, bool(query.names)) for name in shown}
    lines = []
    for entry in entries:
        if isinstance(entry, Fold):
            key, box, first, values = _sweep(entry)
        else:
            key, values = entry.record.run_id, dict(zip(wanted.names, entry.values, strict=True))
            values["loss"] = format_number(losses[key].last) if key in losses else ""
            values |= {name: of.get(key) for name, of in differing.items()}
            box, first = f"compare {key}", _run(entry.record, values)
        cells = ((looks[name], _text(name, values.get(name)), "", "", (), "") for name in shown)
        lines.append(Line(key, box, (*first, *cells)))
    named = {loss.name for loss in losses.values()}  # of one name, it is a column
    sorts = {"eta": "", "loss": f"metric.{named.pop()}" if len(named) == 1 else ""}
    best = {"loss": "loss/best"} if folds else {}
    heads = [
        Head("choose", "ct-pick"), Head("run", "", "run"), Head("state", "", "state"),
        *(Head(best.get(name, name), looks[name], sorts.get(name, name)) for name in shown),
    ]  # fmt: skip
    live = any(not record.status.state.final for record in records)
    sweeps = overview.runs_of_sweeps(store, folds) if folds else {}
    return Shown(tuple(heads), tuple(lines), total, count, sweeps, _outages(store, records), live)


def _run(record: RunRecord, values: Mapping[str, Any]) -> tuple[Cell, ...]:
    """Return the cells of a run's name and state."""
    title = ("★ " if values["star"] else "") + text.clean(values["title"] or record.run_id, 120)
    tags, state = tuple(text.clean(tag, 60) for tag in json.loads(values["tags"] or "[]")), record.status.state
    return (
        ("", title, run_link(record.run_id), "", tags, text.clean(values["short"] or "", 80)),
        ("", state.value, "", widgets.state_class(state) or "ct-other", (), _reason(record)),
    )


def _sweep(fold: Fold) -> tuple[str, str, tuple[Cell, ...], dict[str, Any]]:
    """Return the key of a sweep's row, the name of its box, its first cells, and its values: the best one is its loss."""
    values = {"created": fold.created_at, "loss": "" if fold.best is None else format_number(fold.best)}
    link, name = f"/sweeps/{quote(fold.sweep_id, safe='')}", text.clean(fold.sweep_id, 120)
    return (fold.sweep_id, f"choose the runs of {name}",
            (("", name, link, "", (), ""), ("", fold.counts, "", "", (), "")), values)  # fmt: skip


def _differing(values: Mapping[str, Mapping[str, str]], ids: Sequence[str]) -> dict[str, Mapping[str, str]]:
    """Return the first hyperparameters in which runs differ, with the text of each run."""
    given = {name: of for name, of in values.items() if name.startswith("hp.")}
    return dict(
        [(name, of) for name, of in given.items() if len({of.get(run_id) for run_id in ids}) > 1][:MOST_DIFFERING]
    )


def _page(store: Store, query: Query, offset: int, *, folded: bool) -> tuple[Sequence[table.Row | Fold], int, int]:
    """Return one page, the count of all runs and that of all rows; on the first page the starred runs are on top."""
    rows: Sequence[table.Row | Fold]
    if folded:
        rows = overview.newest(store, query.names, limit=PAGE_SIZE, offset=offset)
        total, count = table.count(store, query), overview.count(store)
    else:
        rows, total = listing.read(store, query, limit=PAGE_SIZE, offset=offset)
        count = total
    if offset:
        return rows, total, count
    starred = replace(query, filter=f"{query.filter} is:starred".strip())
    top = listing.with_live(store, table.first_rows(store, starred, limit=MOST_STARRED), query.names)
    ids = {row.record.run_id for row in top}
    return [*top, *(row for row in rows if isinstance(row, Fold) or row.record.run_id not in ids)], total, count


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
        lines.append(Line(str(number), "", (*cells, *((look, value, "", "", (), "") for value in values))))
    means = (Head(f"{name}: mean (min to max)", "ct-number") for name in query.names)
    heads = (Head(query.group), Head("runs", "ct-number"), *means)
    return Shown(heads, tuple(lines), sum(group.count for group in groups))


def to_csv(store: Store, query: Query, chosen: Sequence[str] = ()) -> str:
    """Return the chosen runs, or all that a query selects, as CSV, with its columns."""
    names = query.names or [name for name in USUAL if name != "loss"]
    ids = chosen or table.run_ids(store, query, limit=LONGEST_CSV)
    rows = listing.with_live(store, table.rows_of(store, ids, names), names)
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
    return tuple((line.key, line.box, line.key in chosen, line.cells) for line in lines)


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


def _outages(store: Store, records: Sequence[RunRecord]) -> str:
    """Return a sentence for each target that does not answer, for the runs of a page."""
    outages: dict[str, str] = {}
    for record in records:
        if (
            not record.status.state.final
            and (answer := last_contact(store.home, record.run_id, store.clock))
            and answer.error
        ):
            outages.setdefault(record.target or record.backend, answer.outage)
    return "; ".join(f"{text.clean(target, 60)}: {text.clean(outage, 300)}" for target, outage in outages.items())
