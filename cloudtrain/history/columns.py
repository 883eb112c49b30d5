"""Columns of a table of runs, as SQL over the history: facts, labels, hyperparameters, metrics and marks.

state name run short target backend exit created started ended took reason user cost gpus step eta
title note tags star
label.NAME   hp.NAME   metric.NAME   metric.NAME.min   metric.NAME.max   system.NAME   system.NAME.max
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cloudtrain.history.usage import UNITS
from cloudtrain.job.units import format_duration, format_number

Kind = Literal["text", "number", "value", "time", "seconds"]
_SPAN = "(julianday(coalesce({0}.ended_at, 'now')) - julianday({0}.started_at)) * 86400"
# The time of its attempts, without the pauses between them; the run's own where no attempt has a time.
TOOK = (
    f"round(coalesce((SELECT sum({_SPAN.format('a')}) FROM attempts a WHERE a.run_id = runs.run_id),"
    f" {_SPAN.format('runs')}), 2)"
)
# Who submitted a run (job/targets.py): of two labels the first by name.
_USER = (
    "(SELECT text FROM run_values v WHERE v.run_id = runs.run_id AND v.name IN ('label.submitted_by', 'label.user')"
    " ORDER BY v.name LIMIT 1)"
)
# What `Plan.requested_gpus` returns for the newest attempt.
_GPUS = """(SELECT CASE WHEN json_valid(a.plan) THEN
    CASE WHEN json_extract(a.plan, '$.job.resources.accelerators') IS NOT NULL OR EXISTS (
        SELECT 1 FROM json_each(a.plan, '$.manifest.roles') r
         WHERE r.key > 0 AND json_type(r.value, '$.gpus_per_node') IS NOT NULL)
    THEN coalesce(
        (SELECT sum(coalesce(json_extract(r.value, '$.gpus_per_node'), json_extract(a.plan, '$.manifest.gpus_per_node'))
            * json_extract(r.value, '$.nodes')) FROM json_each(a.plan, '$.manifest.roles') r),
        json_extract(a.plan, '$.manifest.gpus_per_node') * json_extract(a.plan, '$.manifest.nodes')) END END
    FROM attempts a WHERE a.run_id = runs.run_id ORDER BY a.number DESC LIMIT 1)"""
_OF_RUN: dict[str, tuple[str, Kind]] = {  # column -> how it is computed from the table `runs`, and what it is
    "state": ("state", "text"),
    "name": ("name", "text"),
    "run": ("run_id", "text"),
    "short": ("name || '-' || (SELECT number FROM run_numbers n WHERE n.run_id = runs.run_id)", "text"),
    "target": ("target", "text"),
    "backend": ("backend", "text"),
    "reason": ("reason", "text"),
    "user": (_USER, "text"),
    "exit": ("exit_code", "number"),
    "cost": ("usd", "number"),
    "gpus": (_GPUS, "number"),
    "created": ("created_at", "time"),
    "started": ("started_at", "time"),
    "ended": ("ended_at", "time"),
    "took": (TOOK, "seconds"),
    "step": ("(SELECT max(step) FROM run_metrics m WHERE m.run_id = runs.run_id)", "number"),
}
_MARKS: dict[str, Kind] = {"title": "text", "note": "text", "tags": "text", "star": "number"}
WITHIN = "+run_id IN ("  # begins a condition that a query of ids ends; `+`: the list itself is read by age, not by id
FACTS = (*_OF_RUN, "eta", *_MARKS)
PARTS = {"last": "last", "min": "lowest", "max": "highest"}


@dataclass(frozen=True)
class Column:
    """A column.

    Attributes:
        name: as people write it.
        kind: `value` is a number where the text is one, else text.
        sql: a scalar expression to sort by; None for `eta`, which is no part of the history.
        shown: a scalar expression to show.
        text, number: to compare with; of `source` where that is set.
        values: for the placeholders of `sql`, and of `source`.
        source: the query `SELECT run_id FROM ... WHERE` that a comparison ends.
        numeric: a scalar expression of what means are of.
    """

    name: str
    kind: Kind
    sql: str | None
    shown: str = ""
    text: str = ""
    number: str = ""
    values: Sequence[object] = field(default=())
    source: str = ""
    numeric: str = "NULL"

    def within(self, test: str) -> str:
        """Return the condition that a test of `text` or `number` holds for a run."""
        return f"{WITHIN}{self.source} AND ({test}))" if self.source else f"({test})"


def find_column(name: str) -> Column | None:
    """Return the column of a name, None where there is none."""
    if name in _OF_RUN:
        sql, kind = _OF_RUN[name]
        numeric = sql if kind in ("number", "seconds") else "NULL"
        return Column(name, kind, sql, sql, sql, sql, numeric=numeric)
    if name == "eta":
        return Column(name, "seconds", None)
    if name in _MARKS:
        own = {"star": "starred"}.get(name, name)
        sql = f"(SELECT {own} FROM marks k WHERE k.run_id = runs.run_id)"
        return Column(name, _MARKS[name], sql, sql, own, own, (), "SELECT run_id FROM marks WHERE 1")
    prefix, _, rest = name.partition(".")
    if prefix in ("hp", "label") and rest:
        source = "SELECT run_id FROM run_values WHERE name = ?"
        one = "(SELECT {} FROM run_values v WHERE v.name = ? AND v.run_id = runs.run_id)"
        sort, shown, numeric = map(one.format, ("coalesce(number, text)", "text", "number"))
        return Column(name, "value", sort, shown, "text", "number", (name,), source, numeric)
    if prefix == "metric" and rest:
        metric, _, part = rest.rpartition(".")
        metric, column = (metric, PARTS[part]) if metric and part in PARTS else (rest, "last")
        sql = f"(SELECT {column} FROM run_metrics m WHERE m.name = ? AND m.run_id = runs.run_id)"
        source = "SELECT run_id FROM run_metrics WHERE name = ?"
        return Column(name, "number", sql, sql, column, column, (metric,), source, sql)
    name_of, dot, part = rest.partition(".")
    if prefix == "system" and name_of in UNITS and part in ("", "max") and bool(dot) == bool(part):
        value = "highest" if part else "total / points"
        sql = f"(SELECT {value} FROM run_usage u WHERE u.name = ? AND u.run_id = runs.run_id)"
        source = "SELECT run_id FROM run_usage WHERE name = ?"
        return Column(name, "number", sql, sql, value, value, (name_of,), source, sql)
    return None


def format_cell(name: str, value: Any) -> str:
    """Return a value of a column as text, "" for None."""
    column = find_column(name)
    if value is None or column is None:
        return ""
    if name == "star":
        return "★" if value else ""
    if name == "tags":
        return ", ".join(json.loads(value))
    if name == "cost":
        return f"{value:.2f} USD"
    if column.kind == "time":
        return str(value)[:16].replace("T", " ")
    if column.kind == "seconds":
        return format_duration(value)
    return format_number(value) if column.kind == "number" else str(value)
