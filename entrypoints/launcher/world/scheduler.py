"""Ask Slurm about the job that this launcher runs in, and signal its steps."""

from __future__ import annotations

import os

ASK_S = 30.0  # for a controller to answer


def job_id() -> str:
    """Return the number of this job: a task of an array has two, and the plain one may stand for all tasks.

    Each component of a heterogeneous job has one; the first one's stands for all.
    """
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:
        return f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    return os.environ.get("SLURM_JOB_ID_HET_GROUP_0") or os.environ["SLURM_JOB_ID"]


def signal_tasks() -> bool:
    """Send SIGTERM to the tasks of this job's steps, and return whether it could be: srun itself would kill them at once."""
    try:
        os.posix_spawnp("scancel", ["scancel", "--signal=TERM", job_id()], os.environ)
    except (OSError, KeyError):
        return False
    return True


def is_preempted() -> bool:
    """Return whether Slurm is taking this job's nodes back; blocking. It signals the steps, and not a batch script."""
    import subprocess  # only here: it costs every job some milliseconds

    try:
        command = ["scontrol", "show", "job", "-o", job_id()]
        shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=ASK_S).stdout
    except (OSError, KeyError, subprocess.TimeoutExpired):
        return False
    at = [word for word in shown.split() if word.startswith(b"PreemptTime=")]
    return any(word != b"PreemptTime=None" for word in at)
