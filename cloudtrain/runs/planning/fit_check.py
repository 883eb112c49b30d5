"""Say in a plan whether its training fits on its GPUs, and how long it takes; choose a layout for `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.errors import BadJob, Problem
from cloudtrain.forecast import duration, fit, layout, training

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.forecast.training import Training
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle
    from cloudtrain.source.texts import Texts


def forecast(job: Job, plan: Plan, force: bool, backend: Backend, source: Texts) -> tuple[Plan, list[Problem]]:
    """Return the plan with its lines on memory and time, and why the shared trainer cannot fit, unless `force`.

    A script is never refused: what it does is its own.
    """
    machine = machines.find_node(_machine(job, plan, backend).rpartition("/")[2] or job.resources.instance_type or "")
    if plan.manifest["gpus_per_node"]:
        job, _ = machines.with_gpus(job, machine)
    if not job.resources.gpus:
        return plan, []
    try:
        found = training_of(
            job, plan.manifest["parallelism"], plan.main_nodes, int(plan.manifest["processes_per_node"])
        )
    except BadJob:  # the checks of the plan refuse the same, beside all else that is wrong
        return plan, []
    if found is None:
        return plan, []
    if isinstance(found, str):
        unknown = {"line": f"unknown: {found}"}
        return replace(plan, fit={"answer": "", **unknown}, time=unknown), []
    ranks = max(int(plan.manifest["processes_per_node"]), job.resources.gpus)
    memory = job.resources.memory_bytes or (int(machine.memory_gb * fit.GIB) if machine else None)
    answer, problems = fit.answer(found, job.resources.accelerator or "GPU", ranks, memory), []
    if answer.answer == fit.NOT and job.trainer and not force:
        hint = "; ".join(text for text in (answer.hint, "use --force to submit it anyway") if text)
        problems.append(Problem(answer.line, "resources.accelerators", hint))
    time = duration.forecast(found, job, plan, source, _machine(job, plan, backend))
    return replace(plan, fit=answer.to_dict(), time=time), problems


def training_of(job: Job, parallelism: Mapping[str, Any], nodes: int, processes: int) -> Training | str | None:
    """Return what a job trains on so many main nodes, as `training.of_job` does; a command starts a rank for each GPU.

    Raises BadJob where the shared trainer would refuse it.
    """
    ranks = processes if job.form == "script" else max(processes, job.resources.gpus)
    return training.of_job(job, parallelism, nodes * ranks, nodes)


def freeze(job: Job, backend: Backend, bundle: Bundle) -> tuple[Job, list[str]]:
    """Return a job of `parallelism: auto` with what is chosen for its ranks, and notes on the choice; raises BadJob."""
    draft = backend.plan(job.model_copy(update={"parallelism": type(job.parallelism)()}), bundle, "auto")
    return layout.freeze(job, draft, _machine(job, draft, backend))


def _machine(job: Job, plan: Plan, backend: Backend) -> str:
    """Return the type of a node as provider/region/name, "" where it is not known."""
    return job.resources.priced_as or backend.machine(plan)
