"""Why trials of a sweep fail, and whether all further trials would: then the sweep ends before they are paid."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cloudtrain.errors import CloudtrainError
from cloudtrain.events import State
from cloudtrain.history.trials import TrialRecord
from cloudtrain.job.problems import nearest
from cloudtrain.runs.run import Run
from cloudtrain.sweeps.file import SweepFile

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict
    from cloudtrain.history.store import Store

# All trials pass arguments of the same names: one that the script does not know, or lacks, fails each of them.
_NAMES = re.compile(r"unrecognized arguments|arguments are required|No such option|not used by the HfArgumentParser")
MOST_NAMES = 8  # metrics that a message lists


def find_common(sweep: SweepFile, trials: Sequence[TrialRecord], store: Store) -> str:
    """Return why no further trial can have a result, "" where one may; blocking where a failed trial's log is read."""
    if sweep.of_calls or any(trial.result is not None for trial in trials):
        return ""
    for trial in trials:
        if trial.ended and not trial.stopped and trial.state is State.SUCCEEDED and trial.run_id:
            if why := _missing_metric(sweep, trial, trials, store):
                return why
        elif is_common(trial, store):
            return f"trial {trial.number} failed, as every other would: {describe(trial, store)}"
    return ""


def is_common(trial: TrialRecord, store: Store) -> bool:
    """Return whether a trial failed because of the names of its arguments, which all trials share; blocking."""
    if trial.run_id is None or trial.stopped or trial.state is not State.FAILED:
        return False
    verdict = _verdict(trial, store)
    return bool(verdict and verdict.label == "bad-argument" and _NAMES.search(verdict.deciding))


def describe(trial: TrialRecord, store: Store) -> str:
    """Return why a trial failed in a line: the line of its log that decided, else what is known; blocking."""
    verdict = _verdict(trial, store)
    if verdict and verdict.label != "unknown":
        return verdict.deciding.strip() or verdict.sentence
    return f"{trial.reason} (cloudtrain logs {trial.run_id})"


def _verdict(trial: TrialRecord, store: Store) -> Verdict | None:
    try:
        return Run(str(trial.run_id), store, watch=False).verdict()
    except CloudtrainError:
        return None  # the log cannot be read now


def _missing_metric(sweep: SweepFile, trial: TrialRecord, trials: Sequence[TrialRecord], store: Store) -> str:
    """Return that a trial that has SUCCEEDED lacks a metric which no trial has reported; "" where it is not so."""
    seen: set[str] = set()
    for each in trials:
        if each.run_id and each.state is not None:
            seen |= {curve.name for curve in store.curves.summary(each.run_id)}
    for metric in sweep.metrics:
        if metric.name not in seen:
            names = ", ".join(sorted(seen)[:MOST_NAMES]) + (" and more" if len(seen) > MOST_NAMES else "")
            near = nearest(metric.name, seen)
            return (
                f"trial {trial.number} SUCCEEDED without the sweep's metric {metric.name}; "
                f"it reported {names or 'no metric'}" + (f": did you mean {near}?" if near else "")
            )
    return ""
