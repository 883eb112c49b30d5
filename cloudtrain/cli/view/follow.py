"""Follow or wait for a run, report how it ended, and handle Ctrl-C meanwhile."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from cloudtrain.cli.view import columns, runs, summary, terminal
from cloudtrain.cli.view.failures import INTERRUPTED
from cloudtrain.cli.view.log import LastLines, LineFormatter, print_log
from cloudtrain.cli.view.options import Ending
from cloudtrain.errors import BackendError, CloudtrainError, StoreError, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.job.units import format_duration

if TYPE_CHECKING:
    from cloudtrain.history.records import RunRecord
    from cloudtrain.history.store import Store
    from cloudtrain.runs.run import Run

ANSWER_S = 10.0  # how long a cancel waits for the platform's answer
CONFIRM_S = 10.0  # how long a cancel waits for the platform's confirmation


class Begun(NamedTuple):
    """A run that was just started, what is said of it, and the cursor behind which its log is new."""

    run: Run
    how: str
    after: str | None = None


def begin(store: Store, start: Callable[[], Begun], ending: Ending) -> int:
    """Start a run and print it; with --follow or --wait stay until its end. Return the exit code; blocking.

    Ctrl-C at any moment, while the run is being submitted too, does what --on-interrupt says.
    """
    run: Run | None = None
    with _terminated_as_interrupt(ending.on_interrupt == "cancel"):
        try:
            run, action, after = start()
            for text in run.notes:
                terminal.note(f"note: {text}")
            unknown = bool(run.attempts[-1].unanswered_since)
            waits = False
            if unknown:
                from cloudtrain.runs.sending import outcomes

                waits = outcomes.is_unsent(run.attempts[-1])
                action = "waits for" if waits else "was sent to"
            elif run.attempts[-1].handle is None and run.attempts[-1].status.state.final:
                action = "was refused by"  # and its reason says where the next attempt goes
            _print_started(run, action, ending)
            if not unknown:  # as decided above: a watcher may accept it meanwhile, and the exit code still says unknown
                _acknowledge(run)  # behind the flush: from here on the person knows the id
            if reason := run.record.status.reason if run.attempts[-1].handle is None else "":
                terminal.note(f"{run.run_id}: {reason}")
                run.printed_reason = reason
            if ending.follow or ending.wait:
                code = follow_to_end(run, follow=ending.follow, as_json=ending.as_json, after=after)
                _acknowledge(run)  # its end was printed, also where its begin was not known
                return code
            return BackendError.exit_code if unknown and not waits else 0
        except KeyboardInterrupt as stop:
            run = run or _unprinted_run(store)
            if run is None:
                raise
            return _interrupted(run, ending.on_interrupt, getattr(stop, "cursor", None), ending.as_json)
        except CloudtrainError as error:
            error.run_id = run.run_id if run else error.run_id
            raise


def _acknowledge(run: Run) -> None:
    """Note that the person knows the run. What was printed stays the answer where this cannot be stored."""
    try:
        run.acknowledge()
    except StoreError as error:
        terminal.note(f"warning: {error.message}: the next submit of the same job continues {run.run_id}")


def _print_started(run: Run, action: str, ending: Ending) -> None:
    state = run.record.status.state
    if run.adopted and run.record.acknowledged and state.final and not ending.as_json:
        terminal.print_lines(f"{run.run_id}  {action} {run.record.backend}, and has ended: {state}")
        if not (ending.follow or ending.wait):
            summary.print_next_commands(run.run_id, "show", "fetch")
    elif not ending.as_json:
        summary.print_submitted(run, action)
        if not (ending.follow or ending.wait):
            summary.print_next_commands(run.run_id, "follow", "show", "cancel")
    elif ending.follow or not ending.wait:
        terminal.print_json({**runs.submitted_json(run), "reused": run.adopted})
    else:
        terminal.note(f"{run.run_id}  {action} {run.record.backend}")
    sys.stdout.flush()


def _unprinted_run(store: Store) -> Run | None:
    """Return the run that this process began to submit and whose id was not printed yet."""
    from cloudtrain.nodes.process import Process
    from cloudtrain.runs.run import Run

    me = str(Process.here())
    return next((Run(attempt.run_id, store) for attempt in store.unsettled() if attempt.owner == me), None)


def follow_to_end(run: Run, *, follow: bool, as_json: bool = False, after: str | None = None) -> int:
    """Follow or wait for a run until it is final, print how it ended, and return its exit code; blocking."""
    last_lines = LastLines()
    if follow:
        terminal.print_lines(*[] if as_json else [""])
        print_log(
            run, LineFormatter(run.attempts[-1], as_json=as_json), follow=True, after=after, last_lines=last_lines
        )
        terminal.print_lines(*[] if as_json else [""])
    return report_end(run, wait_quietly(run), last_lines if follow else None, as_json=as_json)


def wait_quietly(run: Run, timeout_s: float | None = None) -> Status:
    """Wait until a run is final; on a terminal a status line on standard error shows progress. Raises TimeoutError."""
    if not terminal.supports_escapes(sys.stderr):
        return run.wait(timeout_s)
    last_drawn = 0.0

    def tick(record: RunRecord) -> None:
        nonlocal last_drawn
        if (moment := run.store.clock.monotonic()) - last_drawn > 0.5:
            last_drawn = moment
            line = terminal.clean(f"{record.run_id}  {record.status.state}  {runs.elapsed(record.created_at)}")
            sys.stderr.write(f"\r\x1b[K{columns.cut(line, terminal.width(sys.stderr) - 1)}")
            sys.stderr.flush()

    try:
        return run.wait(timeout_s, tick=tick)
    finally:
        sys.stderr.write("\r\x1b[K")


def report_end(run: Run, status: Status, seen: LastLines | None = None, *, as_json: bool = False) -> int:
    """Print how a run ended and return its exit code. A failure is printed with the last lines of the rank that failed first."""
    rank_name, last_lines = "", list[str]()
    if status.state not in (State.SUCCEEDED, State.CANCELLED) and not (seen and seen.single_rank):
        rank_name, last_lines = (seen or _read_last_lines(run)).failure_lines(failed_rank(run))
    if as_json:
        terminal.print_json(final_json(run, status))
        for text in last_lines:
            terminal.note(text)
    else:
        summary.print_end(run, status, last_lines, rank_name=rank_name)
    return status.cli_exit_code


def final_json(run: Run, status: Status) -> dict[str, Any]:
    """Return the JSON of `wait --json` and `submit --wait --json`: that of `submit`, and how the run ended."""
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
    """Cancel a run; return a sentence about the outcome, and the status after at most `wait_s` seconds."""
    try:
        asked = _ask_in_time(run)
        if asked is None:
            from cloudtrain.runs.sending import handover

            run.store.request_cancel(run.run_id)
            handover.start(run.store, run.attempts[-1].plan, instead=True)
            backend, status = run.record.backend, run.record.status
            line = (
                f"{backend} has not answered for {ANSWER_S:g} s; the background watcher cancels the run "
                "when the platform answers again"
            )
            return f"{run.run_id}  cancel requested: {line} (cloudtrain show {run.run_id})", status
        if asked.state.final:
            return f"{run.run_id}  had already ended {asked.state}", asked
        status = run.wait(wait_s)
    except TimeoutError:
        status = run.record.status
    except KeyboardInterrupt:
        run.store.request_cancel(run.run_id)
        return f"{run.run_id}  cancel requested; this command did not wait for the end", run.record.status
    if status.state.final:
        return f"{run.run_id}  {status.state}", status
    if run.attempts[-1].handle is None:
        backend = run.record.backend
        raise Unreachable(
            f"{run.run_id} cannot be cancelled yet: {backend} did not answer whether it has the job: {status.reason}",
            f"correct the connection or the credentials: the background watcher cancels it when {backend} answers; where it "
            f"never will, cloudtrain rm --here --force {run.run_id} removes the run from this machine, though a job may exist",
        )
    return (
        f"{run.run_id}  cancel requested; {run.record.backend} has not confirmed it after {wait_s:g} s"
        f" and says {status.state}; what still runs {_grace(run)} after the request is killed (limits.grace)"
        f" (cloudtrain wait {run.run_id})",
        status,
    )


def _grace(run: Run) -> str:
    return format_duration(float(run.attempts[-1].plan.manifest.get("grace_s") or 0))


def _ask_in_time(run: Run) -> Status | None:
    """Ask a run's platform to end it; return the status before, None where there was no answer within ANSWER_S."""
    from cloudtrain.history.store import Store

    answers: list[Status | BaseException] = []

    def ask() -> None:
        own = type(run)(run.run_id, Store(run.store.home), watch=run.watch)  # each thread needs its own history
        try:
            open_intent = own.attempts[-1].handle is None  # then cancel() itself asks the platform
            before = own.record.status if open_intent else own.refresh()
            if not before.state.final:
                own.cancel(take_over=True)  # who asks has looked at the home
            answers.append(before)
        except BaseException as error:
            answers.append(error)
        finally:
            own.store.database.close()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(ANSWER_S)
    answer = answers[0] if answers else None
    if isinstance(answer, BaseException):
        raise answer
    return answer


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
        terminal.note("  to finish  run the same submit again")
        terminal.note(f"  to cancel  cloudtrain cancel {run.run_id}")
        return INTERRUPTED
    terminal.note(f"detached: {run.run_id} continues")
    after_option = f" --after {cursor}" if cursor else ""
    terminal.note(f"  follow again  cloudtrain logs -f {run.run_id}{after_option}")
    terminal.note(f"  cancel        cloudtrain cancel {run.run_id}")
    _acknowledge(run)  # the id is printed now, even if the interrupt came before
    run.refresh()  # starts a watcher in the background
    return INTERRUPTED


@contextmanager
def _terminated_as_interrupt(enabled: bool) -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C, for CI systems that end a job with SIGTERM."""
    if not enabled:
        yield
        return

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _read_last_lines(run: Run) -> LastLines:
    """Read the last lines of every rank from the newest attempt's log; blocking."""
    last_lines = LastLines()
    for line in run.logs(after=f"{run.attempts[-1].number}/", raw=True):
        last_lines.add(line)
    return last_lines


def failed_rank(run: Run) -> int | None:
    """Return the rank that failed first, from the launcher's result event; None where it is not known."""
    newest = run.attempts[-1].attempt_id
    for event in reversed(run.store.events(run.run_id, "result")):
        rank = event.data.get("failed_rank", event.data.get("rank"))
        if event.attempt == newest and isinstance(rank, int):
            return rank
    return None
