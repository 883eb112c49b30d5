"""A submitted run: what is done with it; its state is in state.py, its log and results in results.py."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest
from cloudtrain.events import State, Status
from cloudtrain.history import audit
from cloudtrain.history.spool import expire_contact
from cloudtrain.history.store import Store
from cloudtrain.job import homes, targets
from cloudtrain.runs.planning import attempts
from cloudtrain.runs.results import RunResults
from cloudtrain.runs.sending import handover

if TYPE_CHECKING:
    from cloudtrain.history.marks import Marks
    from cloudtrain.runs.futures import RunFuture, Waiters
    from cloudtrain.runs.planning.budgets import Confirm


class Run(RunResults):
    """A submitted job: one or more attempts under one id. `Run.find(run_id)` returns it again in another process.

    Args:
        run_id: Its id.
        store: The history that it is in.
        adopted: Whether `submit` returned an existing run instead of starting one.
        watch: Whether to start a background watcher when none is alive.
    """

    @classmethod
    def find(cls, text: str | None = None, home: Path | None = None) -> Run:
        """Return a run of the history.

        Args:
            text: The run's id or a unique prefix of it; None for the newest run.
            home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.

        Returns:
            The run.

        Raises:
            UnknownRun: No run, or more than one, has that id or prefix.
            BadRequest: It is not a text.
        """
        if not isinstance(text, str | None):
            raise BadRequest(f"a run's id is a text, not {text!r}")
        store = Store(home or targets.home())
        return cls(store.find(text).run_id, store)

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.record.status.state}>"

    def mark(
        self,
        *,
        title: str | None = None,
        note: str | None = None,
        tag: Sequence[str] = (),
        untag: Sequence[str] = (),
        star: bool | None = None,
        archive: bool | None = None,
    ) -> Marks:
        """Change the title, the note, the tags or the star of the run, or archive it. Arguments that are None change nothing.

        Args:
            title: Name of the run in lists.
            note: Text that replaces the note.
            tag: Tags to add.
            untag: Tags to remove.
            star: Whether the run has a star.
            archive: Whether lists hide the run.

        Returns:
            All marks of the run.

        Raises:
            BadRequest: A title or tag is too long, or has characters that are not allowed.
        """
        from cloudtrain.history import marks

        return marks.write(
            self.store, self.run_id, title=title, note=note, tag=tag, untag=untag, star=star, archive=archive
        )

    def cancel(self, wait_s: float = 0.0, *, take_over: bool = False) -> Status:
        """Cancel the run and everything that it started.

        The request is stored first, so it remains valid even if this process dies. A run that has ended does not change.
        If it is unknown whether the platform has the job, the watcher cancels it when the platform answers.

        Args:
            wait_s: Seconds to wait for the end at most.
            take_over: In a copied home, cancel a run of the original too.

        Returns:
            The status after at most `wait_s` seconds.

        Raises:
            BadRequest: The run is attached, or the original's in a copied home: cancel it where it was submitted.
            BackendError: The platform refuses the request or does not answer; the watcher tries again.
        """
        if self.record.status.state.final:
            return self.record.status
        self._own_only("cancelled")
        if not take_over:
            self.check_home("cancelled")
        row = self.store.request_cancel(self.run_id)
        expire_contact(self.store.home, self.run_id)
        newest = self.attempts[-1]
        with audit.copied(self.store.home, newest.plan.job, row):
            if newest.handle is not None:
                attempts.backend_of(newest.plan, self.store.home, clock=self.store.clock).cancel(newest.handle)
        handover.look_now(self.store, self.run_id)
        self.refresh()
        try:
            return self.wait(wait_s)
        except TimeoutError:
            return self.record.status

    def future(self) -> RunFuture:
        """Return a `concurrent.futures.Future` of `result()`, for `as_completed` and `wait`; returns at once.

        Returns:
            The future. Cancelling it cancels the run.
        """
        from cloudtrain.runs.futures import future_of

        return future_of(self)

    def cancelled(self) -> bool:
        """Return whether the run has ended as CANCELLED; `concurrent.futures.wait` asks."""
        return self.done() and self.state is State.CANCELLED

    # `as_completed` and `wait` of concurrent.futures read these names of whatever they are given.
    _condition = property(lambda self: self._settles.future._condition)
    _state = property(lambda self: self._settles.future._state)
    _waiters = property(lambda self: self._settles)

    @cached_property
    def _settles(self) -> Waiters:
        from cloudtrain.runs.futures import Waiters

        return Waiters(self)

    def __await__(self) -> Generator[Any, None, Any]:
        import asyncio

        from cloudtrain.runs.futures import future_of

        return asyncio.wrap_future(future_of(self, cancels=False)).__await__()

    def resume(
        self,
        *,
        sets: Sequence[str] = (),
        target: str | None = None,
        confirm: Confirm | None = None,
        force: bool = False,
        take_over: bool = False,
    ) -> Run:
        """Start the run's next attempt, from its newest complete checkpoint.

        Blocking. Without an answer of the platform the attempt stays open. What changes is in `notes` afterwards. An
        attached run resumes with the job and the source in its output, and is one of this history from then on.

        Args:
            sets: other limits, resources, ranks or options: `limits.max_cost=80 USD`, `processes_per_node=4`.
            target: a backend or target other than the last attempt's. The run's output must be reached from there.
            confirm: as of `Submitter`.
            force: as of `Submitter`.
            take_over: in a copied home, resume a run of the original too.

        Returns:
            This run.

        Raises:
            BadRequest: the run has not ended, has succeeded, a secret is missing, its cap is used up (CapReached), its
                checkpoints cannot be reached from `target`, or it is the original's in a copied home.
            BackendError: the platform refuses the attempt; the run is FAILED.
        """
        from cloudtrain.runs.sending import resume

        if not take_over:
            self.check_home("resumed")
        self.read_rest()  # its watcher ends this attempt before the next one is there
        self.notes = resume.send_next(
            self.store, self.run_id, sets=sets, target=target, watch=self.watch, confirm=confirm, force=force
        )
        return self

    def rerun(
        self,
        *,
        sets: Sequence[str] = (),
        source: str | None = None,
        key: str | None = None,
        confirm: Confirm | None = None,
        force: bool = False,
    ) -> Run:
        """Start a new run of the same job; blocks until the platform has answered. This run is recorded as its parent.

        Args:
            sets: Changes of the job, such as `hyperparameters.lr=1e-4`.
            source: Folder to package instead of using this run's source.
            key: Idempotency key: the same key returns the same new run.
            confirm: as of `Submitter`.
            force: as of `Submitter`.

        Returns:
            The new run.

        Raises:
            BadRequest: The job is wrong, or this run is attached.
            BackendError: The platform refuses the job; the new run is FAILED.
        """
        from cloudtrain.runs.sending import resume

        self._own_only("run again")
        sent, notes = resume.send_copy(
            self.store, self.run_id, sets=sets, source=source, key=key, watch=self.watch, confirm=confirm, force=force
        )
        run = Run(sent.run_id, self.store, adopted=sent.adopted, watch=self.watch)
        run.notes = notes
        return run

    def evaluate(
        self,
        data: str | os.PathLike[str] | None = None,
        *,
        tasks: Sequence[str] = (),
        include_path: str | os.PathLike[str] | None = None,
        prompts: Sequence[str] = (),
        every_checkpoint: bool = False,
        limit: int | None = None,
        target: str | None = None,
        sets: Sequence[str] = (),
        key: str | None = None,
        confirm: Confirm | None = None,
        force: bool = False,
    ) -> Run:
        """Start a run that evaluates this run's model, and return it; blocks until the platform has answered.

        Its results become metrics of this run once it has SUCCEEDED: `run.metrics("eval/test/loss")`. A run that has not
        ended yet is evaluated after its end.

        Args:
            data: a file of texts, conversations or labelled texts (txt, jsonl, csv, parquet), here or in a bucket.
            tasks: tasks of lm-evaluation-harness, which the job installs.
            include_path: a folder with YAML files of tasks; it goes with the job.
            prompts: beginnings of samples that the model writes.
            every_checkpoint: evaluate the run's checkpoints too, each at its step.
            limit: the first so many samples, and documents of a task, only.
            target: a backend or target; left out: the run's own.
            sets: values of the job: `hyperparameters.batch_size=32`, `resources.accelerators=A100:1`.
            key: as of `submit`.
            confirm: as of `Submitter`.
            force: as of `Submitter`.

        Returns:
            The run that evaluates.

        Raises:
            BadRequest: nothing is to be evaluated, or the run has no model that can be.
            BackendError: the platform refuses the job.
        """
        from cloudtrain.runs.evaluation import Evaluation, submit_evaluation

        asked_for = Evaluation(
            None if data is None else os.fspath(data),
            tuple(tasks),
            None if include_path is None else os.fspath(include_path),
            tuple(prompts),
            every_checkpoint,
            limit,
        )
        self.refresh(lambda _: None)
        sent, notes = submit_evaluation(
            self.store, self.run_id, asked_for, target=target, sets=sets, key=key, watch=self.watch, confirm=confirm,
            force=force,
        )  # fmt: skip
        run = Run(sent.run_id, self.store, adopted=sent.adopted, watch=self.watch)
        run.notes = notes
        return run

    def _own_only(self, what: str) -> None:
        """Raise BadRequest for an attached run."""
        if uri := self.record.attached:
            raise BadRequest(
                f"{self.run_id} was submitted from another machine and can be {what} there only (attached from {uri})",
                "`cloudtrain show --json` prints its job; you can submit it as a new run",
            )

    def check_home(self, what: str) -> None:
        """Refuse a run of the home that this one is a copy of: both would act on its jobs.

        Args:
            what: What is to be done with the run, as a participle.

        Raises:
            BadRequest: The run was submitted from that home.
        """
        label = str((self.record.job.get("labels") or {}).get(targets.HOME_LABEL) or "")
        if where := homes.original_of(self.store.home, label):
            raise BadRequest(
                f"{self.run_id} was submitted from {where}, of which this home is a copy, and is {what} there",
                f"CLOUDTRAIN_HOME={where.partition(':')[2]} names that home; --take-over does it from here",
            )

    def acknowledge(self) -> None:
        """Note that a person knows this run: an equal submit from now on is a new run, not the end of this one.

        Where it is not known yet whether the platform has the job, an equal submit still takes it up.
        """
        if not (self.attempts[-1].unanswered_since or self.store.database.read_only):
            self.store.acknowledge(self.run_id)
