"""What two plans differ in: their cost, job and request. Pure data."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cloudtrain.report.compare import Difference, flatten

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan

# Of a plan itself: where it was made, and what its own id is in.
_OWN = ("source", "labels.commit", "labels.cloudtrain_home", "labels.user")


def between(first: Plan, second: Plan) -> list[Difference]:
    """Return the differences of two plans, cost first; a value that only names its run counts as equal."""
    found = []
    for (section, old), (_, new) in zip(_sections(first), _sections(second), strict=True):
        for path in dict.fromkeys([*old, *new]):
            if old.get(path) != new.get(path):
                found.append(Difference(section, path, old.get(path), new.get(path)))
    return found


def _sections(plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    most, price = (plan.at_most or {}).get("usd"), (plan.price or {}).get("usd_per_hour")
    yield "cost", {"at most USD": most, "USD an hour": price, "target": plan.target or plan.backend}
    job = flatten({key: value for key, value in plan.job.items() if key != "hyperparameters"})
    yield "job", {path: value for path, value in job.items() if path not in _OWN and not path.startswith("name")}
    yield "hyperparameters", flatten(plan.job.get("hyperparameters") or {})
    request = json.loads(json.dumps(plan.request).replace(plan.run_id, "${run_id}").replace(_digest(plan), "${source}"))
    yield "request", flatten(request)
    yield "source", {"source_sha256": plan.bundle.get("source_sha256"), "files": plan.bundle.get("files")}


def _digest(plan: Plan) -> str:
    return str(plan.bundle["sha256"])
