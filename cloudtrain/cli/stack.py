"""cloudtrain stack: print the Python stacks of all ranks of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from cloudtrain.cli.view import options, runs, terminal


@options.command()
@options.run_or_newest
@click.option("--rank", type=click.IntRange(0), help="Only this rank.")
@click.option("--role", metavar="NAME", help="Only ranks of this role.")
@options.json_option
def command(run_id: str | None, rank: int | None, role: str | None, as_json: bool) -> int:
    """Print the Python stacks of all ranks of a run.

    The run continues meanwhile. cloudtrain sends a signal (SIGRTMIN+7) to each rank, and the rank writes its own stacks. The
    script needs no change for it, and no debugger or ptrace permission is needed. A rank that is not a Python process gets no
    signal; a line says so. The exit code is 1 when a node did not answer, or no rank runs.

    \b
    cloudtrain stack
    cloudtrain stack tiny-lm-261125 --rank 3 --json
    """
    from cloudtrain.runs.inside import Inside

    inside = Inside.of(runs.find(run_id))
    inside.record("stack")
    seen = silent = 0
    plan = inside.attempt.plan
    roles, nodes = plan.node_roles, plan.nodes_of(role) if role is not None else range(inside.nodes)
    for node, rows, why in inside.stacks():
        if node not in nodes:
            continue
        for row in rows:
            if rank not in (None, row["rank"]):
                continue
            seen += 1
            if as_json:
                terminal.print_json({"node": node, **row})
                continue
            head, *stack = lines(node, roles[node] if roles else "", row)
            if seen > 1:
                terminal.print_lines("")
            terminal.print_lines(head, style="bold")
            terminal.print_lines(*stack)
        if why:
            silent += 1
            terminal.note(f"node {node}: {why}")
    if not seen and not silent:
        terminal.note("no rank runs" if rank is None else f"rank {rank} does not run")
    return 1 if silent or not seen else 0


def lines(node: int, role: str, row: Mapping[str, Any]) -> list[str]:
    """Return a line about a rank, and those of its stacks, of what `Inside.stacks` yields."""
    head = f"node {node}  {f'role {role}  ' if role else ''}rank {row['rank']}  pid {row['pid']}  {row['state']}"
    stack = row["stack"].splitlines() or [f"no stack: {row['why']}"]
    return [f"{head}  {row['command']}", *(f"  {line}" for line in stack)]
