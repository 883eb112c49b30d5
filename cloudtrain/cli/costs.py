"""cloudtrain costs: what runs have spent, by target, user, label or month."""

from __future__ import annotations

import re
from datetime import date
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.runs.spend import Sum


@options.command()
@click.option(
    "--by",
    default="target",
    show_default=True,
    metavar="target|user|month|label.NAME",
    help="Group costs by target, user, month, or label.NAME.",
)
@click.option(
    "--since", metavar="WHEN", help="Only attempts that started since a date or within the last days: 2026-11-01, 30d."
)
@options.json_option
def command(by: str, since: str | None, as_json: bool) -> int:
    """Print what runs have cost, by target, user, label or month.

    It adds up the runs in this machine's history. Each attempt costs its billed seconds times the price in its plan; where
    the platform reports no billed seconds, the measured time counts. Running attempts count until now. Storage, data
    transfer and logs are not included.

    \b
    cloudtrain costs --by month
    cloudtrain costs --by label.team --since 30d
    """
    from cloudtrain.runs import spend

    if by not in spend.GROUPS and not re.fullmatch(r"label\.\S+", by):
        raise click.BadParameter(f"{by!r} is not target, user, month or label.NAME", param_hint="--by")
    groups = spend.sums(spend.shares(runs.open_history(), _start(since)), by)
    if as_json:
        terminal.print_json([_json(group) for group in groups], indent=2)
    elif not groups:
        terminal.print_lines("no costs" if since else "there are no runs yet")
    else:
        total = spend.Sum("all")
        for group in groups:
            total.runs |= group.runs
            total.node_s, total.usd = total.node_s + group.node_s, total.usd + group.usd
            total.unpriced_s, total.estimate = total.unpriced_s + group.unpriced_s, total.estimate or group.estimate
        rows = [*groups, total] if len(groups) > 1 else groups
        head = (by, "runs", "nodes' time", "USD", "without a price")
        terminal.print_table(head, [_row(group) for group in rows], right=head[1:])
        terminal.print_lines(*["~ marks sums that use estimated prices"] * total.estimate)
    return 0


def _row(group: Sum) -> tuple[str, ...]:
    known = group.unpriced_s < group.node_s or not group.node_s
    usd = f"{'~' if group.estimate else ''}{group.usd:.2f}" if known else "not known"
    unpriced = units.format_duration(group.unpriced_s) if group.unpriced_s else ""
    return group.key, str(len(group.runs)), units.format_duration(group.node_s), usd, unpriced


def _json(group: Sum) -> dict[str, object]:
    return {
        "key": group.key,
        "runs": len(group.runs),
        "node_s": round(group.node_s),
        "usd": round(group.usd, 4) if group.unpriced_s < group.node_s or not group.node_s else None,
        "unpriced_node_s": round(group.unpriced_s),
        "estimate": group.estimate,
    }


def _start(since: str | None) -> str:
    """Return a day, or a duration before now, as the time of an attempt; raises BadParameter."""
    import time

    if since is None:
        return ""
    try:
        if re.fullmatch(r"\d{4}-\d\d-\d\d", since):
            return date.fromisoformat(since).isoformat()
        return units.format_time(time.time() - units.duration_s(since))
    except ValueError:
        hint = "write a date such as 2026-11-01, or a duration such as 30d"
        raise click.BadParameter(f"{since!r}: {hint}", param_hint="--since") from None
