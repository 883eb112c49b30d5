"""What the text of a script says about a plan: what the script expects, and what a person should know before a submit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cloudtrain.source import left_out, world

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan
    from cloudtrain.job.job import Job
    from cloudtrain.source.texts import Texts


def fit(job: Job, texts: Texts) -> tuple[Job, list[str]]:
    """Return the job with what its script needs though nothing in the job says so, and notes on that."""
    if job.has_rank_env or not (why := world.why_needed(texts)):
        return job, []
    note = f"one process: RANK, WORLD_SIZE and MASTER_ADDR are set all the same, because {why} (distributed_env)"
    return job.model_copy(update={"distributed_env": "always"}), [note]


def notes(job: Job, plan: Plan, texts: Texts) -> list[str]:
    """Return what a person should know of a planned job."""
    found = []
    if plan.manifest.get("rank_env") is False:
        found.append(
            "one process: RANK, WORLD_SIZE and MASTER_ADDR are not set, as under plain python (distributed_env: always sets them)"
        )
    if job.form != "script":
        found.append("it runs once per node and may start ranks of its own: only the number of nodes is checked")
    if not job.source.startswith("git+"):
        words = [*job.argv()[1:], *job.env.values()] if job.form != "shell" else []
        found += left_out.mentions(texts, words)
    if job.retry.max_attempts > 1 and not job.trainer and not job.resume_args:  # the shared trainer resumes
        from cloudtrain.runs import resume_check

        found += [warning] if (warning := resume_check.note(job, texts)) else []
    return found
