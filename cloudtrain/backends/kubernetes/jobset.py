"""A job as a JobSet (jobset.x-k8s.io/v1alpha2): a set of one Job, or of one for each role, and the Job that the rest of
this package reads in it.

The controller creates the Jobs <name>-n-0, <name>-n1-0 and so on and the headless Service <name>, suspends and resumes the
Jobs with the set, and copies their end (pkg/controllers/jobset_controller.go of https://github.com/kubernetes-sigs/jobset,
2026-11-23). A set fails with its first Job that fails, and is complete when all are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]
API = "jobset.x-k8s.io/v1alpha2"
REPLICATED_JOB = "n"  # short: the names of pods hold it
ENDS = {"Completed": "Complete", "Failed": "Failed"}  # conditions of a set -> those of its Job


def child_name(name: str, replicated_job: str = REPLICATED_JOB) -> str:
    """Return the name of a Job that the controller creates for a JobSet."""
    return f"{name}-{replicated_job}-0"


def wrap_jobs(jobs: Sequence[Mapping[str, Any]]) -> Object:
    """Return the JobSet of one or several Jobs' manifests; the set has the first one's name, labels, annotations and ttl."""
    templates = []
    for job in jobs:
        spec = dict(job["spec"])
        suspend, ttl = spec.pop("suspend"), spec.pop("ttlSecondsAfterFinished", None)
        templates.append({"metadata": {"labels": spec["template"]["metadata"]["labels"]}, "spec": spec})
    several = sum(template["spec"]["completions"] for template in templates) > 1
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": jobs[0]["metadata"],
        "spec": {
            "suspend": suspend,
            **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
            "network": {"enableDNSHostnames": several, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},  # the next attempt is another set: its log and its limits begin anew
            "replicatedJobs": [
                {"name": f"{REPLICATED_JOB}{number or ''}", "replicas": 1, "template": template}
                for number, template in enumerate(templates)
            ],
        },
    }


def templates_of(manifest: Mapping[str, Any]) -> list[Object]:
    """Return the specs of a manifest's Jobs: of a JobSet the main role's first, of a Job its own."""
    if "replicatedJobs" not in manifest["spec"]:
        return [manifest["spec"]]
    return [each["template"]["spec"] for each in manifest["spec"]["replicatedJobs"]]


def as_job(manifest: Mapping[str, Any], children: Sequence[Object] = ()) -> Object:
    """Return a JobSet as one Job with the first one's template and the nodes of all; a Job as it is.

    Args:
        children: the set's Jobs that exist. Their conditions count, and of the set those that they lack.
    """
    if "replicatedJobs" not in manifest["spec"]:
        return dict(manifest)
    spec, templates = manifest["spec"], templates_of(manifest)
    statuses = [child.get("status") or {} for child in children]
    status: Object = dict(statuses[0]) if statuses else {}
    for key in ("active", "ready", "terminating"):
        if counts := [int(each[key]) for each in statuses if each.get(key) is not None]:
            status[key] = sum(counts)
    conditions = [dict(each) for one in statuses for each in one.get("conditions") or ()]
    if len(templates) > 1:  # complete are all or none
        conditions = [each for each in conditions if each["type"] not in ("Complete", "SuccessCriteriaMet")]
        conditions.sort(key=lambda each: str(each.get("lastTransitionTime") or ""))
    if not any(each["type"] in ENDS.values() and each["status"] == "True" for each in conditions):
        own = (manifest.get("status") or {}).get("conditions") or ()
        kept = {**ENDS, **({} if children else {"Suspended": "Suspended"})}
        conditions += [{**each, "type": kept[each["type"]]} for each in own if each["type"] in kept]
    completions = sum(int(template["completions"]) for template in templates)
    return {
        **manifest,
        "spec": {**templates[0], "completions": completions, "suspend": spec.get("suspend", False)},
        "status": {**status, "conditions": conditions},
        "children": list(children),
    }


def pods_owners(job: Mapping[str, Any]) -> list[Object]:
    """Return the objects that own a Job's pods and have their events: the Job, or those of a JobSet that exist."""
    return list(job.get("children") or ()) or [dict(job)]
