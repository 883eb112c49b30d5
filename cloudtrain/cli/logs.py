"""cloudtrain logs: print or follow a run's log, of all nodes and attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.log import Interrupted, LineFormatter, print_log
from cloudtrain.errors import BadRequest, CloudtrainError
from cloudtrain.events import State

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


@options.command()
@options.run_or_newest
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the run has ended, all attempts included.")
@click.option("--node", type=click.IntRange(0), help="Only lines of this node.")
@click.option("--role", metavar="NAME", help="Only lines of the nodes of this role.")
@click.option(
    "--rank", type=click.IntRange(-1), help="Only lines of this rank, counted over all nodes; -1 is the launcher."
)
@click.option(
    "--tail",
    type=click.IntRange(0),
    metavar="N",
    help="Only the last N lines of all nodes together (and with -f what follows).",
)
@click.option(
    "--after",
    metavar="CURSOR",
    help="Print only the lines after this one, with or without -f; --json prints each line's cursor.",
)
@click.option(
    "--number", is_flag=True, help="Number the lines of each node, as in `line 7 of node 0` of a failure message."
)
@click.option("--raw", is_flag=True, help="Print exactly what the job wrote: no prefixes, hidden lines included.")
@options.json_option
def command(
    run_id: str | None,
    follow: bool,
    node: int | None,
    role: str | None,
    rank: int | None,
    tail: int | None,
    after: str | None,
    number: bool,
    raw: bool,
    as_json: bool,
) -> int:
    """Print the log of all nodes of a run.

    The log has all attempts of the run, one after the other. With -f it follows the log until the run ends. The
    exit code is 0 also when the run failed; `cloudtrain wait` returns the exit code of the run. Ctrl-C ends the
    following only, with exit code 130. Each line of a run with several ranks begins with [node:rank], also with
    --rank; of a job with roles with [role node:rank]. Lines that begin with ::cloudtrain:: (metrics and states for the
    history) are hidden, except with --raw and --json. --json prints one object per line: at, node, rank, seq, text and cursor.

    On a terminal, escape sequences that the job printed (colours, cursor movements) are removed, because they could
    change what you see. A pipe or file gets the text with them. In both, lines of several ranks begin with [node:rank],
    and lines that begin with ::cloudtrain:: are hidden. --raw prints the log unchanged.

    \b
    cloudtrain logs -f
    cloudtrain logs tiny-lm-261125 --rank 0 --tail 50
    """
    if number and (raw or as_json):
        raise click.UsageError("--number cannot be combined with --raw or --json: --json prints the number as `seq`")
    run = runs.find(run_id)
    manifests = [attempt.plan.manifest for attempt in run.attempts]
    _check("node", node, max(int(each["nodes"]) for each in manifests), run)
    programs = [{**each, **own} for each in manifests for own in ({}, *each.get("roles", ()))]
    _check("rank", rank, max(int(each["nodes"]) * int(each["processes_per_node"]) for each in programs), run)
    run.refresh(lambda _: None)  # an outage is reported while the log is read
    formatter = LineFormatter(
        run.attempts[-1], node=node, rank=rank, role=role, raw=raw, as_json=as_json, number=number
    )
    try:
        if print_log(run, formatter, follow=follow, after=after, tail=tail) is None and (gone := _why_gone(run)):
            raise BadRequest(f"{run.run_id} has no log any more: {gone}")
    except Interrupted as interrupt:
        if not follow:
            raise
        after_option = f" --after {interrupt.cursor}" if interrupt.cursor else ""
        terminal.note(f"\n{run.run_id} continues; follow it again: cloudtrain logs -f {run.run_id}{after_option}")
        return INTERRUPTED
    return 0


def _check(what: str, number: int | None, count: int, run: Run) -> None:
    if number is not None and number >= count:
        are = f"its {what}s are 0 to {count - 1}" if count > 1 else f"it has {what} 0"
        raise BadRequest(f"{run.run_id} has no {what} {number}", are)


def _why_gone(run: Run) -> str:
    """Return why the log of an ended run has no line, as its platform explains it now; "" where it still has the run."""
    from cloudtrain.runs.planning.attempts import backend_of

    for attempt in run.attempts if run.record.status.state.final else ():
        if attempt.handle is not None:
            try:
                status = backend_of(attempt.plan, run.store.home, attempt.handle).status(attempt.handle)
            except CloudtrainError as error:
                return error.message
            if status.state is State.LOST:
                return status.reason
    return ""
