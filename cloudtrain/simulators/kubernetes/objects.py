"""What an API server keeps: objects with uids and versions, what it fills in, selectors, patches, and every change of them."""

from __future__ import annotations

import json
import secrets
import threading
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from cloudtrain.simulators.http import Answer
from cloudtrain.simulators.replicas import addresses

KINDS = {
    "jobs": "Job",
    "pods": "Pod",
    "services": "Service",
    "configmaps": "ConfigMap",
    "secrets": "Secret",
    "events": "Event",
    "persistentvolumeclaims": "PersistentVolumeClaim",
}
REASONS = {400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed",
           409: "AlreadyExists", 410: "Expired", 415: "UnsupportedMediaType", 422: "Invalid",
           504: "Timeout"}  # fmt: skip
KEPT = 1000  # changes that a watch may begin behind
Object = dict[str, Any]


class Refused(Exception):
    """An answer that is an error: its status and words."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason or REASONS.get(status, "InternalError")

    @property
    def answer(self) -> Answer:
        about = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return Answer({**about, "message": self.message, "reason": self.reason, "code": self.status}, self.status)


class Objects:
    """All objects by (plural, namespace, name); every change has a version. Guarded by `lock`, which is re-entrant."""

    def __init__(self) -> None:
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

    def add(self, plural: str, namespace: str, found: Object) -> Object:
        """Store a new object with what a server adds to it; raises Refused when the name is taken."""
        with self.lock:
            metadata = found.setdefault("metadata", {})
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = metadata["generateName"] + secrets.token_hex(3)[:5]
            name = str(metadata.get("name", ""))
            if (plural, namespace, name) in self._objects:
                raise Refused(409, f'{plural} "{name}" already exists')
            metadata |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
                "generation": 1,
            }
            self._objects[plural, namespace, name] = found
            return self.touch(plural, found, "ADDED")

    def touch(self, plural: str, found: Object, kind: str = "MODIFIED") -> Object:
        """Give a changed object its new version, and tell watchers."""
        with self.lock:
            self._version += 1
            found["metadata"]["resourceVersion"] = str(self._version)
            copy = json.loads(json.dumps(found))
            self.changes.append((self._version, kind, plural, found["metadata"]["namespace"], copy))
            del self.changes[:-KEPT]
            self.changed.notify_all()
            return found

    def remove(self, plural: str, found: Object) -> None:
        with self.lock:
            metadata = found["metadata"]
            if self._objects.pop((plural, metadata["namespace"], metadata["name"]), None) is not None:
                self.touch(plural, found, "DELETED")


def condition(kind: str, status: str = "True") -> Object:
    """Return a condition that begins now."""
    return {"type": kind, "status": status, "lastTransitionTime": now()}


def now() -> str:
    """Return the time as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def selector(query: Mapping[str, str]) -> Callable[[Object], bool]:
    """Return what labelSelector and fieldSelector of a list stand for; raises Refused for what is unknown here."""
    terms = []
    for field, base in (("labelSelector", ("metadata", "labels")), ("fieldSelector", ())):
        for term in filter(None, query.get(field, "").split(",")):
            wanted = "!=" not in term
            key, equal, value = term.replace("!=", "=").replace("==", "=").partition("=")
            if " in " in key or " notin " in key:
                raise Refused(400, f"this simulator knows no set-based selectors: {term}")
            path = (*base, key) if base else tuple(key.split("."))
            terms.append((path, value if equal else None, wanted))

    def fits(found: Object) -> bool:
        for path, value, wanted in terms:
            here: Any = found
            for key in path:
                here = here.get(key) if isinstance(here, Mapping) else None
            same = here is not None if value is None else (here or "") == value
            if same is not wanted:
                return False
        return True

    return fits


def complete_job(job: Object) -> None:
    """Fill in what a server does, which is then in its answers."""
    spec = job["spec"]
    for name, value in {"suspend": False, "backoffLimit": 6, "completionMode": "NonIndexed", "parallelism": 1}.items():
        spec.setdefault(name, value)
    _complete_spec(spec["template"]["spec"])
    job["status"] = {}


def complete_pod(pod: Object) -> None:
    """The same of a pod, which then waits for its node."""
    metadata, spec = pod["metadata"], pod["spec"]
    _complete_spec(spec)
    spec.setdefault("hostname", metadata.get("name", "pod"))
    pod["status"] = {"phase": "Pending", "conditions": [], "podIP": addresses(1)[0]}


def _complete_spec(spec: Object) -> None:
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


def patched(one: Any, other: Any) -> Any:
    """Return a JSON merge patch laid over a value (RFC 7396): lists are replaced."""
    if not isinstance(other, Mapping):
        return other
    found = dict(one) if isinstance(one, Mapping) else {}
    for key, value in other.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = patched(found.get(key), value)
    return found
