"""Plan an attempt within what is left of its run's cap: the cap becomes the platform's own limit in the request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cloudtrain.backends.api import HasTimeLimit, TimeLimit
from cloudtrain.errors import BadJob, CapReached, Problem
from cloudtrain.forecast import cost, prices
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

LEAST_S = 300  # shortest time for which another attempt is started; limits.max_runtime where that is shorter
_NO_LIMIT = TimeLimit(None, "the backend does not say what ends a job while no client lives")


def plan_attempt(
    backend: Backend,
    job: Job,
    bundle: Bundle,
    run_id: str,
    number: int = 1,
    earlier: Sequence[AttemptRecord] = (),
    home: Path | None = None,
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
        return replace(plan, price=prices.price_of(backend, plan, job, home))

    plan = make(None)
    limit, used = limit_of(backend, plan), cost.spent(earlier, lambda old: limit_of(backend, old))
    if job.limits.capped:
        _check_cap(job, plan, limit)
        left_s = int(cost.left_s(job.limits, plan.price, used))
        if limit.seconds is not None and limit.seconds > left_s:
            shorter_s = _longest_s(
                lambda seconds: limit_of(backend, make(seconds)).seconds or 0, job.limits.max_runtime_s, left_s
            )
            if shorter_s is None:
                raise _too_little(job, plan, limit, used, left_s)
            plan = make(shorter_s)
            limit = limit_of(backend, plan)
            note = f"what is left of the cap gives this attempt {units.format_duration(shorter_s)}"
            plan = replace(plan, notes=(*plan.notes, f"{note} of {job.limits.max_runtime} (limits.max_runtime)"))
    return replace(plan, at_most=cost.worst_case(plan, job.limits, limit, used))


def limit_of(backend: Backend, plan: Plan) -> TimeLimit:
    """Return the longest time of an attempt as its request has it; of another backend's as its plan has it."""
    if plan.backend != backend.name:
        return TimeLimit((plan.at_most or {}).get("attempt_s"), "")
    return backend.time_limit(plan) if isinstance(backend, HasTimeLimit) else _NO_LIMIT


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


def _check_cap(job: Job, plan: Plan, limit: TimeLimit) -> None:
    """Raise BadJob where a cap cannot be held."""
    problems = []
    key = "limits.max_cost" if job.limits.max_cost else "limits.max_total_runtime"
    if limit.seconds is None:
        problems.append(Problem(f"cannot be held on {plan.backend}: {limit.note}", key, "leave it out"))
    if job.limits.max_cost and not plan.price:
        hint = (
            "resources.usd_per_hour says it, or usd_per_hour of the target; `cloudtrain prices refresh` reads lists of"
        )
        hint += " prices; max_total_runtime needs none"
        problems.append(Problem("needs the price of a node, which is not known", "limits.max_cost", hint))
    if problems:
        raise BadJob(job.located(problems))


def _too_little(job: Job, plan: Plan, limit: TimeLimit, used: cost.Spent, left_s: int) -> BadJob | CapReached:
    """Return the error for a cap that does not pay for the shortest useful attempt."""
    margin_s = (limit.seconds or 0) - job.limits.max_runtime_s
    least_s = min(LEAST_S, job.limits.max_runtime_s)
    cap = job.limits.max_cost or job.limits.max_total_runtime
    text = (
        f"leaves {units.format_duration(max(0, left_s))} for {plan.attempt_id}, which needs at least"
        f" {units.format_duration(least_s)} and {units.format_duration(margin_s)} of margins of {plan.backend}"
    )
    name = "limits.max_cost" if job.limits.max_cost else "limits.max_total_runtime"
    if plan.attempt == 1:
        return BadJob(job.located([Problem(f"is {cap}, which {text}", name, "raise it, or ask for fewer nodes")]))
    so_far = (
        f"{used.usd:.2f} USD" if job.limits.max_cost and used.usd is not None else units.format_duration(used.seconds)
    )
    return CapReached(
        f"{name} is {cap}, of which {so_far} are used: that {text}",
        f"cloudtrain resume {plan.run_id} --set {name}=... raises it",
    )
