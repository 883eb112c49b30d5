"""Send a plan exactly once: adopt an interrupted submission of the same job, or the run of the same key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cloudtrain.backends import registry
from cloudtrain.backends.api import Backend, Plan
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadRequest, CloudtrainError, Unreachable
from cloudtrain.events import State, Status
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.store import UNASKED
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.runs.planning import attempts, budgets, environment, keys, upstream
from cloudtrain.runs.planning.plan import Planner
from cloudtrain.runs.sending import handover, outcomes, send
from cloudtrain.runs.sending.outcomes import Accepted, Outcome, Refused
from cloudtrain.source.bundle import Bundle

ASKED_S = 120.0  # for so long a submit waits for another process that asks the platform about the same run


class Submitted(NamedTuple):
    """A run whose first attempt was sent, or that an equal submit had started before."""

    run_id: str
    adopted: bool = False


class ExactlyOnce(Planner):
    """Plans jobs and sends each plan once; see `Submitter`."""

    def __init__(
        self,
        target: str | None = None,
        *,
        home: Path | None = None,
        watch: bool = True,
        confirm: budgets.Confirm | None = None,
        force: bool = False,
        clock: Clock = SYSTEM,
        **options: Any,
    ) -> None:
        super().__init__(target, home=home, force=force, clock=clock, **options)
        self.watch = watch
        self.confirm = confirm
        self.notes: list[str] = []  # warnings of the last submit, one sentence each
        self._sender: tuple[object, Backend] | None = None  # of the last submit
        self._unasked: tuple[str, Unreachable] | None = None  # a run of a key whose platform did not answer, and why

    def send_once(self, plan: Plan, bundle: Bundle, *, key: str | None = None, parent: str | None = None) -> Submitted:
        """Store the intent, submit the plan, store the handle and start the watcher."""
        backend = self.client(plan)
        send.preflight(plan, backend)
        files = self.config_files
        self.notes += budgets.check(self.store, plan, files, self.confirm) if files else []
        origin = {**bundle.origin(), "configuration": [str(path) for path in files]}
        held = upstream.waits_for(self.store, plan) if plan.job.get("after") else ""
        unasked = self._unasked[1] if self._unasked and self._unasked[0] == plan.run_id else None
        if unasked and held:
            raise unasked

        def intent() -> bool:
            owner = upstream.HELD if held else Process.here()
            about: dict[str, Any] = {"key": key, "parent": parent, "provenance": origin}
            event = UNASKED if unasked else ""
            return self.store.intend(plan, identity=plan.identity, owner=owner, event=event, **about)

        if unasked:
            if not intent():
                return self.existing(plan)
            return self._finish_submit(plan.run_id, outcomes.record_unasked(self.store, plan, unasked))
        if held:
            if not intent():
                return self.existing(plan)
            self.store.set_status(plan.run_id, Status(State.QUEUED, None, held))
            return self._finish_submit(plan.run_id, None)
        try:
            outcome = send.send_attempt(self.store, plan, backend, bundle, intent)
        except CloudtrainError as error:
            error.run_id = plan.run_id if self.store.get(plan.run_id) else ""
            raise
        if not isinstance(outcome, Accepted):
            self._sender = None  # the next submit may find other credentials in their files
        if outcome is None:
            return self.existing(plan)
        return self._finish_submit(plan.run_id, outcome)

    def client(self, plan: Plan) -> Backend:
        """Return the plan's backend, that of the last submit where its options and this shell are the same.

        Making an SDK's client costs more than its calls.
        """
        # As `environment.patterns_of`, with a file less of a submit:
        patterns = registry.backend_class(plan.backend).variables
        patterns = environment.CALLS if patterns is None else patterns
        shell = environment.select(os.environ, ("HOME", *patterns)) if patterns else {}
        made_of = plan.backend, (plan.job.get("options") or {}).get(plan.backend), shell
        if self._sender is None or self._sender[0] != made_of:
            self._sender = made_of, registry.create_for(plan, self.home, self.clock)
        return self._sender[1]

    def _finish_submit(self, run_id: str, outcome: Outcome | None, *, adopted: bool = False) -> Submitted:
        """Return a run whose submission has an outcome, watched; raises what the platform refused it with."""
        if isinstance(outcome, Refused) and not outcome.waiting:
            self.store.acknowledge(run_id)  # the person reads why: the next submit is another one
            outcome.error.run_id = run_id
            raise outcome.error
        ended = adopted and self.store.find(run_id).status.state.final
        if self.watch and not ended and not (adopted and self.store.watched(run_id)):
            handover.start(self.store, self.store.attempts(run_id)[-1].plan)
        return Submitted(run_id, adopted)

    # -- exactly once -------------------------------------------------------------------------------------------------

    def adopt_interrupted(self, plan: Plan, key: str | None, *, adopt: bool) -> Submitted | None:
        """Return the run of an interrupted submit of this very job, its submission finished, or the run of a key.

        For interrupted submissions of other jobs the platform is asked only if backend and target are this job's. The
        others are listed in `notes`.
        """
        self._unasked = None
        if key is not None:
            return self.existing(plan) if self.store.is_taken(plan.run_id) else self._on_platform(plan, key)
        mine: AttemptRecord | None = None
        not_checked: list[str] = []
        for attempt in self.store.unsettled():
            free, background = outcomes.is_free(attempt, self.store.clock), outcomes.is_in_background(attempt)
            if upstream.is_held(attempt) and not keys.same(attempt.plan, plan):
                continue  # nothing of it was sent
            if attempt.handle is not None and not background and (not free or attempt.owner == str(Process.here())):
                continue  # accepted: whoever submitted it still lives, and knows its run
            if not free and not background and not attempt.unanswered_since:
                continue  # somebody submits it just now
            run = self.store.find(attempt.run_id)
            if run.key is None and keys.same(attempt.plan, plan):
                if mine is None and not run.cancel_requested and not (upstream.is_held(attempt) and run.acknowledged):
                    mine = attempt
            elif free and attempt.handle is None and not self._look_for(attempt, plan):
                not_checked.append(f"{attempt.run_id} ({run.target})")
        if not_checked:
            self.notes.append(
                f"interrupted submissions, which may be running: {', '.join(not_checked)}; "
                "`cloudtrain show RUN` asks the platform about one, `cloudtrain cancel RUN` ends it"
            )
        if mine is None:
            return None
        run = self.store.find(mine.run_id)
        if not adopt and (run.status.failed or outcomes.age_s(mine, self.store.clock) > outcomes.ADOPTABLE_S):
            _raise_undecided(run, outcomes.age_s(mine, self.store.clock))
        return self._finish(mine)

    def adopt_key(self, plan: Plan, key: str) -> bool:
        """Add the run of a key to this history where a platform has it; False where none does. Nothing is sent.

        Raises:
            BadRequest: the run there is of another job.
            BackendError: a platform does not answer.
        """
        self._unasked = None
        found = self._on_platform(plan, key)
        if self._unasked:
            raise self._unasked[1]
        return found is not None

    def _look_for(self, attempt: AttemptRecord, plan: Plan) -> bool:
        """Accept an interrupted submission of another job if the platform has it; False where that was not asked."""
        if (attempt.plan.backend, attempt.plan.target) != (plan.backend, plan.target):
            return False
        try:
            handle = registry.create_for(attempt.plan, self.home, self.clock).find(attempt.attempt_id)
        except CloudtrainError:
            return False
        if handle is not None:
            self.store.accept(attempt.attempt_id, handle)
        return True

    def _on_platform(self, plan: Plan, key: str) -> Submitted | None:
        """Return the run of a key that the platform knows and this history does not (another machine, CI).

        Where it does not answer and `limits.max_wait` allows it, the run waits: `send_once` stores it, and sends nothing.
        """
        try:
            found = keys.search(plan, self.home, self.clock)
        except Unreachable as error:
            if not plan.stored_job.limits.max_wait_s:
                raise
            self._unasked = plan.run_id, error
            return None
        newest = found.newest
        if not newest:
            return None
        found.check_labels(key)
        handle: str | None
        for number, hit in enumerate(found.attempts[:newest], 1):
            at, handle = hit or (0, None)
            backend = found.clients[at]
            made = plan if (at, number) == (0, 1) else attempts.replan(found.bases[at], number, backend, self.home)[0]
            if number == 1 and not self.store.intend(made, identity=plan.identity, owner=Process.here(), key=key):
                return self.existing(plan)
            if number > 1 and not self.store.next_attempt(made, owner=Process.here()):
                break
            if handle is not None:
                self.store.accept(made.attempt_id, handle)
            if number < newest:
                absent = Status(State.LOST, None, "the platform has no such job", ended_at=now(self.store.clock))
                self.store.record(made.attempt_id, status=absent if handle is None else backend.status(handle))
            plan = made
        if self.watch:
            handover.start(self.store, plan)
        return Submitted(plan.run_id, adopted=True)

    def existing(self, plan: Plan) -> Submitted:
        """Return the run of a plan's id that is in the history; raises BadRequest where it is of another job."""
        record = self.store.find(plan.run_id)
        if record.attached:
            raise BadRequest(
                f"{record.run_id} cannot be submitted here: another machine submitted it, and here it is attached from "
                f"{record.attached}",
                f"cloudtrain wait {record.run_id} waits for its end",
            )
        newest = self.store.attempts(plan.run_id)
        if record.key is not None and not keys.same(newest[0].plan, plan):
            keys.refuse(record, newest[0].plan, plan, self.store.home / "bundles")
        return self._finish(newest[-1])

    def _finish(self, attempt: AttemptRecord) -> Submitted:
        """Return the run of an attempt that is stored, its submission finished unless another process does that."""
        outcome: Outcome | None = None
        attempt = self._wait_while_asked(attempt)
        while outcome is None and self._is_to_be_sent(attempt):
            backend = registry.create_for(attempt.plan, self.home, self.clock)
            send.preflight(attempt.plan, backend)
            outcome = send.send_again(self.store, attempt, backend)
            attempt = self._wait_while_asked(attempt)  # another process may have been first, and only asked
        return self._finish_submit(attempt.run_id, outcome, adopted=True)

    def _is_to_be_sent(self, attempt: AttemptRecord) -> bool:
        sent = (
            attempt.handle is not None or attempt.status.state.final or not outcomes.is_free(attempt, self.store.clock)
        )
        if sent or upstream.is_held(attempt):
            return False
        return not self.store.find(attempt.run_id).cancel_requested  # a cancelled one is left to its watcher

    def _wait_while_asked(self, attempt: AttemptRecord) -> AttemptRecord:
        """Wait while a watcher or a reader asks about an attempt whose sender was killed, and return it as stored then."""
        until = self.store.clock.monotonic() + ASKED_S
        while True:
            found = (one for one in self.store.attempts(attempt.run_id) if one.number == attempt.number)
            attempt = next(found, attempt)
            asked = outcomes.is_in_background(attempt) and not outcomes.is_free(attempt, self.store.clock)
            if not asked or attempt.handle or attempt.status.state.final or attempt.unanswered_since:
                return attempt
            if self.store.clock.monotonic() > until:
                raise Unreachable(
                    f"{attempt.run_id}: another cloudtrain process has asked {attempt.plan.backend} about it "
                    f"for {ASKED_S:.0f} s; nothing was sent",
                    "submit again when it has ended",
                )
            self.store.clock.sleep(0.1)


def _raise_undecided(run: RunRecord, age_s: float) -> NoReturn:
    """Raise BadRequest: it is not clear whether an interrupted submit of the same job is still wanted."""
    since = f"{age_s / 60:.0f} min" if age_s < 2 * 3600 else f"{age_s / 3600:.0f} h"
    ending = f"has since ended {run.status.state}" if run.status.failed else "was interrupted"
    raise BadRequest(
        f"the same job was submitted {since} ago as {run.run_id}, and that run {ending}",
        f"--adopt continues {run.run_id}, --new starts another run",
    )
