"""A job as a JobSet (jobset.x-k8s.io/v1alpha2): a set of one Job, and the Job that the rest of this package reads in it.

The controller creates the Job <name>-n-0 and the headless Service <name>, suspends and resumes the Job with the set, and
copies its end (pkg/controllers/jobset_controller.go of https://github.com/kubernetes-sigs/jobset, 2026-11-23).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Object = dict[str, Any]
API = "jobset.x-k8s.io/v1alpha2"
REPLICATED_JOB = "n"  # short: the names of pods hold it
ENDS = {"Completed": "Complete", "Failed": "Failed"}  # conditions of a set -> those of its Job


def child_name(name: str) -> str:
    """Return the name of the Job that the controller creates for a JobSet."""
    return f"{name}-{REPLICATED_JOB}-0"


def wrap_job(job: Mapping[str, Any]) -> Object:
    """Return the JobSet of a Job's manifest; the set has its name, labels, annotations and ttl."""
    spec = dict(job["spec"])
    suspend, ttl = spec.pop("suspend"), spec.pop("ttlSecondsAfterFinished", None)
    template = {"metadata": {"labels": spec["template"]["metadata"]["labels"]}, "spec": spec}
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": job["metadata"],
        "spec": {
            "suspend": suspend,
            **({} if ttl is None else {"ttlSecondsAfterFinished": ttl}),
            "network": {"enableDNSHostnames": spec["completions"] > 1, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},  # the next attempt is another set: its log and its limits begin anew
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": template}],
        },
    }


def as_job(manifest: Mapping[str, Any], child: Object | None = None) -> Object:
    """Return a JobSet as a Job; a Job as it is.

    Args:
        child: the set's Job, None where it does not exist. Its conditions count, and of the set those that it lacks.
    """
    if "replicatedJobs" not in manifest["spec"]:
        return dict(manifest)
    spec = manifest["spec"]
    status = dict((child or {}).get("status") or {})
    conditions = list(status.get("conditions") or ())
    if not any(each["type"] in ENDS.values() and each["status"] == "True" for each in conditions):
        own = (manifest.get("status") or {}).get("conditions") or ()
        kept = {**ENDS, **({} if child else {"Suspended": "Suspended"})}
        conditions += [{**each, "type": kept[each["type"]]} for each in own if each["type"] in kept]
    template = spec["replicatedJobs"][0]["template"]
    return {
        **manifest,
        "spec": {**template["spec"], "suspend": spec.get("suspend", False)},
        "status": {**status, "conditions": conditions},
        "child": child,
    }


def pods_owner(job: Mapping[str, Any]) -> Object:
    """Return the object that owns a Job's pods and has their events: the Job, or the one of a JobSet that exists."""
    return dict(job.get("child") or job)
