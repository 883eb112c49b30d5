"""The overview of a run: facts, verdict, attempts over time, events of its nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from cloudtrain.cli.view import planned, runs, summary, timeline
from cloudtrain.clock import SYSTEM
from cloudtrain.console import history, text, widgets
from cloudtrain.console.runrows import run_link
from cloudtrain.events import Status
from cloudtrain.history.records import AttemptRecord
from cloudtrain.history.spool import last_contact
from cloudtrain.job.targets import submitter
from cloudtrain.job.units import format_size
from cloudtrain.runs import progress
from cloudtrain.runs.planning import spend
from cloudtrain.runs.run import Run

MAX_EVENTS = 200  # the newest ones
LONGEST_SEARCH = 200  # characters of a line that is searched in the log


@dataclass(frozen=True)
class RunDetails:
    """The values of the overview, read in one query."""

    status: Status
    facts: tuple[tuple[str, str], ...]
    verdict: tuple[tuple[str, str], ...]
    deciding: tuple[int, str] | None  # node and text of the log's line that the verdict is from
    attempts: tuple[tuple[str, ...], ...]
    costs: tuple[str, ...]  # of each attempt, where a price is known
    bars: tuple[
        tuple[float, float, float], ...
    ]  # (created, started, ended) of each attempt, as fractions of the run's time
    events: tuple[str, ...]
    cancelling: bool
    attached: bool  # submitted from another machine: it is cancelled and run again there
    chain: tuple[tuple[str, str], ...]  # label, and the id and state of a run before or after this one


def read_details(run: Run) -> RunDetails:
    """Read the details of a run; blocking. For the first verdict on a failed run it reads the log."""
    record, attempts = run.record, run.attempts
    status, plan = record.status, attempts[-1].plan
    begin = runs.parse_time(record.created_at)
    assert begin is not None
    end = runs.parse_time(status.ended_at) or SYSTEM.utc()
    files = plan.bundle.get("files", 0)
    whole_s = max((end - begin).total_seconds(), 1e-3)
    since = "" if status.state.final else text.format_time(run.store.reason_since(record))
    verdict = run.verdict()
    logged = verdict is not None and verdict.where == "log" and verdict.deciding
    answer = None if status.state.final else last_contact(run.store.home, run.run_id, run.store.clock)
    outage = answer.outage if answer else ""
    facts = (
        ("job", record.name),
        ("submitted by", submitter(record.job.get("labels") or {}) or "" if record.attached else ""),
        ("attached", f"from {text.clean(record.attached, 300)}, read only" if record.attached else ""),
        ("backend", planned.describe_target(plan)),
        ("world", planned.describe_nodes(plan)),
        *(("command", each) for each in planned.describe_commands(plan)),
        (
            "source",
            f"{files} file{'s' if files != 1 else ''}, {format_size(plan.bundle.get('size_bytes', 0))} packed",
        ),
        ("commit", str(plan.bundle.get("commit") or "")[:12] + (" with changes" if plan.bundle.get("dirty") else "")),
        ("limit", planned.describe_limit(plan)),
        ("created", text.format_time(record.created_at)),
        ("took", runs.took(status, attempts)) if status.ended_at else ("elapsed", runs.elapsed(status.started_at)),
        ("exit code", "" if status.exit_code is None else str(status.exit_code)),
        ("step", "" if status.state.final else _newest_step(run)),
        ("progress", found.line if (found := progress.of_run(run.store, attempts)) else ""),
        ("forecast", progress.describe_forecast(attempts, run.store.home)),
        ("spent", spend.describe_run(attempts, run.store.home)),
        ("cap", spend.describe_cap(attempts, run.store.home)),
        ("billed", summary.describe_billing(attempts)),
        ("page", status.url or ""),
    )
    return RunDetails(
        status,
        facts,
        (("reason", status.reason), ("since", since), ("platform", outage), *summary.verdict_rows(verdict)),
        (verdict.node or 0, verdict.deciding[:LONGEST_SEARCH]) if verdict and logged else None,
        tuple(_attempt(attempt) for attempt in attempts),
        tuple(spend.describe_attempts(attempts, run.store.home)),
        tuple(_bar(attempt, begin, whole_s) for attempt in attempts),
        tuple(timeline.event_lines(run, begin))[-MAX_EVENTS:],
        record.cancel_requested,
        record.attached is not None,
        tuple(runs.chain_rows(run)),
    )


def _newest_step(run: Run) -> str:
    last = run.store.curves.newest(run.run_id)
    return f"{max(point.step for point in last):,}" if last else ""


def _attempt(attempt: AttemptRecord) -> tuple[str, ...]:
    status = attempt.status
    took = runs.elapsed(status.started_at, status.ended_at)
    if not status.ended_at:
        took = ""  # the time of a live attempt stands above, where it ticks
    code = "" if status.exit_code is None else str(status.exit_code)
    return str(attempt.number), status.state.value, code, took, attempt.plan.target or attempt.plan.backend


def _bar(attempt: AttemptRecord, begin: datetime, whole_s: float) -> tuple[float, float, float]:
    def part(iso_time: str | None, default: float) -> float:
        moment = runs.parse_time(iso_time)
        return min(1.0, max(0.0, (moment - begin).total_seconds() / whole_s)) if moment else default

    ended = part(attempt.status.ended_at, 1.0)
    created = min(part(attempt.created_at, 0.0), ended)
    return created, min(max(part(attempt.status.started_at, ended), created), ended), ended


class Overview:
    """The overview on one page, redrawn when it changes."""

    def __init__(
        self,
        run_id: str,
        on_change: Callable[[RunDetails], None],
        open_line: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._run_id = run_id
        self._open_line = open_line
        self._on_change = on_change
        self._drawn_state: object = None
        self._drawn_facts: object = None
        self._opened: bool | None = None  # whether the user opened the events

    async def show(self) -> None:
        """Draw the overview."""
        from nicegui import ui

        self._area = ui.element("div").classes("ct-stack")
        await self.refresh()

    async def refresh(self) -> None:
        """Redraw the overview when it has changed."""
        details = await history.current().query_run(self._run_id, read_details)
        state = (details.status, details.verdict, details.attempts, len(details.events), details.cancelling)
        if state == self._drawn_state:
            if (details.facts, details.chain) != self._drawn_facts:  # elapsed, step, ETA and cost, each second
                self._draw_facts(details)
            return
        self._drawn_state = state
        self._on_change(details)
        self._area.clear()
        with self._area:
            if any(value for _, value in details.verdict):
                failed = details.status.failed
                name = "Why it failed" if failed else "How it ended" if details.status.state.final else "Status"
                with widgets.card(name) as card:
                    card.classes("ct-verdict" if failed else "")
                    widgets.pairs((_VERDICT[label], value) for label, value in details.verdict)
                    if line := details.deciding:
                        widgets.button("Show it in the log", lambda: self._open_line(*line)).classes("ct-turn")
            self._facts(details)

    def _facts(self, details: RunDetails) -> None:
        from nicegui import ui

        with ui.element("div").classes("ct-two ct-facts"):
            with widgets.card("Run"):
                self._facts_area = ui.element("div")
            self._draw_facts(details)
            with widgets.card("Timeline"):
                moved = len({row[4] for row in details.attempts}) > 1
                priced = bool(details.costs)
                coded = not (moved and priced)  # there is no space for all; the events have the exit codes
                heads = ("attempt", *["on"] * moved, "state", *["exit"] * coded, "took", *["USD"] * priced, "when")
                rows: list[tuple[object, ...]] = []
                costs = [[cost] for cost in details.costs] or [[]] * len(details.bars)
                for row, cost, bar in zip(details.attempts, costs, details.bars, strict=True):
                    code = row[2:3] * coded
                    rows.append((row[0], *row[4:] * moved, _state(row[1]), *code, row[3], *cost, _bar_cell(bar)))
                looks = {"exit": "ct-number ct-wide", "took": "ct-number", "USD": "ct-number"}
                looks["when"] = "ct-fill"
                widgets.table(heads, rows, caption="Attempts", looks=looks)
                if details.events:
                    opened = len(details.attempts) > 1 if self._opened is None else self._opened
                    with widgets.collapsible(f"{len(details.events)} events", opened=opened, on_toggle=self._toggled):
                        widgets.preformatted("\n".join(line.strip() for line in details.events), name="Events")

    def _draw_facts(self, details: RunDetails) -> None:
        self._drawn_facts = details.facts, details.chain
        self._facts_area.clear()
        with self._facts_area:
            widgets.pairs([*details.facts, *((label, _chained(one)) for label, one in details.chain)])

    def _toggled(self, opened: bool) -> None:
        self._opened = opened


_VERDICT = {
    "reason": "reason",
    "since": "since",
    "platform": "platform",
    "why": "what happened",
    "log": "in the log",
    "at": "raised at",
    "try": "try",
}


def _chained(one: str) -> Callable[[], None]:
    """Return a function that draws a run before or after this one, as a link with its state."""
    from nicegui import ui

    run_id, _, state = one.partition(" ")

    def draw() -> None:
        with ui.element("div").classes("ct-row"):
            if state == runs.REMOVED:
                ui.label(text.clean(one))
                return
            ui.link(text.clean(run_id), run_link(run_id))
            _state(state)()

    return draw


def _state(name: str) -> Callable[[], None]:
    from cloudtrain.events import State

    return lambda: widgets.state(State(name))


def _bar_cell(bar: tuple[float, float, float]) -> Callable[[], None]:
    """Return a function that draws when an attempt waited and ran."""
    from nicegui import ui

    def draw() -> None:
        created, started, ended = bar
        with ui.element("div").classes("ct-bar-track").props('role="img"') as track:
            track.props["aria-label"] = f"waited until {started:.0%}, ran until {ended:.0%} of the run's time"
            ui.element("i").classes("ct-wait").style(f"left: {created:.2%}; width: {started - created:.2%}")
            ui.element("i").style(f"left: {started:.2%}; width: {ended - started:.2%}")

    return draw
