"""Runs as the command line shows them: found by id or prefix, as JSON, their times in words."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from cloudtrain.cli.view.terminal import note
from cloudtrain.events import State, Status

if TYPE_CHECKING:
    from cloudtrain.history.records import AttemptRecord
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


def history() -> Store:
    """Return the history; what a person should be told of it is said when the command ends."""
    from cloudtrain.history.store import Store
    from cloudtrain.job import targets

    return heard(Store(targets.home()))


def heard(store: Store) -> Store:
    """Return the store; its warnings go to standard error when the command ends."""

    def warn() -> None:
        for warning in store.warnings:
            note(f"warning: {warning}")

    click.get_current_context().call_on_close(warn)
    return store


def find(text: str | None) -> Run:
    """Return the run of an id, a unique prefix, or the newest; raises UnknownRun."""
    from cloudtrain.runs.run import Run

    store = history()
    return Run(store.find(text).run_id, store)


def submitted_json(run: Run) -> dict[str, Any]:
    """Return what `submit --json` prints."""
    record, newest = run.record, run.attempts[-1]
    return {
        "run_id": run.run_id,
        "backend": record.backend,
        "handle": newest.handle,
        "state": record.status.state.value,
    }


def shown_json(run: Run) -> dict[str, Any]:
    """Return what `show --json` prints: as `submit`, and all that the history knows."""
    from cloudtrain.report.packages import requirements

    record = run.record
    attempts = run.attempts
    return {
        **submitted_json(run),
        **_status_json(record.status),
        "verdict": verdict_json(run),
        "name": record.name,
        "target": record.target,
        "attached": record.attached,
        "key": record.key,
        "parent": record.parent,
        "created_at": record.created_at,
        "cancel_requested": record.cancel_requested,
        "attempts": [_attempt_json(attempt) for attempt in attempts],
        "events": [
            {"attempt": event.attempt, "node": event.node, "at": event.at, "kind": event.kind, **event.data}
            for event in run.store.events(run.run_id)
            if event.kind in ("state", "world", "checkpoint", "alarm", "result")
        ],
        "provenance": run.store.provenance(run.run_id),
        "requirements": requirements(run.store.events(run.run_id, "requirements")),
        "job": dict(record.job),
    }


def verdict_json(run: Run) -> dict[str, Any] | None:
    """Return why a run failed, None where it did not."""
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
        "handle": attempt.handle,
        "created_at": attempt.created_at,
        "tries": attempt.tries,
        "unanswered_since": attempt.unanswered_since,
        "images": {str(node): image for node, image in sorted(attempt.images.items())},
        **_status_json(attempt.status),
    }


def duration(seconds: float) -> str:
    """Return a duration in words: 12s, 3m 05s, 2h 10m, 4d 03h."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        size, part, units = 60, 1, "ms"
    elif whole < 48 * 3600:
        size, part, units = 3600, 60, "hm"
    else:
        size, part, units = 86400, 3600, "dh"
    rest = whole % size // part
    return f"{whole // size}{units[0]}" + (f" {rest:02d}{units[1]}" if rest else "")


def between(begin: str | None, end: str | None = None) -> str:
    """Return the time between two ISO moments in words (until now without an end); empty without a beginning."""
    first = moment(begin)
    if first is None:
        return ""
    last = moment(end) or datetime.now(UTC)
    return duration((last - first).total_seconds())


def moment(text: str | None) -> datetime | None:
    """Return the moment of an ISO text, None where there is none."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        return None


def size(count: float) -> str:
    """Return a number of bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def ended(status: Status) -> str:
    """Return how a run ended, in a few words: `FAILED with exit code 3 after 12s`."""
    words = str(status.state)
    if status.exit_code and status.state is not State.SUCCEEDED:
        words += f" with exit code {status.exit_code}"
    took = between(status.started_at, status.ended_at) if status.ended_at else ""
    return words + (f" after {took}" if took else "")
