"""Look up runs by id or prefix, and format them: JSON, times, sizes, how they ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.cli.view.terminal import note
from cloudtrain.clock import SYSTEM
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_duration, unix_time

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.runs.run import Run

STYLES = {
    State.SUCCEEDED.value: "green",
    State.RUNNING.value: "cyan",
    State.STARTING.value: "cyan",
    State.STOPPING.value: "yellow",
    State.FAILED.value: "red",
    State.LOST.value: "red",
    State.TIMED_OUT.value: "red",
    State.PREEMPTED.value: "yellow",
    State.CANCELLED.value: "yellow",
}


def open_history() -> Store:
    """Open the history; its warnings are printed when the command ends."""
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    return print_warnings_at_exit(Store(targets.home()))


def print_warnings_at_exit(store: Store) -> Store:
    """Print the warnings of a store to standard error when the command ends; return the store."""

    def warn() -> None:
        for warning in store.warnings:
            note(f"warning: {warning}")

    click.get_current_context().call_on_close(warn)
    return store


def find(text: str | None) -> Run:
    """Return the run with an id or a unique prefix, or the newest run for None; raises UnknownRun."""
    from cloudtrain.runs.run import Run

    store = open_history()
    return Run(store.find(text).run_id, store)


def submitted_json(run: Run) -> dict[str, Any]:
    """Return the JSON of `submit --json`."""
    record, newest = run.record, run.attempts[-1]
    return {
        "run_id": run.run_id,
        "backend": record.backend,
        "handle": newest.handle,
        "state": record.status.state.value,
    }


def shown_json(run: Run) -> dict[str, Any]:
    """Return the JSON of `show --json`: that of `submit`, and everything in the history about the run."""
    from cloudtrain.report.packages import requirements
    from cloudtrain.runs import progress

    record = run.record
    attempts = run.attempts
    live = progress.of_run(run.store, attempts)
    return {
        **submitted_json(run),
        **_status_json(record.status),
        "reason_since": run.store.reason_since(record),
        "unanswered": run.unanswered(),
        "verdict": verdict_json(run),
        "name": record.name,
        "target": record.target,
        "attached": record.attached,
        "key": record.key,
        "parent": record.parent,
        "after": list(record.job.get("after") or ()),
        "before": [one.run_id for one in run.store.dependents(run.run_id)],
        "created_at": record.created_at,
        "cancel_requested": record.cancel_requested,
        "attempts": [_attempt_json(attempt) for attempt in attempts],
        "events": [
            {"attempt": event.attempt, "node": event.node, "at": event.at, "kind": event.kind, **event.data}
            for event in run.store.events(run.run_id)
            if event.kind in ("status", "state", "world", "role", "checkpoint", "alarm", "result")
        ],
        "progress": {**asdict(live), "line": live.line} if live else None,
        "time": progress.compared(attempts, run.store.home),
        "provenance": run.store.provenance(run.run_id),
        "requirements": requirements(run.store.events(run.run_id, "requirements")),
        "job": dict(record.job),
    }


REMOVED = "removed"  # instead of the state of a run that is no longer in the history


def chain_rows(run: Run) -> list[tuple[str, str]]:
    """Return the runs that a run waits for, and those that wait for it, with their states."""
    before = [run.store.get(run_id) or run_id for run_id in run.record.job.get("after") or ()]
    rows = {"after": before, "before": run.store.dependents(run.run_id)}
    return [
        (word if not at else "", f"{one} {REMOVED}" if isinstance(one, str) else f"{one.run_id} {one.status.state}")
        for word, records in rows.items()
        for at, one in enumerate(records)
    ]


def verdict_json(run: Run) -> dict[str, Any] | None:
    """Return the verdict on a failed run as JSON, None where it did not fail."""
    verdict = run.verdict()
    return verdict.to_dict() if verdict else None


def _status_json(status: Status) -> dict[str, Any]:
    return {
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "url": status.url,
        "billable_s": status.billable_s,
    }


def _attempt_json(attempt: AttemptRecord) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "attempt_id": attempt.attempt_id,
        "backend": attempt.plan.backend,
        "target": attempt.plan.target,
        "handle": attempt.handle,
        "created_at": attempt.created_at,
        "tries": attempt.tries,
        "unanswered_since": attempt.unanswered_since,
        "images": {str(node): image for node, image in sorted(attempt.images.items())},
        **_status_json(attempt.status),
    }


def has_moved(attempts: Sequence[AttemptRecord]) -> bool:
    """Return whether a run's attempts are on several targets."""
    return len({(attempt.plan.backend, attempt.plan.target) for attempt in attempts}) > 1


def elapsed(begin: str | None, end: str | None = None) -> str:
    """Format the time between two ISO times, until now without `end`; "" without `begin`, "?" where it is no time."""
    if not begin:
        return ""
    if (first := parse_time(begin)) is None:
        return "?"
    last = parse_time(end) or SYSTEM.utc()
    return format_duration((last - first).total_seconds())


def describe_time(text: str | None) -> str:
    """Return how long ago an ISO time was, and the time to the second; "" for None."""
    return f"{elapsed(text)} ago ({text[:19]}Z)" if text else ""


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO time; None for a missing or invalid one."""
    try:
        return datetime.fromtimestamp(unix_time(text), UTC) if text else None
    except ValueError:
        return None


def describe_live(store: Store, record: RunRecord) -> str:
    """Describe a run that has not ended, why, and for how long that has been the reason: `QUEUED (Slurm: Resources) for 3m`."""
    status = record.status
    if not status.reason:
        return str(status.state)
    lasted = elapsed(store.reason_since(record))
    return f"{status.state} ({status.reason})" + (f" for {lasted}" if lasted else "")


def took(status: Status, attempts: Sequence[AttemptRecord]) -> str:
    """Return how long a run took; of several attempts also how long these ran, without the pauses between them."""
    whole = elapsed(status.started_at, status.ended_at) if status.ended_at else ""
    if not whole or len(attempts) < 2:
        return whole
    times = [(parse_time(each.status.started_at), parse_time(each.status.ended_at)) for each in attempts]
    ran_s = sum((end - begin).total_seconds() for begin, end in times if begin and end)
    return f"{whole} ({len(attempts)} attempts ran {format_duration(ran_s)})"


def describe_end(status: Status, attempts: Sequence[AttemptRecord] = ()) -> str:
    """Describe how a run ended: `FAILED with exit code 3 after 12s`."""
    text = str(status.state)
    if status.exit_code and status.state is not State.SUCCEEDED:
        text += f" with exit code {status.exit_code}"
    lasted = took(status, attempts)
    return text + (f" after {lasted}" if lasted else "")
