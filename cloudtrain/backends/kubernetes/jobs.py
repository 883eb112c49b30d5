"""Create, find, inspect and cancel Kubernetes Jobs.

The handle is <cluster>/<namespace>/<name>/<uid>. submit creates the Job suspended, then the objects that it owns, and a
patch starts it: four calls, each safe to repeat. cancel suspends the Job: its pods are deleted, its record stays. A Job
is not reported as lost when the context points to another cluster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError, error_for_answer
from cloudtrain.backends.kubernetes.names import ATTEMPT, CANCELLED, MAX_EXEC, QUEUE, RUN, STARTED
from cloudtrain.backends.kubernetes.request import UID, fill_placeholders
from cloudtrain.backends.kubernetes.status import (
    condition,
    creation_order,
    first_start,
    get_annotations,
    image_digest,
    newest_by_node,
    newest_note,
    silent_objects,
    status_of,
    waiting_reason,
)
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import State, Status

Object = dict[str, Any]
PATHS = {"Service": "services", "ConfigMap": "configmaps", "NetworkPolicy": "networkpolicies"}
GROUPS = {"jobs": "/apis/batch/v1", "networkpolicies": "/apis/networking.k8s.io/v1"}


class KubeJobs:
    """The Jobs of one kubeconfig context. Every call blocks; raises BackendError."""

    def __init__(self, api: KubeApi, poll_s: float = 0.0) -> None:
        self._api, self._fresh_s = api, 2.5 * poll_s
        # Handle -> when its status was asked for (monotonic), its Job, and its pods without their spec
        self._known: dict[str, tuple[float, Object, list[Object]]] = {}

    # -- submit --------------------------------------------------------------------------------------------------------

    def submit(self, request: Mapping[str, Any], bundle_base64: str) -> str:
        """Create the planned objects, start the Job unless it was started before, and return its handle."""
        namespace = request["namespace"]
        job_manifest, *owned_manifests = request["manifests"]
        job = self._create(namespace, "jobs", job_manifest)
        if not _is_same_job(job, job_manifest):
            name = job_manifest["metadata"]["name"]
            raise BackendError(
                f"there is a Job {name} already, and it is another one", "submit again: the run gets another name"
            )
        uid = str(job["metadata"]["uid"])
        if STARTED not in get_annotations(job) and CANCELLED not in get_annotations(job):
            try:
                self._create_owned(namespace, uid, owned_manifests, bundle_base64)
                self._patch(namespace, str(job["metadata"]["name"]), request["start"], "the Job cannot be started")
            except Unreachable:
                raise
            except BackendError:
                self._delete_refused_job(job)
                raise
        return self._handle(job)

    def _create_owned(
        self, namespace: str, uid: str, manifests: Sequence[Mapping[str, Any]], bundle_base64: str
    ) -> None:
        """Create the Service and the ConfigMap that a Job owns."""
        for manifest in manifests:
            created = self._create(
                namespace,
                PATHS[manifest["kind"]],
                fill_placeholders(manifest, {UID: uid, "${bundle.bytes}": bundle_base64}),
            )
            if not any(owner["uid"] == uid for owner in created["metadata"].get("ownerReferences") or ()):
                message = f"there is a {manifest['kind']} {manifest['metadata']['name']} already, of another Job"
                raise BackendError(message, "it is being removed, perhaps: submit again")

    def _delete_refused_job(self, job: Object) -> None:
        """Delete a Job whose submission was refused halfway.

        A suspended Job runs nothing, so a missing permission does not matter. But a queue may start it: raises Unreachable
        if a queued Job cannot be deleted.
        """
        metadata = job["metadata"]
        try:
            self.delete(self._handle(job))
        except BackendError as error:
            if QUEUE in (metadata.get("labels") or {}):
                message = f"the submission was refused, and its Job is still in the queue: {error.message}"
                raise Unreachable(message, error.hint) from None

    def _create(self, namespace: str, plural: str, manifest: Mapping[str, Any]) -> Object:
        """Create an object, or return the existing one with that name."""
        failure = f"the {manifest['kind']} was not accepted"
        collection = f"{GROUPS.get(plural, '/api/v1')}/namespaces/{namespace}/{plural}"
        answer = self._api.call("POST", collection, failure, body=manifest, accept=(409,))
        if answer.status != 409:
            return dict(answer.json)
        existing = self._api.get(f"{collection}/{manifest['metadata']['name']}", failure)
        if existing is None:
            raise error_for_answer(answer._replace(data=b"it was removed while it was created"), failure)
        return existing

    def _patch(
        self, namespace: str, name: str, change: Mapping[str, Any], failure: str, accept: tuple[int, ...] = ()
    ) -> None:
        self._api.call(
            "PATCH", f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}", failure, body=change, accept=accept
        )

    def find(self, namespace: str, attempt_id: str) -> str | None:
        """Return the handle of an attempt's Job; None if there is none, or if it was not started yet (submit does that)."""
        job = self._api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{attempt_id}", "the Job cannot be looked up")
        return self._handle(job) if job is not None and STARTED in get_annotations(job) else None

    def discard(self, namespace: str, attempt_id: str) -> None:
        """Cancel the Job of an interrupted submission, even if we never started it: a queue may start it."""
        job = self._api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{attempt_id}", "the Job cannot be looked up")
        if job is not None:
            self.cancel(self._handle(job))

    def labels(self, handle: str) -> dict[str, str]:
        """Return the user's labels of an attempt's Job, without our own."""
        job = self.job(handle) or {"metadata": {}}
        own_labels = (RUN, ATTEMPT, QUEUE, MAX_EXEC)
        return {
            name: str(value) for name, value in (job["metadata"].get("labels") or {}).items() if name not in own_labels
        }

    def _handle(self, job: Object) -> str:
        metadata = job["metadata"]
        return f"{self._api.access.identity}/{metadata['namespace']}/{metadata['name']}/{metadata['uid']}"

    # -- look ----------------------------------------------------------------------------------------------------------

    def job(self, handle: str) -> Object | None:
        """Return an attempt's Job, None if it is gone or another one has its name.

        Raises BackendError if the context points to another cluster than the one that the Job was created in.
        """
        cluster, namespace, name, uid = parse_handle(handle)
        job = self._api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}", "the Job cannot be looked at")
        if job and job["metadata"]["uid"] == uid:
            return job
        current_cluster = self._api.access.identity
        if current_cluster != cluster:  # if it were the same cluster under another address, it would have this uid
            message = (
                f"{namespace}/{name} was submitted to the cluster {cluster}, the context leads to {current_cluster}"
            )
            raise BackendError(message, "options.kubernetes.context, or $KUBECONFIG, chooses the cluster")
        return None

    def pods(self, handle: str) -> list[Object]:
        """Return an attempt's pods that still exist, restarted ones included, in order of creation."""
        _, namespace, name, uid = parse_handle(handle)
        query = {"labelSelector": f"{ATTEMPT}={name}"}
        pod_list = self._api.get(f"/api/v1/namespaces/{namespace}/pods", "the pods cannot be listed", query) or {}
        return pods_of(uid, pod_list.get("items") or ())

    def remember(self, handle: str, job: Object, pods: Iterable[Object]) -> None:
        """Keep what a status was made of, for `known`."""
        kept = [{"metadata": pod["metadata"], "status": pod["status"]} for pod in pods]
        self._known[handle] = time.monotonic(), job, kept

    def known(self, handle: str) -> tuple[Object, list[Object]] | None:
        """Return an attempt's Job and pods as they were when its status was asked for not long ago; None else."""
        asked_at, job, pods = self._known.get(handle, (-math.inf, {}, []))
        return (job, pods) if time.monotonic() - asked_at < self._fresh_s else None

    def forget_old(self) -> None:
        """Forget what is too old to be used."""
        self._known = {handle: self._known[handle] for handle in list(self._known) if self.known(handle)}

    def status(self, handle: str) -> Status:
        """Return the attempt's state; while it waits, the reason is the cluster's message."""
        job = self.job(handle)
        if job is None:
            return Status(State.LOST, None, f"the Job {'/'.join(parse_handle(handle)[1:3])} is gone")
        pods = self.pods(handle)
        self.remember(handle, job, pods)
        status = status_of(job, pods)
        if status.state is not State.STARTING:
            return status
        namespace = str(job["metadata"]["namespace"])
        silent = [str(each["metadata"]["uid"]) for each in silent_objects(job, pods)]
        return replace(status, reason=waiting_reason(job, pods, self.newest_notes(namespace, silent)))

    def images(self, handle: str) -> dict[int, str]:
        """Return node rank -> image digest, for nodes whose pods exist and have pulled their image."""
        return {
            node: digest for node, pod in newest_by_node(self.pods(handle)).items() if (digest := image_digest(pod))
        }

    def newest_notes(self, namespace: str, uids: Iterable[str]) -> dict[str, str]:
        """Return uid -> the newest event that says why an object waits; what is known where events may not be read."""
        notes: dict[str, str] = {}
        for uid in uids:
            query = {"fieldSelector": f"involvedObject.uid={uid}"}
            try:
                events = self._api.get(f"/api/v1/namespaces/{namespace}/events", "events cannot be listed", query) or {}
            except KubeError:
                break  # nothing depends on it
            notes[uid] = newest_note(events.get("items") or ())
        return notes

    # -- end -----------------------------------------------------------------------------------------------------------

    def cancel(self, handle: str) -> None:
        """Cancel the Job; does nothing if it has ended or is gone."""
        job = self.job(handle)
        if job is None or condition(job, "Complete") or condition(job, "Failed"):
            return
        _, namespace, name, _ = parse_handle(handle)
        failure = "the Job cannot be cancelled"
        noted = get_annotations(job).get(CANCELLED)
        started = first_start(self.pods(handle)) or "" if noted is None else noted  # the pods will be gone
        self._patch(
            namespace,
            name,
            {"metadata": {"annotations": {CANCELLED: started}}, "spec": {"suspend": True}},
            failure,
            (404,),
        )
        if QUEUE in (job["metadata"].get("labels") or {}):  # Kueue would admit it again
            self.delete(handle, failure)

    def delete(self, handle: str, failure: str = "the Job cannot be removed") -> None:
        """Delete an attempt's Job with all that it owns; does nothing if it is gone."""
        _, namespace, name, uid = parse_handle(handle)
        body = {"propagationPolicy": "Background", "preconditions": {"uid": uid}}
        path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}"
        self._api.call("DELETE", path, failure, body=body, accept=(404, 409))


def pods_of(uid: str, pods: Iterable[Object]) -> list[Object]:
    """Return the pods of a Job among others, in order of creation."""
    own = [pod for pod in pods if _is_owned_by(pod, uid)]
    return sorted(own, key=lambda pod: creation_order(pod, str(pod["metadata"].get("creationTimestamp"))))


def _is_same_job(job: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Return whether an existing Job was created from a manifest: its environment has all values of the manifest's."""
    existing = dict(_env_values(job))
    return all(existing.get(name) == value for name, value in _env_values(manifest))


def _env_values(job: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    pod_spec = job["spec"]["template"]["spec"]
    for container in (*(pod_spec.get("initContainers") or ()), *pod_spec["containers"]):
        for variable in container.get("env") or ():
            if "valueFrom" not in variable:  # the server adds fields to those
                yield (container["name"], variable["name"]), variable.get("value", "")


def _is_owned_by(pod: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences") or ())


def parse_handle(handle: str) -> tuple[str, str, str, str]:
    """Split a handle into cluster, namespace, name and uid; raises BackendError."""
    fields = handle.rsplit("/", 3)
    if len(fields) != 4 or not all(fields):
        raise BackendError(f"{handle!r} is no Job's handle", "CLUSTER/NAMESPACE/NAME/UID")
    return fields[0], fields[1], fields[2], fields[3]
