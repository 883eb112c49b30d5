"""Plan every candidate of a job (several targets or accelerators), and choose the first that is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.plan import Fact, say, without
from cloudtrain.errors import BadJob, BadRequest, BadSource, Problem, UnknownBackend
from cloudtrain.job.units import HOUR_S, duration_s, usd
from cloudtrain.runs.planning import attempts

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.targets import Choice

Row = Mapping[str, Any]


def choose(choices: Sequence[Choice], make: Callable[[Choice], Plan]) -> Plan:
    """Return the plan of the first possible candidate; its `candidates` are the rows of all, the possible ones first.

    Args:
        choices: in the order written.
        make: returns the plan of one; raises BadRequest where it is not possible.

    Raises BadRequest where none is possible, UnknownBackend, and BadSource.
    """
    plans: dict[Choice, Plan] = {}
    refused: dict[Choice, BadRequest] = {}
    for choice in choices:
        try:
            plans[choice] = make(choice)
        except (UnknownBackend, BadSource):
            raise
        except BadRequest as error:
            refused[choice] = error
    if not plans:
        raise _none_possible(refused)
    timed = all(_time_s(plan) is not None for plan in plans.values())
    ordered = sorted(plans.values(), key=lambda plan: _order(plan, timed))
    first = ordered[0]
    rows = [_row(plan, first, timed) for plan in ordered]
    rows += [
        {
            "target": choice.target or first.target,
            "accelerators": choice.accelerators,
            "why_not": _reason(error),
            **_hint(error, choice.target),
        }
        for choice, error in refused.items()
    ]
    notes = [f"not tried: {left}"] if (left := describe_left_out(rows)) else []
    if len(ordered) == 1:
        return replace(first, candidates=tuple(rows), notes=(*notes, *first.notes))
    if unbounded := [plan.target for plan in ordered if say(plan.notes, Fact.WAIT_UNLIMITED)]:
        names = ", ".join(dict.fromkeys(unbounded))
        notes.append(
            f"limits.max_wait is kept by the watcher, not by {names}: it cancels a request that is pending for longer and"
            " sends the next candidate; the last candidate's request stays pending"
        )
    away = [str(row["target"]) for row in rows if row.get("reaches") is False]
    if away:
        names = ", ".join(dict.fromkeys(away))
        notes.append(
            f"{names} cannot read the checkpoints of {first.target}: the run can move there only before its first checkpoint"
        )
    if not (first.job.get("limits") or {}).get("max_wait"):
        notes.append(
            "limits.max_wait is not set: the next target is tried at once where one refuses the run or cannot be"
            " reached; a request that stays pending is not moved"
        )
    # What a platform itself does with this limit is not the whole: the watcher moves the run to the next candidate.
    own = without(first.notes, Fact.WAIT_UNLIMITED, Fact.WAIT_OVERRULED)
    costs = [plan.at_most["usd"] for plan in ordered if plan.at_most and plan.at_most["usd"] is not None]
    at_most = {**(first.at_most or {}), "usd": max(costs, default=None)}
    return replace(first, candidates=tuple(rows), notes=(*notes, *own), at_most=at_most)


def describe_left_out(rows: Sequence[Row]) -> str:
    """Return which candidates are not possible, each with its reason; "" where all are."""
    places: dict[str, list[str]] = {}
    for row in rows:
        if row["why_not"]:
            places.setdefault(row["why_not"], []).append(" ".join(filter(None, (row["target"], row["accelerators"]))))
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in places.items())


def bases(plan: Plan) -> list[Plan]:
    """Return what the attempts of each possible candidate are planned from, in their order; without candidates the plan."""
    possible = [row for row in plan.candidates if not row["why_not"]]
    return [
        replace(
            plan,
            request={},
            manifest={**plan.manifest, "output": row.get("output")},
            **{key: row[key] for key in ("target", "backend", "job")},
        )
        for row in possible
    ] or [plan]


def is_of(base: Plan, plan: Plan) -> bool:
    """Return whether a plan is of the candidate that `base` stands for."""
    same = base.job["resources"]["accelerators"] == plan.job["resources"]["accelerators"]
    return bool(same and base.target == plan.target)


def _order(plan: Plan, timed: bool) -> float:
    """Return the key by which plans are sorted; equal ones stay in the order written."""
    prefer = plan.job.get("prefer")
    value = 0.0 if prefer == "order" else _time_s(plan) if prefer == "time" else _whole_usd(plan, timed)
    return float("inf") if value is None else value


def _time_s(plan: Plan) -> float | None:
    """Return how long the training takes as forecast, its middle; None where that is not known."""
    seconds = (plan.time or {}).get("seconds")
    return float(seconds[1]) if seconds else None


def _whole_usd(plan: Plan, timed: bool) -> float | None:
    """Return what the training costs as forecast, or where one forecast is missing one attempt of limits.max_runtime.

    limits.max_cost does not count: with it, the candidates that it ends early would all cost the same.
    """
    if not plan.price:
        return None
    seconds = (_time_s(plan) if timed else None) or duration_s(str(plan.job["limits"]["max_runtime"]))
    return round(float(plan.price["usd_per_hour"]) * seconds / HOUR_S, 2)


def _total_usd(plan: Plan, timed: bool) -> float | None:
    """Return `_whole_usd`, or limits.max_cost where that is less."""
    whole, cap = _whole_usd(plan, timed), plan.job["limits"].get("max_cost")
    return whole if whole is None or not cap else min(whole, usd(str(cap)))


def _row(plan: Plan, first: Plan, timed: bool) -> Row:
    """Return what is shown of a candidate, and the job from which its attempts are planned."""
    return {
        "target": plan.target,
        "backend": plan.backend,
        "accelerators": plan.job["resources"]["accelerators"],
        "fit": (plan.fit or {}).get("answer", ""),
        "time_s": _time_s(plan),
        "usd_per_hour": (plan.price or {}).get("usd_per_hour"),
        "of": "forecast" if timed else "limits.max_runtime",
        "total_usd": _total_usd(plan, timed),
        "at_most": plan.at_most,
        "output": attempts.output(plan),
        "reaches": attempts.reaches(replace(plan, run_id=first.run_id), first),
        "why_not": "",
        "job": plan.job,
    }


def _reason(error: BadRequest) -> str:
    if isinstance(error, BadJob):
        return "; ".join(f"{problem.path}: {problem.message}".removeprefix(": ") for problem in error.problems)
    return error.message


def _hint(error: BadRequest, target: str | None) -> dict[str, str]:
    """Return what to do about a refused candidate, as the key `hint` of its row; empty where nothing is known.

    What would change the job, such as a price in its resources, would change every candidate (`candidate_hint`).
    """
    if not isinstance(error, BadJob):
        return {"hint": error.hint} if error.hint else {}
    hints = [(target and problem.candidate_hint) or problem.hint for problem in error.problems]
    text = "; ".join(filter(None, hints))
    return {"hint": text} if text else {}


def _none_possible(refused: Mapping[Choice, BadRequest]) -> BadRequest:
    """Return the error for a job of which no candidate is possible: what is wrong with all of them is said once."""
    problems: dict[Problem, list[str]] = {}
    for choice, error in refused.items():
        found = error.problems if isinstance(error, BadJob) else [Problem(error.message, hint=error.hint)]
        for problem in found:
            problems.setdefault(problem, []).append(" ".join(text for text in choice if text))
    return BadJob(
        problem if len(whose) == len(refused) else replace(problem, message=f"{problem.message} ({', '.join(whose)})")
        for problem, whose in problems.items()
    )
