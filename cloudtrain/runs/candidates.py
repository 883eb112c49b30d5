"""Plan every candidate of a job (several targets or accelerators), and choose the first that is possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadJob, BadRequest, BadSource, Problem, UnknownBackend
from cloudtrain.runs import attempts

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
    ordered = sorted(plans.values(), key=lambda plan: _order(plan))
    first = ordered[0]
    rows = [_row(plan, first) for plan in ordered]
    rows += [
        {"target": choice.target or first.target, "accelerators": choice.accelerators, "why_not": _reason(error)}
        for choice, error in refused.items()
    ]
    notes = [*first.notes]
    away = [str(row["target"]) for row in rows if row.get("reaches") is False]
    if away:
        names = ", ".join(dict.fromkeys(away))
        notes.append(f"{names} cannot read the checkpoints of {first.target}: tried only while there are none")
    if not (first.job.get("limits") or {}).get("max_wait"):
        notes.append("a request that stays pending is not withdrawn for the next candidate without limits.max_wait")
    return replace(first, candidates=tuple(rows), notes=tuple(notes))


def bases(plan: Plan) -> list[Plan]:
    """Return what the attempts of each possible candidate are planned from, in their order; without candidates the plan."""
    possible = [row for row in plan.candidates if not row["why_not"]]
    return [replace(plan, **{key: row[key] for key in ("target", "backend", "job")}) for row in possible] or [plan]


def most_usd(plan: Plan) -> float | None:
    """Return what a run can cost at most, whichever of its candidates it runs on; None without a price."""
    costs = [(plan.at_most or {}).get("usd"), *(row.get("most_usd") for row in plan.candidates)]
    return max((float(usd) for usd in costs if usd is not None), default=None)


def _order(plan: Plan) -> float:
    """Return the key by which plans are sorted; equal ones stay in the order written."""
    usd = _total_usd(plan)
    return 0.0 if plan.job.get("prefer") == "order" else float("inf") if usd is None else usd


def _total_usd(plan: Plan) -> float | None:
    """Return what one attempt costs that takes all of limits.max_runtime."""
    if not plan.price:
        return None
    return round(float(plan.price["usd_per_hour"]) * float(plan.manifest["max_runtime_s"]) / 3600, 2)


def _row(plan: Plan, first: Plan) -> Row:
    """Return what is shown of a candidate, and the job from which its attempts are planned."""
    return {
        "target": plan.target,
        "backend": plan.backend,
        "accelerators": plan.job["resources"]["accelerators"],
        "fit": (plan.fit or {}).get("answer", ""),
        "usd_per_hour": (plan.price or {}).get("usd_per_hour"),
        "total_usd": _total_usd(plan),
        "most_usd": (plan.at_most or {}).get("usd"),
        "reaches": attempts.reaches(plan, first),
        "why_not": "",
        "job": plan.job,
    }


def _reason(error: BadRequest) -> str:
    if isinstance(error, BadJob):
        return "; ".join(f"{problem.path}: {problem.message}".removeprefix(": ") for problem in error.problems)
    return error.message


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
