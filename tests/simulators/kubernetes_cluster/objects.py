"""Stores the objects of the simulated API server: uids, versions, defaults, selectors, patches, and changes for watches."""

from __future__ import annotations

import json
import re
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators.http import ApiError, Response
from cloudtrain.simulators.replicas import pick_addresses

KINDS = {
    "jobs": "Job",
    "jobsets": "JobSet",
    "trainjobs": "TrainJob",
    "clustertrainingruntimes": "ClusterTrainingRuntime",
    "workloads": "Workload",
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "events": "Event",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "networkpolicies": "NetworkPolicy",
    "resourcequotas": "ResourceQuota",
    "namespaces": "Namespace",
    "serviceaccounts": "ServiceAccount",
}
# others are of the core group
GROUPS = {
    "jobs": "batch/v1",
    "networkpolicies": "networking.k8s.io/v1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "clustertrainingruntimes": "trainer.kubeflow.org/v1alpha1",
    "workloads": "kueue.x-k8s.io/v1beta1",
}
REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
           409: "AlreadyExists", 410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid",
           504: "Timeout"}  # fmt: skip
MAX_CHANGES = 1000  # changes that a watch can still see
Object = dict[str, Any]


class StatusError(ApiError):
    """An error as Kubernetes returns it: an object of kind Status."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(status, message)
        self.reason = reason or REASONS.get(status, "InternalError")

    @property
    def response(self) -> Response:
        about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return Response({**about, "message": self.message, "reason": self.reason, "code": self.status}, self.status)


class Objects:
    """All objects by (plural, namespace, name); every change has a version. Guarded by `lock`, which is re-entrant."""

    def __init__(self, clock: Clock = SYSTEM) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self._objects: dict[tuple[str, str, str], Object] = {}
        self._version = 100
        self.changes: list[tuple[int, str, str, str, Object]] = []  # version, type, plural, namespace, object

    @property
    def version(self) -> int:
        return self._version

    def get(self, plural: str, namespace: str, name: str) -> Object | None:
        return self._objects.get((plural, namespace, name))

    def all(self, plural: str, namespace: str = "") -> list[Object]:
        with self.lock:
            return [o for (p, ns, _), o in sorted(self._objects.items()) if p == plural and namespace in ("", ns)]

    def add(self, plural: str, namespace: str, resource: Object) -> Object:
        """Store a new object with name, uid and creation time; raises StatusError when the name is taken."""
        with self.lock:
            metadata = resource.setdefault("metadata", {})
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
            name = str(metadata.get("name", ""))
            if (plural, namespace, name) in self._objects:
                raise StatusError(409, f'{plural} "{name}" already exists')
            metadata |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(self.clock),
                "generation": 1,
            }
            self._objects[plural, namespace, name] = resource
            return self.touch(plural, resource, "ADDED")

    def add_event(self, kind: str, resource: Object, reason: str, message: str, type_: str = "Warning") -> None:
        """Store an event of an object."""
        metadata = resource["metadata"]
        event: Object = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}."},
            "involvedObject": {"kind": kind, "name": metadata["name"], "uid": metadata["uid"]},
            "reason": reason,
            "message": message,
            "type": type_,
            "lastTimestamp": now(self.clock),
        }
        self.add("events", metadata["namespace"], event)

    def touch(self, plural: str, resource: Object, kind: str = "MODIFIED") -> Object:
        """Give a changed object a new version and notify watches."""
        with self.lock:
            self._version += 1
            resource["metadata"]["resourceVersion"] = str(self._version)
            copy = json.loads(json.dumps(resource))
            self.changes.append((self._version, kind, plural, resource["metadata"]["namespace"], copy))
            del self.changes[:-MAX_CHANGES]
            self.changed.notify_all()
            return resource

    def remove(self, plural: str, resource: Object) -> None:
        with self.lock:
            metadata = resource["metadata"]
            if self._objects.pop((plural, metadata["namespace"], metadata["name"]), None) is not None:
                self.touch(plural, resource, "DELETED")


def condition(kind: str, status: str = "True") -> Object:
    """Return a condition with the current transition time."""
    return {"type": kind, "status": status, "lastTransitionTime": now()}


def now(clock: Clock = SYSTEM) -> str:
    """Return the current time in the API's format."""
    return clock.utc().strftime("%Y-%m-%dT%H:%M:%SZ")


_COMMA = re.compile(r",(?![^(]*\))")  # between terms, not between the values of a set
_SET = re.compile(r"(\S+)\s+(in|notin)\s*\(([^()]*)\)")


def parse_selector(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Parse labelSelector and fieldSelector into a predicate; raises StatusError for unsupported selectors."""
    terms: list[tuple[tuple[str, ...], set[str] | None, bool]] = []
    for field, base in (("labelSelector", ("metadata", "labels")), ("fieldSelector", ())):
        for term in filter(None, _COMMA.split(query.get(field, ""))):
            if base and (match := _SET.fullmatch(term.strip())):
                values = {value.strip() for value in match[3].split(",")}
                terms.append(((*base, match[1]), values, match[2] == "in"))
                continue
            positive = "!=" not in term
            key, equal, value = term.replace("!=", "=").replace("==", "=").partition("=")
            if " " in key.strip():
                raise StatusError(400, f"unable to parse requirement: {term}")
            path = (*base, key) if base else tuple(key.split("."))
            terms.append((path, {value} if equal else None, positive))

    def matches(resource: Object) -> bool:
        for path, values, positive in terms:
            value_at_path: Any = resource
            for key in path:
                value_at_path = value_at_path.get(key) if isinstance(value_at_path, Mapping) else None
            matches = value_at_path is not None if values is None else (value_at_path or "") in values
            if matches is not positive:
                return False
        return True

    return matches


def set_job_defaults(job: Object) -> None:
    """Set the defaults of a Job, as the API server does."""
    spec = job["spec"]
    for name, value in {"suspend": False, "backoffLimit": 6, "completionMode": "NonIndexed", "parallelism": 1}.items():
        spec.setdefault(name, value)
    _set_spec_defaults(spec["template"]["spec"])
    job["status"] = {}


def set_pod_defaults(pod: Object) -> None:
    """Set the defaults of a pod, with phase Pending."""
    metadata, spec = pod["metadata"], pod["spec"]
    _set_spec_defaults(spec)
    spec.setdefault("hostname", metadata.get("name", "pod"))
    pod["status"] = {"phase": "Pending", "conditions": [], "podIP": pick_addresses(1)[0]}


def _set_spec_defaults(spec: Object) -> None:
    usual = {"dnsPolicy": "ClusterFirst", "schedulerName": "default-scheduler", "securityContext": {}}
    for name, value in {**usual, "terminationGracePeriodSeconds": 30}.items():
        spec.setdefault(name, value)
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        container.setdefault("imagePullPolicy", "IfNotPresent")
        container.setdefault("terminationMessagePath", "/dev/termination-log")
        container.setdefault("terminationMessagePolicy", "File")
        for item in container.get("env", ()):
            if item.get("value") == "":
                del item["value"]
            if reference := (item.get("valueFrom") or {}).get("fieldRef"):
                reference.setdefault("apiVersion", "v1")
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            volume["configMap"].setdefault("defaultMode", 420)


def apply_merge_patch(target: Any, patch: Any) -> Any:
    """Apply a JSON merge patch (RFC 7396): objects are merged, lists replaced."""
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = apply_merge_patch(merged.get(key), value)
    return merged
