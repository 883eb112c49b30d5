"""Query a job's state with the Slurm commands that the site allows (squeue, scontrol, sacct), and classify their errors.

All three return None for a job that Slurm has forgotten (MinJobAge). A heterogeneous job has a number for each component,
which squeue and sacct write as 12+0, 12+1: the first one's is the job's, and so is its state.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cloudtrain.errors import BackendError, NoCapacity, Unreachable

# Prefixes of environment variables, from an outer job or the user's defaults, that change what these commands do.
HIDDEN_VARIABLES = (
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
_UNKNOWN_JOB = "Invalid job id"
_CONTROLLERS = ("squeue", "scontrol")  # ask slurmctld, which knows a job first; slurmdbd hears of it later
# Messages (slurm_errno.c, strerror) of a controller that was not reached or did not answer: the job may be accepted.
_UNANSWERED = re.compile(
    r"[Uu]nable to contact slurm|[Ss]ocket timed out|[Cc]onnection (refused|reset|timed out|failure)|timed out|took more than"
    r"|[Tt]emporarily un(able|available)|standby mode|[Mm]essage (send|receive) failure|Unexpected message received"
    r"|Communication (connection|shutdown) failure|Zero Bytes were|Insane message length|Header lengths|Broken pipe"
    r"|No route to host|[Nn]etwork is unreachable|name resolution|Protocol authentication error|Invalid auth"
    r"|establish a configuration source|Could not find a controller|not in service",
)
# A limit that another job's end lifts. Limits of one job's size, or of one job's time, are never lifted.
_OVER_LIMIT = re.compile(
    r"\b(?>\w*?(?:QOS|Assoc|Assn|Grp))\w*(Submit|Limit|Grp|PerUser|PerAccount|PerAcct)|violates accounting/QOS policy"
    r"|[Nn]odes are busy|Required (node|partition) not available"
)
_NEVER_LIFTED = re.compile(r"\b\w+(PerJob|PerNode|WallDuration|MinCpu|MinGRES|MinNode|MaxWall)\w*\b")
Command = Callable[[Sequence[str]], Mapping[str, Any]]  # argv -> code, out, err: agent.command here or there


class QueueEntry(NamedTuple):
    """A job's number, Slurm's state for it, and Slurm's reason why it waits or ended."""

    job: str
    state: str
    reason: str = ""

    @property
    def pending(self) -> bool:
        return self.state in PENDING

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def query_job(run: Command, job: str) -> QueueEntry | None:
    """Return a job's state in Slurm, None if Slurm has forgotten it; raises BackendError if no command answers."""
    return _query_first(
        run,
        [
            (["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%i|%T|%r"], _parse_squeue),
            (["scontrol", "--oneliner", "show", "job", job], _parse_scontrol),
            (["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job}", _SACCT], _parse_squeue),
        ],
    )


def query_jobs(run: Command, jobs: Sequence[str]) -> dict[str, QueueEntry]:
    """Return the states of several jobs, as far as one squeue shows them; raises Unreachable if Slurm does not answer."""
    if not jobs:
        return {}
    completed = run(
        ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%r"]
    )
    if completed["code"] != 0 and _is_unanswered(completed):
        raise error_for_command(completed)
    entries = [_parse_squeue(line) for line in completed["out"].splitlines()] if completed["code"] == 0 else []
    return {entry.job: entry for entry in entries if entry is not None}


def find_job(run: Command, name: str) -> QueueEntry | None:
    """Return the newest job with a name, None if there is none; raises Unreachable if no command answers."""
    return _query_first(
        run,
        [
            (["squeue", "--noheader", "--states=all", f"--name={name}", "--format=%i|%T|%r"], _parse_squeue),
            (["scontrol", "--oneliner", "show", "job"], lambda out: _parse_scontrol(out, name)),
            (["sacct", "--noheader", "--parsable2", "--allocations", f"--name={name}", _SACCT], _parse_squeue),
        ],
    )


def error_for_command(completed: Mapping[str, Any], what: str = "Slurm refuses the job") -> BackendError:
    """Return the exception for a failed Slurm command: unreachable, over a limit, or refused."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in completed["err"].splitlines() if line.strip()]
    text = lines[-1] if lines else f"exit code {completed['code']}"
    stderr = "\n".join(lines)
    if _is_unanswered(completed):
        return Unreachable(f"Slurm did not answer: {text}", "check that slurmctld runs: scontrol ping")
    error_code = next((line for line in lines[:-1] if re.fullmatch(r"\w+", line)), "")  # QOSMaxSubmitJobPerUserLimit
    text += f" ({error_code})" if error_code else ""
    if _OVER_LIMIT.search(stderr) and not _NEVER_LIFTED.search(stderr):
        return NoCapacity(
            f"{what}: {text}", "`sacctmgr show qos` and `sacctmgr show user $USER withassoc` list the limits"
        )
    hint = "run cloudtrain doctor slurm for details"
    if "time limit" in text.lower():
        hint = "lower limits.max_runtime; sinfo -o '%P %l' shows what partitions allow"
    elif "account" in text.lower() or "qos" in text.lower():
        hint = "check options.slurm.account and qos; `sacctmgr show user $USER withassoc` lists yours"
    elif "partition" in text.lower():
        hint = "check options.slurm.partition; `sinfo -s` lists the partitions"
    return BackendError(f"{what}: {text}", hint)


def _is_unanswered(completed: Mapping[str, Any]) -> bool:
    """Return whether a command failed because no controller answered, or because it was killed."""
    killed = completed["code"] is not None and completed["code"] < 0
    return killed or _UNANSWERED.search(completed["err"]) is not None


_SACCT = "--format=JobID,State,Reason"


def _query_first(
    run: Command, queries: Sequence[tuple[Sequence[str], Callable[[str], QueueEntry | None]]]
) -> QueueEntry | None:
    """Return the entry of the first command that has the job, None if no command has it.

    If a controller does not answer, an empty answer of sacct does not count. Raises Unreachable.
    """
    failures = []
    controller_silent = controller_answered = False
    for argv, parse in queries:
        completed = run(argv)
        if completed["code"] == 0:
            job = parse(completed["out"])
            if job is not None:
                return job
            controller_answered = controller_answered or argv[0] in _CONTROLLERS
        elif _UNKNOWN_JOB in completed["err"]:
            controller_answered = controller_answered or argv[0] in _CONTROLLERS
        else:
            controller_silent = controller_silent or (argv[0] in _CONTROLLERS and _is_unanswered(completed))
            error_lines = completed["err"].strip().splitlines()
            failures.append(f"{argv[0]}: {error_lines[-1] if error_lines else 'exit code ' + str(completed['code'])}")
    if len(failures) == len(queries) or (controller_silent and not controller_answered):
        raise Unreachable(
            f"Slurm's commands do not run: {'; '.join(failures)}",
            "wait if Slurm's controller is down; else run cloudtrain on a login node, or set options.slurm.login",
        )
    return None


def _parse_squeue(out: str) -> QueueEntry | None:
    """Parse the last of squeue's or sacct's lines, id|state|reason: "CANCELLED by 1000" is CANCELLED."""
    lines = [line.split("|") for line in out.splitlines() if line.count("|") >= 2]
    lines = [line for line in lines if line[0].strip().partition("+")[2] in ("", "0")]  # not of a later component
    if not lines:
        return None
    job, state, reason = (part.strip() for part in lines[-1][:3])
    return QueueEntry(
        job.removesuffix("+0"), state.split()[0].rstrip("+") if state else "", "" if reason == "None" else reason
    )


def _parse_scontrol(out: str, name: str = "") -> QueueEntry | None:
    """Parse scontrol's one line for a job, or the last one of a name."""
    lines = [
        line
        for line in out.splitlines()
        if line.startswith("JobId=")
        and (not name or f" JobName={name} " in line)
        and not re.search(r" HetJobOffset=[1-9]", line)
    ]
    if not lines:
        return None
    fields = dict(re.findall(r"(JobId|ArrayJobId|JobState|Reason)=(\S*)", lines[-1]))
    reason = fields.get("Reason", "")
    return QueueEntry(
        fields.get("ArrayJobId") or fields["JobId"], fields.get("JobState", ""), "" if reason == "None" else reason
    )
