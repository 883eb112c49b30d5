"""What to try after an end: the commands of a verdict, with the run's id and figures of its own limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.errors import CloudtrainError, RunFailed
from cloudtrain.job.units import HOUR_S
from cloudtrain.runs.planning import cap
from cloudtrain.runs.planning.attempts import backend_of

if TYPE_CHECKING:
    from cloudtrain.diagnosis.verdict import Verdict
    from cloudtrain.events import Status
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store


def complete(store: Store, attempt: AttemptRecord, status: Status, verdict: Verdict) -> Verdict:
    """Return a verdict whose advice has the run's id, and for a time limit the values to set."""
    change = verdict.change.replace(" RUN", f" {attempt.run_id}")
    if verdict.label == "timeout" and (words := " ".join(_options(store, replace(attempt, status=status)))):
        change = f"raise the limit: cloudtrain resume {attempt.run_id} {words}"
    return replace(verdict, change=change)


def failure(run_id: str, status: Status, read_verdict: Callable[[], Verdict | None]) -> RunFailed:
    """Return the error for a run that did not succeed, with its cause and what to try; blocking, reads its log."""
    try:
        verdict = read_verdict()
    except CloudtrainError:  # its log cannot be read: the state and the reason remain
        verdict = None
    if verdict is None or verdict.only_reason:
        return RunFailed(run_id, status)
    line = f": {verdict.deciding}" if verdict.where == "log" else ""
    place = f" ({verdict.raised})" if verdict.raised else ""
    return RunFailed(run_id, status, f"{verdict.sentence}{line}{place}", verdict.advice)


def longer_options(store: Store, run_id: str) -> str:
    """Return the options that give a run which reached its time limit twice the time; "" where none are known."""
    return " ".join(_options(store, store.attempts(run_id)[-1]))


def _options(store: Store, newest: AttemptRecord) -> Sequence[str]:
    """Return `--set` with twice the limit that ended an attempt, and with a cap that pays for it."""
    plan = newest.plan
    try:
        limits = plan.stored_job.limits
        backend = backend_of(plan, store.home, newest.handle, clock=store.clock)
    except (CloudtrainError, LookupError):  # of an older version, or its extra is not installed any more
        return []
    granted_s = int(plan.manifest.get("max_runtime_s") or limits.max_runtime_s)
    if limits.capped and granted_s < limits.max_runtime_s:  # the cap ended it
        return [_raised_cap(plan.job["limits"], 2.0)]
    longer_s = 2 * limits.max_runtime_s
    options = [f"--set limits.max_runtime={_format(longer_s)}"]
    if limits.capped:
        limit = cap.limit_of(backend, plan)
        needed_s = longer_s + (limit.seconds or 0) - granted_s
        others = [old for old in store.attempts(newest.run_id) if old.attempt_id != newest.attempt_id]
        used = cap.spent([*others, newest], lambda old: cap.limit_of(backend, old))
        left_s = cap.seconds_left(limits, plan.price, used)
        if left_s < needed_s:
            rate = float((plan.price or {}).get("usd_per_hour") or 0) / HOUR_S
            share = 1 + (needed_s - left_s) / limits.max_total_runtime_s if limits.max_total_runtime_s else 1.0
            if limits.max_cost_usd:
                share = max(share, 1 + (needed_s - left_s) * rate / limits.max_cost_usd)
            options.append(_raised_cap(plan.job["limits"], share))
    return options


def _raised_cap(limits: dict[str, str], times: float) -> str:
    """Return `--set` for the caps of a job, raised so many times."""
    from cloudtrain.job import units

    options = []
    if cost := limits.get("max_cost"):
        options.append(f'--set "limits.max_cost={math.ceil(units.usd(cost) * times)} USD"')
    if total := limits.get("max_total_runtime"):
        options.append(f"--set limits.max_total_runtime={_format(math.ceil(units.duration_s(total) * times))}")
    return " ".join(options)


def _format(seconds: int) -> str:
    """Return a duration in one unit, as a shell takes it without quotes."""
    for size, unit in ((3600, "h"), (60, "m")):
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"
