"""Create, find, inspect and cancel Kubernetes Jobs, and objects of other kinds that make one (kinds.py).

The handle is <cluster>/<namespace>/<name>/<uid>, of a JobSet <cluster>/<namespace>/jobset:<name>/<uid>. submit creates
the Job suspended, then the objects that it owns, and a patch starts it: four calls, each safe to repeat, after one that
asks for the account's permissions. cancel suspends the Job: its pods are deleted, its record stays. A Job is not reported
as lost when the context points to another cluster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError, error_for_answer
from cloudtrain.backends.kubernetes.kinds import (
    KINDS,
    RUNTIMES,
    as_job,
    child_names,
    is_child,
    pods_owners,
    runtime_problems,
)
from cloudtrain.backends.kubernetes.kueue import with_ends
from cloudtrain.backends.kubernetes.names import ATTEMPT, CANCELLED, MAX_EXEC, QUEUE, RUN, STARTED
from cloudtrain.backends.kubernetes.permissions import Permission, find_missing
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
    split_pod,
    status_of,
    waiting_reason,
)
from cloudtrain.errors import BackendError, Unreachable, first_request, page
from cloudtrain.events import State, Status

Object = dict[str, Any]
PATHS = {
    **{kind.name: kind.path for kind in KINDS.values()},
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
}
SIMULATED_S = 1.0  # whoever sets a shorter `poll_s` wants to know of changes at once
STRICT = {"fieldValidation": "Strict"}  # kubectl's default too; the server's is to drop unknown fields with a warning


class Handle(NamedTuple):
    """What an attempt's handle names."""

    cluster: str
    namespace: str
    name: str
    uid: str
    kind: str  # Job, JobSet or TrainJob

    @property
    def path(self) -> str:
        return f"{PATHS[self.kind].format(self.namespace)}/{self.name}"


class KubeJobs:
    """The Jobs of a namespace: the calls of a backend that the API server answers. They raise BackendError."""

    def __init__(self, api: KubeApi, poll_s: float = 0.0, kind: str = "job", namespace: str = "default") -> None:
        self._api, self.kind, self._namespace = api, KINDS[kind].name, namespace
        # Old attempts are asked about every 30 s; until then their logs are read of the pods that are known.
        self._fresh_s = 2.5 * poll_s if poll_s < SIMULATED_S else 40.0
        # Handle -> when its status was asked for (monotonic), its Job, and its pods without their spec
        self._known: dict[str, tuple[float, Object, list[Object]]] = {}

    # -- submit --------------------------------------------------------------------------------------------------------

    def create(self, request: Mapping[str, Any], bundle_base64: str) -> str:
        """Create the planned objects, start the Job unless it was started before, and return its handle."""
        namespace = request["namespace"]
        job_manifest, *owned_manifests = request["manifests"]
        with first_request():
            self._check_permissions(namespace, request["manifests"])
            self._check_runtime(job_manifest["spec"].get("runtimeRef"))
            job = self._create(namespace, job_manifest)
        if not _is_same_job(job, job_manifest):
            name = job_manifest["metadata"]["name"]
            raise BackendError(
                f"a different Job named {name} already exists", "submit again: the new run gets another name"
            )
        uid = str(job["metadata"]["uid"])
        if STARTED not in get_annotations(job) and CANCELLED not in get_annotations(job):
            try:
                self._create_owned(namespace, uid, owned_manifests, bundle_base64)
                self._patch(
                    self._path(namespace, str(job["metadata"]["name"])), request["start"], "the Job cannot be started"
                )
            except Unreachable:
                raise
            except BackendError:
                self._delete_refused_job(job)
                raise
        return self.handle(job)

    def _check_permissions(self, namespace: str, manifests: Sequence[Mapping[str, Any]]) -> None:
        """Refuse an attempt that the account may not create, start or read; raises BackendError before anything is sent."""
        places = {manifest["kind"]: _place(manifest["kind"]) for manifest in manifests}
        wanted = [Permission("create", *place) for place in places.values()]
        verbs = ["get", "patch", *(["delete"] if QUEUE in (manifests[0]["metadata"].get("labels") or {}) else [])]
        wanted += [Permission(verb, *_place(self.kind)) for verb in verbs]
        if missing := find_missing(self._api, namespace, wanted):
            names = ", ".join(f"{verb} {resource}" for verb, _, resource in missing)
            raise BackendError(
                f"your account may not {names} in the namespace {namespace}: nothing was created",
                "`cloudtrain permissions -t TARGET` prints the role that you need",
            )

    def _check_runtime(self, reference: Mapping[str, Any] | None) -> None:
        """Refuse a TrainJob whose runtime is not there, or would start single nodes again; raises BackendError."""
        if reference is None:
            return
        name = reference["name"]
        runtime = self._api.get(f"{RUNTIMES}/{name}", f"the ClusterTrainingRuntime {name} cannot be read")
        if runtime is None:
            hint = "kubectl get clustertrainingruntimes lists them: options.kubernetes.runtime names one"
            raise BackendError(f"the cluster has no ClusterTrainingRuntime {name}", hint)
        if lacking := runtime_problems(runtime):
            message = f"the ClusterTrainingRuntime {name} lacks: {'; '.join(lacking)}"
            raise BackendError(message, f"{page('Recipes for Kubernetes')} has a runtime that fits")

    def _create_owned(
        self, namespace: str, uid: str, manifests: Sequence[Mapping[str, Any]], bundle_base64: str
    ) -> None:
        """Create the Service and the ConfigMap that a Job owns."""
        for manifest in manifests:
            filled = fill_placeholders(manifest, {UID: uid, "${bundle.bytes}": bundle_base64})
            created = self._create(namespace, filled)
            if not any(owner["uid"] == uid for owner in created["metadata"].get("ownerReferences") or ()):
                message = (
                    f"a {manifest['kind']} {manifest['metadata']['name']} already exists and belongs to another Job"
                )
                raise BackendError(
                    message, f"Kubernetes may still be deleting that {manifest['kind']}: submit again in a minute"
                )

    def _delete_refused_job(self, job: Object) -> None:
        """Delete a Job whose submission was refused halfway.

        A suspended Job runs nothing, so a missing permission does not matter. But a queue may start it: raises Unreachable
        if a queued Job cannot be deleted.
        """
        metadata = job["metadata"]
        try:
            self.delete(self.handle(job))
        except BackendError as error:
            if QUEUE in (metadata.get("labels") or {}):
                message = f"the submission was refused, and its Job is still in the queue: {error.message}"
                raise Unreachable(message, error.hint) from None

    def _create(self, namespace: str, manifest: Mapping[str, Any]) -> Object:
        """Create an object, or return the existing one with that name; a field that the server does not know is refused."""
        failure = f"the {manifest['kind']} was not accepted"
        collection = PATHS[manifest["kind"]].format(namespace)
        answer = self._api.call("POST", collection, failure, query=STRICT, body=manifest, accept=(409,))
        if answer.status != 409:
            return dict(answer.json)
        existing = self._api.get(f"{collection}/{manifest['metadata']['name']}", failure)
        if existing is None:
            raise error_for_answer(answer._replace(data=b"it was removed while it was created"), failure)
        return existing

    def _path(self, namespace: str, attempt_id: str) -> str:
        return f"{PATHS[self.kind].format(namespace)}/{attempt_id}"

    def _patch(self, path: str, change: Mapping[str, Any], failure: str, accept: tuple[int, ...] = ()) -> None:
        self._api.call("PATCH", path, failure, body=change, accept=accept)

    def find(self, attempt_id: str) -> str | None:
        """Return the handle of an attempt's Job; None if there is none, or if it was not started yet (submit does that)."""
        job = self._api.get(self._path(self._namespace, attempt_id), "the Job cannot be read")
        return self.handle(job) if job is not None and STARTED in get_annotations(job) else None

    def discard(self, attempt_id: str) -> None:
        """Cancel the Job of an interrupted submission, even if we never started it: a queue may start it."""
        job = self._api.get(self._path(self._namespace, attempt_id), "the Job cannot be read")
        if job is not None:
            self.cancel(self.handle(job))

    def labels(self, handle: str) -> dict[str, str]:
        """Return the user's labels of an attempt's Job, without our own."""
        job = self.job(handle) or {"metadata": {}}
        labels, own_labels = job["metadata"].get("labels") or {}, (RUN, ATTEMPT, QUEUE, MAX_EXEC)
        return {name: str(value) for name, value in labels.items() if name not in own_labels}

    def handle(self, job: Object) -> str:
        """Return the handle of an attempt's Job."""
        metadata, prefix = job["metadata"], "" if job["kind"] == "Job" else f"{job['kind'].lower()}:"
        return f"{self._api.access.identity}/{metadata['namespace']}/{prefix}{metadata['name']}/{metadata['uid']}"

    # -- look ----------------------------------------------------------------------------------------------------------

    def job(self, handle: str) -> Object | None:
        """Return an attempt's Job, None if it is gone or another one has its name; other kinds are read as a Job.

        Raises BackendError if the context points to another cluster than the one that the Job was created in.
        """
        cluster, namespace, name, uid, _ = parsed = parse_handle(handle)
        job = self._api.get(parsed.path, "the Job cannot be read")
        if job and job["metadata"]["uid"] == uid:
            return with_ends(self._api, namespace, [as_job(job, self._children(parsed, job))])[0]
        current_cluster = self._api.access.identity
        if current_cluster != cluster:  # if it were the same cluster under another address, it would have this uid
            message = (
                f"{namespace}/{name} was submitted to the cluster {cluster}, the kubeconfig's context "
                f"points to {current_cluster}"
            )
            raise BackendError(message, "set options.kubernetes.context or $KUBECONFIG to choose the cluster")
        return None

    def _children(self, handle: Handle, parent: Object) -> list[Object]:
        """Return the Jobs that a controller made for an object; [] for a Job."""
        paths = [f"{PATHS['Job'].format(handle.namespace)}/{name}" for name in child_names(parent)]
        found = [self._api.get(path, f"the {handle.kind}'s Job cannot be read") for path in paths]
        return [child for child in found if child and is_child(child, handle.uid, handle.name)]

    def pods(self, handle: str, job: Object | None = None) -> list[Object]:
        """Return an attempt's pods that still exist, restarted ones included, in order of creation.

        Args:
            job: its Job, where it was asked for just now.
        """
        _, namespace, name, uid, kind = parse_handle(handle)
        job = job or (self.job(handle) if kind != "Job" else None) or {"metadata": {"uid": uid}}
        path, query = f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"{ATTEMPT}={name}"}
        pod_list = self._api.get(path, "the pods cannot be listed", query) or {}
        return pods_of(job, pod_list.get("items") or ())

    def visible_pods(self, handle: str, job: Object) -> list[Object]:
        """Return an attempt's pods, [] where the account may not list pods: its Job alone says the state then.

        What was seen is remembered; a log that is read of no pods would be empty, and nobody would learn why.
        """
        try:
            pods = self.pods(handle, job)
        except KubeError as error:
            if error.status != 403:
                raise
            return []
        self.remember(handle, job, pods)
        return pods

    def remember(self, handle: str, job: Object, pods: Iterable[Object]) -> None:
        """Keep what a status was made of, for `known`."""
        kept: list[Object] = [
            {key: pod[key] for key in ("metadata", "status", "container") if key in pod} for pod in pods
        ]
        self._known[handle] = self._api.clock.monotonic(), job, kept

    def known(self, handle: str) -> tuple[Object, list[Object]] | None:
        """Return an attempt's Job and pods as they were when its status was asked for not long ago; None else."""
        asked_at, job, pods = self._known.get(handle, (-math.inf, {}, []))
        return (job, pods) if self._api.clock.monotonic() - asked_at < self._fresh_s else None

    def forget_old(self) -> None:
        """Forget what is too old to be used."""
        self._known = {handle: self._known[handle] for handle in list(self._known) if self.known(handle)}

    def status(self, handle: str) -> Status:
        """Return the attempt's state; while it waits, the reason is the cluster's message."""
        job = self.job(handle)
        if job is None:
            return Status(State.LOST, None, f"the Job {'/'.join(parse_handle(handle)[1:3])} no longer exists")
        pods = self.visible_pods(handle, job)
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
        failure = "the Job cannot be cancelled"
        noted = get_annotations(job).get(CANCELLED)
        started = first_start(self.visible_pods(handle, job)) or "" if noted is None else noted  # the pods will be gone
        change = {"metadata": {"annotations": {CANCELLED: started}}, "spec": {"suspend": True}}
        self._patch(parse_handle(handle).path, change, failure, (404,))
        if QUEUE in (job["metadata"].get("labels") or {}):  # Kueue would admit it again
            self.delete(handle, failure)

    def remains(self, handle: str) -> dict[str, int | None]:
        _, namespace, name, _, kind = parse_handle(handle)
        return {f"{kind} {namespace}/{name}": None} if self.job(handle) else {}

    def remove(self, handle: str) -> None:
        self.delete(handle)

    def delete(self, handle: str, failure: str = "the Job cannot be removed") -> None:
        """Delete an attempt's Job with all that it owns; does nothing if it is gone."""
        parsed = parse_handle(handle)
        body = {"propagationPolicy": "Background", "preconditions": {"uid": parsed.uid}}
        self._api.call("DELETE", parsed.path, failure, body=body, accept=(404, 409))


def _place(kind: str) -> tuple[str, str]:
    """Return API group and plural of a kind."""
    parts = PATHS[kind].split("/")
    return parts[2] if parts[1] == "apis" else "", parts[-1]


def pods_of(job: Object, pods: Iterable[Object]) -> list[Object]:
    """Return the pods of a Job among others, in order of creation: one for each node, where several roles share pods."""
    uids = {owner["metadata"]["uid"] for owner in pods_owners(job)}
    own = [pod for pod in pods if any(is_owned_by(pod, uid) for uid in uids)]
    own.sort(key=lambda pod: creation_order(pod, str(pod["metadata"].get("creationTimestamp"))))
    return [node for pod in own for node in split_pod(pod)]


def _is_same_job(job: Mapping[str, Any], manifest: Mapping[str, Any]) -> bool:
    """Return whether an existing Job was created from a manifest: its environment has all values of the manifest's."""
    existing = dict(_env_values(job))
    return all(existing.get(name) == value for name, value in _env_values(manifest))


def _env_values(job: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str]]:
    pod_spec = as_job(job)["spec"]["template"]["spec"]
    for container in (*(pod_spec.get("initContainers") or ()), *pod_spec["containers"]):
        for variable in container.get("env") or ():
            if "valueFrom" not in variable:  # the server adds fields to those
                yield (container["name"], variable["name"]), variable.get("value", "")


def is_owned_by(resource: Object, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in resource["metadata"].get("ownerReferences") or ())


def parse_handle(handle: str) -> Handle:
    """Parse an attempt's handle; raises BackendError."""
    fields = handle.rsplit("/", 3)
    kind, _, name = fields[2].rpartition(":") if len(fields) == 4 else ("", "", "")
    if not (all(fields) and name and (kind or "job") in KINDS):
        raise BackendError(f"{handle!r} is not the handle of a Job", "CLUSTER/NAMESPACE/NAME/UID")
    return Handle(fields[0], fields[1], name, fields[3], KINDS[kind or "job"].name)
