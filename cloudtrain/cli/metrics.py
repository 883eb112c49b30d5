"""cloudtrain metrics: the curves of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal

if TYPE_CHECKING:
    from cloudtrain.history.curves import Summary
    from cloudtrain.runs.run import Run

ROWS = 14  # of a chart


@options.command()
@click.argument("run", nargs=-1, metavar="[RUN]...", shell_complete=options.complete_runs)
@click.option("--name", metavar="NAME", help="Every point of one metric, such as loss.")
@click.option("--plot", is_flag=True, help="Draw the curves here: all of them, or with --name one.")
@click.option("--csv", "as_csv", is_flag=True, help="Print step,name,value,at as CSV.")
@options.json_option
def command(run: tuple[str, ...], name: str | None, plot: bool, as_csv: bool, as_json: bool) -> int:
    """Print the metrics of runs.

    Without RUN it is the newest. A summary of every metric, or with --name its points. --json prints one object a line:
    step, name, value (null where it is no finite number) and at. Of several runs every row says whose it is (run_id).
    --plot draws the curves with characters; several runs come into one picture.

    \b
    cloudtrain metrics
    cloudtrain metrics tiny-lm-26 --name loss --csv > loss.csv
    cloudtrain metrics tiny-lm-26 tiny-lm-27 --plot --name loss
    """
    if as_csv + as_json + plot > 1:
        raise click.UsageError("--csv, --json and --plot exclude each other")
    found = [runs.find(text) for text in run or (None,)]
    for one in found:
        one.refresh()
    if as_json or as_csv:
        _rows(found, name, as_csv)
        return 0
    known = {one.run_id: one.store.curves.summary(one.run_id) for one in found}
    for one in found:
        names = [row.name for row in known[one.run_id]]
        if not names or (name and name not in names):
            terminal.note(f"{one.run_id} has no metric {name!r}" if name else f"{one.run_id} has no metrics yet")
            if names:
                terminal.note(f"  it has {', '.join(sorted(names))}")
    if plot:
        _plots(found, [name] if name else _order(known))
    elif name:
        _points(found, name)
    elif any(known.values()):
        _summary(known)
    return 0


def _rows(found: Sequence[Run], name: str | None, as_csv: bool) -> None:
    """Print every point, by run."""
    import csv
    import sys

    several = len(found) > 1
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if as_csv:
        writer.writerow((*(["run_id"] if several else []), "step", "name", "value", "at"))
    for one in found:
        for row in one.store.metrics(one.run_id, name):
            if as_csv:
                writer.writerow((*([one.run_id] if several else []), row.step, row.name, repr(row.value), row.at))
                continue
            value = row.value if math.isfinite(row.value) else None
            whose = {"run_id": one.run_id} if several else {}
            terminal.print_json({**whose, "step": row.step, "name": row.name, "value": value, "at": row.at})


def _points(found: Sequence[Run], name: str) -> None:
    several = len(found) > 1
    rows = [
        (*([one.run_id] if several else []), str(row.step), number(row.value), row.at)
        for one in found
        for row in one.store.metrics(one.run_id, name)
    ]
    if rows:
        terminal.table((*(["run"] if several else []), "step", name, "at"), rows, right=("step", name))


def _summary(known: dict[str, list[Summary]]) -> None:
    heads = ("metric", "points", "first", "last", "min", "max", "at step")
    several = len(known) > 1
    rows = [(*([run_id] if several else []), *_curve(row)) for run_id, curves in known.items() for row in curves]
    terminal.table((*(["run"] if several else []), *heads), rows, right=heads[1:])


def _curve(row: Summary) -> tuple[str, ...]:
    values = (row.first, row.last, row.lowest, row.highest)
    return row.name, str(row.points), *map(number, values), str(row.step)


def _order(known: dict[str, list[Summary]]) -> list[str]:
    return list(dict.fromkeys(row.name for curves in known.values() for row in curves))


def _plots(found: Sequence[Run], names: Sequence[str]) -> None:
    """Draw one chart for every metric, with a curve for every run that has it."""
    from cloudtrain.cli.view import chart

    width, colours = terminal.width(), terminal.colours()
    for name in names:
        curves = {}
        for one in found:
            points = one.store.curves.points(one.run_id, name, most=4 * width)
            if points:
                curves[terminal.clean(one.run_id)] = [(point.step, point.value) for point in points]
        if curves:
            terminal.say(name, style="bold")
            lines = chart.chart(curves, width, ROWS, colours=colours)
            terminal.write(*lines)


def number(value: float) -> str:
    """Return a value in few digits."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.6g}"
