"""The node of the simulated cluster: runs a pod's containers as local processes, init containers one after another first.

As on a real cluster, the log of a deleted pod is gone. A pod is deleted when its Job is suspended, or fails while the pod
still runs.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.images import parse_reference
from cloudtrain.job import units
from cloudtrain.simulators.http import ApiError
from cloudtrain.simulators.replicas import Replica
from tests.simulators.kubernetes_cluster.job_controller import JobController, find_condition, is_deleted
from tests.simulators.kubernetes_cluster.jobset_controller import JobSetController
from tests.simulators.kubernetes_cluster.objects import Objects, condition, now
from tests.simulators.kubernetes_cluster.pod_view import PodView
from tests.simulators.kubernetes_cluster.trainjob_controller import reconcile_trainjob

TICK_S = 0.02
MESSAGE_BYTES, MESSAGE_LINES = 2048, 80
Object = dict[str, Any]
Lines = list[tuple[str, str]]  # time and text


class Kubelet(threading.Thread):
    """A thread that runs the controllers of Jobs, JobSets and TrainJobs and advances all pods of the node."""

    def __init__(self, objects: Objects, folder: Path, env: Mapping[str, str]) -> None:
        super().__init__(name="kubelet", daemon=True)
        self._objects, self._folder, self._env = objects, folder, dict(env)
        self._controller = JobController(objects, self.delete)
        self._jobsets = JobSetController(objects, self.delete)
        self.operators = {"jobset.x-k8s.io", "trainer.kubeflow.org"}  # those that are installed
        self._stopped = threading.Event()
        self._containers: dict[tuple[str, str], Replica] = {}  # running, by the pod's uid and the container's name
        self._logs: dict[tuple[str, str], Lines] = {}  # by the pod's uid and the container's name
        self._kill_at: dict[str, float] = {}
        self._deadlines: dict[str, float] = {}  # activeDeadlineSeconds, counted from the pod's start
        self._reported: dict[str, tuple[str, str, str]] = {}  # last reported reason why a pod waits, by its uid
        self.absent_images: set[str] = set()
        self.slow_images: set[str] = set()  # whose fetch does not end
        self.oom: set[str] = set()  # names of pods to be killed out of memory
        self.node: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}},
            "spec": {},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}, "conditions": [condition("Ready")]},
        }

    # -- called by the API server ----------------------------------------------------------------------------------------------

    def log(self, uid: str, container: str = "node") -> Lines | None:
        lines = self._logs.get((uid, container))
        return None if lines is None else list(lines)

    def container(self, uid: str, name: str = "node") -> Replica | None:
        """Return a container of a pod, if it runs now."""
        return self._containers.get((uid, name))

    def has_ended(self, uid: str, name: str) -> bool:
        return (uid, name) not in self._containers and (uid, name) in self._logs

    def _running(self, uid: str) -> list[tuple[str, Replica]]:
        return [(name, container) for (own, name), container in self._containers.items() if own == uid]

    def delete(self, pod: Object, grace_s: float | None = None) -> None:
        """Delete a pod and its log: SIGTERM now, SIGKILL after the grace period."""
        with self._objects.lock:
            uid, metadata = pod["metadata"]["uid"], pod["metadata"]
            if "deletionTimestamp" in metadata:
                return
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            metadata |= {"deletionTimestamp": now(self._objects.clock), "deletionGracePeriodSeconds": int(grace)}
            # A kubelet that ends a pod already gives it no more time (calculateEffectiveGracePeriod in its pod_workers.go).
            self._kill_at[uid] = min(self._objects.clock.monotonic() + grace, self._kill_at.get(uid, float("inf")))
            for _, container in self._running(uid):
                container.terminate()
            self._objects.touch("pods", pod)

    def disrupt(self, pod: Object, reason: str, *, grace_s: float | None = None) -> None:
        """Delete a pod with the condition DisruptionTarget and a reason; `grace_s` 0 means without notice."""
        with self._objects.lock:
            pod["status"]["conditions"].append({**condition("DisruptionTarget"), "reason": reason})
            self.delete(pod, grace_s)

    def close(self) -> None:
        self._stopped.set()
        self.join(60)

    def run(self) -> None:
        while not self._stopped.wait(TICK_S):
            self.step()
        for container in self._containers.values():
            container.kill()

    def step(self) -> float:
        """Advance all Jobs and pods once; return when (monotonic) the next one has something to do by itself."""
        with self._objects.lock:
            for trainjob in self._objects.all("trainjobs"):
                reconcile_trainjob(self._objects, trainjob)
            for jobset in self._objects.all("jobsets"):
                self._jobsets.reconcile(jobset)
            for job in self._objects.all("jobs"):
                self._controller.reconcile(job)
            self._controller.collect()
            for pod in self._objects.all("pods"):
                self._advance(pod)
        now = self._objects.clock.monotonic()
        times = [*self._deadlines.values(), *self._kill_at.values(), *self._controller.due, *self._jobsets.due]
        return min((at for at in times if at > now), default=float("inf"))

    # -- one pod -------------------------------------------------------------------------------------------------------

    def _advance(self, pod: Object) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        if running := self._running(uid):
            self._enforce_deadline(pod, [container for _, container in running])
            killed = self._kill_at.get(uid, float("inf")) <= self._objects.clock.monotonic()
            for name, container in running:
                oom = pod["metadata"]["name"] in self.oom and name == running[0][0]
                if container.code is not None or killed or oom:
                    container.kill()
                    del self._containers[uid, name]
                    self._end_container(pod, name, container.code if container.code is not None else 137, oom)
        elif status["phase"] == "Pending" and "deletionTimestamp" in pod["metadata"]:
            status["phase"] = "Failed"
            self._objects.touch("pods", pod)
        elif status["phase"] == "Pending" and (blocker := self._start_blocker(pod)):
            self._report_blocker(pod, *blocker)
        elif status["phase"] == "Pending":
            others = [other for other in status["conditions"] if other["type"] != "PodScheduled"]
            status |= {"startTime": now(self._objects.clock), "conditions": [condition("PodScheduled"), *others]}
            pod["spec"]["nodeName"] = self.node["metadata"]["name"]
            if limit := pod["spec"].get("activeDeadlineSeconds"):
                self._deadlines[uid] = self._objects.clock.monotonic() + limit
            self._start(pod)
        elif is_deleted(pod) and not self._has_active_job(pod):
            self._objects.remove("pods", pod)

    def _enforce_deadline(self, pod: Object, containers: list[Replica]) -> None:
        """Stop a pod that is active for longer than its activeDeadlineSeconds, with its own grace period."""
        uid = pod["metadata"]["uid"]
        if uid in self._kill_at or self._deadlines.get(uid, float("inf")) > self._objects.clock.monotonic():
            return
        message = "Pod was active on the node longer than the specified deadline"
        pod["status"] |= {"reason": "DeadlineExceeded", "message": message}
        self._kill_at[uid] = self._objects.clock.monotonic() + pod["spec"].get("terminationGracePeriodSeconds", 30)
        for container in containers:
            container.terminate()

    def _has_active_job(self, pod: Object) -> bool:
        """Return whether a Job that has not ended owns the pod."""
        owners = {item["uid"] for item in pod["metadata"].get("ownerReferences", ()) if item.get("controller")}
        return any(job["metadata"]["uid"] in owners and not (find_condition(job, "Complete") or find_condition(job, "Failed"))
                   for job in self._objects.all("jobs"))  # fmt: skip

    def _view(self, pod: Object) -> PodView:
        return PodView(self._objects, pod, self._folder / pod["metadata"]["uid"], self._folder.parent / "claims")

    def _start_blocker(self, pod: Object) -> tuple[str, str, str] | None:
        """Return why a pod cannot start yet: kind (schedule, mount, image, pull), reason, message; else None."""
        spec, namespace = pod["spec"], pod["metadata"]["namespace"]
        allocatable = self.node["status"]["allocatable"]
        wanted: Counter[str] = Counter()
        for container in spec["containers"]:
            for name, count in (container.get("resources") or {}).get("requests", {}).items():
                wanted[name] += int(count) if "/" in name else 0
        for name, total in wanted.items():
            if total > int(allocatable.get(name, 0) if total else 0):
                return "schedule", "Unschedulable", f"0/1 nodes are available: 1 Insufficient {name}."
        labels = self.node["metadata"]["labels"]
        if any(labels.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
            message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            return "schedule", "Unschedulable", message
        for volume in spec.get("volumes", ()):
            for kind, plural, field in (
                ("configMap", "configmaps", "name"),
                ("persistentVolumeClaim", "persistentvolumeclaims", "claimName"),
            ):
                if kind in volume and self._objects.get(plural, namespace, volume[kind][field]) is None:
                    message = f'MountVolume.SetUp failed for volume "{volume["name"]}": {volume[kind][field]} not found'
                    return "mount", "FailedMount", message
        for image in (container["image"] for container in spec["containers"]):
            if image in self.absent_images:
                return "image", "ImagePullBackOff", f'Back-off pulling image "{image}"'
            if image in self.slow_images:
                return "pull", "Pulling", f'Pulling image "{image}"'
        for item in (item for container in spec["containers"] for item in container.get("env", ())):
            secret_reference = (item.get("valueFrom") or {}).get("secretKeyRef")
            if (
                secret_reference
                and not secret_reference.get("optional")
                and self._view(pod).secret(secret_reference) is None
            ):
                return "image", "CreateContainerConfigError", f'secret "{secret_reference["name"]}" not found'
        return None

    def _report_blocker(self, pod: Object, kind: str, reason: str, message: str) -> None:
        """Report once why a pod waits: a condition, a container's state, an event."""
        status, uid = pod["status"], pod["metadata"]["uid"]
        if self._reported.get(uid) == (kind, reason, message):
            return
        self._reported[uid] = (kind, reason, message)
        if kind == "schedule":
            status["conditions"] = [{**condition("PodScheduled", "False"), "reason": reason, "message": message}]
        else:
            status["conditions"] = [condition("PodScheduled")]
            waiting = {"reason": reason, "message": message} if kind == "image" else {"reason": "ContainerCreating"}
            for field, containers in _container_groups(pod):
                status[field] = [
                    {**_initial_status(container), "state": {"waiting": {"reason": "PodInitializing"}}}
                    for container in containers
                ]
            status[_container_groups(pod)[0][0]][0]["state"] = {"waiting": waiting}
        self._objects.touch("pods", pod)
        reason = "FailedScheduling" if kind == "schedule" else reason
        self._objects.add_event("Pod", pod, reason, message, "Normal" if kind == "pull" else "Warning")

    def _start(self, pod: Object) -> None:
        """Start the containers of a pod whose turn it is: the next init container, or all others at once."""
        status = pod["status"]
        if not status.get("containerStatuses") or not (self._folder / pod["metadata"]["uid"]).exists():
            (self._folder / pod["metadata"]["uid"]).mkdir(parents=True)
            for field, containers in _container_groups(pod):
                status[field] = [
                    {**_initial_status(container), "state": {"waiting": {"reason": "PodInitializing"}}}
                    for container in containers
                ]
        inits = pod["spec"].get("initContainers") or []
        done = sum("terminated" in each["state"] for each in status.get("initContainerStatuses", ()))
        for container in inits[done : done + 1] or _container_groups(pod)[-1][1]:
            self._start_container(pod, container)

    def _start_container(self, pod: Object, container: Object) -> None:
        uid, name = pod["metadata"]["uid"], container["name"]
        own, is_main = _status_of(pod, name)
        lines: Lines = []
        self._logs[uid, name] = lines

        def write_lines(texts: list[str]) -> None:
            at = units.now(self._objects.clock)
            lines.extend((at, text) for text in texts)

        started = {"running": {"startedAt": now(self._objects.clock)}}
        own |= {"ready": is_main, "state": started, "imageID": _image_id(container)}
        command, env = self._view(pod).command(container, self._env)
        try:
            container_folder = self._folder / uid / f"machine-{name}"
            self._containers[uid, name] = Replica(pod["spec"]["hostname"], command, env, container_folder, write_lines)
        except ApiError as refusal:
            lines.append((now(self._objects.clock), refusal.message))
            self._end_container(pod, name, 128)
            return
        if is_main:
            pod["status"]["phase"] = "Running"
        self._objects.touch("pods", pod)

    def _end_container(self, pod: Object, name: str, code: int, oom: bool = False) -> None:
        """Record the end of a pod's container, and start the next one; the pod ends with the last of them."""
        uid, status = pod["metadata"]["uid"], pod["status"]
        own, is_main = _status_of(pod, name)
        container = next(each for _, group in _container_groups(pod) for each in group if each["name"] == name)
        state = {"exitCode": code, "reason": "OOMKilled" if oom else "Error" if code else "Completed",
                 "startedAt": own["state"]["running"]["startedAt"], "finishedAt": now(self._objects.clock)}  # fmt: skip
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            tail = "".join(f"{text}\n" for _, text in self._logs[uid, name][-MESSAGE_LINES:])
            state["message"] = tail.encode()[-MESSAGE_BYTES:].decode("utf-8", "replace")
        own |= {"ready": False, "state": {"terminated": state}}
        self._objects.touch("pods", pod)
        if not is_main and code == 0 and "deletionTimestamp" not in pod["metadata"]:
            self._start(pod)
            return
        ends = [each["state"].get("terminated") for each in status["containerStatuses"]]
        if is_main and not all(ends):
            return
        failed = not is_main or status.get("reason") or any(end["exitCode"] for end in ends if end)
        status["phase"] = "Failed" if failed else "Succeeded"
        shutil.rmtree(self._folder / uid, ignore_errors=True)
        self._objects.touch("pods", pod)


def _container_groups(pod: Object) -> list[tuple[str, list[Object]]]:
    """Return (status field, containers): init containers first. One without a command, of a hook, does not run."""
    init_containers = pod["spec"].get("initContainers") or []
    init_group = [("initContainerStatuses", init_containers)] if init_containers else []
    return [*init_group, ("containerStatuses", [each for each in pod["spec"]["containers"] if each.get("command")])]


def _status_of(pod: Object, name: str) -> tuple[Object, bool]:
    """Return the status of a container, and whether it is no init container."""
    for field, _ in _container_groups(pod):
        for each in pod["status"][field]:
            if each["name"] == name:
                return each, field == "containerStatuses"
    raise LookupError(name)


def _image_id(container: Object) -> str:
    """Return the imageID of a pulled image; without a registry, the digest is that of the name."""
    name, _, pinned = str(container["image"]).partition("@")
    image = parse_reference(name)
    digest = pinned or f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{image.registry}/{image.name}@{digest}"


def _initial_status(container: Object) -> Object:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
    return {**about, "restartCount": 0}
