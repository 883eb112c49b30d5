"""The end of an attempt: stored with its verdict and images, reported, and followed by the next attempt where one is due."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.api import Backend, Plan
from cloudtrain.backends.images import pinned_image
from cloudtrain.backends.manifest import secret_names, unset_secrets
from cloudtrain.backends.registry import Clients
from cloudtrain.errors import BackendError, BadRequest, CapReached, CloudtrainError
from cloudtrain.events import State, Status
from cloudtrain.history import evaluations
from cloudtrain.history.records import AttemptRecord, RunRecord
from cloudtrain.history.spool import Spool
from cloudtrain.history.store import Store
from cloudtrain.job.units import now
from cloudtrain.nodes.process import Process
from cloudtrain.policy import apply
from cloudtrain.report import notify
from cloudtrain.runs.planning import spend
from cloudtrain.runs.planning.attempts import replan
from cloudtrain.runs.sending import outcomes, retry, send, watch_log
from cloudtrain.runs.watching.collect import Collector

if TYPE_CHECKING:
    from cloudtrain.source.bundle import Bundle

LATE_NODES = re.compile(r"\d+ of \d+ nodes joined within .*missing: ")  # entrypoints/launcher/world/outcome.py


class AttemptEnds:
    """The part of `Watcher` (watch.py, which sets what is declared here) that ends attempts and starts the next ones."""

    store: Store
    run_id: str
    environ: Mapping[str, str] | None
    clients: Clients
    collector: Collector
    _complain: Callable[[CloudtrainError], None]
    _log_home: Path | None
    _lease: Callable[[], object]
    _may_send: bool
    send_due = False  # an attempt is due, where it may not send one itself
    end: tuple[str, Status] | None = None  # of the newest attempt: after which end

    def follow_up(self, run: RunRecord, attempt: AttemptRecord, status: Status, backend: Backend) -> bool:
        """Store an attempt's end, unless the next one waits for capacity, or is to be started by another process."""
        status = self._explain_late_nodes(attempt, status)
        if not run.cancel_requested and retry.allowed(self.store, attempt.plan, status):
            if reason := retry.waits_for_capacity(self.store, attempt.plan, status):
                if (run.status.state, run.status.reason) != (State.QUEUED, reason):
                    waiting = Status(State.QUEUED, None, reason, status.started_at, url=status.url)
                    self.store.set_status(self.run_id, waiting)
                return False
            if not self._may_send:
                self.send_due, self.end = True, (attempt.attempt_id, status)
                return False
        return self._end(run, attempt, status, backend)

    def store_end(self, attempt: AttemptRecord, status: Status, backend: Backend) -> None:
        """Store the end of a run, unless another attempt may follow, before the metrics of a long log are read.

        `_end` does the rest. Of a failure the last lines are read first, which say why.
        """
        run = self.store.find(self.run_id)
        may_follow = not run.cancel_requested and retry.allowed(self.store, attempt.plan, status)
        if may_follow or status.state is State.LOST or self.store.is_unread(self.run_id):
            return
        status = self._with_times(attempt, status)
        if status.failed:
            self.collector.read_log(self.store, attempt, backend, ended=True, events_only=True)
            self.collector.diagnose(self.store, attempt, status, backend)
        self.store.mark_unread(self.run_id)  # first: a watcher that is killed in between reads the log all the same
        self.store.record(attempt.attempt_id, status=status)
        self.store.set_status(self.run_id, status)

    def _with_times(self, attempt: AttemptRecord, status: Status) -> Status:
        # What was seen while it ran counts too: afterwards a platform may have forgotten when its nodes began.
        started = min((at for at in (attempt.status.started_at, status.started_at) if at), default=None)
        return replace(status, started_at=started, ended_at=status.ended_at or now(self.store.clock))

    def _end(self, run: RunRecord, attempt: AttemptRecord, status: Status, backend: Backend) -> bool:
        """Store an attempt's end, and start the next attempt where one is due, else store the run's end."""
        if run.cancel_requested and attempt.handle is None:
            status = Status(State.CANCELLED, None, "cancelled before it started", ended_at=now(self.store.clock))
        status = self._with_times(attempt, status)
        # What is left of a lost one must not run beside the next attempt, on another platform least of all.
        lost = status.state is State.LOST and attempt.handle is not None
        if lost and not self.cancel(backend, attempt.handle or "") and retry.has_candidates(attempt.plan):
            return False
        self.store.record(attempt.attempt_id, status=status)
        if len(attempt.images) < int(attempt.plan.manifest.get("nodes") or 1):
            self.ask_images(attempt, backend)
        if status.state is State.PREEMPTED:
            self._notify(attempt, status, final=False)
        if attempt.status.event == "capacity" and attempt.handle is not None:
            self._delete_cancelled(attempt, attempt.handle, backend)  # it was withdrawn
        if not run.cancel_requested and retry.allowed(self.store, attempt.plan, status):
            plans, reason = retry.next_plans(self.store, attempt.plan, status)
            end, left = status, {}
            for base in plans:
                try:
                    following = self._plan_next(attempt, backend, base)
                except CapReached as error:
                    end = replace(status, state=State.TIMED_OUT)
                    left[base.target] = f"{error.message}; {error.hint}"
                except (BackendError, BadRequest) as error:  # asked again it would be the same: its bundle is gone
                    end = status
                    left[base.target] = f"no new attempt: {error.message}"
                else:
                    if left:
                        reason = f"{status.reason}; not tried: {_describe(left)}"
                        self.store.record(attempt.attempt_id, status=replace(status, reason=reason))
                    self._retry(attempt, status, *following)
                    return True
            status = replace(end, reason=f"{end.reason}; {_describe(left) or reason}".lstrip("; "))
        self.collector.diagnose(self.store, attempt, status, backend)
        if status.state is State.SUCCEEDED:
            evaluations.store_results(self.store, attempt)
        self.store.set_status(self.run_id, status, attempt.number)  # a failure stored early may have been resumed
        if attempt.plan.price:
            used = spend.total(self.store.attempts(self.run_id), self.store.home)
            if not used.unpriced_s:
                self.store.set_cost(self.run_id, used.usd)
        if self.store.is_unread(self.run_id):
            self.store.mark_read(self.run_id)
        self._notify(attempt, status, final=True)
        if status.state is State.CANCELLED and attempt.handle is not None:
            self._delete_cancelled(attempt, attempt.handle, backend)
        return True

    def _plan_next(self, attempt: AttemptRecord, backend: Backend, base: Plan) -> tuple[Backend, Plan, Bundle]:
        """Return the next attempt's backend, plan and bundle; raises BackendError, BadRequest, CapReached."""
        client = backend if base is attempt.plan else self.clients.get(base)
        earlier = self.store.attempts(self.run_id)
        plan, bundle = replan(base, attempt.number + 1, client, self.store.home, earlier=earlier)
        plan = retry.plan_after(self.store, client, apply.check_stored(plan, client, self.store.home))
        if unset := unset_secrets(plan):
            raise BackendError(f"{unset} in the watcher's environment")
        if client is not backend:
            send.preflight(plan, client)
        return client, plan, bundle

    def _delete_cancelled(self, attempt: AttemptRecord, handle: str, backend: Backend) -> None:
        """Delete a cancelled attempt from its platform, unless only the platform has its log; an error is only logged."""
        if Spool(self.store.home, self.run_id, attempt.number).exists():
            try:
                backend.delete_cancelled(handle)
            except BackendError as error:
                self._log(error)

    def _explain_late_nodes(self, attempt: AttemptRecord, status: Status) -> Status:
        """Return the end of an attempt whose nodes did not all come as the event `capacity`, with what its platform said.

        The launcher knows which nodes are missing. Why, the platform has said while they were waited for.
        """
        if status.state is not State.PREEMPTED or status.event or not LATE_NODES.search(status.reason):
            return status
        reasons = [
            str(event.data.get("reason") or "")
            for event in self.store.events(self.run_id, "status")
            if event.attempt == attempt.attempt_id and event.data.get("state") == State.STARTING
        ]
        waited_for = f"; {attempt.plan.backend} reported: {reasons[-1]}" if reasons and reasons[-1] else ""
        return replace(status, event="capacity", reason=status.reason + waited_for)

    def ask_images(self, attempt: AttemptRecord, backend: Backend) -> None:
        """Store which container images an attempt's nodes run, where its platform reports them; an error is only logged."""
        if attempt.handle is None:
            return
        self._lease()  # it may take seconds
        try:
            if images := {
                node: text for node, image in backend.images(attempt.handle).items() if (text := pinned_image(image))
            }:
                self.store.keep_images(attempt.attempt_id, images)
        except Exception as error:
            self._log(error if isinstance(error, BackendError) else f"no images: {error!r}")

    def _notify(self, attempt: AttemptRecord, status: Status | str, *, final: bool) -> None:
        """Send the notifications that cloudtrain.toml asks for, of a status or an event; an error is only logged."""
        try:
            if event := status if isinstance(status, str) else notify.event_of(status, final=final):
                hidden = secret_names(attempt.plan)
                notify.start(self.store, self.run_id, attempt.attempt_id, event, hidden, self.environ)
        except (CloudtrainError, OSError) as error:
            self._log(str(error))

    def _retry(self, attempt: AttemptRecord, status: Status, backend: Backend, plan: Plan, bundle: Bundle) -> None:
        """Start the next attempt."""
        if (
            status.state is State.LOST and status.event != "capacity"
        ):  # with it nothing was started, so nothing was lost
            self._notify(attempt, status, final=False)
        outcome = send.send_attempt(
            self.store, plan, backend, bundle, lambda: self.store.next_attempt(plan, owner=Process.here())
        )
        if isinstance(outcome, outcomes.Unknown):
            self._complain(outcome.error)
        if isinstance(outcome, outcomes.Refused) and not outcome.waiting:
            newest = self.store.attempts(self.run_id)[-1]
            self.collector.diagnose(self.store, newest, newest.status, backend)
            self._notify(newest, newest.status, final=True)

    def cancel(self, backend: Backend, handle: str) -> bool:
        """Ask a platform to end an attempt; False when it did not confirm, which must not keep us from looking at it."""
        try:
            backend.cancel(handle)
        except BackendError as error:
            self._log(error)
            return False
        return True

    def _log(self, error: CloudtrainError | str) -> None:
        watch_log.write(f"{self.run_id}: {error}", self._log_home)


def _describe(left: Mapping[str, str]) -> str:
    """Return why each target is not tried, without its name where there is one alone."""
    return "; ".join(text if len(left) == 1 else f"{target}: {text}" for target, text in left.items())
