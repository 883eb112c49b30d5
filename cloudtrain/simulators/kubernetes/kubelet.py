"""The one node of the simulated cluster: pods whose containers are processes of this machine, one after the other.

Deleting a pod takes its log along, as there: those of a Job that is suspended, and those that still run when their Job
fails.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.backends.images import parse_reference
from cloudtrain.simulators.http import Refusal
from cloudtrain.simulators.kubernetes.job_controller import JobController, gone, has
from cloudtrain.simulators.kubernetes.objects import Objects, condition, now
from cloudtrain.simulators.kubernetes.pod_view import PodView
from cloudtrain.simulators.replicas import Replica

TICK_S = 0.02
MESSAGE_BYTES, MESSAGE_LINES = 2048, 80
Object = dict[str, Any]
Lines = list[tuple[str, str]]  # time and text


class Kubelet(threading.Thread):
    """The node, and beside it the controller of all Jobs: one thread that looks at everything again and again."""

    def __init__(self, objects: Objects, folder: Path, env: Mapping[str, str]) -> None:
        super().__init__(name="kubelet", daemon=True)
        self._objects, self._folder, self._env = objects, folder, dict(env)
        self._controller = JobController(objects, self.delete)
        self._over = threading.Event()
        self._containers: dict[str, Replica] = {}  # by the pod's uid: the one that runs
        self._logs: dict[tuple[str, str], Lines] = {}  # by the pod's uid and the container's name
        self._kill_at: dict[str, float] = {}
        self._told: dict[str, tuple[str, str, str]] = {}  # why a pod waits, by its uid
        self.absent_images: set[str] = set()
        self.oom: set[str] = set()  # names of pods that have used too much memory
        self.machine: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}},
            "spec": {},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}, "conditions": [condition("Ready")]},
        }

    # -- asked by the API ----------------------------------------------------------------------------------------------

    def log(self, uid: str, container: str = "node") -> Lines | None:
        found = self._logs.get((uid, container))
        return None if found is None else list(found)

    def ended(self, uid: str) -> bool:
        return uid not in self._containers and any(known == uid for known, _ in self._logs)

    def delete(self, pod: Object, grace_s: float | None = None) -> None:
        """Delete a pod: SIGTERM now, SIGKILL when its time is over, and its log is gone."""
        with self._objects.lock:
            uid, metadata = pod["metadata"]["uid"], pod["metadata"]
            if "deletionTimestamp" in metadata:
                return
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            metadata |= {"deletionTimestamp": now(), "deletionGracePeriodSeconds": int(grace)}
            self._kill_at[uid] = time.monotonic() + grace
            if uid in self._containers:
                self._containers[uid].ask()
            self._objects.touch("pods", pod)

    def disrupt(self, pod: Object, reason: str, *, grace_s: float | None = None) -> None:
        """Take a pod away, with the condition that says who did; without notice when `grace_s` is 0."""
        with self._objects.lock:
            pod["status"]["conditions"].append({**condition("DisruptionTarget"), "reason": reason})
            self.delete(pod, grace_s)

    def close(self) -> None:
        self._over.set()
        self.join(60)

    def run(self) -> None:
        while not self._over.wait(TICK_S):
            with self._objects.lock:
                for job in self._objects.all("jobs"):
                    self._controller.reconcile(job)
                self._controller.collect()
                for pod in self._objects.all("pods"):
                    self._advance(pod)
        for container in self._containers.values():
            container.end()

    # -- one pod -------------------------------------------------------------------------------------------------------

    def _advance(self, pod: Object) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        container = self._containers.get(uid)
        if container is not None:
            killed = self._kill_at.get(uid, float("inf")) <= time.monotonic() or pod["metadata"]["name"] in self.oom
            if container.code is None and not killed:
                return
            container.end()
            del self._containers[uid]
            self._ended(pod, container.code if container.code is not None else 137)
        elif status["phase"] == "Pending" and "deletionTimestamp" in pod["metadata"]:
            status["phase"] = "Failed"
            self._objects.touch("pods", pod)
        elif status["phase"] == "Pending" and (waits := self._waits(pod)):
            self._tell(pod, *waits)
        elif status["phase"] == "Pending":
            scheduled = [known for known in status["conditions"] if known["type"] != "PodScheduled"]
            status |= {"startTime": now(), "conditions": [condition("PodScheduled"), *scheduled]}
            self._begin(pod)
        elif gone(pod) and not self._controlled(pod):
            self._objects.remove("pods", pod)

    def _controlled(self, pod: Object) -> bool:
        """Return whether a Job that has not ended is still to count the pod."""
        owners = {item["uid"] for item in pod["metadata"].get("ownerReferences", ()) if item.get("controller")}
        return any(job["metadata"]["uid"] in owners and not (has(job, "Complete") or has(job, "Failed"))
                   for job in self._objects.all("jobs"))  # fmt: skip

    def _view(self, pod: Object) -> PodView:
        return PodView(self._objects, pod, self._folder / pod["metadata"]["uid"], self._folder.parent / "claims")

    def _waits(self, pod: Object) -> tuple[str, str, str] | None:
        """Return why a pod cannot start yet: kind (schedule, mount, image), reason, words."""
        spec, where = pod["spec"], pod["metadata"]["namespace"]
        has_here = self.machine["status"]["allocatable"]
        for container in spec["containers"]:
            for name, count in (container.get("resources") or {}).get("requests", {}).items():
                if "/" in name and int(count) > int(has_here.get(name, 0)):
                    return "schedule", "Unschedulable", f"0/1 nodes are available: 1 Insufficient {name}."
        known = self.machine["metadata"]["labels"]
        if any(known.get(name) != value for name, value in (spec.get("nodeSelector") or {}).items()):
            said = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
            return "schedule", "Unschedulable", said
        for volume in spec.get("volumes", ()):
            for kind, plural, field in (
                ("configMap", "configmaps", "name"),
                ("persistentVolumeClaim", "persistentvolumeclaims", "claimName"),
            ):
                if kind in volume and self._objects.get(plural, where, volume[kind][field]) is None:
                    said = f'MountVolume.SetUp failed for volume "{volume["name"]}": {volume[kind][field]} not found'
                    return "mount", "FailedMount", said
        image = spec["containers"][0]["image"]
        if image in self.absent_images:
            return "image", "ImagePullBackOff", f'Back-off pulling image "{image}"'
        for item in spec["containers"][0].get("env", ()):
            found = (item.get("valueFrom") or {}).get("secretKeyRef")
            if found and not found.get("optional") and self._view(pod).secret(found) is None:
                return "image", "CreateContainerConfigError", f'secret "{found["name"]}" not found'
        return None

    def _tell(self, pod: Object, kind: str, reason: str, said: str) -> None:
        """Say once why a pod waits, where a server says it: a condition, a container's state, an event."""
        status, uid = pod["status"], pod["metadata"]["uid"]
        if self._told.get(uid) == (kind, reason, said):
            return
        self._told[uid] = (kind, reason, said)
        if kind == "schedule":
            status["conditions"] = [{**condition("PodScheduled", "False"), "reason": reason, "message": said}]
        else:
            status["conditions"] = [condition("PodScheduled")]
            waiting = {"reason": reason, "message": said} if kind == "image" else {"reason": "ContainerCreating"}
            for which, containers in _groups(pod):
                status[which] = [
                    {**_about(each), "state": {"waiting": {"reason": "PodInitializing"}}} for each in containers
                ]
            status[_groups(pod)[0][0]][0]["state"] = {"waiting": waiting}
        self._objects.touch("pods", pod)
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": pod["metadata"]["name"] + "."},
            "involvedObject": {"kind": "Pod", "name": pod["metadata"]["name"], "uid": uid},
            "reason": "FailedScheduling" if kind == "schedule" else reason,
            "message": said,
            "type": "Warning",
            "lastTimestamp": now(),
        }
        self._objects.add("events", pod["metadata"]["namespace"], event)

    def _begin(self, pod: Object, number: int = 0) -> None:
        """Start a pod's container of that number, those that initialize it first."""
        uid, status = pod["metadata"]["uid"], pod["status"]
        if number == 0:
            (self._folder / uid).mkdir(parents=True)
            for which, containers in _groups(pod):
                status[which] = [
                    {**_about(each), "state": {"waiting": {"reason": "PodInitializing"}}} for each in containers
                ]
        which, place, container = _numbered(pod, number)
        lines: Lines = []
        self._logs[uid, container["name"]] = lines

        def heard(texts: list[str]) -> None:
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            lines.extend((at, text) for text in texts)

        main = which == "containerStatuses"
        status[which][place] |= {
            "ready": main,
            "state": {"running": {"startedAt": now()}},
            "imageID": _pulled(container),
        }
        command, env = self._view(pod).command(container, self._env)
        try:
            machine = self._folder / uid / f"machine-{number}"
            self._containers[uid] = Replica(pod["spec"]["hostname"], command, env, machine, heard)
        except Refusal as refusal:
            lines.append((now(), refusal.message))
            self._ended(pod, 128)
            return
        if main:
            status["phase"] = "Running"
        self._objects.touch("pods", pod)

    def _ended(self, pod: Object, code: int) -> None:
        """Write the end of the container that ran into its pod, and begin the next one."""
        uid, status = pod["metadata"]["uid"], pod["status"]
        number = next(n for n in range(100) if "running" in _state(pod, n))
        which, place, container = _numbered(pod, number)
        oom = pod["metadata"]["name"] in self.oom
        state = {"exitCode": code, "reason": "OOMKilled" if oom else "Error" if code else "Completed",
                 "startedAt": _state(pod, number)["running"]["startedAt"], "finishedAt": now()}  # fmt: skip
        if code and container.get("terminationMessagePolicy") == "FallbackToLogsOnError":
            tail = "".join(f"{text}\n" for _, text in self._logs[uid, container["name"]][-MESSAGE_LINES:])
            state["message"] = tail.encode()[-MESSAGE_BYTES:].decode("utf-8", "replace")
        status[which][place] |= {"ready": False, "state": {"terminated": state}}
        if which == "initContainerStatuses" and code == 0 and "deletionTimestamp" not in pod["metadata"]:
            self._objects.touch("pods", pod)
            self._begin(pod, number + 1)
            return
        status["phase"] = "Failed" if code or which == "initContainerStatuses" else "Succeeded"
        shutil.rmtree(self._folder / uid, ignore_errors=True)
        self._objects.touch("pods", pod)


def _groups(pod: Object) -> list[tuple[str, list[Object]]]:
    """Return where the states of a pod's containers stand, with the containers: those that initialize it first.

    Of the others only the first one is run here.
    """
    first = pod["spec"].get("initContainers") or []
    found = [("initContainerStatuses", first)] if first else []
    return [*found, ("containerStatuses", pod["spec"]["containers"][:1])]


def _numbered(pod: Object, number: int) -> tuple[str, int, Object]:
    return [(which, n, each) for which, containers in _groups(pod) for n, each in enumerate(containers)][number]


def _state(pod: Object, number: int) -> Object:
    which, place, _ = _numbered(pod, number)
    found: Object = pod["status"][which][place]["state"]
    return found


def _pulled(container: Object) -> str:
    """Return what a runtime calls an image that it has pulled; there is no registry here, so the digest is of the name."""
    name, _, pinned = str(container["image"]).partition("@")
    named = parse_reference(name)
    digest = pinned or f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
    return f"{named.registry}/{named.name}@{digest}"


def _about(container: Object) -> Object:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
    return {**about, "restartCount": 0}
