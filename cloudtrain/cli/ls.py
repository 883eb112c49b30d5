"""cloudtrain ls: list the runs in the history."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import BadRequest, CloudtrainError, Unreachable
from cloudtrain.events import State
from cloudtrain.history.columns import find_column, format_cell
from cloudtrain.job.units import format_count, format_number

if TYPE_CHECKING:
    from cloudtrain.history.curves import Summary
    from cloudtrain.history.overview import Fold
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.history.table import Group, Query, Row

MOST = 1_000_000  # runs of one history
USUAL = ("short", "gpus", "cost")  # read of each run without --columns


def complete_filter(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last term of a filter; nothing when the history cannot be read."""
    return _complete(lambda store, table: [each.rstrip() for each in table.completions(store, incomplete)])


def _complete_columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last of some columns; nothing when the history cannot be read."""
    before, comma, last = incomplete.rpartition(",")
    sign = "-" if last.startswith("-") else ""
    return _complete(
        lambda store, table: [before + comma + sign + each for each in table.names(store, last.removeprefix("-"))]
    )


def _complete(find: Callable[[Store, Any], list[str]]) -> list[CompletionItem]:
    from cloudtrain.history import table
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    try:
        return [CompletionItem(each) for each in find(Store(targets.home()), table)]
    except (CloudtrainError, OSError):
        return []


@options.command()
@options.argument(
    "words",
    "[FILTER...]",
    "List only runs for which all these terms hold. Archived runs are left out. The term is:archived lists only archived runs.",
    nargs=-1,
    shell_complete=complete_filter,
)
@click.option(
    "-n",
    "--limit",
    default=None,
    type=click.IntRange(1, 10_000),
    help="List at most this many rows; --group takes all. Default: 20, with --ids all.",
)
@click.option("-q", "--ids", is_flag=True, help="Print only the runs' ids, one a line.")
@click.option("--sort", metavar="COLUMN", default="", shell_complete=_complete_columns,
              help="Sort all runs by this column, then list the first --limit of them; "
              "-COLUMN sorts the highest first.")  # fmt: skip
@click.option("--columns", metavar="COLUMN,...", default="", shell_complete=_complete_columns,
              help="Show these columns, as in hp.lr,metric.loss.min,cost.")  # fmt: skip
@click.option("--group", metavar="COLUMN", default="", shell_complete=_complete_columns,
              help="Print a line for each value of this column, with the mean, lowest and highest value "
              "of each of --columns. Without --columns it counts the runs.")  # fmt: skip
@click.option(
    "--view", metavar="NAME", help="Use a saved view. FILTER is added to its filter; other options replace its values."
)
@click.option(
    "--save-view",
    metavar="NAME",
    help="Save filter, sort, columns and group as a view, in place of one with that name.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State], case_sensitive=False),
    help="List only runs in this state, in upper or lower case; may be repeated, for runs in any of them.",
)
@click.option("--name", metavar="NAME", help="List only runs whose job has this name.")
@options.json_option
def command(
    words: tuple[str, ...],
    limit: int | None,
    ids: bool,
    sort: str,
    columns: str,
    group: str,
    view: str | None,
    save_view: str | None,
    states: tuple[str, ...],
    name: str | None,
    as_json: bool,
) -> int:
    """List runs, the newest first.

    A filter has terms such as `state:failed`, `label.team=vision`, `hp.lr>=1e-3`, `metric.loss<0.5`, `since:7d`,
    and words: parts of ids, titles, notes and tags. All must hold. Put a term with < or > in quotes, or the shell
    redirects output. `since` is about the time of the submission. Without options a sweep is one row with its best
    value; label.sweep=SWEEP lists its runs.

    --columns, --sort and --group take these columns: state, name, run, short, target, backend, exit, created,
    started, ended, took, reason, user, cost, gpus, step, title, note, tags, star. --columns also takes eta, the
    expected time until the end. hp.NAME is a hyperparameter, label.NAME a label. metric.NAME is the last value of a metric;
    metric.NAME.min and metric.NAME.max are its lowest and highest value. system.NAME and system.NAME.max are the
    mean and highest cpu, memory, gpu or gpu_memory of the run's nodes. Without --columns there is also `loss`: the
    last value of the metric loss, train_loss, train/loss or training_loss. A narrow terminal shows fewer columns.

    \b
    cloudtrain ls -n 5
    cloudtrain ls state:failed since:7d
    cloudtrain ls 'hp.lr>=1e-3' --sort metric.loss --columns hp.lr,metric.loss,took
    cloudtrain ls --group hp.lr --columns metric.loss,cost
    cloudtrain ls --state RUNNING --json
    cloudtrain ls --ids tag:test | xargs cloudtrain rm -y
    """
    from cloudtrain.history import marks, table

    store = runs.open_history()
    stored = _stored_view(marks.views(store), view) if view else table.Query()
    terms = [stored.filter, *words, f"state:{','.join(states)}" if states else "", f'name:"{name}"' if name else ""]
    query = table.Query(
        " ".join(filter(None, terms)), sort or stored.sort, columns or stored.columns, group or stored.group
    )
    limit = limit or (MOST if ids else 20)
    if ids and (query.group or as_json):
        raise click.UsageError("--ids prints ids alone: give it without --group and --json")
    if ids:
        terminal.print_lines(*table.run_ids(store, query, limit=limit))
    elif query.group:
        _print_groups(table.groups(store, query), query, as_json)
    else:
        _print_rows(store, query, limit, as_json)
    for sentence in table.unknown_names(store, query):
        terminal.note(f"note: {sentence}")
    if save_view:
        marks.keep_view(store, save_view, query.address())
    return 0


def _stored_view(views: dict[str, str], name: str) -> Query:
    from cloudtrain.history import table

    if name not in views:
        raise BadRequest(f"there is no view {name!r}", f"there is {', '.join(views)}" if views else "")
    return table.Query.of_address(views[name])


def _print_rows(store: Store, query: Query, limit: int, as_json: bool) -> None:
    from cloudtrain.history import overview, table

    usual = not as_json and not query.names
    if usual and query == table.Query():
        entries = _refreshed(store, lambda: overview.newest(store, USUAL, limit=limit + 1), USUAL, limit)
    else:
        shown = replace(query, columns=",".join(USUAL)) if usual else query
        entries = _refreshed(store, lambda: table.first_rows(store, shown, limit=limit + 1), shown.names, limit)
    entries, more = entries[:limit], len(entries) > limit
    rows = [entry for entry in entries if isinstance(entry, table.Row)]
    if as_json:
        losses = store.curves.last([row.record.run_id for row in rows])
        data = [
            _row_json(row.record, losses.get(row.record.run_id)) | dict(zip(query.names, row.values, strict=True))
            for row in rows
        ]
        return terminal.print_json(data)
    if not entries:
        terminal.print_lines("no run matches" if query.filter else "there are no runs yet")
        return terminal.print_pairs([] if query.filter else [("next", "cloudtrain submit train.py -f")])
    if usual:
        _print_usual(store, entries)
    else:
        _print_columns(rows, query)
    for row in rows:
        state, reason = row.record.status.state, row.record.status.reason
        if not state.final and state is not State.RUNNING and reason:
            terminal.print_lines(f"  {_name(row, usual)}: {runs.describe_live(store, row.record)}")
    if more:
        terminal.note(f"there are more: -n {2 * limit}")
    return None


def _name(row: Row, usual: bool = True) -> str:
    """Return the short name of a run where that was read, else its id."""
    return str((usual and row.values[0]) or row.record.run_id)


def _refreshed(
    store: Store, read: Callable[[], Sequence[Row | Fold]], names: Sequence[str], limit: int
) -> list[Row | Fold]:
    """Return rows with live runs as they are now. Of the usual columns, costs of ended runs are as they were stored."""
    from cloudtrain.history.overview import runs_of

    entries = read()
    if live := [row.record for entry in entries[:limit] for row in runs_of(entry) if not row.record.status.state.final]:
        _refresh_live(store, live)
        entries = read()
    if not {"cost", "eta"} & set(names) or (tuple(names) == USUAL and not live):
        return list(entries)
    from cloudtrain.history.overview import Fold
    from cloudtrain.runs import listing

    def now(row: Row) -> Row:
        if tuple(names) == USUAL and row.record.status.state.final:
            return row
        return listing.with_live(store, [row], names)[0]

    return [replace(each, live=tuple(map(now, each.live))) if isinstance(each, Fold) else now(each) for each in entries]


def _print_columns(rows: Sequence[Row], query: Query) -> None:
    names = [name for name in query.names if name not in ("run", "state")]  # these two come first
    cells = [dict(zip(query.names, row.values, strict=True)) for row in rows]
    terminal.print_table(
        ("run", "state", *names),
        [
            (row.record.run_id, str(row.record.status.state), *(format_cell(name, of[name]) for name in names))
            for row, of in zip(rows, cells, strict=True)
        ],
        right=tuple(name for name in names if _is_number(name)),
        styles=runs.STYLES,
    )


def _print_usual(store: Store, entries: Sequence[Row | Fold]) -> None:
    from cloudtrain.history.overview import Fold

    losses = store.curves.last([each.record.run_id for each in entries if not isinstance(each, Fold)])
    sweeps = [each.sweep_id for each in entries if isinstance(each, Fold)]
    value = "loss/best" if sweeps else "loss"
    terminal.print_table(
        ("run", "state", "gpus", "USD", value, "age", "target"),
        [_fold(each) if isinstance(each, Fold) else _row(each, losses.get(each.record.run_id)) for each in entries],
        right=("gpus", "USD", value, "age"),
        styles=runs.STYLES,
        spare=("target", "gpus", "USD", value, "age"),
    )
    if sweeps:
        terminal.note(f"the runs of a sweep: cloudtrain ls label.sweep={sweeps[0]}")


def _print_groups(groups: Sequence[Group], query: Query, as_json: bool) -> None:
    parts = ("mean", "min", "max")
    if as_json:
        data = [
            {query.group: group.key, "runs": group.count}
            | {name: dict(zip(parts, of, strict=True)) if of else None
               for name, of in zip(query.names, group.values, strict=True)}
            for group in groups
        ]  # fmt: skip
        terminal.print_json(data)
        return
    heads = [f"{name} {part}" for name in query.names for part in parts]
    rows = [
        (format_cell(query.group, group.key) or "-", str(group.count),
         *(format_cell(name, value) for name, of in zip(query.names, group.values, strict=True) for value in of or (None,) * 3))
        for group in groups
    ]  # fmt: skip
    terminal.print_table((query.group, "runs", *heads), rows, right=("runs", *heads))


def _is_number(name: str) -> bool:
    column = find_column(name)
    return column is not None and column.kind not in ("text", "time")


def _refresh_live(store: Store, records: Sequence[RunRecord]) -> None:
    """Refresh the runs that are not final and have no watcher. A run whose platform does not answer stays as it was.

    A target that did not answer once is skipped: each try may take seconds.
    """
    from cloudtrain.runs.run import Run  # takes a tenth of a second: only where a run is live

    unreachable: dict[tuple[str, str], list[str]] = {}  # (backend, target) -> ids of the runs that were skipped
    for record in records:
        target_key = (record.backend, record.target)
        if target_key in unreachable:
            unreachable[target_key].append(record.run_id)
            continue

        def warn(error: CloudtrainError, run_id: str = record.run_id, target_key: tuple[str, str] = target_key) -> None:
            if isinstance(error, Unreachable):
                unreachable[target_key] = []
            terminal.note(f"warning: {run_id} shows the last known state: {error.message}")

        try:
            Run(record.run_id, store).refresh(warn)
        except CloudtrainError as error:
            terminal.note(f"warning: {record.run_id}: {error.message}")
    for (_, target), others in unreachable.items():
        if others:
            listed = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
            terminal.note(f"  {format_count(len(others), 'more run')} at {target} not checked: {listed}")


def _row(row: Row, loss: Summary | None) -> tuple[str, ...]:
    record, (_, gpus, usd) = row.record, row.values
    target = "attached" if record.attached else record.target
    last = format_number(loss.last) if loss else ""
    return (_name(row), str(record.status.state), format_cell("gpus", gpus), _usd(usd), last,
            runs.elapsed(record.created_at), target)  # fmt: skip


def _fold(fold: Fold) -> tuple[str, ...]:
    """Return the row of a sweep: its states are counted, and it has the best value instead of a loss."""
    costs = [usd for usd in (fold.usd, *(row.values[2] for row in fold.live)) if usd is not None]
    best = "" if fold.best is None else format_number(fold.best)
    return fold.sweep_id, fold.counts, "", _usd(sum(costs) if costs else None), best, runs.elapsed(fold.created_at), ""


def _usd(usd: float | None) -> str:
    return "" if usd is None else f"{usd:.2f}"


def _row_json(record: RunRecord, loss: Summary | None) -> dict[str, object]:
    status = record.status
    return {
        "run_id": record.run_id,
        "name": record.name,
        "backend": record.backend,
        "target": record.target,
        "attached": record.attached,
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "created_at": record.created_at,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "loss": loss.last if loss and math.isfinite(loss.last) else None,
        "step": loss.step if loss else None,
    }
