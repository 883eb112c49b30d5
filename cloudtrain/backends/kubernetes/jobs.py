"""Jobs on Kubernetes as a client sees them: create once, find, look, follow, stop.

The handle is <cluster>/<namespace>/<name>/<uid>. A Job is created suspended, then what it owns, and a patch starts it: four
calls, each of which may be made again. A cancelled Job is suspended for good, which takes its pods away and keeps what is
known. A Job is never taken for lost because another cluster does not have it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError, refusal
from cloudtrain.backends.kubernetes.request import ATTEMPT, CANCELLED, QUEUE, RUN, STARTED, UID, filled
from cloudtrain.backends.kubernetes.status import age, by_node, condition, container, image, marks, status_of
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import State, Status

Object = dict[str, Any]
PATHS = {"Service": "services", "ConfigMap": "configmaps"}


class KubeJobs:
    """The Jobs of one context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi) -> None:
        self._api = api

    # -- submit --------------------------------------------------------------------------------------------------------

    def submit(self, request: Mapping[str, Any], packed: str) -> str:
        """Create what the plan says, start it unless that was done, and return its handle; `packed` is base64."""
        space = request["namespace"]
        wanted, *others = request["manifests"]
        job = self._create(space, "jobs", wanted)
        if not _is(job, wanted):
            name = wanted["metadata"]["name"]
            raise BackendError(
                f"there is a Job {name} already, and it is another one", "submit again: the run gets another name"
            )
        uid = str(job["metadata"]["uid"])
        if STARTED not in marks(job) and CANCELLED not in marks(job):
            try:
                self._complete(space, uid, others, packed)
                self._patch(space, str(job["metadata"]["name"]), request["start"], "the Job cannot be started")
            except Unreachable:
                raise
            except BackendError:
                self._take_back(job)
                raise
        return self._handle(job)

    def _complete(self, space: str, uid: str, others: Sequence[Mapping[str, Any]], packed: str) -> None:
        """Create what a Job needs and owns."""
        for other in others:
            made = self._create(space, PATHS[other["kind"]], filled(other, {UID: uid, "${bundle.bytes}": packed}))
            if not any(owner["uid"] == uid for owner in made["metadata"].get("ownerReferences") or ()):
                said = f"there is a {other['kind']} {other['metadata']['name']} already, of another Job"
                raise BackendError(said, "it is being removed, perhaps: submit again")

    def _take_back(self, job: Object) -> None:
        """Remove a Job whose submission was refused halfway.

        Left alone, a suspended Job runs nothing, so a missing permission does not matter. But a queue may start it:
        raises Unreachable where it cannot be removed from there.
        """
        about = job["metadata"]
        body = {"propagationPolicy": "Background", "preconditions": {"uid": about["uid"]}}
        place = f"/apis/batch/v1/namespaces/{about['namespace']}/jobs/{about['name']}"
        try:
            self._api.call("DELETE", place, "the Job cannot be removed", body=body, fine=(404, 409))
        except BackendError as error:
            if QUEUE in (about.get("labels") or {}):
                said = f"the submission was refused, and its Job is still in the queue: {error.message}"
                raise Unreachable(said, error.hint) from None

    def _create(self, space: str, plural: str, wanted: Mapping[str, Any]) -> Object:
        """Create an object, or return the one of its name that exists."""
        what = f"the {wanted['kind']} was not accepted"
        place = f"{_base(plural)}/namespaces/{space}/{plural}"
        status, body = self._api.call("POST", place, what, body=wanted, fine=(409,))
        if status != 409:
            return dict(json.loads(body))
        found = self._api.get(f"{place}/{wanted['metadata']['name']}", what)
        if found is None:
            raise refusal(409, b"it was removed while it was created", what)
        return found

    def _patch(self, space: str, name: str, change: Mapping[str, Any], what: str, fine: tuple[int, ...] = ()) -> None:
        self._api.call("PATCH", f"/apis/batch/v1/namespaces/{space}/jobs/{name}", what, body=change, fine=fine)

    def find(self, space: str, attempt_id: str) -> str | None:
        """Return the handle of an attempt's Job; None too for one that was never started: submit completes it."""
        job = self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs/{attempt_id}", "the Job cannot be looked up")
        return self._handle(job) if job is not None and STARTED in marks(job) else None

    def discard(self, space: str, attempt_id: str) -> None:
        """Stop what an interrupted submission left: a Job that was never started by us, and that a queue may start."""
        job = self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs/{attempt_id}", "the Job cannot be looked up")
        if job is not None:
            self.cancel(self._handle(job))

    def labels(self, handle: str) -> dict[str, str]:
        """Return the labels that an attempt's Job was given by its job."""
        job = self.job(handle) or {"metadata": {}}
        ours = (RUN, ATTEMPT, QUEUE)
        return {name: str(text) for name, text in (job["metadata"].get("labels") or {}).items() if name not in ours}

    def _handle(self, job: Object) -> str:
        about = job["metadata"]
        return f"{self._api.place.identity}/{about['namespace']}/{about['name']}/{about['uid']}"

    # -- look ----------------------------------------------------------------------------------------------------------

    def job(self, handle: str) -> Object | None:
        """Return an attempt's Job, None where it is gone or another one has its name.

        Raises BackendError where the context leads to another cluster than the one that the Job was created in.
        """
        cluster, space, name, uid = parts(handle)
        found = self._api.get(f"/apis/batch/v1/namespaces/{space}/jobs/{name}", "the Job cannot be looked at")
        if found and found["metadata"]["uid"] == uid:
            return found
        here = self._api.place.identity
        if here != cluster:  # the same cluster by another address would have it: uids are unique
            said = f"{space}/{name} was submitted to the cluster {cluster}, the context leads to {here}"
            raise BackendError(said, "options.kubernetes.context, or $KUBECONFIG, chooses the cluster")
        return None

    def pods(self, handle: str) -> list[Object]:
        """Return what is left of an attempt's pods, those of starts anew too, in the order in which they were made."""
        _, space, name, uid = parts(handle)
        query = {"labelSelector": f"{ATTEMPT}={name}"}
        listed = self._api.get(f"/api/v1/namespaces/{space}/pods", "the pods cannot be listed", query) or {}
        found = [pod for pod in listed.get("items") or () if _belongs(pod, uid)]
        return sorted(found, key=lambda pod: age(pod, str(pod["metadata"].get("creationTimestamp"))))

    def status(self, handle: str) -> Status:
        """Return the attempt's state; while it waits, the reason is the cluster's own."""
        job = self.job(handle)
        if job is None:
            return Status(State.LOST, None, f"the Job {'/'.join(parts(handle)[1:3])} is gone")
        pods = self.pods(handle)
        found = status_of(job, pods)
        if found.state is State.STARTING and not found.reason:
            return replace(found, reason=self._event(job, pods))
        return found

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> the image that it runs, of those that have pulled theirs and whose pods are there."""
        return {node: found for node, pod in by_node(self.pods(handle)).items() if (found := image(pod))}

    def _event(self, job: Object, pods: list[Object]) -> str:
        """Return the newest warning about a pod that waits, or about the Job where there is none: a quota says so there."""
        waiting = [pod for pod in by_node(pods).values() if not container(pod)]
        about = (waiting or [job])[0]["metadata"]
        return self.warning(str(job["metadata"]["namespace"]), str(about["uid"]))

    def warning(self, space: str, uid: str) -> str:
        """Return the newest warning about an object, "" where there is none or events may not be read."""
        query = {"fieldSelector": f"involvedObject.uid={uid}"}
        try:
            events = self._api.get(f"/api/v1/namespaces/{space}/events", "events cannot be listed", query) or {}
        except KubeError:
            return ""  # nothing depends on it
        found = [event for event in events.get("items") or () if event.get("type") == "Warning"]
        newest = max(found, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""), default=None)
        return f"{newest.get('reason')}: {newest.get('message')}" if newest else ""

    # -- end -----------------------------------------------------------------------------------------------------------

    def cancel(self, handle: str) -> None:
        """Ask for the end; what has ended, or is gone, stays as it is."""
        job = self.job(handle)
        if job is None or condition(job, "Complete") or condition(job, "Failed"):
            return
        _, space, name, uid = parts(handle)
        what = "the Job cannot be cancelled"
        self._patch(
            space, name, {"metadata": {"annotations": {CANCELLED: "yes"}}, "spec": {"suspend": True}}, what, (404,)
        )
        if QUEUE in (job["metadata"].get("labels") or {}):  # Kueue would admit it again
            body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
            self._api.call("DELETE", f"/apis/batch/v1/namespaces/{space}/jobs/{name}", what, body=body, fine=(404, 409))


def _is(job: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Return whether a Job is the one that a plan wants: its pods have these orders, whatever a server has added."""
    known = dict(_orders(job))
    return all(known.get(name) == value for name, value in _orders(wanted))


def _orders(job: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    pod = job["spec"]["template"]["spec"]
    for each in (*(pod.get("initContainers") or ()), *pod["containers"]):
        for item in each.get("env") or ():
            if "valueFrom" not in item:  # a server fills in fields of those
                yield (each["name"], item["name"]), item.get("value", "")


def _belongs(pod: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())


def _base(plural: str) -> str:
    return "/apis/batch/v1" if plural == "jobs" else "/api/v1"


def parts(handle: str) -> tuple[str, str, str, str]:
    """Return cluster, namespace, name and uid of a handle; raises BackendError."""
    found = handle.rsplit("/", 3)
    if len(found) != 4 or not all(found):
        raise BackendError(f"{handle!r} is no Job's handle", "CLUSTER/NAMESPACE/NAME/UID")
    return found[0], found[1], found[2], found[3]
