"""Jobs on Kubernetes as a client sees them: create once, find, look, follow, stop.

The handle is <namespace>/<name>/<uid>. A Job is created suspended, then what it owns, and a patch starts it: four calls,
each of which may be made again. A cancelled Job is suspended for good, which takes its pods away and keeps what is known.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backend import LogLine
from cloudtrain.errors import BackendError
from cloudtrain.kubeapi import KubeApi, KubeError
from cloudtrain.kubestore import KubeStore
from cloudtrain.podlog import Merge, result
from cloudtrain.requests.kubernetes import ATTEMPT, CANCELLED, OUTPUT, QUEUE, STARTED, UID, filled
from cloudtrain.state import EXIT_RESUMABLE, State, Status

INDEX = "batch.kubernetes.io/job-completion-index"
GONE = ("Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated", "NodeAffinity")  # a pod's own reason
_CODE = re.compile(r"failed with exit code (\d+)")
Object = dict[str, Any]
PATHS = {"Service": "services", "ConfigMap": "configmaps"}


class KubeJobs:
    """The Jobs of one context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, store: KubeStore, pause_s: float) -> None:
        self._api, self._store, self._pause_s = api, store, pause_s

    # -- submit --------------------------------------------------------------------------------------------------------

    def submit(self, request: Mapping[str, Any], packed: str) -> str:
        """Create what the plan says, start it unless that was done, and return its handle; `packed` is base64."""
        space = request["namespace"]
        wanted, *others = request["manifests"]
        job = self._create(space, "jobs", wanted)
        if _fixed(job) != _fixed(wanted):
            name = wanted["metadata"]["name"]
            raise BackendError(
                f"there is a Job {name} already, and it is another one", "submit again: the run gets another name"
            )
        uid = str(job["metadata"]["uid"])
        annotations = job["metadata"].get("annotations") or {}
        if STARTED not in annotations and CANCELLED not in annotations:
            for other in others:
                made = self._create(space, PATHS[other["kind"]], filled(other, {UID: uid, "${bundle.bytes}": packed}))
                if not any(owner["uid"] == uid for owner in made["metadata"].get("ownerReferences") or ()):
                    said = f"there is a {other['kind']} {other['metadata']['name']} already, of another Job"
                    raise BackendError(said, "it is being removed, perhaps: submit again")
            self._patch(space, str(job["metadata"]["name"]), request["start"], "the Job cannot be started")
        return f"{space}/{job['metadata']['name']}/{uid}"

    def _create(self, space: str, plural: str, wanted: Mapping[str, Any]) -> Object:
        """Create an object, or return the one of its name that exists."""
        what = f"the {wanted['kind']} was not accepted"
        place = f"{_base(plural)}/namespaces/{space}/{plural}"
        status, body = self._api.call("POST", place, what, body=wanted, fine=(409,))
        if status != 409:
            return dict(json.loads(body))
        found = self._api.get(f"{place}/{wanted['metadata']['name']}", what)
        if found is None:
            raise KubeError(409, "it was removed while it was created", what)
        return found

    def _patch(self, space: str, name: str, change: Mapping[str, Any], what: str, fine: tuple[int, ...] = ()) -> None:
        self._api.call("PATCH", f"/apis/batch/v1/namespaces/{space}/jobs/{name}", what, body=change, fine=fine)

    def find(self, space: str, attempt_id: str) -> str | None:
        """Return the handle of an attempt's Job; None too for one that was never started: submit completes it."""
        job = self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs/{attempt_id}", "the Job cannot be looked up")
        if job is None or STARTED not in (job["metadata"].get("annotations") or {}):
            return None
        return f"{space}/{attempt_id}/{job['metadata']['uid']}"

    # -- look ----------------------------------------------------------------------------------------------------------

    def job(self, handle: str) -> Object | None:
        """Return an attempt's Job, None where it is gone or another one has its name."""
        space, name, uid = _parts(handle)
        found = self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs/{name}", "the Job cannot be looked at")
        return found if found and found["metadata"]["uid"] == uid else None

    def pods(self, handle: str) -> dict[int, Object]:
        """Return an attempt's pods by node rank, the newest of each."""
        space, name, uid = _parts(handle)
        query = {"labelSelector": f"{ATTEMPT}={name}"}
        listed = self._api.get(f"/api/v1/namespaces/{space}/pods", "the pods cannot be listed", query) or {}
        found: dict[int, Object] = {}
        for pod in sorted(listed.get("items") or (), key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
            metadata = pod["metadata"]
            if any(owner["uid"] == uid for owner in metadata.get("ownerReferences") or ()):
                found[int(metadata["labels"].get(INDEX) or metadata["annotations"][INDEX])] = pod
        return found

    def status(self, handle: str) -> Status:
        """Return the attempt's state; while it waits, the reason is the cluster's own."""
        job = self.job(handle)
        if job is None:
            return Status(State.LOST, None, f"the Job {handle.rpartition('/')[0]} is gone")
        pods = self.pods(handle)
        began = [at for pod in pods.values() if (at := _container(pod).get("startedAt"))]
        started = min(began, default=None)
        over = _condition(job, "Complete") or _condition(job, "Failed")
        ended = over.get("lastTransitionTime") if over else None
        if over and over["type"] == "Complete":
            return Status(State.SUCCEEDED, 0, "", started, job["status"].get("completionTime") or ended)
        if CANCELLED in (job["metadata"].get("annotations") or {}):
            paused = _condition(job, "Suspended")
            if over or (paused and not any(_lives(pod) for pod in pods.values())):
                at = ended or (paused or {}).get("lastTransitionTime")
                return Status(State.CANCELLED, EXIT_RESUMABLE, "cancelled", started, at)
            return Status(State.STOPPING, None, "", started)
        if over:
            return _failed(over, pods, started, ended)
        if _condition(job, "FailureTarget"):
            return Status(State.STOPPING, None, str(_condition(job, "FailureTarget").get("message", "")), started)
        if job["spec"].get("suspend"):
            queue = (job["metadata"].get("labels") or {}).get(QUEUE)
            return Status(
                State.QUEUED, None, f"waits in the queue {queue}" if queue else "the Job is suspended", started
            )
        if len(pods) == job["spec"]["completions"] and all(_container(pod).get("startedAt") for pod in pods.values()):
            return Status(State.RUNNING, None, "", started)
        return Status(State.STARTING, None, self._why(job, pods), started)

    def _why(self, job: Object, pods: Mapping[int, Object]) -> str:
        """Return why pods do not run yet, in the cluster's words: theirs, or those of an event."""
        for pod in pods.values():
            for condition in pod["status"].get("conditions") or ():
                if condition["type"] == "PodScheduled" and condition["status"] == "False":
                    return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
            for found in pod["status"].get("containerStatuses") or ():
                waiting = (found.get("state") or {}).get("waiting") or {}
                if waiting.get("reason", "ContainerCreating") not in ("ContainerCreating", "PodInitializing"):
                    return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
        waiting_pods = [pod for pod in pods.values() if not _container(pod)]
        about = waiting_pods[0] if waiting_pods else job  # without pods: a quota says so in an event of the Job's
        space = job["metadata"]["namespace"]
        query = {"fieldSelector": f"involvedObject.uid={about['metadata']['uid']}"}
        try:
            events = self._api.get(f"/api/v1/namespaces/{space}/events", "events cannot be listed", query) or {}
        except KubeError:
            return ""  # not allowed: nothing depends on it
        warnings = [event for event in events.get("items") or () if event.get("type") == "Warning"]
        return f"{warnings[-1].get('reason')}: {warnings[-1].get('message')}" if warnings else ""

    # -- log -----------------------------------------------------------------------------------------------------------

    def logs(self, handle: str, *, follow: bool, after: str | None) -> Iterator[LogLine]:
        """Yield the lines of all nodes behind a cursor; to the end, or with what has come so far."""
        space = _parts(handle)[0]
        merge: Merge | None = None
        while True:
            job = self.job(handle)
            if job is None:
                return
            merge = merge or Merge(int(job["spec"]["completions"]), after)
            final = self.status(handle).state.final  # before reading: what is final has said everything
            pods = self.pods(handle)
            for node in merge.nodes:
                pod = pods.get(node.node)
                text = self._text(space, pod, node.at if node.next else "") if pod else None
                began = str((pod or job)["metadata"].get("creationTimestamp", ""))
                if text is not None:
                    yield from merge.take(node.node, text, began)
                if node.gap or (text is None and final):
                    kept = self._kept(job, node.node)
                    yield from merge.take(node.node, kept, began)
            if final or not follow:
                return
            time.sleep(self._pause_s)

    def _text(self, space: str, pod: Object, since: str) -> str | None:
        """Return what a pod has printed, None where it has not begun or is gone."""
        if not _container(pod).get("startedAt"):
            return None
        query = {"container": pod["spec"]["containers"][0]["name"], **({"sinceTime": since} if since else {})}
        place = f"/api/v1/namespaces/{space}/pods/{pod['metadata']['name']}/log"
        status, body = self._api.call("GET", place, "the log cannot be read", query=query, fine=(400, 404))
        return body.decode("utf-8", "replace") if status == 200 else None

    def _kept(self, job: Object, node: int) -> str:
        base = str((job["metadata"].get("annotations") or {}).get(OUTPUT, ""))
        return self._store.text(f"{base}/logs/{job['metadata']['name']}/node-{node}/") if "://" in base else ""

    # -- end -----------------------------------------------------------------------------------------------------------

    def cancel(self, handle: str) -> None:
        """Ask for the end; what has ended, or is gone, stays as it is."""
        job = self.job(handle)
        if job is None or _condition(job, "Complete") or _condition(job, "Failed"):
            return
        space, name, uid = _parts(handle)
        what = "the Job cannot be cancelled"
        self._patch(
            space, name, {"metadata": {"annotations": {CANCELLED: "yes"}}, "spec": {"suspend": True}}, what, (404,)
        )
        if QUEUE in (job["metadata"].get("labels") or {}):  # Kueue would admit it again
            body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
            self._api.call("DELETE", f"/apis/batch/v1/namespaces/{space}/jobs/{name}", what, body=body, fine=(404, 409))


def _failed(over: Object, pods: Mapping[int, Object], started: str | None, ended: str | None) -> Status:
    """Return how a Job has failed: by the platform, by the launcher's own word, by its container's end."""
    said = str(over.get("message", ""))
    if over.get("reason") == "DeadlineExceeded":
        return Status(State.TIMED_OUT, None, "the Job's deadline is over (options.kubernetes.wait)", started, ended)
    taken = [pod for pod in pods.values() if _disruption(pod)]
    if "DisruptionTarget" in said or taken:
        why = f": {_disruption(taken[0])}" if taken else ""
        return Status(State.PREEMPTED, EXIT_RESUMABLE, f"a pod was taken away{why}", started, ended)
    for rank, pod in sorted(pods.items()):
        if _container(pod).get("reason") == "OOMKilled":
            reason = f"node {rank} ran out of memory and was killed (resources.memory)"
            return Status(State.FAILED, 137, reason, started, ended)
    for _, pod in sorted(pods.items()):
        word = result(str(_container(pod).get("message", "")))
        if word is not None and word.get("state") not in (None, "SUCCEEDED"):
            state = State[str(word["state"])]
            code = None if state is State.LOST else int(word["code"])
            return Status(state, code, str(word.get("reason", "")), started, ended)
    ends = [_container(pod) for _, pod in sorted(pods.items()) if _container(pod).get("exitCode")]
    told = _CODE.search(said)
    code = int(ends[0]["exitCode"]) if ends else int(told[1]) if told else None
    reason = str(ends[0].get("message") or "").strip().split("\n")[-1][:300] if ends else ""
    return Status(State.FAILED, code, reason or said, started, ended)


def _disruption(pod: Object) -> str:
    """Return the cluster's word for why it took a pod away, "" where it did not."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return str(condition.get("reason", "DisruptionTarget"))
    reason = str(pod["status"].get("reason", ""))
    return reason if reason in GONE else ""


def _container(pod: Object) -> Object:
    """Return what is known of a pod's container since it began: running or terminated, {} before."""
    for found in pod["status"].get("containerStatuses") or ():
        state = found.get("state") or {}
        return dict(state.get("running") or state.get("terminated") or {})
    return {}


def _lives(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Pending", "Running", "Unknown")


def _condition(job: Object, kind: str) -> Object:
    """Return a condition that holds, {} where it does not."""
    known = (job.get("status") or {}).get("conditions") or ()
    return next((c for c in known if c["type"] == kind and c["status"] == "True"), {})


def _fixed(job: Mapping[str, Any]) -> Any:
    """Return what tells one attempt's Job from another's: the orders of its pods."""
    return next(iter(job["spec"]["template"]["spec"]["containers"]))["env"]


def _base(plural: str) -> str:
    return "/apis/batch/v1" if plural == "jobs" else "/api/v1"


def _parts(handle: str) -> tuple[str, str, str]:
    parts = handle.split("/")
    if len(parts) != 3 or not all(parts):
        raise BackendError(f"{handle!r} is no Job's handle", "NAMESPACE/NAME/UID")
    return parts[0], parts[1], parts[2]
