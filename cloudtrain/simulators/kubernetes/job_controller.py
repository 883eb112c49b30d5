"""The Job controller of the simulated cluster: Indexed Jobs, their failure policy, suspension, deadlines, starts anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from cloudtrain.simulators.kubernetes.objects import Objects, condition, now
from cloudtrain.simulators.replicas import addresses

AGAIN_S = 1.1  # before a pod is replaced; a real controller waits 10 s, and twice as long each time
INDEX = "batch.kubernetes.io/job-completion-index"
Object = dict[str, Any]


class JobController:
    """Looks at every Job again and again; called with the objects' lock held."""

    def __init__(self, objects: Objects, delete_pod: Callable[[Object], None]) -> None:
        self._objects, self._delete_pod = objects, delete_pod
        self._ours: set[str] = set()  # pods that the controller itself has deleted: they do not count
        self._failures: dict[str, dict[str, int]] = {}  # job's uid -> pod's uid -> 1 where it counts; pods may be gone
        self._again_at: dict[str, float] = {}  # by the job's uid
        self._deadlines: dict[str, float] = {}
        self._hosts: dict[str, list[str]] = {}  # addresses of a job's pods

    def collect(self) -> None:
        """Delete what has owners, none of which is there any more."""
        known = {found["metadata"]["uid"] for plural in ("jobs", "pods") for found in self._objects.all(plural)}
        for plural in ("pods", "services", "configmaps"):
            for found in self._objects.all(plural):
                owners = {item["uid"] for item in found["metadata"].get("ownerReferences", ())}
                if owners and not owners & known:
                    if plural == "pods":
                        self._delete_pod(found)
                    else:
                        self._objects.remove(plural, found)

    def reconcile(self, job: Object) -> None:
        """Bring a Job's pods to what it wants, and its status to what they are."""
        status, spec, uid = job["status"], job["spec"], job["metadata"]["uid"]
        if has(job, "Complete") or has(job, "Failed"):
            return
        pods = [pod for pod in self._objects.all("pods", job["metadata"]["namespace"]) if _controlled(pod, uid)]
        before = repr(status)
        active = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        if target := has(job, "FailureTarget"):
            if not active:
                self._conclude(job, "Failed", target["reason"], target["message"])
        elif spec["suspend"]:
            self._suspend(job, active)
        else:
            self._resume(job)
            why = self._failure(job, pods)
            if time.monotonic() >= self._deadlines.get(uid, float("inf")):
                why = ("DeadlineExceeded", "Job was active longer than specified deadline")
            if why is not None:
                _set(job, "FailureTarget", *why)
                self._delete(active)
            else:
                if time.monotonic() >= self._again_at.get(uid, 0.0):
                    self._start_missing(job, pods)
                done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
                if len(done) == spec.get("completions", 1):
                    self._conclude(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        for pod in [pod for pod in pods if gone(pod)]:  # what is deleted goes when it has ended and was counted
            self._objects.remove("pods", pod)
            pods.remove(pod)
        phases = [pod["status"]["phase"] for pod in pods]
        status.update(active=phases.count("Pending") + phases.count("Running"), ready=phases.count("Running"),
                      succeeded=phases.count("Succeeded"), failed=len(self._failures.get(uid, ())))  # fmt: skip
        if repr(status) != before:
            self._objects.touch("jobs", job)

    def _suspend(self, job: Object, active: list[Object]) -> None:
        if not has(job, "Suspended"):
            _set(job, "Suspended", "JobSuspended", "Job suspended")
        job["status"].pop("startTime", None)
        self._delete(active)

    def _resume(self, job: Object) -> None:
        status, uid = job["status"], job["metadata"]["uid"]
        if "startTime" in status:
            return
        status["startTime"] = now()
        if limit := job["spec"].get("activeDeadlineSeconds"):
            self._deadlines[uid] = time.monotonic() + limit
        for known in status.get("conditions", ()):
            if known["type"] == "Suspended":
                known.update(status="False", reason="JobResumed")

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            self._ours.add(pod["metadata"]["uid"])
            self._delete_pod(pod)

    def _failure(self, job: Object, pods: list[Object]) -> tuple[str, str] | None:
        """Return why the Job fails, by its policy or its limit; every failed pod is counted once."""
        where, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
        rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", ())
        counted = self._failures.setdefault(uid, {})
        for pod in pods:
            pod_uid = pod["metadata"]["uid"]
            if pod["status"]["phase"] != "Failed" or pod_uid in self._ours or pod_uid in counted:
                continue
            self._again_at[uid] = time.monotonic() + AGAIN_S
            name = pod["metadata"]["name"]
            counted[pod_uid] = 1
            for number, rule in enumerate(rules):
                codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
                if codes and (code := _code(pod, codes.get("containerName"))):
                    hit = (code in codes["values"]) is (codes["operator"] == "In")
                    said = f"Container {codes.get('containerName', '')} for pod {where}/{name} failed with exit code {code}"
                elif conditions:
                    kinds = {found["type"] for found in pod["status"]["conditions"] if found["status"] == "True"}
                    hit = any(found["type"] in kinds for found in conditions)
                    said = f"Pod {where}/{name} has condition {conditions[0]['type']}"
                else:
                    continue
                if hit and rule["action"] == "FailJob":
                    return "PodFailurePolicy", f"{said} matching FailJob rule at index {number}"
                if hit:
                    counted[pod_uid] = int(rule["action"] != "Ignore")
                    break
        if sum(counted.values()) > job["spec"]["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _start_missing(self, job: Object, pods: list[Object]) -> None:
        spec, metadata = job["spec"], job["metadata"]
        taken = {_index(pod) for pod in pods if pod["status"]["phase"] != "Failed"}
        hosts = self._hosts.setdefault(metadata["uid"], addresses(spec.get("completions", 1)))
        for index in sorted(set(range(spec.get("completions", 1))) - taken):
            template = spec["template"]
            pod_labels = {
                **(template.get("metadata") or {}).get("labels", {}),
                "batch.kubernetes.io/job-name": metadata["name"],
                "job-name": metadata["name"],
                INDEX: str(index),
                "batch.kubernetes.io/controller-uid": metadata["uid"],
            }
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"],
                     "controller": True}  # fmt: skip
            pod: Object = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "generateName": f"{metadata['name']}-{index}-",
                    "labels": pod_labels,
                    "annotations": {INDEX: str(index)},
                    "ownerReferences": [owner],
                    "finalizers": ["batch.kubernetes.io/job-tracking"],
                },
                "spec": {**template["spec"], "hostname": f"{metadata['name']}-{index}"},
                "status": {"phase": "Pending", "conditions": [], "podIP": hosts[index]},
            }
            self._objects.add("pods", metadata["namespace"], pod)

    def _conclude(self, job: Object, kind: str, reason: str, message: str) -> None:
        if kind == "Complete":
            _set(job, "SuccessCriteriaMet", reason, message)
            job["status"]["completionTime"] = now()
        _set(job, kind, reason, message)


def has(job: Object, kind: str) -> Object | None:
    """Return a condition that holds, None where it does not."""
    return next((c for c in job["status"].get("conditions", ()) if c["type"] == kind and c["status"] == "True"), None)


def gone(pod: Object) -> bool:
    """Return whether a pod is to be deleted and has ended."""
    return "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] not in ("Pending", "Running")


def _set(job: Object, kind: str, reason: str, message: str) -> None:
    kept = [found for found in job["status"].get("conditions", ()) if found["type"] != kind]
    job["status"]["conditions"] = [*kept, {**condition(kind), "reason": reason, "message": message}]


def _controlled(pod: Object, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences", ())
    return any(item["uid"] == uid and item.get("controller") for item in owners)


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _code(pod: Object, container: str | None) -> int:
    """Return the first exit code that is not 0, of one container or of all."""
    known = (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
    codes = (int(each["state"].get("terminated", {}).get("exitCode", 0)) for each in known
             if container in (None, each["name"]))  # fmt: skip
    return next((code for code in codes if code), 0)
