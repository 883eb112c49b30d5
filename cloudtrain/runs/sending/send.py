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

from collections.abc import Callable
from typing import TYPE_CHECKING

from cloudtrain.backends.manifest import unset_secrets
from cloudtrain.errors import BackendError, BadRequest, CloudtrainError, NotReached, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history import audit
from cloudtrain.history.store import UNASKED, Store
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import attempts, keys
from cloudtrain.runs.sending import outcomes, retry
from cloudtrain.runs.sending.outcomes import Outcome, Unknown

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord, RunRecord
    from cloudtrain.source.bundle import Bundle


def preflight(plan: Plan, backend: Backend) -> None:
    """Raise BadRequest or BackendError where this process can see that an attempt cannot run; before its intent is stored."""
    if unset := unset_secrets(plan):
        raise BadRequest(unset, "export it, or use another source for the secret")
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
    with outcomes.marked_as_sending(plan.attempt_id) as mine:
        if not mine or not intent():
            return None
        nothing_sent = again and store.claim_unsent(plan.attempt_id)
        if again:
            try:
                handle = backend.find(plan.attempt_id)  # another history may have sent it under the same key
            except BackendError as error:
                if not nothing_sent:
                    return outcomes.record_unknown(store, plan, error)
                handle, again = None, False
            if handle is not None:
                return outcomes.record_accepted(store, plan, handle)
            if unset := unset_secrets(plan):
                return outcomes.record_not_sent(store, plan, backend, _without_secrets(unset), again=again)
        row = _log(store, plan)
        try:
            with audit.copied(store.home, plan.job, row):
                handle = backend.submit(plan, bundle or attempts.stored_bundle(plan, store.home))
        except NotReached as error:
            return (
                outcomes.record_unknown(store, plan, error)
                if again and not nothing_sent
                else outcomes.record_not_reached(store, plan, error)
            )
        except Unreachable as error:
            return outcomes.record_unknown(store, plan, error)
        except CloudtrainError as error:
            return outcomes.record_not_sent(store, plan, backend, error, again=again)
        return outcomes.record_accepted(store, plan, handle)


def send_again(store: Store, attempt: AttemptRecord, backend: Backend, owner: str = "") -> Outcome | None:
    """Finish the submission of an attempt whose sender is gone; blocking. None where another process was first.

    `owner` is "" for this process as one that prints the run's id, or `outcomes.background_owner()`.
    """

    def claim() -> bool:
        return store.change_owner(attempt.attempt_id, old=attempt.owner, new=owner or Process.here())

    if attempt.status.event == UNASKED:
        return _ask_and_send(store, attempt, backend, claim)
    return send_attempt(store, attempt.plan, backend, None, claim, again=True)


def _ask_and_send(store: Store, attempt: AttemptRecord, backend: Backend, claim: Callable[[], bool]) -> Outcome | None:
    """Look for the run of a key on its platforms, and send its first attempt where none has it; blocking."""
    plan, key = attempt.plan, store.find(attempt.plan.run_id).key
    try:
        found = keys.search(plan, store.home, store.clock)
        if found.newest and key is not None:
            found.check_labels(key)
    except Unreachable as error:
        return outcomes.record_unasked(store, plan, error)
    except CloudtrainError as error:
        return outcomes.record_refused(store, plan, error) if claim() else None
    if not found.newest:
        if unset := unset_secrets(plan):
            return outcomes.record_refused(store, plan, _without_secrets(unset)) if claim() else None

        def claim_unasked() -> bool:
            return store.claim_unsent(attempt.attempt_id) and claim()

        return send_attempt(store, plan, backend, None, claim_unasked)
    if not claim():
        return None
    first = found.attempts[0]
    if first is not None and first.candidate == 0 and found.newest == 1:
        return outcomes.record_accepted(store, plan, first.handle)
    text = f"the run of the key {key!r} was submitted from another machine, and attempt {found.newest} of it exists"
    return outcomes.record_refused(store, plan, BackendError(text, "submit again with the same --key to follow it"))


def settle(store: Store, run: RunRecord, attempt: AttemptRecord, backend: Backend, *, may_send: bool) -> bool:
    """Ask the platform whether it has an attempt without a handle; True when the attempt moved on. Blocking.

    If the platform has it, its handle is stored. If not:

    - the run was cancelled: the attempt ends CANCELLED;
    - a retry, a resume, or a run after others: it is submitted again;
    - a first submission that got no answer, younger than outcomes.ADOPTABLE_S: it is submitted again;
    - a younger first submission whose sender was killed: its run says so, and the next `submit` of the same job sends it;
    - an older first submission: the run ends FAILED.

    One that is `unsent` ends without an answer: nothing of it was sent.

    With `may_send=False` nothing is submitted. An attempt that is accepted here is adopted by the next `submit` of the
    same job until somebody has seen the run's id. Raises BackendError without an answer.
    """
    clock = store.clock
    if not outcomes.is_free(attempt, clock):
        return False
    if may_send and not run.cancel_requested and not retry.outage_is_over(attempt, clock):
        return False
    owner = outcomes.background_owner()
    first, old = attempt.number == 1, outcomes.age_s(attempt, clock) > outcomes.patience_s(attempt)
    if may_send and outcomes.is_wanted(run, attempt, clock):
        outcome = send_again(store, attempt, backend, owner)
        if isinstance(outcome, Unknown):
            raise outcome.error
        return outcome is not None
    nothing_sent = outcomes.is_unsent(attempt)
    if nothing_sent and not run.cancel_requested and not (first and old):
        return False
    with outcomes.marked_as_sending(attempt.attempt_id) as mine:
        if not mine or not store.change_owner(attempt.attempt_id, old=attempt.owner, new=owner):
            return False
        try:
            handle = None if nothing_sent else backend.find(attempt.attempt_id)
            if handle is None and not nothing_sent and (run.cancel_requested or (first and old)):
                backend.discard(attempt.attempt_id)
        except BackendError as error:
            store.record_unanswered(
                attempt.attempt_id, outcomes.unanswered_reason(backend.name, attempt, error), owner=attempt.owner
            )
            raise
        except BaseException:
            store.change_owner(attempt.attempt_id, old=owner, new=attempt.owner)
            raise
        if handle is not None:
            store.accept(attempt.attempt_id, handle)
        elif run.cancel_requested:
            outcomes.end_attempt(
                store, attempt.plan, Status(State.CANCELLED, None, "cancelled before it started", ended_at=now(clock))
            )
        elif first and old:
            reason = f"its submission was interrupted, and {backend.name} has no such job"
            reason = outcomes.given_up(attempt.plan, attempt.status.reason) if nothing_sent else reason
            outcomes.end_attempt(store, attempt.plan, Status(State.FAILED, None, reason, ended_at=now(clock)))
            store.acknowledge(run.run_id)  # it never began: the next submit of the same job is a new run
        else:
            store.change_owner(attempt.attempt_id, old=owner, new=attempt.owner)
            reason = outcomes.interrupted(attempt, backend.name)
            if run.status.reason != reason:
                store.set_status(run.run_id, Status(State.QUEUED, None, reason))
            return False
    return True


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
