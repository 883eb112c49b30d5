"""Say in a plan whether its training fits on the GPUs that the job names; refuse what cannot fit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.errors import BadJob, Problem
from cloudtrain.forecast import fit

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job


def check(job: Job, plan: Plan, force: bool) -> Plan:
    """Return the plan with its line on memory.

    Raises BadJob where the shared trainer cannot fit, unless `force`. A script is never refused: what it does is its own.
    """
    made = plan.manifest
    nodes = int(made["nodes"])
    found = fit.of_job(job, made["parallelism"], nodes * int(made["processes_per_node"]), nodes)
    if found is None:
        return plan
    if isinstance(found, str):
        return replace(plan, fit={"answer": "", "line": f"not known: {found}"})
    if found.answer == fit.NOT:
        hint = "; ".join(text for text in (found.hint, "--force sends it as it is") if text)
        if job.trainer and not force:
            raise BadJob(job.located([Problem(f"{found.line}", "resources.accelerators", hint)]))
    return replace(plan, fit=found.to_dict())
