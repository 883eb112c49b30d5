"""Send several attempts as one array job: each task runs the batch script of one of them, in the attempt's own folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan

MOST = 1000  # tasks; MaxArraySize is 1001 by default (https://slurm.schedmd.com/slurm.conf.html, 2026-11-29)
_OWN = ("--job-name=", "--comment=", "--output=", "--chdir=")  # arguments that differ between attempts of one job
_SCRIPT = """#!/bin/bash -l
folders=({folders})
cd "${{folders[SLURM_ARRAY_TASK_ID]}}" || exit 1
exec ./job.sh >>slurm.out 2>&1
"""


def may_hold(plan: Plan) -> bool:
    """Return whether an attempt can be a task of an array.

    One that is requeued has a time limit and a count of its own, and Slurm has no arrays of heterogeneous jobs.
    """
    argv = plan.request["sbatch"]
    return "--no-requeue" in argv and ":" not in argv and plan.manifest.get("compat") != "sbatch"


def command(plans: Sequence[Plan], name: str, folder: str, at_once: int) -> list[str]:
    """Return the arguments of sbatch for an array of attempts, whose script is in a folder."""
    own = [f"--job-name={name}", f"--output={folder.replace('%', '%%')}/%a.out", f"--chdir={folder}"]
    shared = [text for text in plans[0].request["sbatch"][:-1] if not text.startswith(_OWN)]
    return [*shared, *own, f"--array=0-{len(plans) - 1}%{at_once}", f"{folder}/job.sh"]


def script(plans: Sequence[Plan]) -> str:
    """Return the batch script of an array."""
    return _SCRIPT.format(folders=" ".join(shlex.quote(str(plan.request["folder"])) for plan in plans))
