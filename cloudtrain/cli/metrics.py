"""cloudtrain metrics: print or plot the metrics of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal

if TYPE_CHECKING:
    from cloudtrain.history.curves import Summary
    from cloudtrain.runs.run import Run

CHART_HEIGHT = 14  # lines


@options.command()
@click.argument("run_ids", nargs=-1, metavar="[RUN]...", shell_complete=options.complete_runs)
@click.option("--name", metavar="NAME", help="Every point of one metric, such as loss.")
@click.option("--plot", is_flag=True, help="Draw the curves here: all of them, or with --name one.")
@click.option("--csv", "as_csv", is_flag=True, help="Print step,name,value,at as CSV.")
@options.json_option
def command(run_ids: tuple[str, ...], name: str | None, plot: bool, as_csv: bool, as_json: bool) -> int:
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
    selected = [runs.find(text) for text in run_ids or (None,)]
    for run in selected:
        run.refresh()
    if as_json or as_csv:
        _print_points_as_data(selected, name, as_csv)
        return 0
    summaries = {run.run_id: run.store.curves.summary(run.run_id) for run in selected}
    for run in selected:
        names = [row.name for row in summaries[run.run_id]]
        if not names or (name and name not in names):
            terminal.note(f"{run.run_id} has no metric {name!r}" if name else f"{run.run_id} has no metrics yet")
            if names:
                terminal.note(f"  it has {', '.join(sorted(names))}")
    if plot:
        _print_charts(selected, [name] if name else _metric_names(summaries))
    elif name:
        _print_points_table(selected, name)
    elif any(summaries.values()):
        _print_summary(summaries)
    return 0


def _print_points_as_data(selected: Sequence[Run], name: str | None, as_csv: bool) -> None:
    """Print every point as CSV or JSON, run by run."""
    import csv
    import sys

    several = len(selected) > 1
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if as_csv:
        writer.writerow((*(["run_id"] if several else []), "step", "name", "value", "at"))
    for run in selected:
        for row in run.store.metrics(run.run_id, name):
            if as_csv:
                writer.writerow((*([run.run_id] if several else []), row.step, row.name, repr(row.value), row.at))
                continue
            value = row.value if math.isfinite(row.value) else None
            run_column = {"run_id": run.run_id} if several else {}
            terminal.print_json({**run_column, "step": row.step, "name": row.name, "value": value, "at": row.at})


def _print_points_table(selected: Sequence[Run], name: str) -> None:
    several = len(selected) > 1
    rows = [
        (*([run.run_id] if several else []), str(row.step), format_number(row.value), row.at)
        for run in selected
        for row in run.store.metrics(run.run_id, name)
    ]
    if rows:
        terminal.print_table((*(["run"] if several else []), "step", name, "at"), rows, right=("step", name))


def _print_summary(summaries: dict[str, list[Summary]]) -> None:
    heads = ("metric", "points", "first", "last", "min", "max", "at step")
    several = len(summaries) > 1
    rows = [
        (*([run_id] if several else []), *_summary_row(row)) for run_id, curves in summaries.items() for row in curves
    ]
    terminal.print_table((*(["run"] if several else []), *heads), rows, right=heads[1:])


def _summary_row(row: Summary) -> tuple[str, ...]:
    values = (row.first, row.last, row.lowest, row.highest)
    return row.name, str(row.points), *map(format_number, values), str(row.step)


def _metric_names(summaries: dict[str, list[Summary]]) -> list[str]:
    return list(dict.fromkeys(row.name for curves in summaries.values() for row in curves))


def _print_charts(selected: Sequence[Run], names: Sequence[str]) -> None:
    """Draw one chart for every metric, with a curve for every run that has it."""
    from cloudtrain.cli.view import chart

    width, colours = terminal.width(), terminal.colours()
    for name in names:
        curves = {}
        for run in selected:
            points = run.store.curves.points(run.run_id, name, most=4 * width)
            if points:
                curves[terminal.clean(run.run_id)] = [(point.step, point.value) for point in points]
        if curves:
            terminal.print_lines(name, style="bold")
            lines = chart.chart(curves, width, CHART_HEIGHT, colours=colours)
            terminal.print_raw(*lines)


def format_number(value: float) -> str:
    """Return a metric's value with at most six digits."""
    return str(int(value)) if value.is_integer() and abs(value) < 1e9 else f"{value:.6g}"
