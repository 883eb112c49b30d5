"""Answers requests for objects of the simulated API server: create, get, list, watch, patch and delete, with its checks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping

from cloudtrain.backends.kubernetes import rules
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.simulators.http import Request, Response
from tests.simulators.kubernetes_cluster.admission import check_pod
from tests.simulators.kubernetes_cluster.fields import drop_unknown
from tests.simulators.kubernetes_cluster.job_controller import OWNED
from tests.simulators.kubernetes_cluster.jobset_controller import check_jobset
from tests.simulators.kubernetes_cluster.kubelet import Kubelet
from tests.simulators.kubernetes_cluster.objects import (
    GROUPS,
    KINDS,
    Object,
    Objects,
    StatusError,
    apply_merge_patch,
    parse_selector,
    set_job_defaults,
    set_pod_defaults,
)
from tests.simulators.kubernetes_cluster.trainjob_controller import check_trainjob

# Bytes of all annotations of an object (TotalAnnotationSizeLimitB of k8s.io/apimachinery, 2026-11-25).
MAX_ANNOTATIONS = 256 << 10


class Resources:
    """The objects of a cluster, as its API shows and changes them."""

    def __init__(self, objects: Objects, kubelet: Kubelet) -> None:
        self.objects, self.kubelet = objects, kubelet
        self.denied: set[tuple[str, str]] = set()  # (verb, plural) that the account may not use

    def authorize(self, verb: str, plural: str, namespace: str) -> None:
        if (verb, plural) in self.denied:
            message = (
                f'{plural} is forbidden: User "you" cannot {verb} resource "{plural}" in the namespace "{namespace}"'
            )
            raise StatusError(403, message)

    def create(self, request: Request, namespace: str, plural: str) -> Response:
        self.authorize("create", plural, namespace)
        resource = request.json
        if resource.get("kind", KINDS[plural]) != KINDS[plural]:
            raise StatusError(
                400, f"{resource.get('kind')} in version {resource.get('apiVersion')} cannot be handled as {plural}"
            )
        requested_namespace = resource.get("metadata", {}).get("namespace", namespace)
        if requested_namespace != namespace:
            raise StatusError(
                400, "the namespace of the provided object does not match the namespace sent on the request"
            )
        resource |= {"kind": KINDS[plural], "apiVersion": GROUPS.get(plural, "v1")}
        headers = drop_unknown(resource, request.query.get("fieldValidation", "Warn"))
        self._validate(plural, resource)
        if plural == "jobs":
            set_job_defaults(resource)
        elif plural in ("jobsets", "trainjobs"):
            resource["status"] = {}
        elif plural == "pods":
            set_pod_defaults(resource)
            check_pod(self.objects, namespace, resource)
        with self.objects.lock:
            if request.query.get("dryRun") == "All":
                if self.objects.get(plural, namespace, resource["metadata"]["name"]) is not None:
                    raise StatusError(409, f'{plural} "{resource["metadata"]["name"]}" already exists')
                stored = {**resource, "metadata": {**resource["metadata"], "uid": str(uuid.uuid4())}}
                return Response(stored, 201, headers)
            return Response(_copy(self.objects.add(plural, namespace, resource)), 201, headers)

    def _validate(self, plural: str, resource: Object) -> None:
        checks: dict[str, Callable[[Object], Iterator[rules.Violation]]] = {
            "jobs": rules.check_job,
            "jobsets": check_jobset,
            "trainjobs": lambda it: check_trainjob(it, self.objects),
            "services": rules.check_service,
            "configmaps": lambda it: rules.check_config_map(it, len(json.dumps(it.get("binaryData") or {})) * 3 // 4),
        }
        annotations = (resource.get("metadata") or {}).get("annotations") or {}
        if sum(len(f"{key}{value}".encode()) for key, value in annotations.items()) > MAX_ANNOTATIONS:
            text = f"metadata.annotations: Too long: may not be more than {MAX_ANNOTATIONS} bytes"
            raise StatusError(422, f'{KINDS[plural]} "{resource["metadata"].get("name", "")}" is invalid: {text}')
        broken_rules = (
            list(checks[plural](resource)) if plural in checks and "generateName" not in resource["metadata"] else []
        )
        # A quantity has a decoder of its own: the server fails to read the object, before it is validated.
        if any(rule.message.startswith("is not a valid quantity") for rule in broken_rules):
            kind, version = KINDS[plural], GROUPS.get(plural, "v1").rpartition("/")[2]
            expected = "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'"
            raise StatusError(400, f'{kind} in version "{version}" cannot be handled as a {kind}: {expected}')
        if broken_rules:
            name = resource["metadata"].get("name", "")
            raise StatusError(422, f'{KINDS[plural]} "{name}" is invalid: {rules.join_violations(broken_rules)}')

    def require(self, plural: str, namespace: str, name: str) -> Object:
        resource = self.objects.get(plural, namespace, name)
        if resource is None:
            group = f".{GROUPS[plural].partition('/')[0]}" if plural in ("jobs", "jobsets", "trainjobs") else ""
            raise StatusError(404, f'{plural}{group} "{name}" not found')
        return resource

    def get(self, _: Request, namespace: str, plural: str, name: str) -> Response:
        self.authorize("get", plural, namespace)
        with self.objects.lock:
            return Response(_copy(self.require(plural, namespace, name)))

    def list(self, request: Request, namespace: str, plural: str) -> Response:
        query = request.query
        if query.get("watch") in ("1", "true", "True"):
            return self._watch(query, namespace, plural)
        self.authorize("list", plural, namespace)
        matches = parse_selector(query)
        with self.objects.lock:
            resources = [_copy(item) for item in self.objects.all(plural, namespace) if matches(item)]
            version = self.objects.version
        if (wanted := int(query.get("resourceVersion") or 0)) > version:
            raise StatusError(504, f"Too large resource version: {wanted}, current: {version}", "Timeout")
        first, size = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(resources) or 1
        more = str(first + size) if first + size < len(resources) else ""
        return Response(list_response(KINDS[plural], resources[first : first + size], str(version), more))

    def _watch(self, query: Mapping[str, str], namespace: str, plural: str) -> Response:
        self.authorize("watch", plural, namespace)
        matches, until = (
            parse_selector(query),
            self.objects.clock.monotonic() + float(query.get("timeoutSeconds") or 30),
        )
        objects = self.objects
        with objects.lock:
            since = int(query.get("resourceVersion") or 0)
            if since and objects.changes and since < objects.changes[0][0] - 1:
                gone = StatusError(410, f"too old resource version: {since} ({objects.version})").response.body
                return _watch_response([{"type": "ERROR", "object": gone}])
            if not since:
                existing = [
                    {"type": "ADDED", "object": item} for item in objects.all(plural, namespace) if matches(item)
                ]
                if existing:
                    return _watch_response(existing)
                since = objects.version
            while True:
                changes = [
                    {"type": kind, "object": item}
                    for version, kind, changed_plural, changed_namespace, item in objects.changes
                    if version > since
                    and changed_plural == plural
                    and namespace in ("", changed_namespace)
                    and matches(item)
                ]
                left = until - self.objects.clock.monotonic()
                if changes or left <= 0:
                    return _watch_response(changes)
                objects.changed.wait(min(left, 1.0))

    def patch(self, request: Request, namespace: str, plural: str, name: str) -> Response:
        self.authorize("patch", plural, namespace)
        kind = request.headers.get("content-type", "")
        if "apply-patch" in kind:
            if self.objects.get(plural, namespace, name) is None:
                return self.create(request, namespace, plural)
            kind = "merge-patch"  # of one field manager, which removes nothing
        if "merge-patch" not in kind:
            raise StatusError(415, f"the body of the request was in an unknown format: {kind}")
        with self.objects.lock:
            resource = self.require(plural, namespace, name)
            change = request.json
            expected_version = change.get("metadata", {}).get("resourceVersion")
            if expected_version and expected_version != resource["metadata"]["resourceVersion"]:
                raise StatusError(409, f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified',
                              "Conflict")  # fmt: skip
            if plural == "configmaps" and resource.get("immutable") and {"data", "binaryData"} & change.keys():
                raise StatusError(
                    422, f'ConfigMap "{name}" is invalid: data: field is immutable when `immutable` is set'
                )
            new = merge_manifest(resource, change) if "strategic" in kind else apply_merge_patch(resource, change)
            for field in ("completions", "completionMode", "template", "podFailurePolicy"):
                before = resource.get("spec", {}).get(field)
                if plural == "jobs" and new["spec"].get(field) != before and not resource["spec"].get("suspend"):
                    raise StatusError(422, f'Job.batch "{name}" is invalid: spec.{field}: field is immutable')
            headers = drop_unknown(new, request.query.get("fieldValidation", "Warn"))
            self._validate(plural, new)
            resource.clear()
            resource.update(new)
            resource["metadata"]["generation"] += 1
            return Response(_copy(self.objects.touch(plural, resource)), headers=headers)

    def delete(self, request: Request, namespace: str, plural: str, name: str) -> Response:
        self.authorize("delete", plural, namespace)
        options = request.json if request.body else {}
        with self.objects.lock:
            resource = self.require(plural, namespace, name)
            expected_uid = (options.get("preconditions") or {}).get("uid")
            if expected_uid and expected_uid != resource["metadata"]["uid"]:
                raise StatusError(409, f"Precondition failed: UID in precondition: {expected_uid}", "Conflict")
            if plural == "pods":
                grace = options.get("gracePeriodSeconds")
                self.kubelet.delete(resource, None if grace is None else float(grace))
                return Response(_copy(resource))
            policy = options.get("propagationPolicy") or request.query.get("propagationPolicy")
            self.objects.remove(plural, resource)
            if plural == "jobs" and policy == "Orphan":
                self._orphan(resource["metadata"]["uid"])
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return Response({**done, "details": {"name": name, "kind": plural, "uid": resource["metadata"]["uid"]}})

    def delete_namespace(self, request: Request, name: str) -> Response:
        for plural in KINDS:
            for resource in self.objects.all(plural, name):
                self.objects.remove(plural, resource)
        return self.delete(request, "", "namespaces", name)

    def _orphan(self, owner: str) -> None:
        for plural in OWNED:
            for dependent in self.objects.all(plural):
                kept = [item for item in dependent["metadata"].get("ownerReferences", ()) if item["uid"] != owner]
                dependent["metadata"]["ownerReferences"] = kept


def list_response(kind: str, items: list[Object], version: str, more: str = "") -> Object:
    metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
    api = next((group for name, group in GROUPS.items() if KINDS[name] == kind), "v1")
    return {"kind": f"{kind}List", "apiVersion": api, "metadata": metadata, "items": items}


def _watch_response(watch_events: list[Object]) -> Response:
    return Response("".join(json.dumps(item) + "\n" for item in watch_events).encode())


def _copy(resource: Object) -> Object:
    copy: Object = json.loads(json.dumps(resource))
    return copy
