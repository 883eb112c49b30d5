"""Simulates a Kubernetes API server on loopback: objects, selectors, patches, garbage collection, watches.

    with Cluster(folder) as cluster: ...      cluster.kubeconfig is a file that any client takes

Its semantics are those that were recorded of a real 1.36 server; what it enforces of a Job is in backends/kubernetes/rules.
Pods are processes of this machine (kubelet.py). Fields that 1.36 does not know are dropped (fields.py). What it is not:
roles, a scheduler with more than one node, rotation of logs. A watch is answered when something has happened or its time
is over, and closed.
"""

from __future__ import annotations

import json
import secrets
import shutil
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from cloudtrain.backends.kubernetes import rules
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.simulators.http import Fault, Request, Response, Route, Server
from cloudtrain.simulators.kubernetes import exec as exec_
from cloudtrain.simulators.kubernetes import port_forward, websocket
from cloudtrain.simulators.kubernetes.admission import check_pod
from cloudtrain.simulators.kubernetes.fields import drop_unknown
from cloudtrain.simulators.kubernetes.job_controller import OWNED
from cloudtrain.simulators.kubernetes.jobset_controller import check_jobset
from cloudtrain.simulators.kubernetes.kubelet import Kubelet
from cloudtrain.simulators.kubernetes.objects import (
    GROUPS,
    KINDS,
    Objects,
    StatusError,
    apply_merge_patch,
    parse_selector,
    set_job_defaults,
    set_pod_defaults,
)

MAX_ANNOTATIONS = (
    256 << 10
)  # bytes of all of an object's (TotalAnnotationSizeLimitB of k8s.io/apimachinery, 2026-11-25)
KUEUE = "kueue.x-k8s.io/v1beta1"
Object = dict[str, Any]


class Cluster:
    """An API server with one node; `kubeconfig` is the path of its kubeconfig. `close` ends all pods."""

    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.objects = Objects()
        self.objects.add("namespaces", "", {"metadata": {"name": "default"}})
        self.queues: set[str] = set()  # Kueue's local queues, in every namespace; without any there is no Kueue
        self.kubelet = Kubelet(self.objects, folder / "node", env or {})
        self.denied: set[tuple[str, str]] = set()  # (verb, plural) that the account may not use
        self.token = secrets.token_urlsafe(16)
        self.server = Server(self._routes())
        self.faults: list[Fault] = self.server.faults
        self.url = self.server.url
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.touch(mode=0o600)
        named = {"name": "simulated"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "simulated",
            "clusters": [{**named, "cluster": {"server": self.url}}],
            "users": [{**named, "user": {"token": self.token}}],
            "contexts": [{**named, "context": {"cluster": "simulated", "user": "simulated", "namespace": "default"}}],
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.kubelet.start()

    def close(self) -> None:
        """End every pod and the server; blocking."""
        self.kubelet.close()
        self.server.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- API ---------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        core = "(" + "|".join(plural for plural in KINDS if plural not in GROUPS) + ")"
        routes: list[Route] = []
        for base, plural in (("/api/v1", core), *((f"/apis/{group}", f"({name})") for name, group in GROUPS.items())):
            collection = rf"{base}/namespaces/([^/]+)/{plural}"
            routes += [
                ("GET", rf"{base}/{plural}", self._authenticated(lambda r, p: self._list(r, "", p))),
                ("GET", collection, self._authenticated(self._list)),
                ("POST", collection, self._authenticated(self._create)),
                ("GET", rf"{collection}/([^/]+)", self._authenticated(self._get)),
                ("GET", rf"{collection}/([^/]+)/status", self._authenticated(self._get)),
                ("PATCH", rf"{collection}/([^/]+)", self._authenticated(self._patch)),
                ("DELETE", rf"{collection}/([^/]+)", self._authenticated(self._delete)),
            ]
        pod = r"/api/v1/namespaces/([^/]+)/pods/([^/]+)"
        review = r"/apis/authorization\.k8s\.io/v1/selfsubjectaccessreviews"
        return [
            ("GET", rf"{pod}/log", self._authenticated(self._log)),
            ("GET", rf"{pod}/exec", self._authenticated(self._exec)),
            ("GET", rf"{pod}/portforward", self._authenticated(self._port_forward)),
            ("GET", rf"{pod}:(\d+)/proxy/(.*)", self._authenticated(self._proxy)),
            ("POST", rf"{pod}/eviction", self._authenticated(self._evict)),
            ("POST", review, self._authenticated(self._review)),
            (
                "GET",
                "/version",
                self._authenticated(lambda _: Response({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})),
            ),
            *(
                (("GET", path, self._authenticated(lambda _, document=document: Response(document))))
                for path, document in discovery().items()
            ),
            ("GET", "/api/v1/nodes", self._authenticated(self._nodes)),
            ("GET", "/apis/jobset.x-k8s.io", self._authenticated(self._jobset)),
            ("GET", "/apis/kueue.x-k8s.io", self._authenticated(self._kueue)),
            ("GET", f"/apis/{KUEUE}/namespaces/([^/]+)/localqueues/([^/]+)", self._authenticated(self._kueue)),
            ("POST", "/api/v1/namespaces", self._authenticated(lambda r: self._create(r, "", "namespaces"))),
            ("GET", "/api/v1/namespaces/([^/]+)", self._authenticated(lambda r, n: self._get(r, "", "namespaces", n))),
            ("DELETE", "/api/v1/namespaces/([^/]+)", self._authenticated(self._delete_namespace)),
            *routes,
        ]

    def _authenticated(self, function: Callable[..., Response]) -> Callable[..., Response]:
        def response(request: Request, *groups: str) -> Response:
            authorization = request.headers.get("authorization")
            if authorization is None:
                raise StatusError(403, f'forbidden: User "system:anonymous" cannot use path "{request.path}"')
            if authorization != f"Bearer {self.token}":
                raise StatusError(401, "Unauthorized")
            return function(request, *groups)

        return response

    def _authorize(self, verb: str, plural: str, namespace: str) -> None:
        if (verb, plural) in self.denied:
            message = (
                f'{plural} is forbidden: User "you" cannot {verb} resource "{plural}" in the namespace "{namespace}"'
            )
            raise StatusError(403, message)

    def _create(self, request: Request, namespace: str, plural: str) -> Response:
        self._authorize("create", plural, namespace)
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
        elif plural == "jobsets":
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

    def _require(self, plural: str, namespace: str, name: str) -> Object:
        resource = self.objects.get(plural, namespace, name)
        if resource is None:
            group = f".{GROUPS[plural].partition('/')[0]}" if plural in ("jobs", "jobsets") else ""
            raise StatusError(404, f'{plural}{group} "{name}" not found')
        return resource

    def _get(self, _: Request, namespace: str, plural: str, name: str) -> Response:
        self._authorize("get", plural, namespace)
        with self.objects.lock:
            return Response(_copy(self._require(plural, namespace, name)))

    def _list(self, request: Request, namespace: str, plural: str) -> Response:
        query = request.query
        if query.get("watch") in ("1", "true", "True"):
            return self._watch(query, namespace, plural)
        self._authorize("list", plural, namespace)
        matches = parse_selector(query)
        with self.objects.lock:
            resources = [_copy(item) for item in self.objects.all(plural, namespace) if matches(item)]
            version = self.objects.version
        if (wanted := int(query.get("resourceVersion") or 0)) > version:
            raise StatusError(504, f"Too large resource version: {wanted}, current: {version}", "Timeout")
        first, size = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(resources) or 1
        more = str(first + size) if first + size < len(resources) else ""
        return Response(_list_response(KINDS[plural], resources[first : first + size], str(version), more))

    def _watch(self, query: Mapping[str, str], namespace: str, plural: str) -> Response:
        self._authorize("watch", plural, namespace)
        matches, until = parse_selector(query), time.monotonic() + float(query.get("timeoutSeconds") or 30)
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
                left = until - time.monotonic()
                if changes or left <= 0:
                    return _watch_response(changes)
                objects.changed.wait(min(left, 1.0))

    def _patch(self, request: Request, namespace: str, plural: str, name: str) -> Response:
        self._authorize("patch", plural, namespace)
        kind = request.headers.get("content-type", "")
        if "apply-patch" in kind:
            if self.objects.get(plural, namespace, name) is None:
                return self._create(request, namespace, plural)
            kind = "merge-patch"  # of one field manager, which removes nothing
        if "merge-patch" not in kind:
            raise StatusError(415, f"the body of the request was in an unknown format: {kind}")
        with self.objects.lock:
            resource = self._require(plural, namespace, name)
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

    def _delete(self, request: Request, namespace: str, plural: str, name: str) -> Response:
        self._authorize("delete", plural, namespace)
        options = request.json if request.body else {}
        with self.objects.lock:
            resource = self._require(plural, namespace, name)
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

    def _delete_namespace(self, request: Request, name: str) -> Response:
        for plural in KINDS:
            for resource in self.objects.all(plural, name):
                self.objects.remove(plural, resource)
        return self._delete(request, "", "namespaces", name)

    def _orphan(self, owner: str) -> None:
        for plural in OWNED:
            for dependent in self.objects.all(plural):
                kept = [item for item in dependent["metadata"].get("ownerReferences", ()) if item["uid"] != owner]
                dependent["metadata"]["ownerReferences"] = kept

    def _kueue(self, _: Request, namespace: str = "", name: str = "") -> Response:
        if not self.queues or name not in ("", *self.queues):
            raise StatusError(404, f'localqueues "{name}" not found in {namespace}')
        return Response({"kind": "APIGroup", "preferredVersion": {"groupVersion": KUEUE}})

    def _jobset(self, _: Request) -> Response:
        if not self.kubelet.has_jobsets:
            raise StatusError(404, "the server could not find the requested resource")
        return Response({"kind": "APIGroup", "name": "jobset.x-k8s.io"})

    def _nodes(self, request: Request) -> Response:
        self._authorize("list", "nodes", "")
        matches = parse_selector(request.query)
        return Response(_list_response("Node", [node for node in [self.kubelet.node] if matches(node)], "1"))

    def _proxy(self, request: Request, namespace: str, name: str, port: str, rest: str) -> Response:
        """Forward a request to a server in a pod, without the caller's credentials."""
        self._authorize("get", "pods/proxy", namespace)
        pod = self._require("pods", namespace, name)
        address = f"http://{pod['status'].get('podIP')}:{port}/{rest}?{request.path.partition('?')[2]}"
        headers = {key: value for key, value in request.headers.items() if key not in ("authorization", "host")}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as response:
                return Response(response.read(), response.status, {"Content-Type": "application/octet-stream"})
        except urllib.error.HTTPError as error:
            return Response(error.read(), error.code)
        except OSError as error:
            raise StatusError(503, f"error trying to reach service: {error}", "ServiceUnavailable") from None

    def _log(self, request: Request, namespace: str, name: str) -> Response:
        self._authorize("get", "pods/log", namespace)
        query = request.query
        with self.objects.lock:
            pod = self._require("pods", namespace, name)
            uid = str(pod["metadata"]["uid"])
        if query.get("follow") in ("true", "True"):
            while self.objects.get("pods", namespace, name) is pod and not self.kubelet.has_ended(uid):
                time.sleep(0.02)
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        containers = (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        if container not in {item["name"] for item in containers}:
            raise StatusError(400, f"container {container} is not valid for pod {name}")
        lines = self.kubelet.log(uid, container)
        if lines is None:
            message = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            raise StatusError(400, message)
        if since := query.get("sinceTime"):
            lines = [(at, text) for at, text in lines if at[:19] >= since[:19]]  # whole seconds, as on a real server
        if tail := query.get("tailLines"):
            lines = lines[-int(tail) :]
        stamped = query.get("timestamps") in ("true", "True")
        text = "".join(f"{at} {line}\n" if stamped else f"{line}\n" for at, line in lines)
        return Response(text.encode(), headers={"Content-Type": "text/plain"})

    def _exec(self, request: Request, namespace: str, name: str) -> Response:
        """Run a program in a pod's container, over a websocket. Since 1.35 that needs the verb create too."""
        for verb in ("get", "create"):
            self._authorize(verb, "pods/exec", namespace)
        query = parse_qsl(request.path.partition("?")[2], keep_blank_values=True)
        argv = [value for key, value in query if key == "command"]
        names = {item["name"] for item in self._require("pods", namespace, name)["spec"]["containers"]}
        wanted = dict(query).get("container") or next(iter(names))
        if wanted not in names:
            raise StatusError(400, f"container {wanted} is not valid for pod {name}")
        if not argv:
            raise StatusError(400, "you must specify at least 1 command for the container")
        container = self.kubelet.container(str(self._require("pods", namespace, name)["metadata"]["uid"]))
        if container is None or container.code is not None:
            raise StatusError(500, f'unable to upgrade connection: container not found ("{wanted}")')
        streams = frozenset(key for key, value in query if value in ("true", "1"))

        def serve(frames: websocket.Frames) -> None:
            program = shutil.which(argv[0], path=container.env["PATH"])
            if program is None:
                failure = f'exec: "{argv[0]}": executable file not found in $PATH'
                frames.send(b"\x03" + json.dumps({"status": "Failure", "message": failure, "code": 500}).encode())
                frames.close()
                return
            exec_.Program([program, *argv[1:]], container.env, container.folder, streams, frames).serve()

        return websocket.upgrade(request, exec_.PROTOCOL, serve)

    def _port_forward(self, request: Request, namespace: str, name: str) -> Response:
        """Connect to ports of a pod, over a websocket. Since 1.35 that needs the verb create too."""
        for verb in ("get", "create"):
            self._authorize(verb, "pods/portforward", namespace)
        query = parse_qsl(request.path.partition("?")[2], keep_blank_values=True)
        ports = port_forward.parse_ports([value for key, value in query if key == "ports"])
        container = self.kubelet.container(str(self._require("pods", namespace, name)["metadata"]["uid"]))
        if container is None or container.code is not None:
            raise StatusError(400, f"unable to forward port because pod {name} is not running")
        protocol = port_forward.PROTOCOL
        return websocket.upgrade(request, protocol, lambda frames: port_forward.serve(frames, ports, name))

    def _evict(self, _: Request, namespace: str, name: str) -> Response:
        self._authorize("create", "pods/eviction", namespace)
        with self.objects.lock:
            self.kubelet.disrupt(self._require("pods", namespace, name), "EvictionByEvictionAPI")
        return Response({"kind": "Status", "apiVersion": "v1", "status": "Success"}, 201)

    def _review(self, request: Request) -> Response:
        review = request.json
        attributes = review["spec"].get("resourceAttributes") or {}
        plural = "/".join(part for part in (attributes.get("resource"), attributes.get("subresource")) if part)
        allowed = (str(attributes.get("verb")), plural) not in self.denied
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
        return Response({**about, "spec": review["spec"], "status": {"allowed": allowed}}, 201)


def discovery() -> dict[str, Object]:
    """Return path -> discovery document (API groups and resources), which kubectl requests first."""
    verbs = ["create", "delete", "get", "list", "patch", "watch"]

    def resources(version: str, plurals: Iterable[str]) -> Object:
        entries = [{"name": name, "singularName": KINDS[name].lower(), "namespaced": True, "kind": KINDS[name], "verbs": verbs}
                 for name in plurals]  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": entries}

    groups = []
    for group in GROUPS.values():
        name, _, version = group.partition("/")
        each = {"groupVersion": group, "version": version}
        groups.append({"name": name, "versions": [each], "preferredVersion": each})
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups},
        "/api/v1": resources("v1", (name for name in KINDS if name not in GROUPS)),
        **{f"/apis/{group}": resources(group, [name]) for name, group in GROUPS.items()},
    }


def _list_response(kind: str, items: list[Object], version: str, more: str = "") -> Object:
    metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
    api = next((group for name, group in GROUPS.items() if KINDS[name] == kind), "v1")
    return {"kind": f"{kind}List", "apiVersion": api, "metadata": metadata, "items": items}


def _watch_response(watch_events: list[Object]) -> Response:
    return Response("".join(json.dumps(item) + "\n" for item in watch_events).encode())


def _copy(resource: Object) -> Object:
    copy: Object = json.loads(json.dumps(resource))
    return copy
