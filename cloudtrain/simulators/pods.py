"""The Job controller and the kubelet of the simulated cluster: Indexed Jobs whose pods are processes of this machine.

What is a mount or a DNS name in a pod is replaced, in the values of its environment, by the folder or the address that it
stands for. Deleting a pod takes its log along, as there: those of a Job that is suspended, and those that still run when
their Job fails.
"""

from __future__ import annotations

import base64
import re
import shutil
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.simulators.replicas import Replica, addresses, shared_environment
from cloudtrain.simulators.server import Refusal

if TYPE_CHECKING:
    from cloudtrain.simulators.kubernetes import Objects

TICK_S = 0.02
MESSAGE_BYTES, MESSAGE_LINES = 2048, 80
_REFERENCE = re.compile(r"\$(\$\([^)]*\)|\(([^)]+)\))")
Object = dict[str, Any]


class Kubelet(threading.Thread):
    """One node, and the controller of all Jobs: one thread that looks at everything again and again."""

    def __init__(self, objects: Objects, folder: Path, env: Mapping[str, str]) -> None:
        super().__init__(name="kubelet", daemon=True)
        self._objects, self._folder, self._env = objects, folder, dict(env)
        self._over = threading.Event()
        self._containers: dict[str, Replica] = {}  # by the pod's uid
        self._logs: dict[str, list[tuple[str, str]]] = {}
        self._kill_at: dict[str, float] = {}
        self._ours: set[str] = set()  # pods that the controller itself has deleted: they do not count
        self._deadlines: dict[str, float] = {}  # by the job's uid
        self._hosts: dict[str, list[str]] = {}  # addresses of a job's pods
        self.absent_images: set[str] = set()
        self.oom: set[str] = set()  # names of pods that have used too much memory
        self.machine: Object = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": "node-1", "labels": {"kubernetes.io/hostname": "node-1"}},
            "spec": {},
            "status": {"allocatable": {"cpu": "8", "memory": "64Gi"}, "conditions": [_condition("Ready")]},
        }

    # -- asked by the API ----------------------------------------------------------------------------------------------

    def log(self, uid: str) -> list[tuple[str, str]] | None:
        found = self._logs.get(uid)
        return None if found is None else list(found)

    def ended(self, uid: str) -> bool:
        return uid in self._logs and uid not in self._containers

    def delete(self, pod: Object, grace_s: float | None = None) -> None:
        """Delete a pod: SIGTERM now, SIGKILL when its time is over, and its log is gone."""
        with self._objects.lock:
            uid, metadata = pod["metadata"]["uid"], pod["metadata"]
            if "deletionTimestamp" in metadata:
                return
            grace = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace_s is None else grace_s
            metadata |= {"deletionTimestamp": _now(), "deletionGracePeriodSeconds": int(grace)}
            self._kill_at[uid] = time.monotonic() + grace
            if uid in self._containers:
                self._containers[uid].ask()
            self._objects.touch("pods", pod)

    def disrupt(self, pod: Object, reason: str, *, grace_s: float | None = None) -> None:
        """Take a pod away, with the condition that says who did; without notice when `grace_s` is 0."""
        with self._objects.lock:
            pod["status"]["conditions"].append({**_condition("DisruptionTarget"), "reason": reason})
            self.delete(pod, grace_s)

    def collect(self, owner: str) -> None:
        """Delete what a deleted Job owned."""
        with self._objects.lock:
            for plural in ("pods", "services", "configmaps"):
                for found in self._objects.all(plural):
                    if any(item["uid"] == owner for item in found["metadata"].get("ownerReferences", ())):
                        if plural == "pods":
                            self._ours.add(found["metadata"]["uid"])
                            self.delete(found)
                        else:
                            self._objects.remove(plural, found)

    def close(self) -> None:
        self._over.set()
        self.join(60)

    def run(self) -> None:
        while not self._over.wait(TICK_S):
            with self._objects.lock:
                for job in self._objects.all("jobs"):
                    self._reconcile(job)
                for pod in self._objects.all("pods"):
                    self._advance(pod)
        for container in self._containers.values():
            container.end()

    # -- the controller ------------------------------------------------------------------------------------------------

    def _reconcile(self, job: Object) -> None:
        status, spec, uid = job["status"], job["spec"], job["metadata"]["uid"]
        if _has(job, "Complete") or _has(job, "Failed"):
            return
        pods = [pod for pod in self._objects.all("pods", job["metadata"]["namespace"]) if _owner(pod) == uid]
        before = repr(status)
        active = [pod for pod in pods if pod["status"]["phase"] in ("Pending", "Running")]
        if target := _has(job, "FailureTarget"):
            if not active:
                self._conclude(job, "Failed", target["reason"], target["message"])
        elif spec["suspend"]:
            self._suspend(job, active)
        else:
            if "startTime" not in status:
                status["startTime"] = _now()
                if limit := spec.get("activeDeadlineSeconds"):
                    self._deadlines[uid] = time.monotonic() + limit
                for known in status.get("conditions", ()):
                    if known["type"] == "Suspended":
                        known.update(status="False", reason="JobResumed")
            why = self._failure(job, pods)
            if time.monotonic() >= self._deadlines.get(uid, float("inf")):
                why = ("DeadlineExceeded", "Job was active longer than specified deadline")
            if why is not None:
                self._condition(job, "FailureTarget", *why)
                for pod in active:
                    self._ours.add(pod["metadata"]["uid"])
                    self.delete(pod)
            else:
                self._start_missing(job, pods)
                done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
                if len(done) == spec.get("completions", 1):
                    self._conclude(job, "Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        for pod in [pod for pod in pods if _gone(pod)]:  # what is deleted goes when it has ended and was counted
            self._objects.remove("pods", pod)
            pods.remove(pod)
        phases = [pod["status"]["phase"] for pod in pods]
        ready = sum(pod["status"]["phase"] == "Running" for pod in pods)
        status.update(active=phases.count("Pending") + phases.count("Running"), ready=ready,
                      succeeded=phases.count("Succeeded"), failed=phases.count("Failed"))  # fmt: skip
        if repr(status) != before:
            self._objects.touch("jobs", job)

    def _suspend(self, job: Object, active: list[Object]) -> None:
        if not _has(job, "Suspended"):
            self._condition(job, "Suspended", "JobSuspended", "Job suspended")
        job["status"].pop("startTime", None)
        for pod in active:
            self._ours.add(pod["metadata"]["uid"])
            self.delete(pod)

    def _failure(self, job: Object, pods: list[Object]) -> tuple[str, str] | None:
        """Return why the Job fails, by its policy or its limit."""
        where = job["metadata"]["namespace"]
        failed = [
            pod
            for pod in pods
            if pod["status"]["phase"] == "Failed" and pod["metadata"]["uid"] not in self._ours
        ]  # fmt: skip
        rules = (job["spec"].get("podFailurePolicy") or {}).get("rules", ())
        counted = 0
        for pod in failed:
            name, code = pod["metadata"]["name"], _code(pod)
            for number, rule in enumerate(rules):
                codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions")
                if codes and code:
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
                    counted -= rule["action"] == "Ignore"
                    break
            counted += 1
        if counted > job["spec"]["backoffLimit"]:
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
                "batch.kubernetes.io/job-completion-index": str(index),
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
                    "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                    "ownerReferences": [owner],
                    "finalizers": ["batch.kubernetes.io/job-tracking"],
                },
                "spec": {**template["spec"], "hostname": f"{metadata['name']}-{index}"},
                "status": {"phase": "Pending", "conditions": [], "podIP": hosts[index]},
            }
            self._objects.add("pods", metadata["namespace"], pod)

    def _conclude(self, job: Object, kind: str, reason: str, message: str) -> None:
        if kind == "Complete":
            self._condition(job, "SuccessCriteriaMet", reason, message)
            job["status"]["completionTime"] = _now()
        self._condition(job, kind, reason, message)

    def _condition(self, job: Object, kind: str, reason: str, message: str) -> None:
        kept = [found for found in job["status"].get("conditions", ()) if found["type"] != kind]
        job["status"]["conditions"] = [*kept, {**_condition(kind), "reason": reason, "message": message}]

    # -- the kubelet ---------------------------------------------------------------------------------------------------

    def _advance(self, pod: Object) -> None:
        uid, status = pod["metadata"]["uid"], pod["status"]
        container = self._containers.get(uid)
        if container is not None:
            killed = self._kill_at.get(uid, float("inf")) <= time.monotonic() or pod["metadata"]["name"] in self.oom
            if container.code is None and not killed:
                return
            container.end()
            del self._containers[uid]
            self._end(pod, container.code if container.code is not None else 137)
        elif status["phase"] == "Pending" and "deletionTimestamp" in pod["metadata"]:
            status["phase"] = "Failed"
            self._objects.touch("pods", pod)
        elif status["phase"] == "Pending" and (waits := self._waits(pod)):
            self._tell(pod, *waits)
        elif status["phase"] == "Pending":
            self._begin(pod)
        elif _gone(pod) and not self._owned(pod):
            self._objects.remove("pods", pod)

    def _owned(self, pod: Object) -> bool:
        return any(job["metadata"]["uid"] == _owner(pod) and not (_has(job, "Complete") or _has(job, "Failed"))
                   for job in self._objects.all("jobs"))  # fmt: skip

    def _waits(self, pod: Object) -> tuple[str, str, str] | None:
        """Return why a pod cannot start yet: kind (schedule, mount, image), reason, words."""
        spec, where = pod["spec"], pod["metadata"]["namespace"]
        has = self.machine["status"]["allocatable"]
        for container in spec["containers"]:
            for name, count in (container.get("resources") or {}).get("requests", {}).items():
                if "/" in name and int(count) > int(has.get(name, 0)):
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
            if found and not found.get("optional") and self._secret(where, found) is None:
                return "image", "CreateContainerConfigError", f'secret "{found["name"]}" not found'
        return None

    def _tell(self, pod: Object, kind: str, reason: str, said: str) -> None:
        """Say once why a pod waits, where a server says it: a condition, the container's state, an event."""
        status, container = pod["status"], pod["spec"]["containers"][0]
        if kind == "schedule":
            new = {**_condition("PodScheduled", "False"), "reason": reason, "message": said}
        else:
            new = _condition("PodScheduled")
        state = {"waiting": {"reason": reason if kind == "image" else "ContainerCreating",
                             **({"message": said} if kind == "image" else {})}}  # fmt: skip
        known = [{k: v for k, v in found.items() if k != "lastTransitionTime"} for found in status["conditions"]]
        if {k: v for k, v in new.items() if k != "lastTransitionTime"} in known and status.get("said") == said:
            return
        status["said"] = said
        status["conditions"] = [new]
        if kind != "schedule":
            status["containerStatuses"] = [{**_about(container), "state": state}]
        self._objects.touch("pods", pod)
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": pod["metadata"]["name"] + "."},
            "involvedObject": {"kind": "Pod", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]},
            "reason": "FailedScheduling" if kind == "schedule" else reason,
            "message": said,
            "type": "Warning",
            "lastTimestamp": _now(),
        }
        self._objects.add("events", pod["metadata"]["namespace"], event)

    def _begin(self, pod: Object) -> None:
        uid, spec = pod["metadata"]["uid"], pod["spec"]
        container = spec["containers"][0]
        folder = self._folder / uid
        folder.mkdir(parents=True)
        mounts = self._mounts(pod, folder)
        names = self._names(pod)
        env = shared_environment() | self._env
        if (index := pod["metadata"]["annotations"].get("batch.kubernetes.io/job-completion-index")) is not None:
            env["JOB_COMPLETION_INDEX"] = index
        env["HOSTNAME"] = spec["hostname"]
        for item in container.get("env", ()):
            value = self._value(item, pod)
            if value is not None:
                env[item["name"]] = _real(_expanded(value, env), mounts, names)
        command = [_real(_expanded(word, env), mounts, names)
                   for word in [*container.get("command", ()), *container.get("args", ())]]  # fmt: skip
        lines: list[tuple[str, str]] = []
        self._logs[uid] = lines

        def heard(texts: list[str]) -> None:
            at = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            lines.extend((at, text) for text in texts)

        status = pod["status"]
        status |= {"startTime": _now(), "conditions": [_condition("PodScheduled"), *status["conditions"]]}
        started = _about(container)
        try:
            self._containers[uid] = Replica(spec["hostname"], command, env, folder / "machine", heard)
        except Refusal as refusal:
            lines.append((_now(), refusal.message))
            status["containerStatuses"] = [{**started, "state": {"running": {"startedAt": _now()}}}]
            self._end(pod, 128)
            return
        status["phase"] = "Running"
        status["containerStatuses"] = [{**started, "ready": True, "state": {"running": {"startedAt": _now()}}}]
        self._objects.touch("pods", pod)

    def _end(self, pod: Object, code: int) -> None:
        """Write a container's end into its pod."""
        uid, status = pod["metadata"]["uid"], pod["status"]
        known = status["containerStatuses"][0]
        began = known["state"].get("running", {}).get("startedAt")
        oom = pod["metadata"]["name"] in self.oom
        state = {"exitCode": code, "reason": "OOMKilled" if oom else "Error" if code else "Completed",
                 "startedAt": began, "finishedAt": _now()}  # fmt: skip
        policy = pod["spec"]["containers"][0].get("terminationMessagePolicy")
        if code and policy == "FallbackToLogsOnError":
            tail = "".join(f"{text}\n" for _, text in self._logs[uid][-MESSAGE_LINES:])
            state["message"] = tail.encode()[-MESSAGE_BYTES:].decode("utf-8", "replace")
        status["containerStatuses"] = [{**known, "ready": False, "state": {"terminated": state}}]
        status["phase"] = "Failed" if code else "Succeeded"
        shutil.rmtree(self._folder / uid, ignore_errors=True)
        self._objects.touch("pods", pod)

    def _mounts(self, pod: Object, folder: Path) -> dict[str, str]:
        """Make the pod's volumes and return mount path -> folder; /dev/shm is the machine's own."""
        where, found = pod["metadata"]["namespace"], {}
        volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
        for mount in pod["spec"]["containers"][0].get("volumeMounts", ()):
            volume = volumes[mount["name"]]
            place = folder / "volumes" / mount["name"]
            if "persistentVolumeClaim" in volume:
                place = self._folder.parent / "claims" / where / volume["persistentVolumeClaim"]["claimName"]
            place.mkdir(parents=True, exist_ok=True)
            if "configMap" in volume:
                held = self._objects.get("configmaps", where, volume["configMap"]["name"]) or {}
                for name, data in (held.get("binaryData") or {}).items():
                    (place / name).write_bytes(base64.b64decode(data))
                for name, text in (held.get("data") or {}).items():
                    (place / name).write_text(text)
            if mount["mountPath"] != "/dev/shm":  # noqa: S108
                found[mount["mountPath"].rstrip("/")] = str(place)
        return found

    def _names(self, pod: Object) -> dict[str, str]:
        """Return DNS name -> address of the pods that the pod's headless Service selects."""
        where, subdomain = pod["metadata"]["namespace"], pod["spec"].get("subdomain")
        service = self._objects.get("services", where, subdomain) if subdomain else None
        if service is None or service["spec"].get("clusterIP") != "None":
            return {}
        wanted = (service["spec"].get("selector") or {}).items()
        return {
            f"{other['spec']['hostname']}.{subdomain}": other["status"]["podIP"]
            for other in self._objects.all("pods", where)
            if other["spec"].get("subdomain") == subdomain and wanted <= other["metadata"]["labels"].items()
        }

    def _value(self, item: Mapping[str, Any], pod: Object) -> str | None:
        source = item.get("valueFrom")
        if source is None:
            return str(item.get("value", ""))
        if "secretKeyRef" in source:
            return self._secret(pod["metadata"]["namespace"], source["secretKeyRef"])
        here: Any = pod
        for key in re.findall(r"\['([^']+)'\]|([^.\[]+)", source["fieldRef"]["fieldPath"]):
            here = here.get(key[0] or key[1])
        return str(here)

    def _secret(self, where: str, reference: Mapping[str, Any]) -> str | None:
        found = self._objects.get("secrets", where, reference["name"])
        data = (found or {}).get("data") or {}
        plain = (found or {}).get("stringData") or {}
        if reference["key"] in plain:
            return str(plain[reference["key"]])
        return base64.b64decode(data[reference["key"]]).decode() if reference["key"] in data else None


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Return what Kubernetes makes of $(NAME): the value where it is known; $$(NAME) stays as $(NAME)."""

    def value(found: re.Match[str]) -> str:
        if found[2] is None:
            return found[1]
        return env.get(found[2], found[0])

    return _REFERENCE.sub(value, text)


def _real(text: str, mounts: Mapping[str, str], names: Mapping[str, str]) -> str:
    if text in names:
        return names[text]
    for path, folder in mounts.items():
        if text == path or text.startswith(path + "/"):
            return folder + text[len(path) :]
    return text


def _condition(kind: str, status: str = "True") -> Object:
    return {"type": kind, "status": status, "lastTransitionTime": _now()}


def _has(job: Object, kind: str) -> Object | None:
    return next((c for c in job["status"].get("conditions", ()) if c["type"] == kind and c["status"] == "True"), None)


def _about(container: Object) -> Object:
    about = {"name": container["name"], "image": container["image"], "imageID": "", "ready": False}
    return {**about, "restartCount": 0}


def _gone(pod: Object) -> bool:
    return "deletionTimestamp" in pod["metadata"] and pod["status"]["phase"] not in ("Pending", "Running")


def _index(pod: Object) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def _owner(pod: Object) -> str | None:
    return next((str(item["uid"]) for item in pod["metadata"].get("ownerReferences", ())), None)


def _code(pod: Object) -> int:
    statuses = pod["status"].get("containerStatuses") or [{}]
    return int(statuses[0].get("state", {}).get("terminated", {}).get("exitCode", 0))


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
