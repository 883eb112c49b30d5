"""What policies change in a job: the keys that rules set, and the entry points `cloudtrain.policies`. Pure.

An entry point names a function of an installed package:

    def apply(job: Job, context: Context) -> Job:
        if not job.labels.get("project"):
            raise ValueError("labels.project is not set")
        return job.replace(labels={**job.labels, "org": "acme"})

It is called at every plan, must not block, and refuses a job with ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job.document import Document, Mark
from cloudtrain.job.problems import quote
from cloudtrain.policy.checks import holds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from cloudtrain.job.job import Job
    from cloudtrain.policy.files import Policy, Rule


@dataclass(frozen=True)
class Context:
    """What a policy of an entry point knows besides the job."""

    target: str
    backend: str
    user: str


def settings(policies: Sequence[Policy], target: str, backend: str) -> Iterator[tuple[Rule, Document]]:
    """Yield what rules set for a target, as documents to lay over a job, marked with the rule's place."""
    for policy in policies:
        for rule in policy.rules:
            if rule.sets and holds(rule, target, backend):
                document = Document.of({}, "")
                marks = {}
                for key, value in rule.sets.items():
                    path = tuple(key.split("."))
                    made = Document.of(value, rule.file)
                    document.put(path, made)
                    for at, mark in made.marks.items():
                        marks[path + at] = Mark(rule.file, rule.lines.get("set"), mark.text)
                document.marks = marks  # none of the tables around the keys: these are the job's own
                yield rule, document


def describe_settings(rule: Rule, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a rule has changed in a job, one sentence for each key."""
    for key in rule.sets:
        old, new = (_get(job, key) for job in (before, after))
        if old != new:
            yield f"the policy sets {key} to {quote(new)}, was {quote(old)} ({rule.place('set')}{rule.reason})"


def missing_settings(
    policies: Sequence[Policy], target: str, backend: str, job: Mapping[str, Any]
) -> Iterator[Problem]:
    """Yield what rules set and a stored plan's job does not have."""
    for rule, document in settings(policies, target, backend):
        for key in rule.sets:
            wanted, value = _get(document.value, key), _get(job, key)
            if wanted != value and str(wanted) != str(value):
                message = f"is {quote(value)}, the policy sets {quote(wanted)} ({rule.place('set')}{rule.reason})"
                yield Problem(message, key, "make the plan again")


def apply_entry_points(
    points: Sequence[EntryPoint], job: Job, context: Context
) -> tuple[Job, list[str], list[Problem]]:
    """Return the job as the installed policies have changed it, what they changed, and what they refuse.

    Raises:
        BadRequest: a policy fails, or returns something else than a job.
    """
    from cloudtrain.job.job import Job

    notes: list[str] = []
    problems = []
    for point in points:
        try:
            made: Any = point.load()(job, context)
        except BadRequest as error:
            problems.append(Problem(f"{error.message} (the policy {point.name})", hint=error.hint))
            continue
        except ValueError as error:
            problems.append(Problem(f"{error} (the policy {point.name})"))
            continue
        except Exception as error:
            raise BadRequest(
                f"the policy {point.name} ({point.value}) fails: {error!r}", "ask who installed it"
            ) from error
        if not isinstance(made, Job):
            raise BadRequest(
                f"the policy {point.name} ({point.value}) returned {type(made).__name__}, not a job",
                "end it with `return job` or `return job.replace(...)`",
            )
        notes += [f"the policy {point.name} sets {what}" for what in _differences(job.to_dict(), made.to_dict())]
        job = made
    return job, notes, problems


def _get(data: Any, key: str) -> Any:
    for name in key.split("."):
        data = data.get(name) if isinstance(data, Mapping) else None
    return data


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], at: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after, f"{at}{key}.")
        elif before != after:
            yield f"{at}{key} to {quote(after)}, was {quote(before)}"
