"""An attempt without a handle: who is sending it, whether it is to be sent again, and until when."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.history.store import UNASKED, UNSENT
from cloudtrain.job.units import seconds_since
from cloudtrain.nodes.process import Process

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord

ADOPTABLE_S = 15 * 60.0  # for so long an interrupted or unanswered first submission may be sent again
# Ends the owner of an attempt that a watcher or a reader is sending: that process prints no run id.
BACKGROUND = " in the background"
_SENDING: set[str] = set()  # attempts that a thread of this process is sending
_LOCK = Lock()


def background_owner() -> str:
    """Return the owner of what this process sends or asks about as a watcher or a reader, which prints no run id."""
    return f"{Process.here()}{BACKGROUND}"


def is_in_background(attempt: AttemptRecord) -> bool:
    """Return whether the next `submit` of the same job adopts an attempt although its owner lives and has its handle."""
    return attempt.owner.endswith(BACKGROUND)


def is_free(attempt: AttemptRecord, clock: Clock = SYSTEM, *, mine: bool = False) -> bool:
    """Return whether no process is sending an attempt: its sender has died, or has ended without an answer.

    Whether a sender on another machine lives cannot be seen; it counts as gone after ADOPTABLE_S. `mine`: the caller
    holds the mark of `marked_as_sending`.
    """
    if attempt.attempt_id in _SENDING and not mine:
        return False
    owner = attempt.owner.removesuffix(BACKGROUND)
    if owner in ("", str(Process.here())):
        return True
    sender = Process.parse(owner)
    if sender is None or sender.alive is None:
        return age_s(attempt, clock) > ADOPTABLE_S
    return not sender.alive


def is_unsent(attempt: AttemptRecord) -> bool:
    """Return whether an attempt waits for machines that could not be reached: nothing of it was sent anywhere."""
    return attempt.handle is None and not attempt.status.state.final and attempt.status.event in (UNSENT, UNASKED)


def is_wanted(run: RunRecord, attempt: AttemptRecord, clock: Clock = SYSTEM) -> bool:
    """Return whether an attempt without a handle is to be sent, once no other process is sending it."""
    unanswered = attempt.unanswered_since is not None and age_s(attempt, clock) <= patience_s(attempt)
    return not run.cancel_requested and (attempt.number > 1 or unanswered or bool(attempt.plan.job.get("after")))


def needs_watcher(run: RunRecord, attempt: AttemptRecord, clock: Clock = SYSTEM) -> bool:
    """Return whether a watcher has anything to do for an attempt: not for a first submission that was killed."""
    if attempt.handle is not None or attempt.status.state.final:
        return True
    if run.cancel_requested:
        return True
    chained = bool(attempt.plan.job.get("after"))
    return is_free(attempt, clock) and (attempt.number > 1 or attempt.unanswered_since is not None or chained)


def age_s(attempt: AttemptRecord, clock: Clock = SYSTEM) -> float:
    """Return how many seconds ago an attempt's intent was stored."""
    return seconds_since(attempt.created_at, clock)


def patience_s(attempt: AttemptRecord) -> float:
    """Return for how many seconds a first submission is repeated."""
    limit_s = max_wait_s(attempt.plan) if is_unsent(attempt) else None
    return ADOPTABLE_S if limit_s is None else limit_s


def max_wait_s(plan: Plan) -> float | None:
    """Return `limits.max_wait` of a plan in seconds; None where it is not set."""
    from cloudtrain.job.job import Job

    return Job.from_dict(plan.job).limits.max_wait_s


@contextmanager
def marked_as_sending(attempt_id: str) -> Iterator[bool]:
    """Mark an attempt as being sent by this thread, from before its intent is stored; False where another one sends it.

    Without the mark another thread would take the attempt for one that this process left behind, and send it too.
    """
    with _LOCK:
        mine = attempt_id not in _SENDING
        _SENDING.add(attempt_id)
    try:
        yield mine
    finally:
        if mine:
            _SENDING.discard(attempt_id)
