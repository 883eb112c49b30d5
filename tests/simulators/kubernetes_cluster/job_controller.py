"""Job controller of the simulated cluster: Indexed Jobs, pod failure policy, suspension, deadlines, pod replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudtrain.simulators.replicas import pick_addresses
from tests.simulators.kubernetes_cluster.admission import check_pod
from tests.simulators.kubernetes_cluster.objects import Objects, StatusError, condition, now

RETRY_S = 1.1  # before a pod is replaced; a real controller waits 10 s, and twice as long each time
OWNED = ("jobsets", "jobs", "pods", "services", "configmaps", "networkpolicies")  # deleted with their owner
INDEX = "batch.kubernetes.io/job-completion-index"
Object = dict[str, Any]


class JobController:
    """Reconciles Jobs; called with the objects' lock held."""

    def __init__(self, objects: Objects, delete_pod: Callable[[Object], None]) -> None:
        self._objects, self._delete_pod = objects, delete_pod
        self._deleted_pods: set[str] = set()  # uids of pods that the controller deleted: they are no failures
        # job uid -> pod uid -> 1 where it counts, else 0; also of deleted pods
        self._failures: dict[str, dict[str, int]] = {}
        self._retry_at: dict[str, float] = {}  # by the job's uid
        self._deadlines: dict[str, float] = {}
        self._refusals: dict[str, str] = {}  # last reported reason why a job's pod was not taken
        self._expires: dict[str, float] = {}  # when an ended Job is deleted (ttlSecondsAfterFinished)
        self._hosts: dict[str, list[str]] = {}  # addresses of a job's pods

    @property
    def due(self) -> list[float]:
        """When (monotonic) Jobs reach their deadlines or get pods again."""
        return [*self._deadlines.values(), *self._retry_at.values(), *self._expires.values()]

    def collect(self) -> None:
        """Collect garbage: delete objects whose owners are all gone."""
        existing_uids = {
            resource["metadata"]["uid"]
            for plural in ("trainjobs", "jobsets", "jobs", "pods")
            for resource in self._objects.all(plural)
        }
        for plural in OWNED:
            for resource in self._objects.all(plural):
                owners = {item["uid"] for item in resource["metadata"].get("ownerReferences", ())}
                if owners and not owners & existing_uids:
                    if plural == "pods":
                        self._delete_pod(resource)
                    else:
                        self._objects.remove(plural, resource)

    def reconcile(self, job: Object) -> None:
        """Create or delete pods as a Job's spec requires, and update its status."""
        status, spec, uid = job["status"], job["spec"], job["metadata"]["uid"]
        if find_condition(job, "Complete") or find_condition(job, "Failed"):
            expires = self._expires.get(uid, float("inf"))
            if self._objects.clock.monotonic() >= expires:  # never of a suspended Job: it has not ended
                del self._expires[uid]
                self._objects.remove("jobs", job)
            return
        pods = [pod for pod in self._objects.all("pods", job["metadata"]["namespace"]) if _is_controlled_by(pod, uid)]
        before = repr(status)
        active = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        if target := find_condition(job, "FailureTarget"):
            if not active:
                self._conclude(job, "Failed", target["reason"], target["message"])
        elif spec["suspend"]:
            self._suspend(job, active)
        else:
            self._resume(job)
            failure = self._count_failures(job, pods)
            if self._objects.clock.monotonic() >= self._deadlines.get(uid, float("inf")):
                failure = ("DeadlineExceeded", "Job was active longer than specified deadline")
            if failure is not None:
                set_condition(job, "FailureTarget", *failure)
                self._delete(active)
            else:
                if self._objects.clock.monotonic() >= self._retry_at.get(uid, 0.0):
                    self._start_missing(job, pods)
                done = {_completion_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
                if len(done) == spec.get("completions", 1):
                    self._conclude(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        for pod in [pod for pod in pods if is_deleted(pod)]:  # only after it was counted
            self._objects.remove("pods", pod)
            pods.remove(pod)
        phases = [pod["status"]["phase"] for pod in pods]
        status.update(active=phases.count("Pending") + phases.count("Running"), ready=phases.count("Running"),
                      succeeded=phases.count("Succeeded"), failed=len(self._failures.get(uid, ())))  # fmt: skip
        if repr(status) != before:
            self._objects.touch("jobs", job)

    def _suspend(self, job: Object, active: list[Object]) -> None:
        if not find_condition(job, "Suspended"):
            set_condition(job, "Suspended", "JobSuspended", "Job suspended")
        job["status"].pop("startTime", None)
        self._delete(active)

    def _resume(self, job: Object) -> None:
        status, uid = job["status"], job["metadata"]["uid"]
        if "startTime" in status:
            return
        status["startTime"] = now(self._objects.clock)
        if limit := job["spec"].get("activeDeadlineSeconds"):
            self._deadlines[uid] = self._objects.clock.monotonic() + limit
        for job_condition in status.get("conditions", ()):
            if job_condition["type"] == "Suspended":
                job_condition.update(status="False", reason="JobResumed")

    def _delete(self, pods: list[Object]) -> None:
        for pod in pods:
            self._deleted_pods.add(pod["metadata"]["uid"])
            self._delete_pod(pod)

    def _count_failures(self, job: Object, pods: list[Object]) -> tuple[str, str] | None:
        """Count each failed pod once; return reason and message where the failure policy or backoff limit fails the Job."""
        namespace, uid = job["metadata"]["namespace"], job["metadata"]["uid"]
        rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", ())
        counted = self._failures.setdefault(uid, {})
        for pod in pods:
            pod_uid = pod["metadata"]["uid"]
            if pod["status"]["phase"] != "Failed" or pod_uid in self._deleted_pods or pod_uid in counted:
                continue
            self._retry_at[uid] = self._objects.clock.monotonic() + RETRY_S
            name = pod["metadata"]["name"]
            counted[pod_uid] = 1
            for number, rule in enumerate(rules):
                codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
                if codes and (code := _exit_code(pod, codes.get("containerName"))):
                    matches = (code in codes["values"]) is (codes["operator"] == "In")
                    container = codes.get("containerName", "")
                    message = f"Container {container} for pod {namespace}/{name} failed with exit code {code}"
                elif conditions:
                    kinds = {
                        pod_condition["type"]
                        for pod_condition in pod["status"]["conditions"]
                        if pod_condition["status"] == "True"
                    }
                    matches = any(pod_condition["type"] in kinds for pod_condition in conditions)
                    message = f"Pod {namespace}/{name} has condition {conditions[0]['type']}"
                else:
                    continue
                if matches and rule["action"] == "FailJob":
                    return "PodFailurePolicy", f"{message} matching FailJob rule at index {number}"
                if matches:
                    counted[pod_uid] = int(rule["action"] != "Ignore")
                    break
        if sum(counted.values()) > job["spec"]["backoffLimit"]:
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        return None

    def _start_missing(self, job: Object, pods: list[Object]) -> None:
        spec, metadata = job["spec"], job["metadata"]
        taken = {_completion_index(pod) for pod in pods if pod["status"]["phase"] != "Failed"}
        hosts = self._hosts.setdefault(metadata["uid"], pick_addresses(spec.get("completions", 1)))
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
                    "annotations": {**(template.get("metadata") or {}).get("annotations", {}), INDEX: str(index)},
                    "ownerReferences": [owner],
                    "finalizers": ["batch.kubernetes.io/job-tracking"],
                },
                "spec": {**template["spec"], "hostname": f"{metadata['name']}-{index}"},
                "status": {"phase": "Pending", "conditions": [], "podIP": hosts[index]},
            }
            try:
                check_pod(self._objects, metadata["namespace"], pod)
            except StatusError as refusal:
                self._retry_at[metadata["uid"]] = self._objects.clock.monotonic() + RETRY_S
                if self._refusals.get(metadata["uid"]) != refusal.message:
                    self._refusals[metadata["uid"]] = refusal.message
                    self._objects.add_event("Job", job, "FailedCreate", f"Error creating: {refusal.message}")
                return
            self._objects.add("pods", metadata["namespace"], pod)

    def _conclude(self, job: Object, kind: str, reason: str, message: str) -> None:
        if kind == "Complete":
            set_condition(job, "SuccessCriteriaMet", reason, message)
            job["status"]["completionTime"] = now(self._objects.clock)
        set_condition(job, kind, reason, message)
        if (ttl_s := job["spec"].get("ttlSecondsAfterFinished")) is not None:
            self._expires[job["metadata"]["uid"]] = self._objects.clock.monotonic() + ttl_s


def find_condition(job: Object, kind: str) -> Object | None:
    """Return the condition of this type if its status is True, else None."""
    return next((c for c in job["status"].get("conditions", ()) if c["type"] == kind and c["status"] == "True"), None)


def is_deleted(pod: Object) -> bool:
    """Return whether a pod has a deletion timestamp and has ended."""
    return "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] not in ("Pending", "Running")


def set_condition(job: Object, kind: str, reason: str, message: str, status: str = "True") -> None:
    """Set a condition of a Job or JobSet, with the current time."""
    others = [other for other in job["status"].get("conditions", ()) if other["type"] != kind]
    job["status"]["conditions"] = [*others, {**condition(kind, status), "reason": reason, "message": message}]


def _is_controlled_by(pod: Object, uid: str) -> bool:
    owners = pod["metadata"].get("ownerReferences", ())
    return any(item["uid"] == uid and item.get("controller") for item in owners)


def _completion_index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"][INDEX])


def _exit_code(pod: Object, container: str | None) -> int:
    """Return the first non-zero exit code of a container, or of all containers; 0 where there is none."""
    statuses = (*pod["status"].get("initContainerStatuses", ()), *pod["status"].get("containerStatuses", ()))
    codes = (int(status["state"].get("terminated", {}).get("exitCode", 0)) for status in statuses
             if container in (None, status["name"]))  # fmt: skip
    return next((code for code in codes if code), 0)
