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
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes.kinds import RUNTIMES
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators.http import Fault, Request, Response, Route, Server
from tests.simulators.kubernetes_cluster.kubelet import Kubelet
from tests.simulators.kubernetes_cluster.objects import (
    GROUPS,
    KINDS,
    Objects,
    StatusError,
    parse_selector,
)
from tests.simulators.kubernetes_cluster.pod_requests import PodRequests
from tests.simulators.kubernetes_cluster.resources import Resources, list_response

KUEUE = "kueue.x-k8s.io/v1beta1"
Object = dict[str, Any]


class Cluster(AbstractContextManager["Cluster"]):
    """An API server with one node; `kubeconfig` is the path of its kubeconfig. `close` ends all pods."""

    def __init__(self, folder: Path, *, env: Mapping[str, str] | None = None, clock: Clock = SYSTEM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.objects = Objects(clock)
        self.objects.add("namespaces", "", {"metadata": {"name": "default"}})
        self.queues: set[str] = set()  # Kueue's local queues, in every namespace; without any there is no Kueue
        self.kubelet = Kubelet(self.objects, folder / "node", env or {})
        self.resources = Resources(self.objects, self.kubelet)
        self.pods = PodRequests(self.resources, self.kubelet)
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

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- API ---------------------------------------------------------------------------------------------------

    def _routes(self) -> list[Route]:
        core = "(" + "|".join(plural for plural in KINDS if plural not in GROUPS) + ")"
        routes: list[Route] = []
        for base, plural in (("/api/v1", core), *((f"/apis/{group}", f"({name})") for name, group in GROUPS.items())):
            collection = rf"{base}/namespaces/([^/]+)/{plural}"
            routes += [
                ("GET", rf"{base}/{plural}", self._authenticated(lambda r, p: self.resources.list(r, "", p))),
                ("GET", collection, self._authenticated(self.resources.list)),
                ("POST", collection, self._authenticated(self.resources.create)),
                ("GET", rf"{collection}/([^/]+)", self._authenticated(self.resources.get)),
                ("GET", rf"{collection}/([^/]+)/status", self._authenticated(self.resources.get)),
                ("PATCH", rf"{collection}/([^/]+)", self._authenticated(self.resources.patch)),
                ("DELETE", rf"{collection}/([^/]+)", self._authenticated(self.resources.delete)),
            ]
        pod = r"/api/v1/namespaces/([^/]+)/pods/([^/]+)"
        review = r"/apis/authorization\.k8s\.io/v1/selfsubjectaccessreviews"
        rules = r"/apis/authorization\.k8s\.io/v1/selfsubjectrulesreviews"
        return [
            ("GET", rf"{pod}/log", self._authenticated(self.pods.log)),
            ("GET", rf"{pod}/exec", self._authenticated(self.pods.exec)),
            ("GET", rf"{pod}/portforward", self._authenticated(self.pods.port_forward)),
            ("GET", rf"{pod}:(\d+)/proxy/(.*)", self._authenticated(self.pods.proxy)),
            ("POST", rf"{pod}/eviction", self._authenticated(self.pods.evict)),
            ("POST", review, self._authenticated(self._review)),
            ("POST", rules, self._authenticated(self._review_rules)),
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
            ("GET", r"/apis/(jobset\.x-k8s\.io|trainer\.kubeflow\.org)", self._authenticated(self._operator)),
            (
                "GET",
                rf"{RUNTIMES}/([^/]+)",
                self._authenticated(lambda r, name: self.resources.get(r, "", "clustertrainingruntimes", name)),
            ),
            ("GET", "/apis/kueue.x-k8s.io", self._authenticated(self._kueue)),
            ("GET", f"/apis/{KUEUE}/namespaces/([^/]+)/localqueues/([^/]+)", self._authenticated(self._kueue)),
            ("POST", "/api/v1/namespaces", self._authenticated(lambda r: self.resources.create(r, "", "namespaces"))),
            (
                "GET",
                "/api/v1/namespaces/([^/]+)",
                self._authenticated(lambda r, n: self.resources.get(r, "", "namespaces", n)),
            ),
            ("DELETE", "/api/v1/namespaces/([^/]+)", self._authenticated(self.resources.delete_namespace)),
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

    def _kueue(self, _: Request, namespace: str = "", name: str = "") -> Response:
        if not self.queues or name not in ("", *self.queues):
            raise StatusError(404, f'localqueues "{name}" not found in {namespace}')
        return Response({"kind": "APIGroup", "preferredVersion": {"groupVersion": KUEUE}})

    def _operator(self, _: Request, group: str) -> Response:
        if group not in self.kubelet.operators:
            raise StatusError(404, "the server could not find the requested resource")
        return Response({"kind": "APIGroup", "name": group})

    def _nodes(self, request: Request) -> Response:
        self.resources.authorize("list", "nodes", "")
        matches = parse_selector(request.query)
        return Response(list_response("Node", [node for node in [self.kubelet.node] if matches(node)], "1"))

    def _review(self, request: Request) -> Response:
        review = request.json
        attributes = review["spec"].get("resourceAttributes") or {}
        plural = "/".join(part for part in (attributes.get("resource"), attributes.get("subresource")) if part)
        allowed = (str(attributes.get("verb")), plural) not in self.resources.denied
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview", "metadata": {}}
        return Response({**about, "spec": review["spec"], "status": {"allowed": allowed}}, 201)

    def _review_rules(self, request: Request) -> Response:
        plurals = [*KINDS, "events", "workloads", "pods/log", "pods/proxy", "pods/exec", "pods/portforward"]
        verbs = ("create", "delete", "get", "list", "patch", "watch")
        denied = self.resources.denied
        allowed = {name: [verb for verb in verbs if (verb, name) not in denied] for name in dict.fromkeys(plurals)}
        rules = [{"apiGroups": ["*"], "resources": [name], "verbs": allowed[name]} for name in allowed]
        about = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", "metadata": {}}
        status = {"resourceRules": rules, "nonResourceRules": [], "incomplete": False}
        return Response({**about, "spec": request.json["spec"], "status": status}, 201)


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
