"""What happened when: a run's attempts as bars over the run's time, and the events of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cloudtrain.cli.view import runs, terminal

if TYPE_CHECKING:
    from cloudtrain.events import Event
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

KINDS = ("state", "world", "checkpoint", "alarm", "result")
LINES = 30
BAR = 24  # columns
_UNTOLD = ("hostname", "pid", "node_rank", "platform", "python", "versions")  # provenance tells them


def tell(run: Run) -> None:
    """Print a run's attempts and its events, the newest of them."""
    record, attempts = run.record, run.attempts
    begin, end = runs.moment(record.created_at), runs.moment(record.status.ended_at) or datetime.now(UTC)
    assert begin is not None
    terminal.say("", "attempts")
    terminal.table(
        ("  attempt", "state", "exit", "took", "when", "reason"),
        [_attempt(attempt, begin, max((end - begin).total_seconds(), 1e-3)) for attempt in attempts],
        right=("exit", "took"),
        styles=runs.STYLES,
        spare=("when", "exit", "took"),
    )
    lines = list(events(run, begin))
    if lines:
        terminal.say("", "timeline")
        if len(lines) > LINES:
            terminal.say(f"  ... {len(lines) - LINES} events before (--json has them all)")
        terminal.say(*lines[-LINES:])


def _attempt(attempt: AttemptRecord, begin: datetime, whole_s: float) -> tuple[str, ...]:
    status = attempt.status
    took = runs.between(status.started_at, status.ended_at) if status.started_at else ""
    code = "" if status.exit_code is None else str(status.exit_code)
    return f"  {attempt.number}", str(status.state), code, took, _bar(attempt, begin, whole_s), status.reason


def _bar(attempt: AttemptRecord, begin: datetime, whole_s: float) -> str:
    """Return when an attempt waited (-) and ran (=), over the time of the whole run."""

    def column(text: str | None, default: int) -> int:
        moment = runs.moment(text)
        return min(BAR, max(0, round((moment - begin).total_seconds() / whole_s * BAR))) if moment else default

    last = column(attempt.status.ended_at, BAR)
    first = min(column(attempt.created_at, 0), last)
    started = min(max(column(attempt.status.started_at, last), first), last)
    return f"{'-' * (started - first) + '=' * (last - started) or '=':>{last}}".ljust(BAR)


def events(run: Run, begin: datetime) -> Iterator[str]:
    """Yield a line for each event of a run; what several nodes said alike within a second is one line."""
    told = [event for event in run.store.events(run.run_id) if event.kind in KINDS]
    for _, group in groupby(told, key=lambda event: (event.attempt, event.at[:19], event.kind, _said(event))):
        alike = list(group)
        first = alike[0]
        moment = runs.moment(first.at)
        since = f"+{runs.duration((moment - begin).total_seconds())}" if moment else ""
        nodes = sorted({event.node for event in alike})
        whose = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes"
        yield f"  {since:>8}  {first.attempt.rpartition('-')[2]} {whose}  {first.kind} {_said(first)}".rstrip()


def _said(event: Event) -> str:
    data: Mapping[str, Any] = event.data
    told = {name: value for name, value in data.items() if value not in (None, "", [], {}) and name not in _UNTOLD}
    if event.kind == "state":
        return str(told.get("state", ""))
    text = "  ".join(f"{name}={value}" for name, value in told.items())
    return text if len(text) <= 200 else text[:197] + "..."
