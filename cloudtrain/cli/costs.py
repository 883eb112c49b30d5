"""cloudtrain costs: what runs have spent, by target, user, label or month."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.history.store import Store
    from cloudtrain.runs.planning.spend import Sum


@options.command()
@click.option(
    "--by",
    "columns",
    default=("target",),
    show_default=True,
    multiple=True,
    metavar="target|user|month|label.NAME",
    help="Group costs by target, user, month (in which the attempt was started), or label.NAME; may be repeated.",
)
@click.option(
    "--since",
    metavar="WHEN",
    help="Only attempts that started on this date or later (2026-11-01), or not longer ago than this (30d, 12h).",
)
@click.option(
    "--until",
    metavar="WHEN",
    help="Only attempts that started before this date (2026-12-01), or longer ago than this (7d: not in the last 7 days).",
)
@options.json_option
def command(columns: tuple[str, ...], since: str | None, until: str | None, as_json: bool) -> int:
    """Print what runs have cost, by target, user, label or month.

    It adds up the runs in this machine's history. Each attempt costs its billed seconds times the price in its
    plan; where the platform reports no billed seconds, the measured time counts. Running attempts count until now.
    An attempt whose end is not known counts with its whole time limit. Deleted runs count too. Storage, data
    transfer and logs are not included. `user` is who submitted a run, whatever its labels say. Time without a known
    price has a column of its own and costs nothing here.

    \b
    cloudtrain costs --by month
    cloudtrain costs --by label.team --by month --since 2026-11-01 --until 2026-12-01
    """
    from cloudtrain.runs.planning import spend

    store = runs.open_history()
    by = [_column(store, name) for name in dict.fromkeys(columns)]
    groups = spend.sums(
        spend.shares(store, options.parse_start(since, "--since"), options.parse_start(until, "--until")), *by
    )
    if as_json:
        terminal.print_json([_json(group, by) for group in groups], indent=2)
    elif not groups:
        terminal.print_lines("no costs" if since or until else "there are no runs yet")
    else:
        total = spend.Sum("all", ("all", *[""] * (len(by) - 1)))
        for group in groups:
            total.runs |= group.runs
            total.node_s, total.usd = total.node_s + group.node_s, total.usd + group.usd
            total.unpriced_s, total.estimate = total.unpriced_s + group.unpriced_s, total.estimate or group.estimate
        rows = [*groups, total] if len(groups) > 1 else groups
        numbers = ("runs", "nodes' time", "USD", "without a price")
        terminal.print_table((*by, *numbers), [_row(group) for group in rows], right=numbers)
        terminal.print_lines(*["~ marks sums that use estimated prices"] * total.estimate)
        if any(group.whole_limit for group in groups):
            terminal.print_lines("LOST attempts whose end was not reported count with their whole time limit")
    return 0


def _column(store: Store, name: str) -> str:
    """Return what runs are grouped by; a bare name is a label that runs have. Raises BadParameter, notes unknown labels."""
    from cloudtrain.history import filters, table
    from cloudtrain.runs.planning import spend

    if name in spend.GROUPS:
        return name
    known = table.names(store, "label.")
    if re.fullmatch(r"label\.\S+", name):
        if name not in known:
            close = filters.closest(name, known)
            terminal.note(f"note: no run has {name}" + (f": {close}" if close else ""))
        return name
    if f"label.{name}" in known:
        return f"label.{name}"
    hint = f", or one of the labels {', '.join(each.removeprefix('label.') for each in known[:10])}" if known else ""
    raise click.BadParameter(f"{name!r} is not target, user, month or label.NAME{hint}", param_hint="--by")


def _row(group: Sum) -> tuple[str, ...]:
    known = group.unpriced_s < group.node_s or not group.node_s
    usd = f"{'~' if group.estimate else ''}{group.usd:.2f}" if known else "not known"
    unpriced = units.format_duration(group.unpriced_s) if group.unpriced_s else ""
    return *group.keys, str(len(group.runs)), units.format_duration(group.node_s), usd, unpriced


def _json(group: Sum, by: Sequence[str]) -> dict[str, object]:
    return {
        "key": group.key,
        "keys": dict(zip(by, group.keys, strict=True)),
        "runs": len(group.runs),
        "node_s": round(group.node_s),
        "usd": round(group.usd, 4) if group.unpriced_s < group.node_s or not group.node_s else None,
        "unpriced_node_s": round(group.unpriced_s),
        "estimate": group.estimate,
    }
