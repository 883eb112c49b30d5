"""Runs in a notebook: a card of HTML for one run, a table for many, and a pandas data frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from cloudtrain.events import show_marks
from cloudtrain.history.columns import format_cell
from cloudtrain.history.sampling import Point, share, split_lost
from cloudtrain.job.units import format_number, seconds_since

if TYPE_CHECKING:
    from cloudtrain.history.store import Store
    from cloudtrain.history.table import Row

_COLOURS = {"SUCCEEDED": "#2e7d32", "RUNNING": "#00639b", "STARTING": "#00639b", "FAILED": "#b3261e", "LOST": "#b3261e"}
CURVE = (160, 32)  # pixels
LOST_OPACITY = 0.3


def table_of(columns: Sequence[str], rows: Iterable[Row]) -> str:
    """Return rows of the table of runs as HTML, with their columns beside id and state."""
    cells = [(row.record.run_id, row.record.status.state.value, *map(format_cell, columns, row.values)) for row in rows]
    return html_table(("run", "state", *columns), cells)


def table(store: Store, run_ids: Sequence[str]) -> str:
    """Return runs as a table of HTML."""
    heads = ("run", "state", "created", "loss", "backend")
    rows = []
    losses = store.curves.last(list(run_ids)) if run_ids else {}
    for run_id in run_ids:
        record = store.find(run_id)
        loss = losses.get(run_id)
        cells = (run_id, record.status.state.value, record.created_at[:19], format_number(loss.last) if loss else "")
        rows.append((*cells, record.backend))
    return html_table(heads, rows)


def html_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of HTML; every cell is text."""
    body = "".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{_text(head)}</th>' for head in heads)}</tr>{body}</table>"


def data_frame(
    store: Store | None, run_ids: Sequence[str], columns: Sequence[str] = (), chosen: Sequence[Row] = ()
) -> Any:
    """Return a pandas data frame with a row for each run: what it is, its hyperparameters (`hp.NAME`), and the last value
    of every metric (`metrics.NAME` where a column of the run has that name); then `columns`, with their values in `chosen`.
    Raises BadRequest without pandas."""
    rows = [_row(store, run_id) for run_id in run_ids] if store else []
    for row, found in zip(rows, chosen, strict=False):
        row.update(zip(columns, found.values, strict=True))
    return frame_of(rows, ("created_at", "started_at", "ended_at"))


def frame_of(rows: Any, times: Sequence[str]) -> Any:
    """Return a pandas data frame of rows or columns, of which some are times. Raises BadRequest without pandas."""
    try:
        import pandas
    except ImportError:
        from cloudtrain.errors import BadRequest, install_command

        raise BadRequest("a data frame needs pandas, which is not installed", install_command("pandas")) from None
    frame = pandas.DataFrame(rows)
    for name in times:
        if name in frame:
            frame[name] = pandas.to_datetime(frame[name], utc=True, format="ISO8601")
    return frame


def card(store: Store, run_id: str, more: Sequence[tuple[str, str]] = ()) -> str:
    """Return a run as a small piece of HTML: state, times, reason, `more` rows, and a curve for each of its first metrics."""
    record = store.find(run_id)
    status = record.status
    rows = [
        ("backend", record.backend if record.target in ("", record.backend) else f"{record.target} ({record.backend})"),
        ("took", _took(status.started_at, status.ended_at)),
        ("reason", status.reason),
        *more,
    ]
    curves = []
    for summary in store.curves.summary(run_id)[:6]:
        curve = _svg(store.curves.points(run_id, summary.name, 100))
        value = f"{format_number(summary.last)} at step {summary.step}"
        curves.append((summary.name, curve, value))
    return frame(run_id, status.state.value, rows, curves)


def frame(name: str, state: str, rows: Sequence[tuple[str, str]], curves: Sequence[tuple[str, str, str]] = ()) -> str:
    """Return a card of a name and its state: rows of a head and a text, then those of a head, a picture and a text."""
    colour = _COLOURS.get(state, "#9a6700")
    body = "".join(
        f"<tr><th>{_text(head)}</th><td>{picture} {_text(value)}</td></tr>"
        for head, picture, value in (*((head, "", value) for head, value in rows if value), *curves)
    )
    title = f'<b>{_text(name)}</b> <span style="color:{colour}">{_text(state)}</span>'
    return f"<div>{title}<table>{body}</table></div>"


def _row(store: Store, run_id: str) -> dict[str, Any]:
    from cloudtrain.report.compare import beside

    record = store.find(run_id)
    status = record.status
    hyperparameters = record.job.get("hyperparameters") or {}
    row = {
        "run_id": run_id,
        "name": record.name,
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "backend": record.backend,
        "target": record.target,
        "created_at": record.created_at,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        **{f"hp.{name}": value for name, value in hyperparameters.items()},
    }
    return row | beside(row, {curve.name: curve.last for curve in store.curves.summary(run_id)})


def _took(begin: str | None, end: str | None) -> str:
    if begin is None:
        return ""
    return f"{seconds_since(begin) - (seconds_since(end) if end else 0.0):.0f} s"


def _svg(points: Sequence[Point]) -> str:
    """Return a curve over its steps as an inline picture; lost parts are faint."""
    finite = [point for point in points if math.isfinite(point.value)]
    if len(finite) < 2:
        return ""
    width, height = CURVE
    values, steps = [point.value for point in finite], [point.step for point in finite]
    low, high, first, last = min(values), max(values), min(steps), max(steps)

    def line(part: Sequence[Point], opacity: float) -> str:
        places = " ".join(
            f"{share(point.step, first, last) * width:.1f},"
            f"{height - 1 - share(point.value, low, high) * (height - 2):.1f}"
            for point in part
        )
        return f'<polyline points="{places}" fill="none" stroke="#00639b" stroke-width="1.2" opacity="{opacity}"/>'

    kept, lost = split_lost(finite)
    drawn = "".join([*(line(part, LOST_OPACITY) for part in lost), line(kept, 1)])
    return f'<svg width="{width}" height="{height}" style="vertical-align:middle">{drawn}</svg>'


def _text(value: str) -> str:
    return escape(show_marks(value))
