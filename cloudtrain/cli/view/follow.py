"""To the end of a run: its log as it comes or in silence, what it ended with, and what Ctrl-C does on the way."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.cli.view import columns, runs, summary, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.log import Memory, Screen, print_log
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import State, Status

if TYPE_CHECKING:
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.runs.run import Run

CONFIRM_S = 10.0  # how long a cancel waits for the platform's word


class Begun(NamedTuple):
    """A run that was just started, what is said of it, and the cursor behind which its log is new."""

    run: Run
    how: str
    after: str | None = None


def begin(
    store: Store, start: Callable[[], Begun], *, follow: bool, wait: bool, on_interrupt: str, as_json: bool
) -> int:
    """Start a run and say so; then, when asked to, stay until its end. Return the exit code; blocking.

    Ctrl-C at any moment, while the run is being submitted too, does what `on_interrupt` says.
    """
    run: Run | None = None
    with _terminated_as_interrupt(on_interrupt == "cancel"):
        try:
            run, how, after = start()
            unknown = bool(run.attempts[-1].unanswered_since)
            _tell_begin(run, "was sent to" if unknown else how, follow=follow, wait=wait, as_json=as_json)
            if reason := run.record.status.reason if run.attempts[-1].handle is None else "":
                terminal.note(f"{run.run_id}: {reason}")
            if follow or wait:
                return to_the_end(run, follow=follow, as_json=as_json, after=after)
            return BackendError.exit_code if unknown else 0
        except KeyboardInterrupt as stop:
            run = run or _being_submitted(store)
            if run is None:
                raise
            return _interrupted(run, on_interrupt, getattr(stop, "cursor", None), as_json)


def _tell_begin(run: Run, how: str, *, follow: bool, wait: bool, as_json: bool) -> None:
    if not as_json:
        summary.of_submitted(run, how)
        if not (follow or wait):
            summary.next_commands(run.run_id, "follow", "show", "cancel")
    elif follow or not wait:
        terminal.print_json({**runs.submitted_json(run), "reused": run.adopted})
    else:
        terminal.note(f"{run.run_id}  {how} {run.record.backend}")
    sys.stdout.flush()
    run.acknowledge()  # behind the flush: from here on the person knows the id


def _being_submitted(store: Store) -> Run | None:
    """Return the run that this process has begun to submit, and that nobody was told of yet."""
    from cloudtrain.nodes.process import Process
    from cloudtrain.runs.run import Run

    me = str(Process.here())
    return next((Run(attempt.run_id, store) for attempt in store.unsettled() if attempt.owner == me), None)


def to_the_end(run: Run, *, follow: bool, as_json: bool = False, after: str | None = None) -> int:
    """Stay with a run until it is final, say how it ended, and return its exit code; blocking."""
    memory = Memory()
    if follow:
        terminal.say(*[] if as_json else [""])
        print_log(run, Screen(run.attempts[-1], as_json=as_json), follow=True, after=after, memory=memory)
        terminal.say(*[] if as_json else [""])
    return tell_end(run, quietly(run), memory if follow else None, as_json=as_json)


def quietly(run: Run, timeout_s: float | None = None) -> Status:
    """Wait for a run's end; on a terminal a line on standard error shows that it lives. Raises TimeoutError."""
    if not terminal.obeys(sys.stderr):
        return run.wait(timeout_s)
    shown = 0.0

    def tick(record: RunRecord) -> None:
        nonlocal shown
        if (moment := time.monotonic()) - shown > 0.5:
            shown = moment
            line = f"{record.run_id}  {record.status.state}  {runs.between(record.created_at)}"
            sys.stderr.write(f"\r\x1b[K{columns.cut(line, terminal.width(sys.stderr) - 1)}")
            sys.stderr.flush()

    try:
        return run.wait(timeout_s, tick=tick)
    finally:
        sys.stderr.write("\r\x1b[K")


def tell_end(run: Run, status: Status, memory: Memory | None = None, *, as_json: bool = False) -> int:
    """Say how a run ended and return its exit code; a failure with the last lines of the rank that failed first."""
    whose, last = "", list[str]()
    if status.state not in (State.SUCCEEDED, State.CANCELLED) and not (memory and memory.alone):
        whose, last = (memory or _read(run)).why(_failed_rank(run))
    if as_json:
        terminal.print_json(final_json(run, status))
        for text in last:
            terminal.note(text)
    else:
        summary.of_end(run, status, last, whose=whose)
    return status.cli_exit_code


def final_json(run: Run, status: Status) -> dict[str, Any]:
    """Return what `wait --json` and `submit --wait --json` print: as `submit`, and how the run ended."""
    data = {
        **runs.submitted_json(run),
        "state": status.state.value,
        "exit_code": status.exit_code,
        "reason": status.reason,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
        "phase": "run",
        **({"reused": True} if run.adopted else {}),
    }
    if status.state is not State.SUCCEEDED:
        data["error"] = f"{run.run_id} ended {status.state}" + (f": {status.reason}" if status.reason else "")
        data["hint"] = f"cloudtrain logs {run.run_id}"
        data["verdict"] = runs.verdict_json(run)
    return data


def cancel(run: Run, wait_s: float = CONFIRM_S) -> tuple[str, Status]:
    """Cancel a run; return a sentence on what came of it, and its status after at most `wait_s` seconds."""
    open_intent = run.attempts[-1].handle is None  # then cancelling looks at the platform itself
    if (before := run.record.status if open_intent else run.refresh()).state.final:
        return f"{run.run_id}  had already ended {before.state}", before
    try:
        status = run.cancel(wait_s)
    except KeyboardInterrupt:
        return f"{run.run_id}  is asked to end; nobody waited for its end", run.record.status
    if status.state.final:
        return f"{run.run_id}  {status.state}", status
    if run.attempts[-1].handle is None:
        backend = run.record.backend
        raise Unreachable(
            f"{run.run_id} is to be cancelled, but {backend} could not be asked whether it has the job: {status.reason}",
            f"it is cancelled as soon as {backend} answers; cloudtrain show {run.run_id}",
        )
    return (
        f"{run.run_id}  is asked to end; {run.record.backend} has not confirmed it after {wait_s:g} s"
        f" and says {status.state} (cloudtrain wait {run.run_id})",
        status,
    )


def _interrupted(run: Run, on_interrupt: str, cursor: str | None, as_json: bool) -> int:
    if on_interrupt == "cancel":
        sentence, status = cancel(run)
        if as_json:
            terminal.print_json(final_json(run, status))
        terminal.note(sentence)
        return INTERRUPTED
    terminal.note("")
    if run.attempts[-1].handle is None:
        terminal.note(f"interrupted: {run.record.backend} has not accepted {run.run_id} yet")
        terminal.note("  finish it with  the same submit again")
        terminal.note(f"  end it with     cloudtrain cancel {run.run_id}")
        return INTERRUPTED
    terminal.note(f"detached: {run.run_id} goes on")
    behind = f" --after {cursor}" if cursor else ""
    terminal.note(f"  return with  cloudtrain logs -f {run.run_id}{behind}")
    terminal.note(f"  end it with  cloudtrain cancel {run.run_id}")
    run.acknowledge()  # the person knows it now, even where it was interrupted before its id was printed
    run.refresh()  # and somebody should watch it
    return INTERRUPTED


@contextmanager
def _terminated_as_interrupt(wanted: bool) -> Iterator[None]:
    """Let SIGTERM do what Ctrl-C does, for CI systems that end a job so."""
    if not wanted:
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _read(run: Run) -> Memory:
    """Read the newest attempt's log for what its ranks said last; blocking."""
    memory = Memory()
    for line in run.logs(after=f"{run.attempts[-1].number}/", raw=True):
        memory.add(line)
    return memory


def _failed_rank(run: Run) -> int | None:
    """Return the rank that failed first, as the launcher's result event has it."""
    newest = run.attempts[-1].attempt_id
    for event in reversed(run.store.events(run.run_id, "result")):
        rank = event.data.get("failed_rank", event.data.get("rank"))
        if event.attempt == newest and isinstance(rank, int):
            return rank
    return None
