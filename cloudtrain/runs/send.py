"""Submit attempts to their platforms: the only module that calls `Backend.submit`.

Each submission has one of three outcomes, which is stored before it is returned:

- `Accepted`: the platform gave a handle.
- `Refused`: the platform said no. The attempt is FAILED; only insufficient capacity may be followed by another attempt.
- `Unknown`: the answer was lost. The attempt stays open, and nothing is sent again before `Backend.find` has answered.

Where no machine could be reached, nothing was sent (`unsent`): the next candidate is tried, or the attempt is tried again
until `limits.max_wait` is over. A run of a `--key` is sent only after its platforms have answered whether they have it
(`unasked` until then).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

from cloudtrain.backends.api import HasPreflight, HasRemains
from cloudtrain.backends.manifest import unset_secrets
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError, NoCapacity, NotReached, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history import audit
from cloudtrain.history.store import UNASKED, UNSENT, Store
from cloudtrain.job.units import now, seconds_since
from cloudtrain.nodes.process import Process
from cloudtrain.runs import attempts, failover, key_search, output_audit, retry

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.source.bundle import Bundle

ADOPTABLE_S = 15 * 60.0  # for so long an interrupted or unanswered first submission may be sent again
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
    waiting: bool = False


@dataclass(frozen=True)
class Unknown:
    """It is not known whether the platform has the attempt, or (`unsent`) it was not sent yet."""

    error: CloudtrainError


Outcome = Accepted | Refused | Unknown


def preflight(plan: Plan, backend: Backend) -> None:
    """Raise BadRequest where this process can see that an attempt cannot run; called before its intent is stored."""
    if unset := unset_secrets(plan):
        raise BadRequest(unset, "export it, or use another source for the secret")
    if isinstance(backend, HasPreflight):
        backend.preflight(plan)


def send_attempt(
    store: Store,
    plan: Plan,
    backend: Backend,
    bundle: Bundle | None,
    intent: Callable[[], bool],
    *,
    again: bool = False,
) -> Outcome | None:
    """Send an attempt and store the outcome; blocking. None where `intent` says that another process was first.

    Args:
        bundle: what `plan` was made with; None to read it from the home.
        intent: stores the intent, or claims one whose sender is gone; called before anything is sent.
        again: whether something may have been sent before: `find` is asked first.
    """
    with _marked(plan.attempt_id) as mine:
        if not mine or not intent():
            return None
        nothing_sent = again and store.claim_unsent(plan.attempt_id)
        if again:
            try:
                handle = backend.find(plan.attempt_id)  # another history may have sent it under the same key
            except BackendError as error:
                if not nothing_sent:
                    return _record_unknown(store, plan, error)
                handle, again = None, False
            if handle is not None:
                return _record_accepted(store, plan, handle)
            if unset := unset_secrets(plan):
                return _record_not_sent(store, plan, backend, _without_secrets(unset), again=again)
        row = _log(store, plan)
        try:
            with output_audit.copied(store.home, plan.job, row):
                handle = backend.submit(plan, bundle or attempts.stored_bundle(plan, store.home))
        except NotReached as error:
            return _record_unknown(store, plan, error) if again else _record_not_reached(store, plan, error)
        except Unreachable as error:
            return _record_unknown(store, plan, error)
        except CloudtrainError as error:
            return _record_not_sent(store, plan, backend, error, again=again)
        return _record_accepted(store, plan, handle)


def send_again(store: Store, attempt: AttemptRecord, backend: Backend) -> Outcome | None:
    """Finish the submission of an attempt whose sender is gone; blocking. None where another process was first."""

    def claim() -> bool:
        return store.change_owner(attempt.attempt_id, old=attempt.owner, new=Process.here())

    if attempt.status.event == UNASKED:
        return _ask_and_send(store, attempt, backend, claim)
    return send_attempt(store, attempt.plan, backend, None, claim, again=True)


def _ask_and_send(store: Store, attempt: AttemptRecord, backend: Backend, claim: Callable[[], bool]) -> Outcome | None:
    """Look for the run of a key on its platforms, and send its first attempt where none has it; blocking."""
    plan, key = attempt.plan, store.find(attempt.plan.run_id).key
    try:
        found = key_search.search(plan, store.home)
        if found.newest and key is not None:
            found.check_labels(key)
    except Unreachable as error:
        return record_unasked(store, plan, error)
    except CloudtrainError as error:
        return _record_refused(store, plan, error) if claim() else None
    if not found.newest:
        if unset := unset_secrets(plan):
            return _record_refused(store, plan, _without_secrets(unset)) if claim() else None

        def claim_unasked() -> bool:
            return store.claim_unsent(attempt.attempt_id) and claim()

        return send_attempt(store, plan, backend, None, claim_unasked)
    if not claim():
        return None
    first = found.attempts[0]
    if first is not None and first.candidate == 0 and found.newest == 1:
        return _record_accepted(store, plan, first.handle)
    text = f"the run of the key {key!r} was submitted from another machine, and attempt {found.newest} of it exists"
    return _record_refused(store, plan, BackendError(text, "submit again with the same --key to follow it"))


def settle(store: Store, run: RunRecord, attempt: AttemptRecord, backend: Backend, *, may_send: bool) -> bool:
    """Ask the platform whether it has an attempt without a handle; True when the attempt moved on. Blocking.

    If the platform has it, its handle is stored. If not:

    - the run was cancelled: the attempt ends CANCELLED;
    - a retry, a resume, or a run after others: it is submitted again;
    - a first submission that got no answer, younger than ADOPTABLE_S: it is submitted again;
    - a younger first submission whose sender was killed: it is left to the next `submit` of the same job;
    - an older first submission: the run ends FAILED.

    One that is `unsent` ends without an answer: nothing of it was sent.

    With `may_send=False` nothing is submitted. An attempt that is accepted here keeps no owner, so that the next
    `submit` of the same job adopts it until somebody has seen the run's id. Raises BackendError without an answer.
    """
    if not is_free(attempt):
        return False
    if may_send and not run.cancel_requested and not retry.outage_is_over(attempt):
        return False
    first, old = attempt.number == 1, age_s(attempt) > _patience_s(attempt)
    if may_send and is_wanted(run, attempt):
        outcome = send_again(store, attempt, backend)
        if isinstance(outcome, Unknown):
            raise outcome.error
        if isinstance(outcome, Accepted):
            store.change_owner(attempt.attempt_id, old=str(Process.here()), new="")
        return outcome is not None
    nothing_sent = is_unsent(attempt)
    if nothing_sent and not run.cancel_requested and not (first and old):
        return False
    with _marked(attempt.attempt_id) as mine:
        if not mine or not store.change_owner(attempt.attempt_id, old=attempt.owner, new=Process.here()):
            return False
        try:
            handle = None if nothing_sent else backend.find(attempt.attempt_id)
            if (
                handle is None
                and not nothing_sent
                and (run.cancel_requested or (first and old))
                and isinstance(backend, HasRemains)
            ):
                backend.discard(attempt.attempt_id)
        except BackendError as error:
            store.record_unanswered(
                attempt.attempt_id, _unanswered_reason(backend.name, attempt, error), owner=attempt.owner
            )
            raise
        except BaseException:
            store.change_owner(attempt.attempt_id, old=str(Process.here()), new=attempt.owner)
            raise
        if handle is not None:
            store.accept(attempt.attempt_id, handle)
            store.change_owner(attempt.attempt_id, old=str(Process.here()), new="")
        elif run.cancel_requested:
            _end(store, attempt.plan, Status(State.CANCELLED, None, "cancelled before it started", ended_at=now()))
        elif first and old:
            reason = f"its submission was interrupted, and {backend.name} has no such job"
            reason = _given_up(attempt.plan, attempt.status.reason) if nothing_sent else reason
            _end(store, attempt.plan, Status(State.FAILED, None, reason, ended_at=now()))
            store.acknowledge(run.run_id)  # it never began: the next submit of the same job is a new run
        else:
            store.change_owner(attempt.attempt_id, old=str(Process.here()), new=attempt.owner)
            return False
    return True


def is_wanted(run: RunRecord, attempt: AttemptRecord) -> bool:
    """Return whether an attempt without a handle is to be sent, once no other process is sending it."""
    unanswered = attempt.unanswered_since is not None and age_s(attempt) <= _patience_s(attempt)
    return not run.cancel_requested and (attempt.number > 1 or unanswered or bool(attempt.plan.job.get("after")))


def is_unsent(attempt: AttemptRecord) -> bool:
    """Return whether an attempt waits for machines that could not be reached: nothing of it was sent anywhere."""
    return attempt.handle is None and not attempt.status.state.final and attempt.status.event in (UNSENT, UNASKED)


def _patience_s(attempt: AttemptRecord) -> float:
    """Return for how many seconds a first submission is repeated."""
    limit_s = max_wait_s(attempt.plan) if is_unsent(attempt) else None
    return ADOPTABLE_S if limit_s is None else limit_s


def max_wait_s(plan: Plan) -> float | None:
    """Return `limits.max_wait` of a plan in seconds; None where it is not set."""
    from cloudtrain.job.job import Job

    return Job.from_dict(plan.job).limits.max_wait_s


def is_free(attempt: AttemptRecord) -> bool:
    """Return whether no process is sending an attempt: its sender has died, or has ended without an answer.

    Whether a sender on another machine lives cannot be seen; it counts as gone after ADOPTABLE_S.
    """
    if attempt.attempt_id in _SENDING:
        return False
    if attempt.owner in ("", str(Process.here())):
        return True
    sender = Process.parse(attempt.owner)
    if sender is None or sender.alive is None:
        return age_s(attempt) > ADOPTABLE_S
    return not sender.alive


def needs_watcher(run: RunRecord, attempt: AttemptRecord) -> bool:
    """Return whether a watcher has anything to do for an attempt: not for a first submission that was killed."""
    if attempt.handle is not None or attempt.status.state.final:
        return True
    if run.cancel_requested:
        return True
    chained = bool(attempt.plan.job.get("after"))
    return is_free(attempt) and (attempt.number > 1 or attempt.unanswered_since is not None or chained)


def age_s(attempt: AttemptRecord) -> float:
    """Return how many seconds ago an attempt's intent was stored."""
    return seconds_since(attempt.created_at)


@contextmanager
def _marked(attempt_id: str) -> Iterator[bool]:
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


def _log(store: Store, plan: Plan) -> dict[str, object]:
    """Add a line to the audit log before an attempt is sent: another word where the tries before it sent nothing."""
    attempt = next(found for found in store.attempts(plan.run_id) if found.number == plan.attempt)
    waited = attempt.tries and any(
        (row.get("what"), row.get("attempt")) == ("submit", plan.attempt) for row in audit.read(store.home, plan.run_id)
    )
    what, detail = ("try again", "the tries before sent nothing") if waited else ("submit", "")
    target = plan.target or plan.backend
    return audit.append(store.home, what, plan.run_id, attempt=plan.attempt, target=target, detail=detail)


def _without_secrets(unset: str) -> BackendError:
    return BackendError(f"not submitted again: {unset} in this process")


def _record_accepted(store: Store, plan: Plan, handle: str) -> Accepted:
    store.accept(plan.attempt_id, handle)
    return Accepted(handle)


def _record_not_sent(store: Store, plan: Plan, backend: Backend, error: CloudtrainError, *, again: bool) -> Outcome:
    """Record a refusal. Where an earlier submission may have begun, the platform is asked for it once more first."""
    if again:
        try:
            if (handle := backend.find(plan.attempt_id)) is not None:
                return _record_accepted(store, plan, handle)
            if isinstance(backend, HasRemains):
                backend.discard(plan.attempt_id)
        except BackendError as lookup_error:
            return _record_unknown(store, plan, lookup_error)
    return _record_refused(store, plan, error)


def _record_not_reached(store: Store, plan: Plan, error: NotReached) -> Outcome:
    """Record that nothing was sent: the next candidate follows, or this attempt is tried again, or it has failed."""
    if len(plan.candidates) > 1:
        return _record_refused(store, plan, NoCapacity(error.message, error.hint))
    attempt = next(candidate for candidate in store.attempts(plan.run_id) if candidate.number == plan.attempt)
    limit_s = max_wait_s(plan)
    if limit_s is not None:
        if age_s(attempt) > limit_s:
            return _record_refused(store, plan, BackendError(_given_up(plan, error.message), error.hint))
    elif plan.attempt == 1 and (not error.waits or age_s(attempt) > ADOPTABLE_S):
        return _record_refused(store, plan, error)
    tries = f", tried {attempt.tries + 1} times" if attempt.tries else ""
    reason = f"not sent yet{tries}: {error.message}"
    # Another machine may submit the same key meanwhile: its platforms are asked again before the next try.
    keyed = plan.attempt == 1 and store.find(plan.run_id).key is not None
    store.record_unanswered(plan.attempt_id, reason, event=UNASKED if keyed else UNSENT)
    return Unknown(error)


def record_unasked(store: Store, plan: Plan, error: Unreachable) -> Unknown:
    """Record that the platforms of a key's run could not be asked for it, so that nothing was sent."""
    attempt = store.attempts(plan.run_id)[0]
    tries = f", tried {attempt.tries + 1} times" if attempt.tries else ""
    asked = "with --key nothing is sent before all targets were asked for the key's run"
    store.record_unanswered(plan.attempt_id, f"not sent yet{tries}: {error.message} ({asked})", event=UNASKED)
    return Unknown(error)


def _given_up(plan: Plan, message: str) -> str:
    limit = (plan.job.get("limits") or {}).get("max_wait")
    return (
        f"{message}; not tried again after {f'{limit} (limits.max_wait)' if limit else f'{ADOPTABLE_S / 60:.0f} min'}"
    )


def _record_refused(store: Store, plan: Plan, error: CloudtrainError) -> Refused:
    event = "capacity" if isinstance(error, NoCapacity) else ""
    status = Status(State.FAILED, None, error.message, ended_at=now(), event=event)
    store.record(plan.attempt_id, status=status)
    waiting = retry.allowed(store, plan, status)
    if waiting:
        reason = retry.waits_for_capacity(store, plan, status) or f"{status.reason}; {_following(store, plan, status)}"
        store.set_status(plan.run_id, Status(State.QUEUED, None, reason))
    else:
        reason_shown = error.message if plan.attempt == 1 else f"attempt {plan.attempt} was refused: {error.message}"
        store.set_status(plan.run_id, replace(status, reason=reason_shown))
    return Refused(error, waiting=waiting)


def _following(store: Store, plan: Plan, status: Status) -> str:
    """Return that another attempt follows, and where: the target, and its GPUs where only these differ."""
    plans = failover.next_plans(store, plan, status)[0] if failover.has_candidates(plan) else []
    if not plans:
        return "another attempt follows"
    target, gpus = plans[0].target, plans[0].job["resources"]["accelerators"]
    return f"another attempt follows on {target}" + (f" ({gpus})" if gpus and target == plan.target else "")


def _record_unknown(store: Store, plan: Plan, error: CloudtrainError) -> Unknown:
    attempt = next(candidate for candidate in store.attempts(plan.run_id) if candidate.number == plan.attempt)
    store.record_unanswered(plan.attempt_id, _unanswered_reason(plan.backend, attempt, error))
    return Unknown(error)


def _unanswered_reason(name: str, attempt: AttemptRecord, error: CloudtrainError) -> str:
    since = attempt.unanswered_since or attempt.created_at
    tries = f", tried {attempt.tries + 1} times" if attempt.tries else ""
    return f"unknown since {since[:19]}Z whether {name} has accepted it{tries}: {error.message}"


def _end(store: Store, plan: Plan, status: Status) -> None:
    store.record(plan.attempt_id, status=status)
    store.set_status(plan.run_id, status)
