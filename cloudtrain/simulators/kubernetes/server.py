"""A Kubernetes API server on loopback: objects with uids and versions, selectors, patches, garbage collection, watches.

    with Cluster(folder) as cluster: ...      cluster.kubeconfig is a file that any client takes

Its semantics are those that were recorded of a real 1.36 server; what it enforces of a Job is in backends/kubernetes/rules.
Pods are processes of this machine (kubelet.py). What it is not: roles, quotas, admission, schemas, a scheduler with more than
one node, rotation of logs. A watch is answered when something has happened or its time is over, and closed.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes import rules
from cloudtrain.backends.kubernetes.request import merge_manifest
from cloudtrain.simulators.http import Answer, Fault, Request, Route, Server
from cloudtrain.simulators.kubernetes.kubelet import Kubelet
from cloudtrain.simulators.kubernetes.objects import (
    KINDS,
    Objects,
    Refused,
    complete_job,
    complete_pod,
    patched,
    selector,
)

GROUPS = {"jobs": "/apis/batch/v1", "events": "/api/v1"}
Object = dict[str, Any]


class Cluster:
    """An API server and its one node; `kubeconfig` leads there. Closing it ends all pods."""

    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.objects = Objects()
        self.kubelet = Kubelet(self.objects, folder / "node", env or {})
        self.denied: set[tuple[str, str]] = set()  # (verb, plural) that the account may not do
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

    # -- the service ---------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        core = "(" + "|".join(plural for plural in KINDS if plural != "jobs") + ")"
        found: list[Route] = []
        for base, plural in (("/api/v1", core), ("/apis/batch/v1", "(jobs)")):
            place = rf"{base}/namespaces/([^/]+)/{plural}"
            found += [
                ("GET", rf"{base}/{plural}", self._guarded(lambda r, p: self._list(r, "", p))),
                ("GET", place, self._guarded(self._list)),
                ("POST", place, self._guarded(self._create)),
                ("GET", rf"{place}/([^/]+)", self._guarded(self._get)),
                ("GET", rf"{place}/([^/]+)/status", self._guarded(self._get)),
                ("PATCH", rf"{place}/([^/]+)", self._guarded(self._patch)),
                ("DELETE", rf"{place}/([^/]+)", self._guarded(self._delete)),
            ]
        pod = r"/api/v1/namespaces/([^/]+)/pods/([^/]+)"
        review = r"/apis/authorization\.k8s\.io/v1/selfsubjectaccessreviews"
        return [
            ("GET", rf"{pod}/log", self._guarded(self._log)),
            ("GET", rf"{pod}:(\d+)/proxy/(.*)", self._guarded(self._proxy)),
            ("POST", rf"{pod}/eviction", self._guarded(self._evict)),
            ("POST", review, self._guarded(self._review)),
            (
                "GET",
                "/version",
                self._guarded(lambda _: Answer({"major": "1", "minor": "36", "gitVersion": "v1.36.2"})),
            ),
            *(
                (("GET", path, self._guarded(lambda _, found=found: Answer(found))))
                for path, found in discovery().items()
            ),
            ("GET", "/api/v1/nodes", self._guarded(self._nodes)),
            *found,
        ]

    def _guarded(self, function: Callable[..., Answer]) -> Callable[..., Answer]:
        def answer(request: Request, *groups: str) -> Answer:
            try:
                if request.headers.get("authorization") != f"Bearer {self.token}":
                    raise Refused(401, "Unauthorized")
                return function(request, *groups)
            except Refused as refused:
                return refused.answer

        return answer

    def _may(self, verb: str, plural: str, namespace: str) -> None:
        if (verb, plural) in self.denied:
            said = f'{plural} is forbidden: User "you" cannot {verb} resource "{plural}" in the namespace "{namespace}"'
            raise Refused(403, said)

    def _create(self, request: Request, namespace: str, plural: str) -> Answer:
        self._may("create", plural, namespace)
        found = request.json
        if found.get("kind", KINDS[plural]) != KINDS[plural]:
            raise Refused(
                400, f"{found.get('kind')} in version {found.get('apiVersion')} cannot be handled as {plural}"
            )
        named = found.get("metadata", {}).get("namespace", namespace)
        if named != namespace:
            raise Refused(400, "the namespace of the provided object does not match the namespace sent on the request")
        found |= {"kind": KINDS[plural], "apiVersion": "batch/v1" if plural == "jobs" else "v1"}
        self._check(plural, found)
        if plural == "jobs":
            complete_job(found)
        elif plural == "pods":
            complete_pod(found)
        with self.objects.lock:
            if request.query.get("dryRun") == "All":
                if self.objects.get(plural, namespace, found["metadata"]["name"]) is not None:
                    raise Refused(409, f'{plural} "{found["metadata"]["name"]}" already exists')
                return Answer({**found, "metadata": {**found["metadata"], "uid": str(uuid.uuid4())}}, 201)
            return Answer(_copy(self.objects.add(plural, namespace, found)), 201)

    def _check(self, plural: str, found: Object) -> None:
        checks: dict[str, Callable[[Object], Iterator[rules.Violation]]] = {
            "jobs": rules.check_job,
            "services": rules.check_service,
            "configmaps": lambda it: rules.check_config_map(it, len(json.dumps(it.get("binaryData") or {})) * 3 // 4),
        }
        wrong = list(checks[plural](found)) if plural in checks and "generateName" not in found["metadata"] else []
        if wrong:
            name = found["metadata"].get("name", "")
            raise Refused(422, f'{KINDS[plural]} "{name}" is invalid: {rules.join_violations(wrong)}')

    def _known(self, plural: str, namespace: str, name: str) -> Object:
        found = self.objects.get(plural, namespace, name)
        if found is None:
            group = ".batch" if plural == "jobs" else ""
            raise Refused(404, f'{plural}{group} "{name}" not found')
        return found

    def _get(self, _: Request, namespace: str, plural: str, name: str) -> Answer:
        self._may("get", plural, namespace)
        with self.objects.lock:
            return Answer(_copy(self._known(plural, namespace, name)))

    def _list(self, request: Request, namespace: str, plural: str) -> Answer:
        query = request.query
        if query.get("watch") in ("1", "true", "True"):
            return self._watch(query, namespace, plural)
        self._may("list", plural, namespace)
        fits = selector(query)
        with self.objects.lock:
            found = [_copy(item) for item in self.objects.all(plural, namespace) if fits(item)]
            version = str(self.objects.version)
        first, size = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(found) or 1
        more = str(first + size) if first + size < len(found) else ""
        return Answer(_listing(KINDS[plural], found[first : first + size], version, more))

    def _watch(self, query: Mapping[str, str], namespace: str, plural: str) -> Answer:
        self._may("watch", plural, namespace)
        fits, until = selector(query), time.monotonic() + float(query.get("timeoutSeconds") or 30)
        objects = self.objects
        with objects.lock:
            since = int(query.get("resourceVersion") or 0)
            if since > objects.version:
                raise Refused(504, f"Too large resource version: {since}, current: {objects.version}", "Timeout")
            if since and objects.changes and since < objects.changes[0][0] - 1:
                gone = Refused(410, f"too old resource version: {since} ({objects.version})").answer.body
                return _lines([{"type": "ERROR", "object": gone}])
            if not since:
                now = [{"type": "ADDED", "object": item} for item in objects.all(plural, namespace) if fits(item)]
                if now:
                    return _lines(now)
                since = objects.version
            while True:
                news = [
                    {"type": kind, "object": item}
                    for version, kind, what, where, item in objects.changes
                    if version > since and what == plural and namespace in ("", where) and fits(item)
                ]
                left = until - time.monotonic()
                if news or left <= 0:
                    return _lines(news)
                objects.changed.wait(min(left, 1.0))

    def _patch(self, request: Request, namespace: str, plural: str, name: str) -> Answer:
        self._may("patch", plural, namespace)
        kind = request.headers.get("content-type", "")
        if "merge-patch" not in kind:
            raise Refused(415, f"the body of the request was in an unknown format: {kind}")
        with self.objects.lock:
            found = self._known(plural, namespace, name)
            change = request.json
            wanted = change.get("metadata", {}).get("resourceVersion")
            if wanted and wanted != found["metadata"]["resourceVersion"]:
                raise Refused(409, f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified',
                              "Conflict")  # fmt: skip
            if plural == "configmaps" and found.get("immutable") and {"data", "binaryData"} & change.keys():
                raise Refused(422, f'ConfigMap "{name}" is invalid: data: field is immutable when `immutable` is set')
            new = merge_manifest(found, change) if "strategic" in kind else patched(found, change)
            for field in ("completions", "completionMode", "template", "podFailurePolicy"):
                before = found.get("spec", {}).get(field)
                if plural == "jobs" and new["spec"].get(field) != before and not found["spec"].get("suspend"):
                    raise Refused(422, f'Job.batch "{name}" is invalid: spec.{field}: field is immutable')
            self._check(plural, new)
            found.clear()
            found.update(new)
            found["metadata"]["generation"] += 1
            return Answer(_copy(self.objects.touch(plural, found)))

    def _delete(self, request: Request, namespace: str, plural: str, name: str) -> Answer:
        self._may("delete", plural, namespace)
        options = request.json if request.body else {}
        with self.objects.lock:
            found = self._known(plural, namespace, name)
            wanted = (options.get("preconditions") or {}).get("uid")
            if wanted and wanted != found["metadata"]["uid"]:
                raise Refused(409, f"Precondition failed: UID in precondition: {wanted}", "Conflict")
            if plural == "pods":
                grace = options.get("gracePeriodSeconds")
                self.kubelet.delete(found, None if grace is None else float(grace))
                return Answer(_copy(found))
            policy = options.get("propagationPolicy") or request.query.get("propagationPolicy")
            self.objects.remove(plural, found)
            if plural == "jobs" and policy == "Orphan":
                self._orphan(found["metadata"]["uid"])
        done = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        return Answer({**done, "details": {"name": name, "kind": plural, "uid": found["metadata"]["uid"]}})

    def _orphan(self, owner: str) -> None:
        for plural in ("pods", "services", "configmaps"):
            for found in self.objects.all(plural):
                kept = [item for item in found["metadata"].get("ownerReferences", ()) if item["uid"] != owner]
                found["metadata"]["ownerReferences"] = kept

    def _nodes(self, request: Request) -> Answer:
        self._may("list", "nodes", "")
        fits = selector(request.query)
        return Answer(_listing("Node", [node for node in [self.kubelet.machine] if fits(node)], "1"))

    def _proxy(self, request: Request, namespace: str, name: str, port: str, rest: str) -> Answer:
        """Ask the server in a pod, as the API server does: without the caller's credentials."""
        self._may("get", "pods/proxy", namespace)
        pod = self._known("pods", namespace, name)
        address = f"http://{pod['status'].get('podIP')}:{port}/{rest}?{request.path.partition('?')[2]}"
        headers = {key: value for key, value in request.headers.items() if key not in ("authorization", "host")}
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=60) as answer:
                return Answer(answer.read(), answer.status, {"Content-Type": "application/octet-stream"})
        except urllib.error.HTTPError as error:
            return Answer(error.read(), error.code)
        except OSError as error:
            raise Refused(503, f"error trying to reach service: {error}", "ServiceUnavailable") from None

    def _log(self, request: Request, namespace: str, name: str) -> Answer:
        self._may("get", "pods/log", namespace)
        query = request.query
        with self.objects.lock:
            pod = self._known("pods", namespace, name)
            uid = str(pod["metadata"]["uid"])
        if query.get("follow") in ("true", "True"):
            while self.objects.get("pods", namespace, name) is pod and not self.kubelet.ended(uid):
                time.sleep(0.02)
        container = query.get("container") or pod["spec"]["containers"][0]["name"]
        every = (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        if container not in {item["name"] for item in every}:
            raise Refused(400, f"container {container} is not valid for pod {name}")
        lines = self.kubelet.log(uid, container)
        if lines is None:
            said = f'container "{container}" in pod "{name}" is waiting to start: ContainerCreating'
            raise Refused(400, said)
        if since := query.get("sinceTime"):
            lines = [(at, text) for at, text in lines if at[:19] >= since[:19]]  # whole seconds, as there
        if tail := query.get("tailLines"):
            lines = lines[-int(tail) :]
        stamped = query.get("timestamps") in ("true", "True")
        text = "".join(f"{at} {line}\n" if stamped else f"{line}\n" for at, line in lines)
        return Answer(text.encode(), headers={"Content-Type": "text/plain"})

    def _evict(self, _: Request, namespace: str, name: str) -> Answer:
        self._may("create", "pods/eviction", namespace)
        with self.objects.lock:
            self.kubelet.disrupt(self._known("pods", namespace, name), "EvictionByEvictionAPI")
        return Answer({"kind": "Status", "apiVersion": "v1", "status": "Success"}, 201)

    def _review(self, request: Request) -> Answer:
        found = request.json
        asked = found["spec"].get("resourceAttributes") or {}
        plural = "/".join(part for part in (asked.get("resource"), asked.get("subresource")) if part)
        allowed = (str(asked.get("verb")), plural) not in self.denied
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
        return Answer({**about, "spec": found["spec"], "status": {"allowed": allowed}}, 201)


def discovery() -> dict[str, Object]:
    """Return path -> what a server says of its groups and resources, which kubectl asks for first."""
    verbs = ["create", "delete", "get", "list", "patch", "watch"]

    def resources(version: str, plurals: Iterable[str]) -> Object:
        found = [{"name": name, "singularName": KINDS[name].lower(), "namespaced": True, "kind": KINDS[name], "verbs": verbs}
                 for name in plurals]  # fmt: skip
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}

    batch = {"groupVersion": "batch/v1", "version": "v1"}
    group = {"name": "batch", "versions": [batch], "preferredVersion": batch}
    return {
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]},
        "/api/v1": resources("v1", (name for name in KINDS if name != "jobs")),
        "/apis/batch/v1": resources("batch/v1", ["jobs"]),
    }


def _listing(kind: str, items: list[Object], version: str, more: str = "") -> Object:
    metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
    api = "batch/v1" if kind == "Job" else "v1"
    return {"kind": f"{kind}List", "apiVersion": api, "metadata": metadata, "items": items}


def _lines(found: list[Object]) -> Answer:
    return Answer("".join(json.dumps(item) + "\n" for item in found).encode())


def _copy(found: Object) -> Object:
    copy: Object = json.loads(json.dumps(found))
    return copy
