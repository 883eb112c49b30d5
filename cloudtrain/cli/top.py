"""cloudtrain top: processors, memory and GPUs of all nodes of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from cloudtrain import events
from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.clock import SYSTEM
from cloudtrain.job.units import format_duration, format_size, unix_time

if TYPE_CHECKING:
    from cloudtrain.runs.run import Run

EVERY_S = 2.0  # a launcher measures every 10 s
HEADS = ("node", "host", "cpu", "memory", "processes", "gpus", "gpu", "least", "gpu memory", "age")
BEGIN, END, CLEAR = "\x1b[?1049h", "\x1b[?1049l", "\x1b[H\x1b[2J"  # the terminal's other screen


@options.command()
@options.run_or_newest
@click.option("--once", is_flag=True, help="Print one table and end.")
@options.json_option
def command(run_id: str | None, once: bool, as_json: bool) -> int:
    """Show processors, memory and GPUs of all nodes of a run.

    On a terminal the table is updated until the run has ended, or until Ctrl-C, which does not end the run. In a
    pipe it is printed once. Each node measures every 10 seconds, and `age` is the time since then. `cpu` is in
    percent of one processor: 400 is four busy processors. `gpu` is the mean utilisation of a node's GPUs in
    percent, `least` that of the least used GPU.

    \b
    cloudtrain top
    cloudtrain top tiny-lm-261125 --json
    """
    run = runs.find(run_id)
    live = terminal.supports_escapes() and not once and not as_json
    if not live:
        run.refresh(lambda _: None)
        _print(run, as_json)
        return 0
    sys.stdout.write(BEGIN)
    try:
        while True:
            status = run.refresh(lambda _: None)
            sys.stdout.write(CLEAR)
            terminal.print_lines(f"{run.run_id}  {status.state}", style="bold")
            _print(run, as_json=False)
            sys.stdout.flush()
            if status.state.final:
                break
            SYSTEM.sleep(EVERY_S)
    except KeyboardInterrupt:
        pass  # how it ends
    finally:
        sys.stdout.write(END)
    _print(run, as_json=False)
    return 0


def _print(run: Run, as_json: bool) -> None:
    rows = list(_rows(run))
    if not rows:
        state = run.record.status.state
        ended = f"{run.run_id} has ended ({state}), and no node has reported what it used"
        soon = "no node has reported yet; a node reports every 10 s while it runs: try again in some seconds"
        note = ended if state.final else soon
        if as_json:
            terminal.print_json({"run_id": run.run_id, "state": state.value, "note": note})
        else:
            terminal.note(note)
        return
    if as_json:
        for row in rows:
            terminal.print_json(row)
        return
    terminal.print_table(
        HEADS,
        [_cells(row) for row in rows],
        right=("cpu", "memory", "processes", "gpus", "gpu", "least", "gpu memory", "age"),
        spare=("host", "processes"),
    )


def cells(run: Run) -> list[list[str]]:
    """Return the rows of the table, for other views of it."""
    return [_cells(row) for row in _rows(run)]


def _rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield what each node of the newest attempt has reported last."""
    attempt = run.attempts[-1]
    roles = attempt.plan.node_roles
    for node in range(int(attempt.plan.manifest.get("nodes") or 1)):
        event = run.store.latest(attempt.attempt_id, node, "usage")
        if event is None or not (usage := events.read_usage(event.data)):
            continue
        world = run.store.latest(attempt.attempt_id, node, "world")
        yield {
            "node": node,
            "role": roles[node] if roles else "",
            "host": str(world.data.get("hostname") or "") if world else "",
            "at": event.at,
            "cpu_percent": usage.cpu_percent,
            "memory_bytes": usage.rss_bytes,
            "processes": event.data.get("processes"),
            "gpus": [asdict(gpu) for gpu in usage.gpus],
        }


def _cells(row: dict[str, Any]) -> list[str]:
    busy = [gpu["percent"] for gpu in row["gpus"] if gpu["percent"] is not None]
    used = [gpu["memory_bytes"] for gpu in row["gpus"] if gpu["memory_bytes"] is not None]
    total = [gpu["memory_total_bytes"] for gpu in row["gpus"] if gpu["memory_total_bytes"] is not None]
    memory = format_size(int(sum(used))) if used else ""
    return [
        f"{row['node']} {row['role']}".rstrip(),
        row["host"],
        "" if row["cpu_percent"] is None else f"{row['cpu_percent']:.0f}%",
        "" if row["memory_bytes"] is None else format_size(int(row["memory_bytes"])),
        str(row["processes"] if isinstance(row["processes"], int) else ""),
        str(len(row["gpus"]) or ""),
        f"{sum(busy) / len(busy):.0f}%" if busy else "",
        f"{min(busy):.0f}%" if len(busy) > 1 else "",
        f"{memory} of {format_size(int(sum(total)))}" if memory and total else memory,
        format_duration(max(0.0, SYSTEM.now() - unix_time(row["at"]))),
    ]
