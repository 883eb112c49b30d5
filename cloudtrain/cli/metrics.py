"""cloudtrain metrics: print or plot the metrics of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, summary, terminal
from cloudtrain.errors import UnknownRun
from cloudtrain.job.units import format_number

if TYPE_CHECKING:
    from cloudtrain.history.curves import Summary
    from cloudtrain.history.records import MetricRow
    from cloudtrain.history.sampling import Point
    from cloudtrain.runs.run import Run

CHART_HEIGHT = 14  # lines
DIGITS = 6  # of a value in tables
COLUMNS = ("step", "name", "value", "at", "attempt", "rank", "epoch")  # of CSV and JSON; new ones come last


@options.command()
@options.argument(
    "run_ids", "[RUN]...", f"{options.RUNS} {options.NEWEST}", nargs=-1, shell_complete=options.complete_runs
)
@click.option("--name", metavar="NAME", help="Print every point of one metric, such as loss.")
@options.rank_option
@click.option("--plot", is_flag=True, help="Draw curves in the terminal: of all metrics, or only of --name.")
@click.option("--over", type=click.Choice(["step", "epoch"]), default="step", help="X axis of --plot; default: step.")
@click.option(
    "--csv",
    "as_csv",
    is_flag=True,
    help=f"Print every point as CSV: {','.join(COLUMNS)}; with several runs run_id comes first.",
)
@options.json_option
def command(
    run_ids: tuple[str, ...], name: str | None, rank: int | None, plot: bool, over: str, as_csv: bool, as_json: bool
) -> int:
    """Print or plot the metrics of runs.

    Without --name it prints a summary of every metric, with --name every point of one. In every form, the exit code
    is 1 when any of the runs has no metric of that name.

    --json and --csv print every point of all metrics, or only those of --name. They print the points of one rank,
    or of all ranks with --rank all. A point has step, name, value, at, attempt, rank and epoch, with several runs
    also run_id. --json prints one object per line; NaN, infinite and unknown values are null.

    --plot draws curves in the terminal, several runs in one chart. Each curve shows one rank.

    \b
    cloudtrain metrics
    cloudtrain metrics tiny-lm-261125 --name loss --csv > loss.csv
    cloudtrain metrics tiny-lm-261124 tiny-lm-261125 --plot --name loss
    cloudtrain metrics tiny-lm-261125 --plot --rank all
    """
    if as_csv + as_json + plot > 1:
        raise click.UsageError("--csv, --json and --plot cannot be combined")
    selected = _find_runs(run_ids)
    for run in selected:
        run.refresh()
        if unread := summary.describe_unread(run):
            terminal.note(f"note: {run.run_id}: {unread}")
    summaries = {run.run_id: run.store.curves.summary(run.run_id, rank) for run in selected}
    errors = [_explain_missing(run, name, rank, [row.name for row in summaries[run.run_id]]) for run in selected]
    if as_json or as_csv:
        _print_points_as_data(selected, name, rank, as_csv)
    elif plot:
        _print_charts(selected, [name] if name else _metric_names(summaries), rank, over)
    elif name:
        _print_points_table(selected, name, rank)
    elif any(summaries.values()):
        _print_summary(summaries)
    if not (as_json or as_csv):
        _print_not_finite(selected, name, rank, plot=plot)
    return int(any(errors))


def _find_runs(run_ids: Sequence[str]) -> list[Run]:
    """Return the runs that are named, the newest for none; of a metric's name in place of a run the hint has --name."""
    found: list[Run] = []
    for text in run_ids or (None,):
        try:
            found.append(runs.find(text))
        except UnknownRun as error:
            run = found[-1] if found else runs.find(None)
            names = {row.name for row in run.store.curves.summary(run.run_id, None)}
            if text not in names:
                raise
            given = f"{run_ids[0]} " if found else ""
            raise UnknownRun(error.message, f"{text} is a metric: cloudtrain metrics {given}--name {text}") from None
    return found


def _explain_missing(run: Run, name: str | None, rank: int | None, names: Sequence[str]) -> bool:
    """Say that a run has no such metric or none at all, and what to do; return whether that is an error."""
    import difflib

    if names and name in (None, *names):
        return False
    if names:
        terminal.note(f"{run.run_id} has no metric {name!r}")
        closest = difflib.get_close_matches(str(name), names, 1, 0.5)
        terminal.note(f"  did you mean {closest[0]}?" if closest else f"  it has {', '.join(sorted(names))}")
    elif ranks := run.store.curves.ranks(run.run_id):
        terminal.note(f"{run.run_id} has no metrics of rank {rank}; ranks with metrics: {', '.join(map(str, ranks))}")
    elif not run.record.status.state.final:
        terminal.note(f"{run.run_id} has no metrics yet")
        return False
    else:
        from cloudtrain.report import nearest

        first, *rest = nearest.describe(run.logs(raw=True))
        terminal.note(f"{run.run_id}: {first}")
        for line in rest:
            terminal.note(f"  {line}")
        return name is not None
    return True


def _print_points_as_data(selected: Sequence[Run], name: str | None, rank: int | None, as_csv: bool) -> None:
    """Print every point as CSV or JSON, run by run."""
    import csv
    import sys

    several = len(selected) > 1
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if as_csv:
        writer.writerow((*(["run_id"] if several else []), *COLUMNS))
    for run in selected:
        for row in run.store.metrics(run.run_id, name, rank):
            values = {column: getattr(row, column) for column in COLUMNS}
            if as_csv:
                values["value"] = repr(row.value)
                writer.writerow((*([run.run_id] if several else []), *values.values()))
            else:
                values["value"] = row.value if math.isfinite(row.value) else None
                terminal.print_json(({"run_id": run.run_id} if several else {}) | values)


def _print_points_table(selected: Sequence[Run], name: str, rank: int | None) -> None:
    rows = [(run.run_id, row) for run in selected for row in run.store.metrics(run.run_id, name, rank)]
    if not rows:
        return
    shown: list[tuple[str, list[str]]] = [
        ("run", [run_id for run_id, _ in rows]),
        ("attempt", [str(row.attempt) for _, row in rows]),
        ("rank", [str(row.rank) for _, row in rows]),
        ("step", [str(row.step) for _, row in rows]),
        ("epoch", [_epoch(row) for _, row in rows]),
        (name, [format_number(row.value, DIGITS) for _, row in rows]),
        ("at", [row.at for _, row in rows]),
    ]
    usual = {"run": {selected[0].run_id}, "attempt": {"1"}, "rank": {"0"}, "epoch": {""}}
    columns = [(head, cells) for head, cells in shown if set(cells) != usual.get(head)]
    heads = tuple(head for head, _ in columns)
    terminal.print_table(
        heads, list(zip(*(cells for _, cells in columns), strict=True)), right=tuple(set(heads) - {"run", "at"})
    )


def _epoch(row: MetricRow) -> str:
    return "" if row.epoch is None else f"{row.epoch:g}"


def _print_summary(summaries: dict[str, list[Summary]]) -> None:
    heads = ("metric", "points", "first", "last", "min", "max", "last step")
    several = len(summaries) > 1
    ranked = any(row.rank for curves in summaries.values() for row in curves)
    rows = [
        (*([run_id] if several else []), *([str(row.rank)] if ranked else []), *_summary_row(row))
        for run_id, curves in summaries.items()
        for row in curves
    ]
    before = (*(["run"] if several else []), *(["rank"] if ranked else []))
    terminal.print_table((*before, *heads), rows, right=("rank", *heads[1:]))


def _print_not_finite(selected: Sequence[Run], name: str | None, rank: int | None, *, plot: bool) -> None:
    """Print where curves became NaN or infinite, one line for each."""
    from cloudtrain.history import not_finite

    for run in selected:
        found = [each for each in not_finite.find(run.store, run.run_id, rank) if name in (None, each.name)]
        before = f"{run.run_id}: " if len(selected) > 1 else ""
        after = "" if plot or name else "; min and max are of its finite values"
        terminal.print_lines(*(f"{before}{each.sentence}{after}" for each in found))


def _summary_row(row: Summary) -> tuple[str, ...]:
    values = (row.first, row.last, row.lowest, row.highest)
    return row.name, str(row.points), *(format_number(value, DIGITS) for value in values), str(row.step)


def _metric_names(summaries: dict[str, list[Summary]]) -> list[str]:
    return list(dict.fromkeys(row.name for curves in summaries.values() for row in curves))


def _print_charts(selected: Sequence[Run], names: Sequence[str], rank: int | None, over: str) -> None:
    """Draw one chart for every metric, with a curve for every run and rank that has it."""
    from cloudtrain.cli.view import chart
    from cloudtrain.history.sampling import split_lost

    width, colours = terminal.width(), terminal.colours()
    for name in names:
        curves: dict[str, chart.Curve] = {}
        lost: dict[str, list[chart.Curve]] = {}
        for run in selected:
            for of in run.store.curves.ranks(run.run_id, name) if rank is None else [rank]:
                points = run.store.curves.points(run.run_id, name, 4 * width, of)
                points = [point for point in points if over == "step" or point.epoch is not None]
                if not points:
                    continue
                kept, parts = split_lost(points)
                label = terminal.clean(run.run_id) + (f" rank {of}" if rank is None else "")
                curves[label] = [(_along(point, over), point.value) for point in kept]
                lost[label] = [[(_along(point, over), point.value) for point in part] for part in parts]
        if curves:
            terminal.print_lines(name, style="bold")
            terminal.print_raw(*chart.chart(curves, width, CHART_HEIGHT, lost=lost, colours=colours))
        elif over == "epoch":
            terminal.note(f"{name}: its points have no epochs")


def _along(point: Point, over: str) -> float:
    return point.step if over == "step" else point.epoch or 0.0
