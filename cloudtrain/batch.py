"""What Slurm knows about a job, asked of whichever of its commands the site allows: squeue, scontrol or sacct.

`Reading` is what one of them said. All three may be asked for a job that Slurm has forgotten (MinJobAge): None then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError

# Variables of a surrounding job, or of a user's defaults, that would change what these commands do.
HIDE = (
    "SBATCH_",
    "SQUEUE_",
    "SACCT_",
    "SCANCEL_",
    "SLURM_JOB",
    "SLURM_STEP",
    "SLURM_NODE",
    "SLURM_EXPORT",
    "SLURM_TASK",
)
PENDING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
         "DEADLINE", "REVOKED"}  # fmt: skip
_FORGOTTEN = "Invalid job id"
Command = Callable[[Sequence[str]], Mapping[str, Any]]  # argv -> code, out, err: agent.command here or there


class Reading(NamedTuple):
    """A job's number, Slurm's word for its state, and why it waits or ended (Slurm's word too)."""

    job: str
    state: str
    reason: str = ""

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def read(run: Command, job: str) -> Reading | None:
    """Return what Slurm says of a job, None when it knows it no more; raises BackendError when nobody answers."""
    return _first(
        run,
        [
            (["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i|%T|%r"], _squeue),
            (["scontrol", "--oneliner", "show", "job", job], _scontrol),
            (["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", _SACCT], _squeue),
        ],
    )


def find(run: Command, name: str) -> Reading | None:
    """Return the newest job of a name, None when there is none, or nobody may be asked."""
    try:
        return _first(
            run,
            [
                (["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%T|%r"], _squeue),
                (["scontrol", "--oneliner", "show", "job"], lambda out: _scontrol(out, name)),
                (["sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", _SACCT], _squeue),
            ],
        )
    except BackendError:
        return None


_SACCT = "--format=JobIDRaw,State,Reason"


def _first(run: Command, tries: Sequence[tuple[Sequence[str], Callable[[str], Reading | None]]]) -> Reading | None:
    """Return the first reading; who says that there is no such job is believed when no other knows it."""
    refused = []
    for argv, parse in tries:
        said = run(argv)
        if said["code"] == 0:
            found = parse(said["out"])
            if found is not None:
                return found
        elif _FORGOTTEN not in said["err"]:
            words = said["err"].strip().splitlines()
            refused.append(f"{argv[0]}: {words[-1] if words else 'exit code ' + str(said['code'])}")
    if len(refused) == len(tries):
        raise BackendError(
            f"Slurm cannot be asked: {'; '.join(refused)}", "is this a login node? (options.slurm.login names one)"
        )
    return None


def _squeue(out: str) -> Reading | None:
    """Parse the last of squeue's or sacct's lines, id|state|reason: "CANCELLED by 1000" is CANCELLED."""
    lines = [line.split("|") for line in out.splitlines() if line.count("|") >= 2]
    if not lines:
        return None
    job, state, reason = (part.strip() for part in lines[-1][:3])
    return Reading(job, state.split()[0].rstrip("+") if state else "", "" if reason == "None" else reason)


def _scontrol(out: str, name: str = "") -> Reading | None:
    """Parse scontrol's one line for a job, or the last one of a name."""
    lines = [
        line for line in out.splitlines() if line.startswith("JobId=") and (not name or f" JobName={name} " in line)
    ]
    if not lines:
        return None
    fields = dict(re.findall(r"(JobId|JobState|Reason)=(\S*)", lines[-1]))
    reason = fields.get("Reason", "")
    return Reading(fields["JobId"], fields.get("JobState", ""), "" if reason == "None" else reason)
