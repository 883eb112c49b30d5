"""Where a sweep stands: its trials' values, the best one, what is spent, and whether it is over. Reads the history only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cloudtrain.events import State
from cloudtrain.history.trials import SweepRecord, TrialRecord
from cloudtrain.job.units import format_count
from cloudtrain.runs.planning.spend import total, total_of_deleted
from cloudtrain.sweeps.draw import Past
from cloudtrain.sweeps.file import Metric, SweepFile

if TYPE_CHECKING:
    from cloudtrain.history.store import Store

PRUNED = "pruned"


@dataclass(frozen=True)
class Spent:
    """What the trials of a sweep have used so far, and what the live ones may use beside that."""

    hours: float = 0.0  # of all nodes
    usd: float = 0.0
    promised_usd: float = 0.0


def spent(store: Store, trials: Sequence[TrialRecord]) -> Spent:
    """Return what trials have used until now, by the times of their attempts and the prices of their plans."""
    hours = usd = promised = 0.0
    for trial in trials:
        if trial.run_id is None:
            continue
        attempts = store.attempts(trial.run_id)
        used = total(attempts, store.home)
        hours, usd = hours + used.node_s / 3600, usd + used.usd
        if not trial.ended and attempts:
            promised += max(0.0, float((attempts[-1].plan.at_most or {}).get("usd") or 0.0) - used.usd)
    deleted = total_of_deleted(store.home, {str(trial.run_id) for trial in trials if trial.deleted})
    return Spent(hours + deleted.node_s / 3600, usd + deleted.usd, promised)


def describe_spent(used: Spent) -> str:
    """Return what a sweep has used in words; "" before a machine was used."""
    if not used.hours:
        return ""
    hours = f"{used.hours:.2g} machine hours" if used.hours >= 0.1 else f"{used.hours * 60:.2g} machine minutes"
    return f"{hours}, {used.usd:.2f} USD" if used.usd else hours


def reports(store: Store, run_id: str | None, name: str) -> list[float]:
    """Return what a run has reported of a metric, one value for each step, in order; NaN counts as worst."""
    if run_id is None:
        return []
    by_step = {row.step: row.value for row in store.metrics(run_id, name)}
    return [by_step[step] for step in sorted(by_step)]


def result_of(store: Store, run_id: str | None, metrics: Sequence[Metric]) -> list[float] | None:
    """Return the last value of each metric; None where one was not reported, or is no finite number."""
    values = [reports(store, run_id, metric.name) for metric in metrics]
    if not all(column and math.isfinite(column[-1]) for column in values):
        return None
    return [column[-1] for column in values]


def succeeded(trial: TrialRecord) -> bool:
    """Return whether a trial has succeeded; of a deleted run only its result says so, which a failed one never has."""
    if trial.deleted:
        return trial.result is not None and not trial.stopped
    return trial.ended and trial.state is State.SUCCEEDED


def failed(trial: TrialRecord) -> bool:
    """Return whether a trial ended by itself, without a result that counts."""
    return trial.ended and not trial.stopped and not succeeded(trial) and trial.state is not State.CANCELLED


def failed_twice(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the repeated trials that have failed as well, without those that `rerun-failed` has repeated since."""
    repeated = {trial.retry_of for trial in trials}
    return [trial for trial in trials if failed(trial) and trial.retry_of is not None and trial.number not in repeated]


def best(sweep: SweepFile, trials: Sequence[TrialRecord]) -> TrialRecord | None:
    """Return the best trial by the first metric, of those that have succeeded; None without any."""
    found: TrialRecord | None = None
    for trial in trials:
        if trial.result is None or not sweep.metrics or not succeeded(trial):
            continue
        if found is None or sweep.metrics[0].is_better(trial.result[0], (found.result or [math.nan])[0]):
            found = trial
    return found


def past(sweep: SweepFile, trials: Sequence[TrialRecord], store: Store) -> list[Past]:
    """Return the trials as the method of a sweep learns from them: a failed one counts as `impute` says."""
    known = [trial.result for trial in trials if trial.result is not None]
    found = []
    for trial in trials:
        result = trial.result
        if trial.ended and result is None:
            result = _imputed(sweep, trial, known, store)
            if result is None:
                continue
        found.append(Past(trial.point, result if trial.ended else None))
    return found


def _imputed(
    sweep: SweepFile, trial: TrialRecord, known: Sequence[Sequence[float]], store: Store
) -> list[float] | None:
    values = []
    for at, metric in enumerate(sweep.metrics):
        own = [value for value in reports(store, trial.run_id, metric.name) if math.isfinite(value)]
        worst, best = (max, min) if metric.goal == "minimize" else (min, max)
        column = [result[at] for result in known]
        if metric.impute == "worst" or not own:
            if not column:
                return None
            values.append(worst(column))
        else:
            values.append(own[-1] if metric.impute == "latest" else best(own))
    return values


def outcome(
    sweep: SweepFile, record: SweepRecord, trials: Sequence[TrialRecord], spent: Spent, *, exhausted: bool
) -> tuple[str, str] | None:
    """Return the state and the reason with which a sweep is to end, None while it continues.

    Args:
        exhausted: whether nothing is left to draw: the grid is done.
    """
    if record.state == "STOPPING":
        return "CANCELLED", record.reason
    first = sweep.metrics[0] if sweep.metrics else None
    top = best(sweep, trials)
    if first and top and top.result and first.is_reached(top.result[0]):
        return "SUCCEEDED", f"the goal was reached: {first.name} {top.result[0]:.6g} by trial {top.number}"
    if len(broken := failed_twice(trials)) > sweep.max_failed:
        return "FAILED", f"{format_count(len(broken), 'trial')} failed twice (max_failed: {sweep.max_failed})"
    drawn = sum(trial.retry_of is None for trial in trials)
    limit = None if sweep.budget.trials is None else sweep.budget.trials + record.extra
    spent_all = (
        "the budget of trials" if limit is not None and drawn >= limit
        else "the budget of hours" if sweep.budget.hours is not None and spent.hours >= sweep.budget.hours
        else "the budget in USD" if sweep.budget.usd is not None and exhausted
        else ""
    )  # fmt: skip
    if not (spent_all or exhausted) or not all(trial.ended for trial in trials):
        return None
    if not any(succeeded(trial) or trial.stopped for trial in trials):
        return "FAILED", "no trial has succeeded"
    return "SUCCEEDED", f"{spent_all} is spent: {drawn} trials" if spent_all else f"all {drawn} trials have run"
