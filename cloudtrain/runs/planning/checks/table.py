"""The table of all checks of a plan; its order is the order of the notes, the most important first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cloudtrain.errors import Problem
from cloudtrain.runs.planning.checks import job, source
from cloudtrain.runs.planning.checks.job import Case

CHECKS: tuple[Callable[[Case], Iterator[str | Problem]], ...] = (
    # The job cannot run as it is written.
    job.refusals,
    job.too_long,
    job.lost_values,
    job.given_twice,
    job.missing_inputs,
    job.audit_elsewhere,
    # Work or its results are lost.
    source.results_outside,
    source.model_over_limit,
    source.no_resume,
    source.not_sent,
    # Machines are paid that do nothing, or do the same twice.
    job.launcher_nodes,
    job.idle_gpus,
    source.separate_trainings,
    source.copies,
    job.unlimited_wait,
    job.without_effect,
    job.unknown_gpu,
    # What was chosen for the job, and what its platform does.
    job.set_by_policies,
    job.found_while_planning,
    source.of_backend,
    # Something is not what the job seems to say.
    source.strategy,
    source.arguments,
    source.unread_directives,
    source.unused_engine,
    source.unread_keep,
    job.unused_keep_limit,
    job.placeholders_in_shell,
    job.another_user,
    # Who can read it.
    job.source_in_output,
    # How it runs.
    job.notes_of_nodes,
    job.inputs_of_runs,
    job.other_tools,
    job.renamed,
    job.once_per_node,
)
