"""What a run has left: its log, metrics, curves, report, verdict and files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cloudtrain.backends.api import FETCHABLE
from cloudtrain.errors import BadRequest, RunFailed
from cloudtrain.events import LogLine, State, Status
from cloudtrain.history.records import MetricRow
from cloudtrain.runs.planning import advice, attempts, fetched, spend
from cloudtrain.runs.reading import read_run
from cloudtrain.runs.returned import add_cause, is_call, values
from cloudtrain.runs.state import RunState

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict


class Metrics(list[MetricRow]):
    """Points of curves in the order in which they were logged: a list of rows, which a notebook shows as a table."""

    COLUMNS = ("step", "name", "value", "at", "attempt", "rank", "epoch")
    SHOWN = 20

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each point. Raises BadRequest without pandas."""
        from cloudtrain.report import notebook

        return notebook.frame_of({name: [getattr(row, name) for row in self] for name in self.COLUMNS}, ["at"])

    def _repr_html_(self) -> str:
        from cloudtrain.report import notebook

        rows = [[str(getattr(row, name)) for name in self.COLUMNS] for row in self[-self.SHOWN :]]
        before = [[f"{len(self) - len(rows)} more", *[""] * (len(self.COLUMNS) - 1)]] if len(self) > len(rows) else []
        return notebook.html_table(self.COLUMNS, [*before, *rows])


class RunResults(RunState):
    """A run's state and what it has left."""

    def result(self, timeout_s: float | None = None, *, trust: bool = False) -> Any:
        """Block until the run has SUCCEEDED; return what its function has returned on rank 0, of a script the status.

        A value is a pickle, which runs code when it is loaded: of another user's run it is loaded with `trust` only.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.
            trust: Load the value of another user's run, or of an attached one.

        Returns:
            The value; the final Status of a run that is not the call of a function.

        Raises:
            RunFailed: The run ended in another state; its `__cause__` is the exception of the function.
            BadRequest: The value cannot be loaded here, or the run is another user's.
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        status = self._succeeded(timeout_s, trust)
        return values(self.store, self.record, trust, 1)[0] if is_call(self.record) else status

    def results(self, timeout_s: float | None = None, *, trust: bool = False) -> list[Any]:
        """Block until the run has SUCCEEDED; return what its function has returned on each rank.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.
            trust: Load the values of another user's run, or of an attached one.

        Returns:
            The values by rank.

        Raises:
            RunFailed: The run ended in another state; its `__cause__` is the exception of the function.
            BadRequest: The run is not the call of a function, or its values cannot be loaded here.
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        self._succeeded(timeout_s, trust)
        return values(self.store, self.record, trust)

    def exception(self, timeout_s: float | None = None) -> RunFailed | None:
        """Block until the run has ended; return what `result` raises, None where it has SUCCEEDED.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            The error, whose `__cause__` is the exception of the function.

        Raises:
            TimeoutError: The run is not final after `timeout_s` seconds. It continues.
        """
        try:
            self._succeeded(timeout_s, False)
        except RunFailed as failure:
            return failure
        return None

    def done(self) -> bool:
        """Return whether the run has ended; asks the platform when no watcher is alive."""
        return self.refresh(lambda _: None).state.final

    def _succeeded(self, timeout_s: float | None, trust: bool) -> Status:
        status = self.wait(timeout_s)
        if status.state is not State.SUCCEEDED:
            failure = advice.failure(self.run_id, status, self.verdict)
            if is_call(self.record):
                add_cause(self.store, self.record, failure, trust)
            raise failure
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
            yield from read_run(self.store, self.run_id, refresher, int(first), inner or None, follow=follow, raw=raw)

    def metrics(self, name: str | None = None, *, rank: int | None = 0) -> Metrics:
        """Return the points of all curves, or of one, in the order in which they were logged.

        Of a run that has ended it waits until its log is read to the end.

        Args:
            name: A metric, such as `loss`.
            rank: Points of this rank; None for all ranks. If rank 0 did not log a metric, the lowest rank that did counts.

        Returns:
            A list of rows with step, name, value, at, attempt, rank and epoch; `to_pandas()` is a data frame of them.
        """
        self.read_rest()
        return Metrics(self.store.metrics(self.run_id, name, rank))

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

        self.read_rest()
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

        self.read_rest()
        ended = self.record.status.state.final
        missing = nearest.describe(self.logs(raw=True)) if ended and not self.store.curves.ranks(self.run_id) else ()
        return page.write(
            self.store, self.run_id, Path(path), verdict=self.verdict(), log=self.logs(raw=True), rank=rank,
            no_metrics=missing, costs=spend.describe_attempts(self.attempts, self.store.home),
        )  # fmt: skip

    def _ipython_display_(self) -> None:
        """Show the run's card in a notebook, which is drawn again until the run has ended."""
        from cloudtrain.runs.live_card import live_card

        self.refresh()
        if live_card(self) is None:
            raise NotImplementedError  # as IPython asks for: it takes the next way to show it

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

    @property
    def model_artifacts(self) -> str:
        """Where the newest attempt's model is stored: the address that SageMaker's `ModelArtifacts` has, or a folder.

        Raises:
            BadRequest: It has no address outside its machine; `fetch` copies it.
        """
        return self._stored("model")

    @property
    def output_data(self) -> str:
        """Where the newest attempt's outputs are stored, as the SDK's `ModelTrainer.output_data`.

        Raises:
            BadRequest: They have no address outside their machine; `fetch` copies them.
        """
        return self._stored("outputs")

    def _stored(self, what: str) -> str:
        plan = self.attempts[-1].plan
        packed = attempts.backend_of(plan, self.store.home, clock=self.store.clock).packed(plan, what)
        if not (packed or attempts.output(plan)):
            raise BadRequest(f"the {what} of {self.run_id} has no address", f"cloudtrain fetch {self.run_id} copies it")
        return packed or f"{attempts.place(plan)}/{what}"

    def estimator(self) -> Any:
        """Return the newest attempt's `HuggingFace` estimator, for `.deploy()` and `.create_model()`; blocking (imports).

        Its models run in the SDK's inference image of the same versions, or in the `image_uri` that you pass.

        Raises:
            BadRequest: The run is not on SageMaker.
            MissingExtra: The SageMaker SDK is not installed.
        """
        plan = self.attempts[-1].plan
        backend = attempts.backend_of(plan, self.store.home, clock=self.store.clock)
        return backend.estimator(plan)
