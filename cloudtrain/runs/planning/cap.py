"""What a run can cost at most, and its attempts within what is left of its cap: the platform's own limit in the request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import TimeLimit
from cloudtrain.errors import BadJob, CapReached, Problem
from cloudtrain.events import ENDED, State, Status
from cloudtrain.forecast import prices
from cloudtrain.job import units
from cloudtrain.job.units import HOUR_S

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.job.job import Job
    from cloudtrain.job.sections import Limits
    from cloudtrain.source.bundle import Bundle

LEAST_S = 300  # shortest time for which another attempt is started; limits.max_runtime where that is shorter


def plan_attempt(
    backend: Backend,
    job: Job,
    bundle: Bundle,
    run_id: str,
    number: int = 1,
    earlier: Sequence[AttemptRecord] = (),
    home: Path | None = None,
    candidates: Sequence[Mapping[str, Any]] = (),
) -> Plan:
    """Return the plan of an attempt. With a cap it may use what earlier attempts have left, margins included.

    Pure, as `Backend.plan`, apart from the price lists that are stored below `home`.

    Raises:
        BadJob: the job cannot run there, or this backend cannot hold its cap.
        CapReached: what is left is too little for another attempt.
    """

    def make(max_runtime_s: int | None) -> Plan:
        chosen = job
        if max_runtime_s is not None:
            limits = job.limits.model_copy(update={"max_runtime": f"{max_runtime_s}s"})
            chosen = job.model_copy(update={"limits": limits})
        plan = backend.plan(chosen, bundle, run_id, number)
        if chosen is not job:  # the next attempt is planned from the limits that were asked for
            plan = replace(plan, job={**plan.job, "limits": job.limits.model_dump(mode="json")})
        resources = job.resources
        if (
            backend.traits.prices
            or resources.usd_per_hour is not None
            or resources.priced_as
            or resources.instance_type
        ):
            plan = replace(plan, price=prices.price_of(backend, plan, job, home))
        return plan

    plan = make(None)
    limit, used = limit_of(backend, plan), spent(earlier, lambda old: limit_of(backend, old))
    if job.limits.capped:
        _check_cap(job, plan, limit, backend)
        most_s = seconds_left(job.limits, plan.price, used)  # infinite where nodes are free
        if limit.seconds is not None and limit.seconds > most_s:
            left_s = int(most_s)

            def longest(max_runtime_s: int) -> int:
                return limit_of(backend, make(max_runtime_s)).seconds or 0

            shorter_s = _longest_s(longest, job.limits.max_runtime_s, left_s)
            if shorter_s is None:
                extra = describe_after_end(earlier, lambda old: limit_of(backend, old))
                at_least_s = longest(min(LEAST_S, job.limits.max_runtime_s))
                raise _too_little(job, plan, limit, used, (left_s, at_least_s), extra)
            plan = make(shorter_s)
            limit = limit_of(backend, plan)
            note = f"the rest of the cost limit gives this attempt {units.format_duration(shorter_s)}"
            plan = replace(plan, notes=(*plan.notes, f"{note} of {job.limits.max_runtime} (limits.max_runtime)"))
    return replace(plan, at_most=worst_case(plan, job.limits, limit, used, earlier, candidates))


def limit_of(backend: Backend, plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt as its request has it; of another backend's, or an attached run's, as its
    plan has it."""
    if plan.backend != backend.name or not plan.request:
        return TimeLimit((plan.at_most or {}).get("attempt_s"), "")
    return backend.time_limit(plan)


def _longest_s(longest: Callable[[int], int], max_runtime_s: int, left_s: int) -> int | None:
    """Return the longest max_runtime whose request stays within `left_s`, None where that is too short.

    `longest` returns the seconds of a request by its max_runtime. A platform may start an attempt several times: the
    seconds then grow by several for each one of max_runtime.
    """
    least_s = min(LEAST_S, max_runtime_s)
    at_least_s = longest(least_s)
    if at_least_s > left_s:
        return None
    rate = (longest(max_runtime_s) - at_least_s) / max(1, max_runtime_s - least_s)
    seconds = least_s + int((left_s - at_least_s) / max(rate, 1.0))
    while longest(seconds) > left_s:  # rounded up, as Slurm's minutes are
        seconds = max(least_s, seconds - 60)
    return seconds


def _check_cap(job: Job, plan: Plan, limit: TimeLimit, backend: Backend) -> None:
    """Raise BadJob where a cap cannot be held."""
    problems = []
    key = "limits.max_cost" if job.limits.max_cost else "limits.max_total_runtime"
    if limit.seconds is None:
        problems.append(Problem(f"cannot be enforced on {plan.backend}: {limit.note}", key, "remove it"))
    if job.limits.max_cost and not plan.price:
        here, there = (
            f"set {place}; `cloudtrain prices refresh` downloads price lists; max_total_runtime needs none"
            for place in (
                "resources.usd_per_hour, or usd_per_hour of the target",
                f"usd_per_hour in section [targets.{job.target}] of cloudtrain.toml",
            )
        )
        why = prices.describe_none(backend, plan)
        message = f"needs the price of a node, which is unknown{f': {why}' if why else ''}"
        problems.append(Problem(message, "limits.max_cost", here, candidate_hint=there))
    if problems:
        raise BadJob(job.located(problems))


def _too_little(
    job: Job, plan: Plan, limit: TimeLimit, used: Spent, left: tuple[int, int], extra: str
) -> BadJob | CapReached:
    """Return the error for a cap that does not pay for the shortest useful attempt; `left` and needed are seconds."""
    left_s, at_least_s = left
    margin_s = (limit.seconds or 0) - job.limits.max_runtime_s
    least_s = min(LEAST_S, job.limits.max_runtime_s)
    cap = job.limits.max_cost or job.limits.max_total_runtime
    text = (
        f"leaves {units.format_duration(max(0, left_s))} for {plan.attempt_id}, which needs at least"
        f" {units.format_duration(least_s)} and {units.format_duration(margin_s)} of margins of {plan.backend}"
    )
    name = "limits.max_cost" if job.limits.max_cost else "limits.max_total_runtime"
    enough, why = _enough(job, plan, used, at_least_s)
    if plan.attempt == 1:
        hint = f"raise it to {enough} or more{why}" if enough else "raise it"
        hint += "; or ask for fewer nodes" if int(plan.manifest["nodes"]) > 1 else ""
        return BadJob(job.located([Problem(f"is {cap}, which {text}", name, hint)]))
    so_far = (
        f"{used.usd:.2f} USD" if job.limits.max_cost and used.usd is not None else units.format_duration(used.seconds)
    )
    return CapReached(
        f"{name} is {cap}, of which {so_far} are used{f' ({extra})' if extra else ''}: that {text}",
        f'cloudtrain resume {plan.run_id} --set "{name}={enough or "..."}" raises it'
        + (f" enough{why}" if enough else ""),
    )


def _enough(job: Job, plan: Plan, used: Spent, at_least_s: int) -> tuple[str, str]:
    """Return the smallest cap that pays for an attempt of so many seconds, and its price; "" where that is not known."""
    if not job.limits.max_cost:
        return f"{math.ceil(used.seconds) + at_least_s}s", ""
    if not plan.price or used.usd is None:
        return "", ""
    rate, machine = float(plan.price["usd_per_hour"]), plan.price.get("machine")
    cents = math.ceil((used.usd + (at_least_s + 1) / HOUR_S * rate) * 100)  # a second more: the rest is rounded down
    return f"{cents / 100:.2f} USD", f", at {rate:g} USD an hour" + (f" for {machine}" if machine else "")


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
    began = status.state is State.PREEMPTED or status.started_at  # a part of the nodes waited for the others
    no_nodes = status.event == "capacity" and not began
    if status.state.final and (attempt.handle is None or no_nodes):
        return 0.0  # nothing was started
    if status.state is State.CANCELLED and not status.started_at:
        return 0.0
    if (took_s := measured_s(status)) is not None:
        counted_s = took_s + limit_of(attempt.plan).after_end_s
        return min(counted_s, (attempt.plan.at_most or {}).get("attempt_s") or counted_s)
    return float(limit_of(attempt.plan).seconds or 0)


def measured_s(status: Status) -> float | None:
    """Return the seconds from an attempt's start to its end, None where one of them is not known.

    `ended_at` of a loss is when it was noticed, unless its event is ENDED: its nodes may have been billed for longer.
    """
    if not status.started_at or not status.ended_at or (status.state is State.LOST and status.event != ENDED):
        return None
    return max(0.0, units.unix_time(status.ended_at) - units.unix_time(status.started_at))


def describe_after_end(attempts: Sequence[AttemptRecord], limit_of: Callable[[Plan], TimeLimit]) -> str:
    """Return what a cap counts beside the measured time of ended attempts; "" where that is nothing."""
    extra_s = max(
        (
            limit_of(old.plan).after_end_s
            for old in attempts
            if old.status.billable_s is None and measured_s(old.status) is not None
        ),
        default=0.0,
    )
    return f"each ended attempt counts {extra_s:.0f} s more, which its platform may bill" if extra_s else ""


def seconds_left(limits: Limits, price: Mapping[str, Any] | None, used: Spent) -> float:
    """Return how many seconds of one node are left of a cap: infinite without one, 0 where money has no price."""
    left = [float("inf")]
    if limits.max_total_runtime_s is not None:
        left.append(limits.max_total_runtime_s - used.seconds)
    if limits.max_cost_usd is not None:
        if not price or used.usd is None:
            return 0.0
        left_usd, rate = limits.max_cost_usd - used.usd, float(price["usd_per_hour"])
        left.append(left_usd / rate * HOUR_S if rate else float("inf"))
    return min(left)


def worst_case(
    plan: Plan,
    limits: Limits,
    limit: TimeLimit,
    used: Spent,
    earlier: Sequence[AttemptRecord] = (),
    candidates: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return what the whole run can take and cost at most, as `Plan.at_most` has it.

    With candidates the next attempts may be on the dearest one, and those that found no machines do not count.

    Returns:
        `attempts` that may still be started, `attempt_s` of each on each node, `usd` of the run (None without a price),
        `unbounded` (why there is no such figure), `note` (what is not in it) and `parts` (what is added to max_runtime);
        `run_usd` where a wait that is not billed is in `usd`, without that wait.
    """
    before = sum(old.status.event != "capacity" for old in earlier) if candidates else plan.attempt - 1
    left = max(1, plan.job["retry"]["max_attempts"] - before)
    attempts = 1 if plan.retries == "platform" else left
    case: dict[str, Any] = {
        "attempts": attempts,
        "attempt_s": limit.seconds,
        "usd": None,
        "unbounded": "",
        "note": limit.note,
        "parts": limit.parts,
    }
    if limit.seconds is None:
        return case | {"unbounded": limit.note, "note": "", "parts": ""}
    if plan.price and used.usd is not None:
        longest_s = min(attempts * limit.seconds, seconds_left(limits, plan.price, used))
        costs = [longest_s / HOUR_S * float(plan.price["usd_per_hour"])]
        for row in candidates:
            if (cost := row.get("at_most") or {}).get("usd") is not None:
                costs.append(cost["attempt_s"] / HOUR_S * row["usd_per_hour"] * min(left, cost["attempts"]))
        case["usd"] = round(min(used.usd + max(costs), limits.max_cost_usd or math.inf), 2)
        if limit.wait_s:
            run_s = attempts * (limit.seconds - limit.wait_s)
            case["run_usd"] = round(used.usd + run_s / HOUR_S * float(plan.price["usd_per_hour"]), 2)
    return case
