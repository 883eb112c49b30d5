"""Print what was measured on the nodes of a run before its ranks started (`cloudtrain show --health`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.cli.view import terminal
from cloudtrain.report.nodecheck import node_check

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run


def print_health(run: Run, as_json: bool) -> int:
    """Print the figures of the newest attempt whose nodes were checked. Return 1 when there are none."""
    check = node_check(run.store, run.run_id)
    if as_json:
        events = check.events if check else []
        rows = [{"attempt": event.attempt, "node": event.node, "at": event.at, **event.data} for event in events]
        terminal.print_json(rows, indent=2)
    elif check is None:
        terminal.note(f"{run.run_id} has reported no health check; `health: strict` in the job asks for one")
    else:
        terminal.print_table(check.head, check.rows, right=tuple(check.head[3:]))
        terminal.print_lines(*check.facts, *check.verdict)
    return 0 if check else 1
