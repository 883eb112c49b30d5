"""A submitted run: status, logs, metrics, cancel, fetch, resume and rerun."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cloudtrain.backends.api import FETCHABLE, HasEstimator
from cloudtrain.errors import BadRequest, CloudtrainError, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.records import AttemptRecord, MetricRow, RunRecord
from cloudtrain.history.store import Store
from cloudtrain.job import targets
from cloudtrain.runs import (
    advice,
    asked,
    attempts,
    fetched,
    open_attempt,
    output_audit,
    reading,
    spend,
    watcher,
)

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict
    from cloudtrain.history.marks import Marks
    from cloudtrain.runs.budgets import Confirm


class Run:
    """A submitted job: one or more attempts under one id. `Run.find(run_id)` returns it again in another process.

    Args:
        run_id: Its id.
        store: The history that it is in.
        adopted: Whether `submit` returned an existing run instead of starting one.
        watch: Whether to start a background watcher when none is alive.
    """

    def __init__(self, run_id: str, store: Store, *, adopted: bool = False, watch: bool = True) -> None:
        self.run_id = run_id
        self.store = store
        self.adopted = adopted  # submit found this run half submitted and finished it, or the key was known
        self.watch = watch  # whether to start a detached watcher where none is alive
        self.notes: list[str] = []  # of its submit or last resume, one line each
        self.printed_reason = ""  # why it waits, as its caller has printed it: a reader does not repeat it

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
        """
        store = Store(home or targets.home())
        return cls(store.find(text).run_id, store)

    def __repr__(self) -> str:
        return f"<Run {self.run_id} {self.record.status.state}>"

    @property
    def record(self) -> RunRecord:
        """The run's row in the history, as it is now."""
        return self.store.find(self.run_id)

    @property
    def attempts(self) -> list[AttemptRecord]:
        """The run's attempts, the oldest first."""
        return self.store.attempts(self.run_id)

    @property
    def state(self) -> State:
        """The state now; asks the platform when no watcher is alive."""
        return self.refresh().state

    def refresh(self, complain: Callable[[CloudtrainError], None] | None = None, *, may_send: bool = False) -> Status:
        """Return the status as the platform reported it not long ago.

        Where no watcher is alive it asks the platform (blocking), unless any process has asked in the last 5 s (30 s for a run
        older than 10 minutes), and starts a watcher. It starts no attempt itself, unless `may_send`. Where the platform
        did not answer it returns the last known status and calls `complain` (None: writes to standard error).
        From a home that cannot be written it returns the stored status. Of an attached run it copies the log and metrics that
        are not in the history yet.

        Args:
            complain: Called with each error instead of printing it.
            may_send: Start the next attempt when one is due.

        Returns:
            The status of the run.
        """
        record = self.record
        final = record.status.state.final
        if self.store.database.read_only or (final and not (record.attached and self.store.is_unread(self.run_id))):
            return record.status
        errors: list[CloudtrainError] = []
        if record.attached:
            from cloudtrain.runs import attached_history

            try:
                attached_history.refresh(self.store, self.run_id, record.attached)
            except CloudtrainError as gone:
                if not final:
                    raise
                errors.append(gone)  # its end is known, though its output is gone
        elif not self.store.watched(self.run_id):
            self._look(errors, may_send)
        elif self.watch:
            watcher.give_missing(self.store, self.run_id)
        if not errors and (sentence := self.unanswered()):
            errors.append(Unreachable(sentence))
        for error in errors:
            complain(error) if complain else print(f"{self.run_id}: {error}", file=sys.stderr)  # noqa: T201 - as promised
        return self.record.status

    def unanswered(self) -> str:
        """Return when the platform was last asked and since when it gives no answer; "" where it answered."""
        answer = asked.last(self.store.home, self.run_id)
        return answer.describe() if answer and answer.error and not self.record.status.state.final else ""

    def _look(self, errors: list[CloudtrainError], may_send: bool) -> None:
        """Ask the platform once, unless it was asked a moment ago, and start a watcher.

        Where the platform did not answer, only the watcher waits for it.
        """
        newest = self.attempts[-1]
        answer = asked.last(self.store.home, self.run_id)
        outage = self.watch and answer is not None and answer.shared and bool(answer.error)
        if not (outage and open_attempt.needs_watcher(self.record, newest)) and not (
            answer and answer.is_fresh(newest)
        ):
            from cloudtrain.runs.watch import Watcher  # who finds a living watcher needs none

            Watcher(self.store, self.run_id, complain=errors.append, may_send=may_send).run(until=lambda: True)
            newest = self.attempts[-1]
        if self.watch and not self.record.status.state.final and open_attempt.needs_watcher(self.record, newest):
            watcher.start(self.store, newest.plan, instead=True)

    def _refresher(self) -> reading.Refresher:
        return reading.Refresher(
            self.store,
            self.run_id,
            lambda: self.refresh(lambda _: None, may_send=not self.watch),
            watch=self.watch or self.record.attached is not None,
            reason=self.printed_reason,
        )

    def wait(self, timeout_s: float | None = None, *, tick: Callable[[RunRecord], None] | None = None) -> Status:
        """Block until the run is final and return its status.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.
            tick: Called with the run's record at every look, several times a second at first.

        Returns:
            The final status.

        Raises:
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        began = time.monotonic()
        with closing(self._refresher()) as refresher:
            while True:
                record = self.record
                if tick:
                    tick(record)
                if record.status.state.final:
                    return record.status
                age_s = time.monotonic() - began
                if timeout_s is not None and age_s > timeout_s:
                    raise TimeoutError(f"{self.run_id} is still {record.status.state} after {timeout_s:g} s")
                refresher.tick()
                time.sleep(attempts.pause(age_s, 0.02))  # a look is one row of a local file

    def result(self, timeout_s: float | None = None) -> Status:
        """Block until the run has SUCCEEDED and return its status.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            The status; its state is SUCCEEDED.

        Raises:
            RunFailed: The run ended in another state.
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        status = self.wait(timeout_s)
        if status.state is not State.SUCCEEDED:
            raise advice.failure(self.run_id, status, self.verdict)
        return status

    def logs(self, *, follow: bool = False, after: str | None = None, raw: bool = False) -> Iterator[LogLine]:
        """Yield the log lines of all attempts and nodes.

        Args:
            follow: Wait for new lines until the run is final (blocking).
            after: Cursor of a line (`line.cursor`): start with the line after it.
            raw: Also yield the lines that start with ::cloudtrain:: (metrics and states).

        Returns:
            An iterator of LogLine: at, node, rank, seq, text, cursor.

        Raises:
            BadRequest: `after` is not the cursor of a line.
        """
        first, _, inner = (after or "1/").partition("/")
        if not first.isdigit():
            raise BadRequest(f"{after!r} is not a log cursor")
        with closing(self._refresher()) as refresher:
            yield from reading.read_run(
                self.store, self.run_id, refresher, int(first), inner or None, follow=follow, raw=raw
            )

    def plot(self, *names: str, rank: int | None = 0, over: Literal["step", "epoch", "time"] = "step") -> Any:
        """Return a plotly figure of the run's curves. Points that an attempt repeated after a resume are drawn faint.

        Args:
            names: Metrics to draw; all metrics without any.
            rank: Draw the points of this rank; None for a curve of each rank.
            over: The X axis: `step`, `epoch` or `time`.

        Returns:
            A plotly Figure.

        Raises:
            BadRequest: plotly is not installed, or the run has no such metric.
        """
        from cloudtrain.report import plots

        self.refresh()
        return plots.curves(self.store, [self.run_id], names, rank=rank, over=over)

    def report(self, path: str | Path, *, rank: int | None = 0) -> Path:
        """Write the run as one HTML file that works offline: curves, use, verdict, provenance, job, plan and log; blocking.

        Args:
            path: The file.
            rank: Whose curves; None for all ranks.

        Returns:
            The path of the file.

        Raises:
            BadRequest: plotly is not installed.
            OSError: the file cannot be written.
        """
        from cloudtrain.report import nearest, page

        ended = self.refresh(lambda _: None).state.final
        missing = nearest.describe(self.logs(raw=True)) if ended and not self.store.curves.ranks(self.run_id) else ()
        return page.write(
            self.store, self.run_id, Path(path), verdict=self.verdict(), log=self.logs(raw=True), rank=rank,
            no_metrics=missing, costs=spend.describe_attempts(self.attempts, self.store.home),
        )  # fmt: skip

    def _repr_html_(self) -> str:
        from cloudtrain.report import notebook

        self.refresh()
        return notebook.card(self.store, self.run_id)

    def verdict(self) -> Verdict | None:
        """Return why the run failed, None where it did not (yet); blocking where the log has to be read for it."""
        status, newest = self.refresh(lambda _: None), self.attempts[-1]
        if not status.failed:
            return None
        from cloudtrain.diagnosis import record
        from cloudtrain.diagnosis.tail import Tail

        if stored := record.load_verdict(self.store, newest):
            return stored
        tail = Tail()
        if newest.handle is not None:
            for line in self.logs(after=f"{newest.number}/", raw=True):
                tail.add(line)
        return record.judge_attempt(self.store, newest, status, tail.lines(), advice.complete)

    def metrics(self, name: str | None = None, *, rank: int | None = 0) -> list[MetricRow]:
        """Return the points of all curves, or of one, in the order in which they were logged.

        Args:
            name: A metric, such as `loss`.
            rank: Points of this rank; None for all ranks. If rank 0 did not log a metric, the lowest rank that did counts.

        Returns:
            Rows with step, name, value, at, attempt, rank and epoch.
        """
        self.refresh()
        return self.store.metrics(self.run_id, name, rank)

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

    def cancel(self, wait_s: float = 0.0) -> Status:
        """Cancel the run and everything that it started.

        The request is stored first, so it remains valid even if this process dies. A run that has ended does not change.
        If it is unknown whether the platform has the job, the watcher cancels it when the platform answers.

        Args:
            wait_s: Seconds to wait for the end at most.

        Returns:
            The status after at most `wait_s` seconds.

        Raises:
            BadRequest: The run is attached: cancel it on the machine that submitted it.
            BackendError: The platform refuses the request or does not answer; the watcher tries again.
        """
        if self.record.status.state.final:
            return self.record.status
        self._own_only("cancelled")
        row = self.store.request_cancel(self.run_id)
        asked.expire(self.store.home, self.run_id)
        newest = self.attempts[-1]
        with output_audit.copied(self.store.home, newest.plan.job, row):
            if newest.handle is not None:
                attempts.backend_of(newest.plan, self.store.home).cancel(newest.handle)
        watcher.look_now(self.store, self.run_id)
        self.refresh()
        try:
            return self.wait(wait_s)
        except TimeoutError:
            return self.record.status

    def fetch(self, into: str | os.PathLike[str], what: Sequence[str] = FETCHABLE) -> Path:
        """Copy results of the run to a folder; blocking.

        The folder then belongs to this run: results of another run are refused there. git and cloudtrain ignore it when
        they package a source.

        Args:
            into: The folder; created if missing.
            what: Any of `model`, `outputs` and `checkpoints`; `workdir` on the backend `local` only.

        Returns:
            The folder.

        Raises:
            BadRequest: The folder belongs to another run, or the run has no such results.
        """
        return fetched.fetch(self.store, self.record, Path(into), what)

    def estimator(self) -> Any:
        """Return the newest attempt's `HuggingFace` estimator, for `.deploy()` and `.create_model()`; blocking (imports).

        Its models run in the SDK's inference image of the same versions, or in the `image_uri` that you pass.

        Raises:
            BadRequest: The run is not on SageMaker.
            MissingExtra: The SageMaker SDK is not installed.
        """
        plan = self.attempts[-1].plan
        backend = attempts.backend_of(plan, self.store.home)
        if not isinstance(backend, HasEstimator):
            raise BadRequest(f"{self.run_id} ran on {plan.backend}: only runs on SageMaker have an estimator")
        return backend.estimator(plan)

    def resume(
        self,
        *,
        sets: Sequence[str] = (),
        target: str | None = None,
        confirm: Confirm | None = None,
        force: bool = False,
    ) -> Run:
        """Start the run's next attempt, from its newest complete checkpoint.

        Blocking. Without an answer of the platform the attempt stays open. What changes is in `notes` afterwards. An
        attached run resumes with the job and the source in its output, and is one of this history from then on.

        Args:
            sets: other limits, resources, ranks or options: `limits.max_cost=80 USD`, `processes_per_node=4`.
            target: a backend or target other than the last attempt's. The run's output must be reached from there.
            confirm: as of `Submitter`.
            force: as of `Submitter`.

        Returns:
            This run.

        Raises:
            BadRequest: the run has not ended, has succeeded, a secret is missing, its cap is used up (CapReached), or its
                checkpoints cannot be reached from `target`.
            BackendError: the platform refuses the attempt; the run is FAILED.
        """
        from cloudtrain.runs import resume

        self.refresh()
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
        from cloudtrain.runs import resume

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
        from cloudtrain.runs import evaluation

        asked_for = evaluation.Evaluation(
            None if data is None else os.fspath(data),
            tuple(tasks),
            None if include_path is None else os.fspath(include_path),
            tuple(prompts),
            every_checkpoint,
            limit,
        )
        self.refresh(lambda _: None)
        sent, notes = evaluation.submit_evaluation(
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

    def acknowledge(self) -> None:
        """Note that a person knows this run: an equal submit from now on is a new run, not the end of this one.

        Where it is not known yet whether the platform has the job, an equal submit still takes it up.
        """
        if not (self.attempts[-1].unanswered_since or self.store.database.read_only):
            self.store.acknowledge(self.run_id)
