"""JobSet controller of the simulated cluster: sets of replicated Jobs, as backends/kubernetes makes them.

It creates the Jobs and the headless Service, suspends and resumes the Jobs, fails with the first and is complete with the
last of them, deletes those that still run, and is deleted after its ttl: what
pkg/controllers/jobset_controller.go of https://github.com/kubernetes-sigs/jobset does (2026-11-23). After a failure that a rule
allows it deletes all Jobs and makes others, once their pods are gone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from cloudtrain.backends.kubernetes import rules
from tests.simulators.kubernetes_cluster.job_controller import find_condition, set_condition
from tests.simulators.kubernetes_cluster.objects import Objects, set_job_defaults

LABEL = "jobset.sigs.k8s.io/jobset-name"
Object = dict[str, Any]


def check_jobset(jobset: Object) -> Iterator[rules.Violation]:
    """Yield what the webhook, or the Job's rules, refuse of a JobSet; and what is not simulated."""
    spec = jobset.get("spec") or {}
    replicated = spec.get("replicatedJobs") or []
    if not replicated or any(each.get("replicas", 1) != 1 for each in replicated):
        yield rules.Violation("spec.replicatedJobs", "is not simulated for more than one Job each")
        return
    for number, rule in enumerate((spec.get("failurePolicy") or {}).get("rules") or ()):
        if rule.get("action") not in ("FailJobSet", "RestartJobSet"):
            yield rules.Violation(f"spec.failurePolicy.rules[{number}].action", "is not simulated")
    if violation := rules.check_set_name(jobset):
        yield violation
    for number, each in enumerate(replicated):
        job = {"metadata": {"name": "job"}, "spec": each["template"]["spec"]}
        for violation in rules.check_job(job):
            yield violation._replace(path=f"spec.replicatedJobs[{number}].template.{violation.path}")


class JobSetController:
    """Reconciles JobSets; called with the objects' lock held."""

    def __init__(self, objects: Objects, delete_pod: Callable[[Object], None]) -> None:
        self._objects, self._delete_pod = objects, delete_pod
        self._expires: dict[str, float] = {}  # when an ended JobSet is deleted (ttlSecondsAfterFinished)

    def reconcile(self, jobset: Object) -> None:
        """Create what a JobSet owns, pass on `suspend`, and copy the end of its Jobs."""
        spec, metadata = jobset["spec"], jobset["metadata"]
        if find_condition(jobset, "Completed") or find_condition(jobset, "Failed"):
            if self._objects.clock.monotonic() >= self._expires.get(metadata["uid"], float("inf")):
                del self._expires[metadata["uid"]]
                self._objects.remove("jobsets", jobset)
            return
        before = repr(jobset["status"])
        jobs = [self._job(jobset, replicated) for replicated in spec["replicatedJobs"]]
        failed = [(job, end) for job in jobs if (end := find_condition(job, "Failed"))]
        if failed and self._restart(jobset, jobs, failed[0][1]):
            pass
        elif failed:
            message = f"jobset failed due to reaching max number of restarts ({failed[0][0]['metadata']['name']})"
            self._end(jobset, "Failed", "ReachedMaxRestarts", message)
            for job in (job for job in jobs if not (find_condition(job, "Failed") or find_condition(job, "Complete"))):
                self._objects.remove("jobs", job)
        elif all(find_condition(job, "Complete") for job in jobs):
            self._end(jobset, "Completed", "AllJobsCompleted", "jobset completed successfully")
        else:
            suspended = spec.get("suspend", False)
            for job in (job for job in jobs if job["spec"]["suspend"] != suspended):
                job["spec"]["suspend"] = suspended
                self._objects.touch("jobs", job)
            if suspended and not find_condition(jobset, "Suspended"):
                set_condition(jobset, "Suspended", "SuspendedJobs", "jobset is suspended")
            elif not suspended and find_condition(jobset, "Suspended"):
                set_condition(jobset, "Suspended", "ResumeJobs", "jobset is resumed", "False")
        if repr(jobset["status"]) != before:
            self._objects.touch("jobsets", jobset)

    def _job(self, jobset: Object, replicated: Object) -> Object:
        name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
        found = self._objects.get("jobs", jobset["metadata"]["namespace"], name)
        return found or self._create(jobset, replicated, name)

    def _restart(self, jobset: Object, jobs: list[Object], failed: Object) -> bool:
        """Delete the Jobs where the failure policy says so, and its restarts are not used up; the next pass makes others."""
        policy, restarts = jobset["spec"].get("failurePolicy") or {}, jobset["status"].get("restarts", 0)
        matching = (rule for rule in policy.get("rules") or () if _matches(rule, failed))
        action = next(matching, {"action": "RestartJobSet"})["action"]
        if action == "FailJobSet" or restarts >= policy.get("maxRestarts", 0):
            return False
        pods = [pod for pod in self._objects.all("pods") if any(_owns(job, pod) for job in jobs)]
        for pod in pods:
            self._delete_pod(pod)
        if not pods:
            for job in jobs:
                self._objects.remove("jobs", job)
            jobset["status"]["restarts"] = restarts + 1
        return True

    def _create(self, jobset: Object, replicated: Object, name: str) -> Object:
        spec, metadata, template = jobset["spec"], jobset["metadata"], replicated["template"]
        owner = {"apiVersion": jobset["apiVersion"], "kind": "JobSet", "name": metadata["name"], "uid": metadata["uid"],
                 "controller": True}  # fmt: skip
        labels = {LABEL: metadata["name"], "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"]}
        pod = template["spec"]["template"]
        pod_labels = {**((pod.get("metadata") or {}).get("labels") or {}), **labels}
        pod = {**pod, "metadata": {**(pod.get("metadata") or {}), "labels": pod_labels}}
        if (spec.get("network") or {}).get("enableDNSHostnames", True):
            pod["spec"] = {**pod["spec"], "subdomain": metadata["name"]}
        if pod["spec"].get("subdomain") == metadata["name"] and replicated is spec["replicatedJobs"][0]:
            service: Object = {"apiVersion": "v1", "kind": "Service"}
            service["metadata"] = {"name": metadata["name"], "ownerReferences": [owner]}
            service["spec"] = {"clusterIP": "None", "selector": {LABEL: metadata["name"]}}
            if self._objects.get("services", metadata["namespace"], metadata["name"]) is None:
                self._objects.add("services", metadata["namespace"], service)
        job = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": name,
                "labels": {**((template.get("metadata") or {}).get("labels") or {}), **labels},
                "ownerReferences": [owner],
            },
            "spec": {**template["spec"], "suspend": spec.get("suspend", False), "template": pod},
        }
        set_job_defaults(job)
        return self._objects.add("jobs", metadata["namespace"], job)

    def _end(self, jobset: Object, kind: str, reason: str, message: str) -> None:
        set_condition(jobset, kind, reason, message)
        jobset["status"]["terminalState"] = kind
        if (ttl_s := jobset["spec"].get("ttlSecondsAfterFinished")) is not None:
            self._expires[jobset["metadata"]["uid"]] = self._objects.clock.monotonic() + ttl_s

    @property
    def due(self) -> list[float]:
        """When (monotonic) ended JobSets are deleted."""
        return list(self._expires.values())


def _matches(rule: Object, failed: Object) -> bool:
    reasons, patterns = rule.get("onJobFailureReasons"), rule.get("onJobFailureMessagePatterns")
    known = not reasons or failed.get("reason") in reasons
    return known and (not patterns or any(re.search(each, failed.get("message", "")) for each in patterns))


def _owns(job: Object, pod: Object) -> bool:
    return any(owner["uid"] == job["metadata"]["uid"] for owner in pod["metadata"].get("ownerReferences") or ())
