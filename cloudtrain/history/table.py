"""The table of runs that `ls`, `cloudtrain.runs()` and the console show: filtered, sorted, in columns, grouped, paged."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from cloudtrain.errors import BadRequest
from cloudtrain.history import filters
from cloudtrain.history.columns import FACTS, PARTS, Column, find_column
from cloudtrain.history.records import RUNS, RunRecord, run_from_row
from cloudtrain.job.targets import HOME_LABEL

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

MOST_NAMES = 500  # of labels, hyperparameters or metrics that are completed
MOST_GROUPS = 1000
_INTERNAL = f"label.{HOME_LABEL}"  # is not offered


@dataclass(frozen=True)
class Query:
    """What a list shows.

    Attributes:
        filter: in the language of filters.py.
        sort: a column, `-` before it for the highest first; "" for the newest first.
        columns: separated by commas.
        group: a column; one row for each of its values.
    """

    filter: str = ""
    sort: str = ""
    columns: str = ""
    group: str = ""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name.strip() for name in self.columns.split(",") if name.strip()))

    def address(self) -> str:
        """Return the query of an address: `filter=...&sort=...`."""
        return urlencode({each.name: value for each in fields(self) if (value := getattr(self, each.name))})

    @classmethod
    def of_address(cls, query: str) -> Query:
        known = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in parse_qsl(query) if name in known})


@dataclass(frozen=True)
class Row:
    """A run and its values of the columns, None where it has none."""

    record: RunRecord
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Group:
    """The runs with one value of a column. `values` are (mean, lowest, highest) of each column, None without numbers."""

    key: Any
    count: int
    values: tuple[tuple[float, float, float] | None, ...]


def page(store: Store, query: Query, *, limit: int = 50, offset: int = 0) -> tuple[list[Row], int]:
    """Return one page of the runs that a query selects, and the count of all. Raises BadRequest."""
    return first_rows(store, query, limit=limit, offset=offset), count(store, query)


def count(store: Store, query: Query) -> int:
    """Return how many runs a query selects."""
    where, values = filters.where(query.filter)
    return int(store.select(f"SELECT count(*) FROM runs WHERE {where}", values)[0][0])


def first_rows(store: Store, query: Query, *, limit: int = 50, offset: int = 0) -> list[Row]:
    """Return one page of the runs that a query selects, without the count: in a long history it takes as long again."""
    return rows_of(
        store, run_ids(store, query, limit=limit, offset=offset), query.names
    )  # ids first: whole rows hold jobs


def run_ids(store: Store, query: Query, *, limit: int, offset: int = 0) -> list[str]:
    """Return the ids of the runs that a query selects, from an index."""
    where, values = filters.where(query.filter)
    order, order_values = _order(query.sort)
    ids = f"SELECT run_id FROM runs WHERE {where} ORDER BY {order} LIMIT {int(limit)} OFFSET {int(offset)}"
    return [row[0] for row in store.select(ids, [*values, *order_values])]


def values_of(store: Store, run_ids: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return column -> run id -> text of the labels and hyperparameters of runs."""
    found: dict[str, dict[str, str]] = {}
    wanted = "run_id IN (SELECT value FROM json_each(?))"
    query = f"SELECT name, run_id, text FROM run_values WHERE {wanted} ORDER BY name"
    for name, run_id, text in store.select(query, (json.dumps(list(run_ids)),)):
        found.setdefault(name, {})[run_id] = text
    return found


def rows_of(store: Store, run_ids: Sequence[str], names: Sequence[str]) -> list[Row]:
    """Return runs in an order, with their values of some columns; raises BadRequest."""
    columns = [_column(name) for name in names]
    chosen, wanted = json.dumps(list(run_ids)), "run_id IN (SELECT value FROM json_each(?))"
    records = {row[0]: run_from_row(row) for row in store.select(f"{RUNS} WHERE {wanted}", (chosen,))}
    shown = ", ".join(["run_id", *(column.shown or "NULL" for column in columns)])
    values = [value for column in columns for value in column.values]
    cells = store.select(f"SELECT {shown} FROM runs WHERE {wanted}", [*values, chosen])
    found = {row[0]: Row(records[row[0]], tuple(row)[1:]) for row in cells if row[0] in records}
    return [found[run_id] for run_id in run_ids if run_id in found]


def groups(store: Store, query: Query) -> list[Group]:
    """Return the runs that a query selects, grouped by its column; raises BadRequest."""
    where, values = filters.where(query.filter)
    by = _column(query.group)
    columns = [_column(name) for name in query.names]
    inner = ", ".join([f"{by.shown or 'NULL'} AS k", *(f"{each.numeric} AS c{at}" for at, each in enumerate(columns))])
    outer = "".join(f", avg(c{at}), min(c{at}), max(c{at})" for at in range(len(columns)))
    select = (
        f"SELECT k, count(*){outer} FROM (SELECT {inner} FROM runs WHERE {where}) GROUP BY k"
        f" ORDER BY count(*) DESC, k LIMIT {MOST_GROUPS}"
    )
    given = [value for column in (by, *columns) for value in column.values]
    return [
        Group(row[0], row[1], tuple(_extremes(row[2 + 3 * at : 5 + 3 * at]) for at in range(len(columns))))
        for row in store.select(select, [*given, *values])
    ]


def names(store: Store, prefix: str = "") -> list[str]:
    """Return the columns that there are, with a beginning; the query skips from one name to the next in an index."""
    leap = (
        "WITH RECURSIVE leap(name) AS (SELECT min(name) FROM {0} WHERE name >= ? UNION ALL SELECT (SELECT min(name) FROM {0}"
        " WHERE name > leap.name) FROM leap WHERE leap.name IS NOT NULL) SELECT name FROM leap WHERE name IS NOT NULL"
        f" LIMIT {MOST_NAMES}"
    )
    given = [
        row[0] for row in store.select(leap.format("run_values"), (prefix.partition(".")[0],)) if row[0] != _INTERNAL
    ]
    metrics = [f"metric.{row[0]}" for row in store.select(leap.format("run_metrics"), ("",))]
    used = [f"system.{row[0]}" for row in store.select(leap.format("run_usage"), ("",))]
    parts = [f"{name}.{part}" for name in metrics for part in PARTS if part != "last"]
    every = [*FACTS, *given, *metrics, *parts, *(f"{name}{part}" for name in used for part in ("", ".max"))]
    return [name for name in every if name.startswith(prefix)]


def unknown_names(store: Store, query: Query) -> list[str]:
    """Return a sentence for each name in a query that no run has: a label, a hyperparameter, a metric, a target ..."""
    named = [*query.names, query.sort.removeprefix("-"), query.group, *filters.fields_of(query.filter)]
    sentences = []
    for name in dict.fromkeys(named):
        column = find_column(name)
        if (
            column
            and column.source
            and column.values
            and not store.select(f"{column.source} LIMIT 1", [*column.values])
        ):
            close = filters.closest(name, names(store, name.partition(".")[0] + "."))
            sentences.append(f"no run has {name}" + (f": {close}" if close else ""))
    for field, value in filters.values_of(query.filter, ("target", "backend", "name", "user")):
        column = _column(field)
        if "*" not in value and not store.select(f"SELECT 1 FROM runs WHERE {column.text} = ? LIMIT 1", (value,)):
            known = [row[0] for row in store.select(f"SELECT DISTINCT {column.shown} FROM runs LIMIT 100") if row[0]]
            close = filters.closest(value, known)
            sentences.append(f"no run has {field}:{value}" + (f": {close}" if close else ""))
    return sentences


def completions(store: Store, text: str) -> list[str]:
    """Return what the last term of a filter may become: fields, then the values of state, target, tag and others."""
    term = text[max(text.rfind(" "), -1) + 1 :].lstrip("-")
    before = text[: len(text) - len(term)]
    field, colon, begun = term.partition(":")
    if not colon:
        found = [name + ("" if name.endswith(".") else ":") for name in filters.FIELDS if name.startswith(term)]
        if "." in term:
            found = [f"{name}{'<' if name.startswith('metric.') else ':'}" for name in names(store, term)]
    else:
        values = _values(store, field)
        found = [f"{field}:{_quoted(value)} " for value in values if value.startswith(begun)]
    return [before + each for each in found if each != term][:20]


def _values(store: Store, field: str) -> list[str]:
    """Return the values of a field that are completed."""
    if field == "state":
        return list(filters.STATES)
    if field == "is":
        return list(filters.FLAGS)
    if field in ("since", "after", "before"):
        return ["1h", "1d", "7d", "30d"]
    if field == "tag":
        rows = store.select("SELECT DISTINCT value FROM marks, json_each(marks.tags) ORDER BY value LIMIT 100")
    elif field in ("target", "backend", "name"):
        rows = store.select(f"SELECT DISTINCT {field} FROM runs ORDER BY {field} LIMIT 100")
    else:
        query = "SELECT DISTINCT text FROM run_values WHERE name = ? ORDER BY number, text LIMIT 100"
        rows = store.select(query, (field,))
    return [row[0] for row in rows]


def _quoted(value: str) -> str:
    return f'"{value}"' if set(value) & set(" ,") else value


def _column(name: str) -> Column:
    column = find_column(name)
    if column is None:
        hint = f"columns are {', '.join(FACTS)}, label.NAME, hp.NAME, metric.NAME, metric.NAME.min, metric.NAME.max, system.NAME"
        raise BadRequest(f"there is no column {name!r}", hint)
    return column


def _order(sort: str) -> tuple[str, Sequence[object]]:
    """Return the ORDER BY of a list; runs without the value come last."""
    newest = "created_at DESC, run_id DESC"
    if not sort:
        return newest, ()
    column = _column(sort.removeprefix("-"))
    if column.sql is None:
        raise BadRequest(f"runs cannot be sorted by {column.name}")
    return f"{column.sql} {'DESC' if sort.startswith('-') else 'ASC'} NULLS LAST, {newest}", column.values


def _extremes(values: Sequence[float | None]) -> tuple[float, float, float] | None:
    mean, lowest, highest = values
    return None if mean is None or lowest is None or highest is None else (mean, lowest, highest)
