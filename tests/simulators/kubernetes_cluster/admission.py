"""Admission of pods by the simulated API server: Pod Security and quotas, with the messages of a real 1.36 server."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from cloudtrain.backends.kubernetes.rules import join_violations, parse_quantity, usage_of
from cloudtrain.backends.kubernetes.security import check_restricted
from tests.simulators.kubernetes_cluster.objects import Objects, StatusError

ENFORCE = "pod-security.kubernetes.io/enforce"  # label of a namespace
Object = dict[str, Any]


def check_pod(objects: Objects, namespace: str, pod: Object) -> None:
    """Raise StatusError (403) where a namespace does not take a pod: a label that it has, a ResourceQuota in it."""
    name, spec = pod["metadata"].get("name") or pod["metadata"].get("generateName", ""), pod["spec"]
    forbidden = f'pods "{name}" is forbidden'
    labels = ((objects.get("namespaces", "", namespace) or {}).get("metadata") or {}).get("labels") or {}
    if labels.get(ENFORCE) == "restricted" and (broken := list(check_restricted(spec))):
        raise StatusError(403, f'{forbidden}: violates PodSecurity "restricted:latest": {join_violations(broken)}')
    used: Counter[str] = Counter()
    for other in objects.all("pods", namespace):
        if other["status"]["phase"] in ("Pending", "Running"):
            used.update(usage_of(other["spec"]))
    requested = usage_of(spec)
    for quota in objects.all("resourcequotas", namespace):
        hard, quota_name = quota["spec"]["hard"], quota["metadata"]["name"]
        for key in hard:
            needs = re.fullmatch(r"(requests|limits)\.(cpu|memory)", key)
            lacking = [c["name"] for c in spec["containers"] if needs and not _amount(c, needs[1], needs[2])]
            if lacking:
                message = f"failed quota: {quota_name}: must specify {key} for: {','.join(lacking)}"
                raise StatusError(403, f"{forbidden}: {message}")
            if requested[key] and used[key] + requested[key] > parse_quantity(hard[key]):
                amounts = f"requested: {key}={requested[key]}, used: {key}={used[key]}, limited: {key}={hard[key]}"
                raise StatusError(403, f"{forbidden}: exceeded quota: {quota_name}, {amounts}")


def _amount(container: Object, kind: str, name: str) -> object:
    return ((container.get("resources") or {}).get(kind) or {}).get(name)
