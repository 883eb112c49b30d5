"""cloudtrain ls: list the runs in the history."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import click

from cloudtrain.cli.view import options, runs, terminal
from cloudtrain.errors import CloudtrainError, Unreachable
from cloudtrain.events import State

if TYPE_CHECKING:
    from cloudtrain.history.curves import Summary
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store


@options.command()
@click.option("-n", "--limit", default=20, show_default=True, type=click.IntRange(1, 10_000), help="How many runs.")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice([state.value for state in State], case_sensitive=False),
    help="Only runs in this state; may be repeated.",
)
@click.option("--name", metavar="NAME", help="Only runs of jobs of this name.")
@options.json_option
def command(limit: int, states: tuple[str, ...], name: str | None, as_json: bool) -> int:
    """List runs, the newest first.

    The column `loss` has each run's last loss. A narrow terminal shows fewer columns.

    \b
    cloudtrain ls -n 5
    cloudtrain ls --state RUNNING --json
    """
    store = runs.open_history()
    _refresh_live(store, limit, name)
    selected_states = [State(state.upper()) for state in states]
    records = store.runs(limit=limit, states=selected_states, name=name)
    if as_json:
        losses = store.curves.last([record.run_id for record in records])
        terminal.print_json([_row_json(record, losses.get(record.run_id)) for record in records])
    elif records:
        losses = store.curves.last([record.run_id for record in records])
        terminal.print_table(
            ("run", "state", "exit", "age", "took", "loss", "backend", "target"),
            [_row(record, losses.get(record.run_id)) for record in records],
            right=("exit", "age", "took", "loss"),
            styles=runs.STYLES,
            spare=("target", "backend", "took", "exit", "loss", "age"),
        )
        for record in records:
            waits = not record.status.state.final and record.status.state is not State.RUNNING
            if waits and record.status.reason:
                terminal.print_lines(f"  {record.run_id}: {runs.describe_live(store, record)}")
    else:
        terminal.print_lines("there are no runs yet" if not (selected_states or name) else "no run is like that")
        terminal.print_pairs([("next", "cloudtrain submit train.py -f")] if not (selected_states or name) else [])
    return 0


def _refresh_live(store: Store, limit: int, name: str | None) -> None:
    """Refresh the runs that are not final and have no watcher. A run whose platform does not answer stays as it was.

    A target that did not answer once is skipped: each try may take seconds.
    """
    from cloudtrain.runs.run import Run

    live_states = [state for state in State if not state.final]
    unreachable: dict[tuple[str, str], list[str]] = {}  # (backend, target) -> ids of the runs that were skipped
    for record in store.runs(limit=limit, states=live_states, name=name):
        target_key = (record.backend, record.target)
        if target_key in unreachable:
            unreachable[target_key].append(record.run_id)
            continue

        def warn(error: CloudtrainError, run_id: str = record.run_id, target_key: tuple[str, str] = target_key) -> None:
            if isinstance(error, Unreachable):
                unreachable[target_key] = []
            terminal.note(f"warning: {run_id} as last known: {error.message}")

        try:
            Run(record.run_id, store).refresh(warn)
        except CloudtrainError as error:
            terminal.note(f"warning: {record.run_id}: {error.message}")
    for (_, target), others in unreachable.items():
        if others:
            terminal.note(
                f"  {len(others)} more at {target} were not asked: {', '.join(others[:3])}{', ...' * (len(others) > 3)}"
            )


def _row(record: RunRecord, loss: Summary | None) -> tuple[str, ...]:
    status = record.status
    code = "" if status.exit_code is None else str(status.exit_code)
    took = runs.elapsed(status.started_at, status.ended_at) if status.started_at else ""
    target = "attached" if record.attached else "" if record.target == record.backend else record.target
    last = f"{loss.last:.4g}" if loss else ""
    return record.run_id, str(status.state), code, runs.elapsed(record.created_at), took, last, record.backend, target


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
