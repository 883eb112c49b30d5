"""cloudtrain metrics: a run's curves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from cloudtrain.cli import options, runs, terminal

if TYPE_CHECKING:
    from cloudtrain.store import MetricRow


@options.command()
@options.run_or_newest
@click.option("--name", metavar="NAME", help="Every point of one metric, such as loss.")
@click.option("--csv", "as_csv", is_flag=True, help="Print step,name,value,at as CSV.")
@options.json_option
def command(run: str | None, name: str | None, as_csv: bool, as_json: bool) -> int:
    """Print a run's metrics.

    Without RUN it is the newest. A summary of every metric, or with --name its points. --json prints one object a line:
    step, name, value (null where it is no finite number) and at.

    \b
    cloudtrain metrics
    cloudtrain metrics tiny-lm-26 --name loss --csv > loss.csv
    """
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    found = runs.find(run)
    rows = found.metrics(name)
    if as_json:
        for row in rows:
            value = row.value if math.isfinite(row.value) else None
            terminal.print_json({"step": row.step, "name": row.name, "value": value, "at": row.at})
    elif as_csv:
        import csv
        import sys

        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(("step", "name", "value", "at"))
        writer.writerows((row.step, row.name, repr(row.value), row.at) for row in rows)
    elif not rows:
        known = sorted({row.name for row in found.store.metrics(found.run_id)}) if name else []
        terminal.note(f"{found.run_id} has no metric {name!r}" if name else f"{found.run_id} has no metrics yet")
        if known:
            terminal.note(f"  it has {', '.join(known)}")
    elif name:
        terminal.table(
            ("step", name, "at"), [(str(r.step), _number(r.value), r.at) for r in rows], right=("step", name)
        )
    else:
        _summary(rows)
    return 0


def _summary(rows: list[MetricRow]) -> None:
    curves: dict[str, list[MetricRow]] = {}
    for row in rows:
        curves.setdefault(row.name, []).append(row)
    heads = ("metric", "points", "first", "last", "min", "max", "at step")
    terminal.table(heads, [_curve(name, points) for name, points in curves.items()], right=heads[1:])


def _curve(name: str, points: list[MetricRow]) -> tuple[str, ...]:
    finite = [point.value for point in points if math.isfinite(point.value)] or [math.nan]
    values = (points[0].value, points[-1].value, min(finite), max(finite))
    return name, str(len(points)), *map(_number, values), str(points[-1].step)


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.6g}"
