"""What `cloudtrain doctor` asks a cluster: permissions, the namespace, Kueue, secrets, GPUs, and whether it would take a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.kinds import KINDS
from cloudtrain.backends.kubernetes.permissions import find_missing, purposes
from cloudtrain.backends.kubernetes.rules import parse_quantity, usage_of
from cloudtrain.errors import CloudtrainError, Problem
from cloudtrain.job.units import format_count

QUEUE_API = "/apis/kueue.x-k8s.io"


class KubeDoctor:
    """Checks a cluster for a target's options. Every call blocks, and changes nothing."""

    def __init__(self, api: KubeApi, options: Mapping[str, Any]) -> None:
        self._api, self._options, self._namespace = api, options, str(options["namespace"])

    def check(self) -> list[Problem]:
        """Return what stands in the way of every job; what may not be asked is left out."""
        try:
            self._api.get("/version", "the cluster cannot be reached")
            checks = (self._check_namespace, self._check_permissions, self._check_operator, self._check_queue)
            return [problem for check in (*checks, self._check_names) for problem in check()]
        except CloudtrainError as error:
            return [Problem(error.message, "", error.hint)]

    def probe(self, job: Mapping[str, Any]) -> list[Problem]:
        """Return why the cluster would not take a Job's pods: a dry run of one, and the quotas of all of them."""
        problems = []
        spec = job["spec"]["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "spec": spec}
        pod["metadata"] = {
            "name": f"{job['metadata']['name']}-0",
            "labels": job["spec"]["template"]["metadata"]["labels"],
        }
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        query = {"dryRun": "All", "fieldValidation": "Strict"}
        try:
            self._api.call("POST", path, "its pods would be rejected", query=query, body=pod)
        except KubeError as error:
            if "cannot create resource" in error.message:
                return []  # who may only create Jobs cannot try a pod
            problems.append(Problem(error.message, "", error.hint))
        return problems or list(self._check_quotas(spec, int(job["spec"]["completions"])))

    def _check_quotas(self, spec: Mapping[str, Any], count: int) -> Iterator[Problem]:
        wanted = usage_of(spec)
        quotas = self._ask(f"/api/v1/namespaces/{self._namespace}/resourcequotas") or {}
        for quota in quotas.get("items") or ():
            used = (quota.get("status") or {}).get("used") or {}
            for key, hard in quota["spec"]["hard"].items():
                left = parse_quantity(hard) - parse_quantity(used.get(key, 0))
                needed = count * wanted[key]
                if needed > left:
                    name = quota["metadata"]["name"]
                    message = f"{count} pods need {needed:g} of {key}, and the quota {name} has {left:g} left"
                    yield Problem(message, "", f"kubectl describe quota {name} -n {self._namespace}")

    def _check_namespace(self) -> Iterator[Problem]:
        if self._ask(f"/api/v1/namespaces/{self._namespace}") is None:
            yield Problem(f"there is no namespace {self._namespace}", "options.kubernetes.namespace")

    def _check_operator(self) -> Iterator[Problem]:
        kind = KINDS[str(self._options.get("kind") or "job")]
        if kind.operator and self._ask(f"/apis/{kind.api.partition('/')[0]}") is None:
            hint = f"install it ({kind.operator}), or remove options.kubernetes.kind"
            yield Problem(f"the cluster has no {kind.name} operator", "options.kubernetes.kind", hint)

    def _check_queue(self) -> Iterator[Problem]:
        if not (queue := self._options.get("queue")):
            return
        group = self._ask(QUEUE_API)
        if group is None:
            hint = "install Kueue, or remove options.kubernetes.queue: without Kueue the Job stays suspended forever"
            yield Problem("the cluster has no Kueue", "options.kubernetes.queue", hint)
            return
        version = (group.get("preferredVersion") or {}).get("groupVersion")
        if version and self._ask(f"/apis/{version}/namespaces/{self._namespace}/localqueues/{queue}") is None:
            message = f"Kueue has no LocalQueue {queue} in {self._namespace}"
            yield Problem(message, "options.kubernetes.queue", "kubectl get localqueues")

    def _check_names(self) -> Iterator[Problem]:
        secrets, account = self._options.get("pull_secrets") or (), self._options.get("service_account")
        names = [("pull_secrets", "secrets", name) for name in secrets]
        names += [("service_account", "serviceaccounts", account)] if account else []
        for option, plural, name in names:
            if self._ask(f"/api/v1/namespaces/{self._namespace}/{plural}/{name}") is None:
                yield Problem(f"{self._namespace} has no {plural[:-1]} {name}", f"options.kubernetes.{option}")

    def _ask(self, path: str) -> dict[str, Any] | None:
        """Return an object, None where there is none, {} where it may not be asked for."""
        try:
            return self._api.get(path, "the cluster does not answer the check")
        except KubeError as error:
            if error.status != 403:
                raise
            return {}

    def _check_permissions(self) -> Iterator[Problem]:
        needed, namespace = purposes(self._options), self._namespace
        for permission in find_missing(self._api, namespace, needed):
            verb, _, resource = permission
            message = f"you have no permission to {verb} {resource} in {namespace}, which cloudtrain needs {needed[permission]}"
            hint = (
                f"kubectl auth can-i {verb} {resource} -n {namespace}; `cloudtrain permissions -t TARGET` prints a role"
            )
            yield Problem(message, "", hint)

    def capacity(self) -> str:
        """Return a sentence that counts the GPUs on the nodes that this target may use; raises BackendError."""
        options = self._options
        selector = dict(options.get("node_selector") or {})
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in selector.items())} if selector else None
        try:
            node_list = self._api.get("/api/v1/nodes", "nodes cannot be listed", query) or {}
        except KubeError as error:
            if error.status != 403:
                raise
            return "unknown: you have no permission to list nodes"
        gpu_resource = str(options.get("gpu_resource") or "nvidia.com/gpu")
        schedulable = [
            node for node in node_list.get("items") or () if not (node.get("spec") or {}).get("unschedulable")
        ]
        counts = [int((node["status"].get("allocatable") or {}).get(gpu_resource, 0)) for node in schedulable]
        fitting = " that match the node_selector" if selector else ""
        fitting += self._other_values(selector) if selector and not counts else ""
        largest = f", at most {max(counts)} on one" if any(counts) else ""
        nodes = format_count(len(counts), "node")
        return f"{sum(counts)} of {gpu_resource} on {nodes}{fitting}{largest}; an autoscaler may add nodes"

    def _other_values(self, selector: Mapping[str, str]) -> str:
        """Return the values that nodes have for a selector's labels, where no node has those that it asks for."""
        nodes = (self._api.get("/api/v1/nodes", "nodes cannot be listed") or {}).get("items") or ()
        parts = []
        for label, wanted in selector.items():
            values = sorted({str((node["metadata"].get("labels") or {}).get(label, "")) for node in nodes} - {""})
            if wanted not in values:
                parts.append(f"no node has {label}={wanted}" + (f", but {' or '.join(values)}" if values else ""))
        return f" ({'; '.join(parts)})" if parts else ""
