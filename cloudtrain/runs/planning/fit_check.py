"""Say in a plan whether its training fits on its GPUs, and how long it takes; choose a layout for `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cloudtrain.errors import Problem
from cloudtrain.forecast import duration, fit, layout, training

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle


def forecast(job: Job, plan: Plan, force: bool, backend: Backend) -> tuple[Plan, list[Problem]]:
    """Return the plan with its lines on memory and time, and why the shared trainer cannot fit, unless `force`.

    A script is never refused: what it does is its own.
    """
    made = plan.manifest
    nodes = plan.main_nodes
    found = training.of_job(job, made["parallelism"], nodes * int(made["processes_per_node"]), nodes)
    if found is None:
        return plan, []
    if isinstance(found, str):
        unknown = {"line": f"unknown: {found}"}
        return replace(plan, fit={"answer": "", **unknown}, time=unknown), []
    answer, problems = fit.answer(found, job.resources.accelerator or "GPU"), []
    if answer.answer == fit.NOT and job.trainer and not force:
        hint = "; ".join(text for text in (answer.hint, "use --force to submit it anyway") if text)
        problems.append(Problem(answer.line, "resources.accelerators", hint))
    time = duration.forecast(found, job, plan, _machine(job, plan, backend))
    return replace(plan, fit=answer.to_dict(), time=time), problems


def freeze(job: Job, backend: Backend, bundle: Bundle) -> tuple[Job, list[str]]:
    """Return a job of `parallelism: auto` with what is chosen for its ranks, and notes on the choice; raises BadJob."""
    draft = backend.plan(job.model_copy(update={"parallelism": type(job.parallelism)()}), bundle, "auto")
    return layout.freeze(job, draft, _machine(job, draft, backend))


def _machine(job: Job, plan: Plan, backend: Backend) -> str:
    """Return the type of a node as provider/region/name, "" where it is not known."""
    return job.resources.priced_as or backend.machine(plan)
