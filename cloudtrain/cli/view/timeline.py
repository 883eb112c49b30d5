"""Print the timeline of a run: its attempts as bars, and the events of its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from cloudtrain.cli.view import runs, terminal
from cloudtrain.clock import SYSTEM
from cloudtrain.events import PLATFORM
from cloudtrain.history import audit
from cloudtrain.job.units import format_duration
from cloudtrain.runs.planning import spend

if TYPE_CHECKING:
    from cloudtrain.events import Event
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.runs.run import Run

KINDS = ("status", "state", "world", "role", "checkpoint", "alarm", "result")
USES = ("exec", "stack", "forward")  # by a person, from this history
MAX_LINES = 30  # of events
BAR_WIDTH = 24  # columns
_PRINTED_ELSEWHERE = (
    "hostname",
    "pid",
    "node_rank",
    "platform",
    "python",
    "versions",
    "not_kept",
    "incomplete",
    "has_results",
)


def print_timeline(run: Run) -> None:
    """Print a run's attempts and its newest events."""
    record, attempts = run.record, run.attempts
    end = runs.parse_time(record.status.ended_at) or SYSTEM.utc()
    begin = runs.parse_time(record.created_at) or end
    terminal.print_lines("", "attempts")
    costs = spend.describe_attempts(attempts, run.store.home)
    whole_s, moved = max((end - begin).total_seconds(), 1e-3), runs.has_moved(attempts)
    terminal.print_table(
        ("  attempt", *["on"] * moved, "state", "exit", "took", *["USD"] * bool(costs), "when", "reason"),
        [
            _attempt_row(attempt, begin, whole_s, moved, costs[number : number + 1])
            for number, attempt in enumerate(attempts)
        ],
        right=("exit", "took", "USD"),
        styles=runs.STYLES,
        spare=("when", "exit", "took"),
    )
    lines = list(event_lines(run, begin))
    if lines:
        terminal.print_lines("", "timeline")
        if len(lines) > MAX_LINES:
            terminal.print_lines(f"  ... {len(lines) - MAX_LINES} events before (--json has them all)")
        for line in lines[-MAX_LINES:]:
            terminal.print_folded(line, " " * 12)
    if record.cancel_requested:
        terminal.print_lines(*_cancel_lines(run, begin))


def _attempt_row(
    attempt: AttemptRecord, begin: datetime, whole_s: float, moved: bool, cost: list[str]
) -> tuple[str, ...]:
    status = attempt.status
    took = runs.elapsed(status.started_at, status.ended_at) if status.started_at else ""
    code = "" if status.exit_code is None else str(status.exit_code)
    place = [attempt.plan.target or attempt.plan.backend] * moved
    bar = _attempt_bar(attempt, begin, whole_s)
    return f"  {attempt.number}", *place, str(status.state), code, took, *cost, bar, status.reason


def _attempt_bar(attempt: AttemptRecord, begin: datetime, whole_s: float) -> str:
    """Return a bar over the time of the run: `-` while the attempt waited, `=` while it ran."""

    def column(text: str | None, default: int) -> int:
        moment = runs.parse_time(text)
        return (
            min(BAR_WIDTH, max(0, round((moment - begin).total_seconds() / whole_s * BAR_WIDTH))) if moment else default
        )

    last = column(attempt.status.ended_at, BAR_WIDTH)
    first = min(column(attempt.created_at, 0), last)
    started = min(max(column(attempt.status.started_at, last), first), last)
    return f"{'-' * (started - first) + '=' * (last - started) or '=':>{last}}".ljust(BAR_WIDTH)


def event_lines(run: Run, begin: datetime) -> Iterator[str]:
    """Yield a line for each event of a run. Equal events of several nodes within a second make one line."""
    selected = [event for event in run.store.events(run.run_id) if event.kind in KINDS + USES]
    with_steps = {
        event.attempt
        for event in selected
        if event.kind == "checkpoint" and "step" in event.data and not {"written", "kept"} & event.data.keys()
    }
    selected = [event for event in selected if "written" not in event.data or event.attempt not in with_steps]
    for _, group in groupby(
        selected, key=lambda event: (event.attempt, event.at[:19], event.kind, _describe_event(event))
    ):
        same_events = list(group)
        first = same_events[0]
        moment = runs.parse_time(first.at)
        offset = f"+{format_duration((moment - begin).total_seconds())}" if moment else ""
        nodes = sorted({event.node for event in same_events})
        node_text = f"node {nodes[0]}" if len(nodes) == 1 else f"{len(nodes)} nodes"
        if nodes == [PLATFORM]:
            node_text = "user" if first.kind in USES else "platform"
        yield f"  {offset:>8}  {first.attempt.rpartition('-')[2]} {node_text}  {first.kind} {_describe_event(first)}".rstrip()


def _cancel_lines(run: Run, begin: datetime) -> Iterator[str]:
    """Yield who asked from here to cancel the run, from the audit log."""
    for row in audit.read(run.store.home, run.run_id):
        if row.get("what") == "cancel" and (moment := runs.parse_time(str(row.get("at") or ""))):
            yield f"  +{format_duration((moment - begin).total_seconds())}  cancel asked for by {row.get('who')}"


def _describe_event(event: Event) -> str:
    data: Mapping[str, Any] = event.data
    values = {
        name: value
        for name, value in data.items()
        if value not in (None, "", [], {}) and name not in _PRINTED_ELSEWHERE
    }
    if event.kind == "state":
        return str(values.get("state", ""))
    if event.kind == "status":
        return f"{values['state']} ({values['reason']})" if "reason" in values else str(values["state"])
    if event.kind == "result" and "code" in values:  # what the platform saw; the run's own exit code may be another
        values = {("launcher_exit" if name == "code" else name): value for name, value in values.items()}
    if event.kind == "checkpoint" and "written" in values:  # by a script that reports no steps
        return f"{values['written']} was written into the checkpoint folder"
    if "kept" in values:
        return (
            f"{values['kept']} was written"
            if values["kept"].startswith("{")
            else f"{values['kept']} was copied from the script's folder"
        )
    if event.kind == "role":
        return (
            f"{data.get('name')} waits for {', '.join(map(str, values['waits']))}"
            if "waits" in values
            else f"{data.get('name')} is ready"
        )
    if event.kind == "exec":
        import shlex

        values["command"] = shlex.join(map(str, data.get("command", ())))
    text = "  ".join(f"{name}={value}" for name, value in values.items())
    return text if len(text) <= 200 else text[:197] + "..."
