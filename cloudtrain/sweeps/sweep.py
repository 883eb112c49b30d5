"""A sweep: many runs of one job with other hyperparameters, started, looked at, paused, stopped and extended."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BadRequest, CloudtrainError, MissingExtra
from cloudtrain.history.store import Store
from cloudtrain.history.trials import SweepHistory, SweepRecord, TrialRecord
from cloudtrain.job.problems import fit_name
from cloudtrain.job.targets import home as default_home
from cloudtrain.job.units import format_number
from cloudtrain.report import notebook
from cloudtrain.report.importance import importance
from cloudtrain.runs.run import Run
from cloudtrain.sweeps import drive, standing
from cloudtrain.sweeps.file import SweepFile, read
from cloudtrain.sweeps.send import specification, sweep_of


class Sweep:
    """A sweep in the history.

    `Sweep(job, parameters, ...)` starts one: `Sweep({"entrypoint": "train.py"}, {"lr": {"min": 1e-5, "max": 1e-2}},
    method="tpe", metric={"name": "loss"}, run_cap=20, target="prod")`. It blocks until the first trial was planned. The
    watcher of this machine starts the trials; this process may end.

    Args:
        job: a job file, or its keys.
        parameters: the section `parameters` of a sweep file.
        home: where the history lives; None for the user's.
        keys: the other keys of a sweep file (page "how/sweep" of the documentation).

    Raises:
        BadRequest: the sweep is wrong; the error lists all problems.
    """

    sweep_id: str
    home: Path
    _history: SweepHistory

    def __init__(
        self,
        job: str | os.PathLike[str] | Mapping[str, Any],
        parameters: Mapping[str, Any],
        *,
        home: Path | None = None,
        **keys: Any,
    ) -> None:
        given = dict(job) if isinstance(job, Mapping) else os.fspath(job)
        started: Sweep = begin({"job": given, "parameters": dict(parameters), **keys}, Path.cwd(), home=home)
        self.sweep_id, self.home = started.sweep_id, started.home
        self._history = started._history

    @staticmethod
    def find(sweep_id: str | None = None, home: Path | None = None) -> Sweep:
        """Return a sweep of the history.

        Args:
            sweep_id: The sweep's id or a unique prefix of it; None for the newest sweep.
            home: Folder of the history; None for CLOUDTRAIN_HOME or ~/.local/share/cloudtrain.

        Returns:
            The sweep.

        Raises:
            UnknownRun: No sweep, or more than one, has that id or prefix.
        """
        found = Sweep.__new__(Sweep)
        found.home = home or default_home()
        found._history = SweepHistory(found.home)
        found.sweep_id = found._history.find(sweep_id).sweep_id
        return found

    def __repr__(self) -> str:
        return f"<Sweep {self.sweep_id} {self.record.state}>"

    def _repr_html_(self) -> str:
        record = self.record
        rows = [("reason", record.reason), ("trials", str(len(self.trials))), ("best", self.best_text)]
        with suppress(MissingExtra):
            rows.append(("importance", ", ".join(f"{name} {share:.0%}" for name, share in self.importance.items())))
        return notebook.frame(self.sweep_id, record.state, rows)

    @property
    def record(self) -> SweepRecord:
        """What the history has of it: `state` is RUNNING, PAUSED, STOPPING, SUCCEEDED, FAILED or CANCELLED."""
        return self._history.find(self.sweep_id)

    @property
    def file(self) -> SweepFile:
        """The sweep file as it was read."""
        return sweep_of(self.record.spec)

    @property
    def trials(self) -> Sequence[TrialRecord]:
        """Its trials in their order; each has its parameters, its run's id and state, and its result."""
        return self._history.trials(self.sweep_id)

    @property
    def best(self) -> TrialRecord | None:
        """The best trial by the first metric so far, of those that have succeeded; None without any."""
        return standing.best(self.file, self.trials)

    @property
    def best_text(self) -> str:
        """The best trial in a line, with the parameters that were searched; "" without any."""
        file, best = self.file, self.best
        if not best or not best.result:
            return ""
        params = ", ".join(f"{one.name} {format_value(best.params.get(one.name))}" for one in file.searched)
        return f"{file.metrics[0].name} {best.result[0]:.6g} by trial {best.number} ({params})"

    @property
    def spent(self) -> standing.Spent:
        """What its trials have used so far: machine hours, USD where prices are known."""
        return standing.spent(Store(self.home), self.trials)

    @property
    def importance(self) -> dict[str, float]:
        """The share of the first metric's variance that each parameter explains; {} before 8 trials have a result.

        Raises:
            MissingExtra: Optuna or scikit-learn is not installed.
        """
        known = [trial for trial in self.trials if trial.result]
        values = [trial.result[0] if trial.result else None for trial in known]
        return importance([trial.params for trial in known], values)

    def run(self, trial: TrialRecord) -> Run:
        """Return the run of a trial.

        Args:
            trial: One of `trials`.

        Returns:
            The run.

        Raises:
            BadRequest: The trial was not submitted.
        """
        if trial.run_id is None:
            raise BadRequest(
                f"trial {trial.number} of {self.sweep_id} has no run", f"cloudtrain sweep show {self.sweep_id}"
            )
        return Run(trial.run_id, Store(self.home))

    def results(self, *, return_exceptions: bool = False, trust: bool = False) -> list[Any]:
        """Block until the sweep has ended; return what the function has returned in each call, in their order.

        Args:
            return_exceptions: Return the error of a call in its place instead of raising the first one.
            trust: As of `Run.result`.

        Returns:
            The values of the calls.

        Raises:
            RunFailed: A call has failed; its `__cause__` is the exception of the function.
            BadRequest: The sweep is not of `Function.map`, or a call was not submitted.
        """
        file = self.file
        if not file.of_calls:
            raise BadRequest(
                f"{self.sweep_id} is no group of calls of a function", f"cloudtrain sweep show {self.sweep_id}"
            )
        self.wait()
        newest = {trial.params["call"]: trial for trial in self.trials}  # one that rerun_failed repeats has several
        found, store = list[Any](), Store(self.home)
        for call in file.parameters[0].steps():
            try:
                if call not in newest:
                    raise BadRequest(
                        f"call {call} of {self.sweep_id} was not submitted", f"cloudtrain sweep show {self.sweep_id}"
                    )
                run = self.run(newest[call])
                run.store = store  # one connection for all
                found.append(run.result(trust=trust))
            except CloudtrainError as error:
                if not return_exceptions:
                    raise
                found.append(error)
        return found

    def wait(self, timeout_s: float | None = None) -> SweepRecord:
        """Block until the sweep has ended.

        Args:
            timeout_s: Seconds to wait at most; None for no limit.

        Returns:
            The sweep's record; `record.state` is SUCCEEDED, FAILED or CANCELLED.

        Raises:
            TimeoutError: The sweep has not ended after `timeout_s` seconds. It continues.
        """
        end = None if timeout_s is None else self._history.clock.monotonic() + timeout_s
        while (record := self.record).live:
            self.ensure_driven()
            if end is not None and self._history.clock.monotonic() > end:
                raise TimeoutError(f"{self.sweep_id} is still {record.state}")
            self._history.clock.sleep(0.1)
        return record

    def stop(self) -> None:
        """Cancel its live trials and end it; returns when the request is stored."""
        self._change("STOPPING", "stopped", ("RUNNING", "PAUSED"))
        self.ensure_driven()

    def pause(self) -> None:
        """Start no further trial; those that run continue."""
        self._change("PAUSED", "paused", ("RUNNING",))

    def resume(self) -> None:
        """Resume a paused sweep."""
        self._change("RUNNING", "", ("PAUSED",))
        self.ensure_driven()

    def extend(self, trials: int) -> None:
        """Allow more trials; a sweep that has ended continues.

        Args:
            trials: Number of trials to add to the budget.

        Raises:
            BadRequest: The sweep has no limit on the number of trials.
        """
        if self.file.budget.trials is None:
            raise BadRequest(
                f"{self.sweep_id} has no limit on the number of trials, so none can be added",
                "its limits of time and cost cannot be changed: start a new sweep with higher ones",
            )
        self._history.extend(self.sweep_id, trials)
        self.ensure_driven()

    def rerun_failed(self) -> int:
        """Repeat the trials that have failed twice, once more each, and return how many."""
        broken = standing.failed_twice(self.trials)
        for trial in broken:
            number = len(self.trials) + 1
            self._history.add_trial(
                self.sweep_id, number, trial.params, trial.point, trial.target, retry_of=trial.number
            )
        if broken:
            self._history.extend(self.sweep_id, 0)
            self.ensure_driven()
        return len(broken)

    def ensure_driven(self) -> None:
        """Start the process that drives it, where none lives; returns at once."""
        record = self.record
        if record.state in ("RUNNING", "STOPPING") and not record.is_driven(self._history.clock):
            drive.start(self.home, self.sweep_id)

    def _change(self, state: str, reason: str, old: Sequence[str]) -> None:
        if not self._history.set_state(self.sweep_id, state, reason, old=old):
            raise BadRequest(f"{self.sweep_id} is {self.record.state}", f"cloudtrain sweep show {self.sweep_id}")


def format_value(value: Any) -> str:
    """Return a parameter's value as lists show it."""
    return format_number(value) if isinstance(value, float) else str(value)


def begin(
    document: Mapping[str, Any],
    folder: Path,
    *,
    job: Mapping[str, Any] | None = None,
    target: str | None = None,
    home: Path | None = None,
    key: str | None = None,
    extra: Mapping[str, Path] | None = None,
) -> Sweep:
    """Start a sweep and return it; blocks until its first trial was planned on each target. Raises BadRequest.

    Args:
        document: a sweep file's keys.
        folder: to which its relative paths belong.
        job: the job's keys, where the sweep is a section of a job file.
        target: instead of the sweep's and the job's.
        key: names the sweep: the same key returns the same one.
        extra: files beside the job's source, as of `Submitter.submit`.
    """
    home = home or default_home()
    document = {**document, **({"target": target} if target else {})}
    sweep = read(document, folder, job=job)
    spec = specification(home, document, sweep, extra)
    stamp = SYSTEM.utc().strftime("%y%m%d-%H%M%S")
    name = fit_name(sweep.name) or "sweep"
    ending = f"k{hashlib.sha256(key.encode()).hexdigest()[:16]}" if key else f"{stamp}-{secrets.token_hex(2)}"
    sweep_id = f"{name}-sweep-{ending}"
    SweepHistory(home).add(sweep_id, sweep.name, spec)
    found = Sweep.find(sweep_id, home)
    if key and _comparable(found.record.spec) != _comparable(spec):
        raise BadRequest(
            f"the key {key!r} is already used by {sweep_id}, a different sweep",
            "use another --key, or the file as it was",
        )
    found.ensure_driven()
    return found


def _comparable(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a specification without the seed, which is drawn where the file names none."""
    return {**spec, "document": {name: value for name, value in spec["document"].items() if name != "seed"}}
