"""Say why Slurm lets a job wait, what to do about it, and whether it would wait without end."""

from __future__ import annotations

import re

# The codes that squeue prints with %r: https://slurm.schedmd.com/job_reason_codes.html (2026-11-23).
_WAITS = {
    "Priority": "it waits for jobs with a higher priority; it starts by itself",
    "Resources": "it is next when busy nodes become free; it starts by itself",
    "BeginTime": "it starts at a set time; a job that was requeued waits for about two minutes",
    "Dependency": "it starts when the job that it depends on has ended",
    "Licenses": "its licenses are in use; it starts by itself",
    "Reservation": "it starts when its reservation begins",
    "Cleaning": "Slurm still cleans up its previous start; it starts by itself",
    "ReqNodeNotAvail": "nodes that it needs are down, drained or reserved for maintenance: `sinfo -R` lists them; "
    "a shorter limits.max_runtime may fit before the maintenance",
    "NodeDown": "a node that it needs is down; `sinfo -R` shows why",
    "PartitionDown": "its partition starts no jobs at present; `sinfo -s` lists other partitions",
    "PartitionInactive": "its partition starts no jobs at present; `sinfo -s` lists other partitions",
}
_NEVER = {
    "PartitionTimeLimit": "it requests more time than its partition allows: lower limits.max_runtime; `sinfo -o '%P %l'` "
    "lists the limits",
    "PartitionNodeLimit": "it requests more or fewer nodes than its partition allows: change num_nodes; `sinfo -o '%P "
    "%s'` lists them",
    "PartitionConfig": "it requests more than its partition allows: lower limits.max_runtime or num_nodes; "
    "`scontrol show partition` lists the limits",
    "BadConstraints": "no node has all the resources that it requests: change resources, options.slurm.constraint or gpu_type",
    "DependencyNeverSatisfied": "the job that it depends on has failed",
    "AccountNotAllowed": "its partition does not accept this account: change options.slurm.account",
    "QOSNotAllowed": "its partition does not accept this quality of service: change options.slurm.qos",
    "InvalidAccount": "the account does not exist: change options.slurm.account",
    "InvalidQOS": "the quality of service does not exist: change options.slurm.qos",
    "JobHeldUser": "its owner put it on hold: `scontrol release JOB` lets it start",
    "JobHeldAdmin": "an administrator put it on hold: ask them",
    "JobHoldMaxRequeue": "Slurm restarted it too often and put it on hold: `scontrol release JOB` lets it start",
}
# AssocGrpGRES, QOSMaxCpuPerUserLimit: a limit of the association (account and user) or of the quality of service.
_LIMIT = re.compile(r"(?P<whose>Assoc|QOS)(?P<what>\w+)")
_ONE_JOB = re.compile(r"PerJob|PerNode|WallDuration")
_BUDGET = re.compile(r"Minutes|GrpBilling|GrpWall")


def describe(reason: str) -> str:
    """Return Slurm's reason with a sentence of what to do; the reason alone where it is not known."""
    code = (re.match(r"\w*", reason) or [""])[0]
    if sentence := _WAITS.get(code):
        return f"Slurm: {reason}: {sentence}"
    if sentence := _NEVER.get(code) or _limit_of_one_job(code):
        return f"Slurm: {reason}: it will not start by itself: {sentence}; to give up, run `cloudtrain cancel`"
    if limit := _LIMIT.fullmatch(code):
        whose = "the account's limit" if limit["whose"] == "Assoc" else "the limit of the quality of service"
        if _BUDGET.search(limit["what"]):
            return f"Slurm: {reason}: {whose} the budget of computing time is used up; it starts when the site renews the budget"
        return f"Slurm: {reason}: {whose} is reached; it starts when other jobs end"
    return f"Slurm: {reason}" if reason else ""


def _limit_of_one_job(code: str) -> str:
    if _LIMIT.fullmatch(code) and _ONE_JOB.search(code):
        return "the job requests more than one job may have: `sacctmgr show qos` and `show assoc` list the limits"
    return ""
