"""What became of a submission: accepted, refused or unknown, stored before it is returned.

An attempt that is stored without a handle is one that somebody is sending, or that is to be sent again, until a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, NoCapacity, NotReached, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history.store import UNASKED, UNSENT, Store
from cloudtrain.job.units import now, seconds_since
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import candidates
from cloudtrain.runs.sending import retry

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord

ADOPTABLE_S = 15 * 60.0  # for so long an interrupted or unanswered first submission may be sent again
# Ends the owner of an attempt that a watcher or a reader is sending: that process prints no run id.
BACKGROUND = " in the background"
_SENDING: set[str] = set()  # attempts that a thread of this process is sending
_LOCK = Lock()


@dataclass(frozen=True)
class Accepted:
    """The platform has the attempt, under this handle."""

    handle: str


@dataclass(frozen=True)
class Refused:
    """The platform does not take the attempt; `waiting` where another one follows when there is capacity."""

    error: CloudtrainError
    waiting: bool


@dataclass(frozen=True)
class Unknown:
    """It is not known whether the platform has the attempt, or (`unsent`) it was not sent yet."""

    error: CloudtrainError


Outcome = Accepted | Refused | Unknown


def record_accepted(store: Store, plan: Plan, handle: str) -> Accepted:
    store.accept(plan.attempt_id, handle)
    return Accepted(handle)


def record_not_sent(store: Store, plan: Plan, backend: Backend, error: CloudtrainError, *, again: bool) -> Outcome:
    """Record a refusal. Where an earlier submission may have begun, the platform is asked for it once more first."""
    if again:
        try:
            if (handle := backend.find(plan.attempt_id)) is not None:
                return record_accepted(store, plan, handle)
            backend.discard(plan.attempt_id)
        except BackendError as lookup_error:
            return record_unknown(store, plan, lookup_error)
    return record_refused(store, plan, error)


def record_not_reached(store: Store, plan: Plan, error: NotReached) -> Outcome:
    """Record that nothing was sent: the next candidate follows, or this attempt is tried again, or it has failed."""
    if len(plan.candidates) > 1:
        return record_refused(store, plan, NoCapacity(error.message, error.hint))
    attempt = next(candidate for candidate in store.attempts(plan.run_id) if candidate.number == plan.attempt)
    limit_s = plan.stored_job.limits.max_wait_s
    if limit_s is not None:
        if age_s(attempt, store.clock) > limit_s:
            return record_refused(store, plan, BackendError(given_up(plan, error.message), error.hint))
    elif plan.attempt == 1 and (not error.waits or age_s(attempt, store.clock) > ADOPTABLE_S):
        return record_refused(
            store, plan, NotReached(f"{error.message}; nothing was sent", error.hint, waits=error.waits)
        )
    reason = f"not sent yet{_tries(attempt)}: {error.message}"
    # Another machine may submit the same key meanwhile: its platforms are asked again before the next try.
    keyed = plan.attempt == 1 and store.find(plan.run_id).key is not None
    store.record_unanswered(plan.attempt_id, reason, event=UNASKED if keyed else UNSENT)
    return Unknown(error)


def record_unasked(store: Store, plan: Plan, error: Unreachable) -> Unknown:
    """Record that the platforms of a key's run could not be asked for it, so that nothing was sent."""
    attempt = store.attempts(plan.run_id)[0]
    asked = "with --key nothing is sent before all targets were asked for the key's run"
    store.record_unanswered(plan.attempt_id, f"not sent yet{_tries(attempt)}: {error.message} ({asked})", event=UNASKED)
    return Unknown(error)


def record_refused(store: Store, plan: Plan, error: CloudtrainError) -> Refused:
    event = "capacity" if isinstance(error, NoCapacity) else ""
    status = Status(State.FAILED, None, error.message, ended_at=now(store.clock), event=event)
    store.record(plan.attempt_id, status=status)
    waiting = retry.allowed(store, plan, status)
    if waiting:
        reason = retry.waits_for_capacity(store, plan, status) or f"{status.reason}; {_following(store, plan, status)}"
        store.set_status(plan.run_id, Status(State.QUEUED, None, reason))
    else:
        if left := candidates.describe_left_out(plan.candidates):
            error.message += f"; not tried: {left}"
            error.args = (error.message,)
        reason_shown = error.message if plan.attempt == 1 else f"attempt {plan.attempt} was refused: {error.message}"
        store.set_status(plan.run_id, replace(status, reason=reason_shown))
    return Refused(error, waiting=waiting)


def record_unknown(store: Store, plan: Plan, error: CloudtrainError) -> Unknown:
    attempt = next(candidate for candidate in store.attempts(plan.run_id) if candidate.number == plan.attempt)
    store.record_unanswered(plan.attempt_id, unanswered_reason(plan.backend, attempt, error))
    return Unknown(error)


def end_attempt(store: Store, plan: Plan, status: Status) -> None:
    store.record(plan.attempt_id, status=status)
    store.set_status(plan.run_id, status)


def unanswered_reason(name: str, attempt: AttemptRecord, error: CloudtrainError) -> str:
    since = attempt.unanswered_since or attempt.created_at
    return f"unknown since {since[:19]}Z whether {name} has accepted it{_tries(attempt)}: {error.message}"


def _tries(attempt: AttemptRecord) -> str:
    return f", tried {attempt.tries + 1} times" if attempt.tries else ""


def interrupted(attempt: AttemptRecord, name: str) -> str:
    """Return the reason of a run whose first submission was killed, and which no platform has."""
    minutes = f"{ADOPTABLE_S / 60:.0f} min"
    return (
        f"its submission was interrupted, and {name} does not have it: submit the same job again to continue it, "
        f"or it ends FAILED {minutes} after {attempt.created_at[:19]}Z"
    )


def given_up(plan: Plan, message: str) -> str:
    limit = (plan.job.get("limits") or {}).get("max_wait")
    waited = f"{limit} (limits.max_wait)" if limit else f"{ADOPTABLE_S / 60:.0f} min"
    return f"{message}; not tried again after {waited}"


def _following(store: Store, plan: Plan, status: Status) -> str:
    """Return that another attempt follows, and where: the target, and its GPUs where only these differ."""
    plans = retry.next_plans(store, plan, status)[0] if retry.has_candidates(plan) else []
    if not plans:
        return "another attempt follows"
    target, gpus = plans[0].target, plans[0].job["resources"]["accelerators"]
    return f"another attempt follows on {target}" + (f" ({gpus})" if gpus and target == plan.target else "")


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
    """Return whether a watcher has anything to do for an attempt: not while a living process sends it."""
    known = attempt.handle is not None or attempt.status.state.final
    return known or run.cancel_requested or is_free(attempt, clock)


def age_s(attempt: AttemptRecord, clock: Clock = SYSTEM) -> float:
    """Return how many seconds ago an attempt's intent was stored."""
    return seconds_since(attempt.created_at, clock)


def patience_s(attempt: AttemptRecord) -> float:
    """Return for how many seconds a first submission is repeated."""
    limit_s = attempt.plan.stored_job.limits.max_wait_s if is_unsent(attempt) else None
    return ADOPTABLE_S if limit_s is None else limit_s


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
