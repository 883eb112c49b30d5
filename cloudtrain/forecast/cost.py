"""What a run can cost at most, and how much of its cap is left; pure arithmetic over plans and ended attempts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.events import State
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan, TimeLimit
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.job.sections import Limits

HOUR_S = 3600.0
END_S = 30.0  # what a platform may bill of an attempt after the end that it reports


@dataclass(frozen=True)
class Spent:
    """What ended attempts have used: seconds of one node, and USD of all nodes (None where a price is not known)."""

    seconds: float = 0.0
    usd: float | None = 0.0


def spent(attempts: Sequence[AttemptRecord], limit_of: Callable[[Plan], TimeLimit]) -> Spent:
    """Return what attempts have used: what the platform bills, else their measured time, else their whole limit."""
    seconds, usd = 0.0, 0.0
    priced = True
    for attempt in attempts:
        used_s = _used_s(attempt, limit_of)
        price = (attempt.plan.price or {}).get("usd_per_hour")
        seconds += used_s
        usd += used_s / HOUR_S * float(price or 0)
        priced = priced and (price is not None or used_s == 0)
    return Spent(seconds, usd if priced else None)


def _used_s(attempt: AttemptRecord, limit_of: Callable[[Plan], TimeLimit]) -> float:
    """Return the billed seconds of each node of an attempt."""
    status = attempt.status
    if status.billable_s is not None:
        return status.billable_s / int(attempt.plan.manifest["nodes"])
    no_nodes = status.event == "capacity" and status.state is not State.PREEMPTED  # else a part of the nodes waited
    if status.state.final and (attempt.handle is None or no_nodes):
        return 0.0  # nothing was started
    if status.state is State.CANCELLED and not status.started_at:
        return 0.0
    if status.state is not State.LOST and status.started_at and status.ended_at:
        measured_s = max(0.0, units.unix_time(status.ended_at) - units.unix_time(status.started_at)) + END_S
        return min(measured_s, (attempt.plan.at_most or {}).get("attempt_s") or measured_s)
    return float(limit_of(attempt.plan).seconds or 0)


def left_s(limits: Limits, price: Mapping[str, Any] | None, used: Spent) -> float:
    """Return how many seconds of one node are left of a cap: infinite without one, 0 where money has no price."""
    left = [float("inf")]
    if limits.max_total_runtime_s is not None:
        left.append(limits.max_total_runtime_s - used.seconds)
    if limits.max_cost_usd is not None:
        if not price or used.usd is None:
            return 0.0
        left.append((limits.max_cost_usd - used.usd) / float(price["usd_per_hour"]) * HOUR_S)
    return min(left)


def worst_case(plan: Plan, limits: Limits, limit: TimeLimit, used: Spent) -> dict[str, Any]:
    """Return what the whole run can take and cost at most, as `Plan.at_most` has it.

    Returns:
        `attempts` that may still be started, `attempt_s` of each on each node, `usd` of the run (None without a price),
        `unbounded` (why there is no such figure) and `note` (what is not in it).
    """
    attempts = 1 if plan.retries == "platform" else plan.job["retry"]["max_attempts"] - plan.attempt + 1
    attempts = max(1, attempts)
    case: dict[str, Any] = {
        "attempts": attempts,
        "attempt_s": limit.seconds,
        "usd": None,
        "unbounded": "",
        "note": limit.note,
    }
    if limit.seconds is None:
        return case | {"unbounded": limit.note, "note": ""}
    if plan.price and used.usd is not None:
        longest_s = min(attempts * limit.seconds, left_s(limits, plan.price, used))
        case["usd"] = round(used.usd + longest_s / HOUR_S * float(plan.price["usd_per_hour"]), 2)
    return case
