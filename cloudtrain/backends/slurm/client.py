"""What Slurm knows about a job, asked of whichever of its commands the site allows: squeue, scontrol or sacct.

`Reading` is what one of them said. All three may be asked for a job that Slurm has forgotten (MinJobAge): None then.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError, NoCapacity, Unreachable

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
_CONTROLLERS = ("squeue", "scontrol")  # ask slurmctld, which knows a job first; slurmdbd hears of it later
# Slurm's words (slurm_errno.c, strerror) where a controller was not reached or did not answer: a job may have been taken.
_SILENT = re.compile(
    r"[Uu]nable to contact slurm|[Ss]ocket timed out|[Cc]onnection (refused|reset|timed out|failure)|timed out|took more than"
    r"|[Tt]emporarily un(able|available)|standby mode|[Mm]essage (send|receive) failure|Unexpected message received"
    r"|Communication (connection|shutdown) failure|Zero Bytes were|Insane message length|Header lengths|Broken pipe"
    r"|No route to host|[Nn]etwork is unreachable|name resolution|Protocol authentication error|Invalid auth"
    r"|establish a configuration source|Could not find a controller|not in service",
)
# A limit that another job's end lifts. Limits of one job's size, or of one job's time, are never lifted.
_LIMITED = re.compile(
    r"(QOS|Assoc|Assn|Grp)\w*(Submit|Limit|Grp|PerUser|PerAccount|PerAcct)|violates accounting/QOS policy"
    r"|[Nn]odes are busy|Required (node|partition) not available"
)
_NEVER = re.compile(r"\b\w+(PerJob|PerNode|WallDuration|MinCpu|MinGRES|MinNode|MaxWall)\w*\b")
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
    """Return the newest job of a name, None when there is none; raises Unreachable when nobody answers."""
    return _first(
        run,
        [
            (["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%T|%r"], _squeue),
            (["scontrol", "--oneliner", "show", "job"], lambda out: _scontrol(out, name)),
            (["sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", _SACCT], _squeue),
        ],
    )


def refusal(said: Mapping[str, Any], what: str = "Slurm refuses the job") -> BackendError:
    """Return the error of a command of Slurm's that failed, as the class that says what it means for a submission."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in said["err"].splitlines() if line.strip()]
    text = lines[-1] if lines else f"exit code {said['code']}"
    whole = "\n".join(lines)
    if _silent(said):
        return Unreachable(f"Slurm did not answer: {text}", "is slurmctld up? scontrol ping")
    named = next((line for line in lines[:-1] if re.fullmatch(r"\w+", line)), "")  # QOSMaxSubmitJobPerUserLimit
    text += f" ({named})" if named else ""
    if _LIMITED.search(whole) and not _NEVER.search(whole):
        return NoCapacity(f"{what}: {text}", "sacctmgr show qos, and show user $USER withassoc, list the limits")
    hint = "cloudtrain doctor slurm looks closer"
    if "time limit" in text.lower():
        hint = "ask for less: limits.max_runtime; sinfo -o '%P %l' shows what partitions allow"
    elif "account" in text.lower() or "qos" in text.lower():
        hint = "options.slurm.account and qos; sacctmgr show user $USER withassoc shows yours"
    elif "partition" in text.lower():
        hint = "options.slurm.partition; sinfo -s shows what there is"
    return BackendError(f"{what}: {text}", hint)


def _silent(said: Mapping[str, Any]) -> bool:
    """Return whether a command failed because no controller answered, or was killed before it could say."""
    killed = said["code"] is not None and said["code"] < 0
    return killed or _SILENT.search(said["err"]) is not None


_SACCT = "--format=JobIDRaw,State,Reason"


def _first(run: Command, tries: Sequence[tuple[Sequence[str], Callable[[str], Reading | None]]]) -> Reading | None:
    """Return the first reading; who says that there is no such job is believed when no other knows it.

    sacct alone is not believed while a controller could answer and does not. Raises Unreachable.
    """
    refused = []
    silent = answered = False
    for argv, parse in tries:
        said = run(argv)
        if said["code"] == 0:
            found = parse(said["out"])
            if found is not None:
                return found
            answered = answered or argv[0] in _CONTROLLERS
        elif _FORGOTTEN in said["err"]:
            answered = answered or argv[0] in _CONTROLLERS
        else:
            silent = silent or (argv[0] in _CONTROLLERS and _silent(said))
            words = said["err"].strip().splitlines()
            refused.append(f"{argv[0]}: {words[-1] if words else 'exit code ' + str(said['code'])}")
    if len(refused) == len(tries) or (silent and not answered):
        raise Unreachable(
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
