"""Write the Role that a target's options need: for who submits, follows, cancels, fetches and removes. Pure data.

The verbs are those of the calls that the backend makes; a test compares them with the calls that a cluster receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rule = dict[str, Any]
NAME = "cloudtrain"
# A websocket begins with GET; since Kubernetes 1.35 the API server asks for `create` too
# (gate AuthorizePodWebsocketUpgradeCreatePermission, https://github.com/kubernetes/kubernetes/pull/134577, 2026-11-25).
INSIDE: tuple[Rule, ...] = (
    {"apiGroups": [""], "resources": ["pods/exec", "pods/portforward"], "verbs": ["get", "create"]},
)


def build_role(options: Mapping[str, Any], *, inside: bool = False) -> list[dict[str, Any]]:
    """Return a Role and the RoleBinding of the group `cloudtrain`, in the target's namespace.

    With `inside` it has what `exec`, `stack` and `forward` need: whoever has that reads the secrets of all pods there.
    """
    named = {"name": NAME, "namespace": str(options.get("namespace") or "default")}
    group, role = "rbac.authorization.k8s.io", {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role"}
    subject = {"kind": "Group", "name": NAME, "apiGroup": group}
    return [
        {**role, "metadata": named, "rules": [*_rules(options), *(INSIDE if inside else ())]},
        {
            **role,
            "kind": "RoleBinding",
            "metadata": named,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": NAME},
            "subjects": [subject],
        },
    ]


def _rules(options: Mapping[str, Any]) -> list[Rule]:
    own = ["create", "get", "list", "patch", "delete"]
    if options.get("kind") == "jobset":
        found = [_rule("jobset.x-k8s.io", "jobsets", *own), _rule("batch", "jobs", "get", "list")]
    else:
        found = [_rule("batch", "jobs", *own), _rule("", "services", "create", "get")]
    found += [_rule("", "configmaps", "create", "get"), _rule("", "pods/log", "get"), _rule("", "events", "list")]
    pods = ["list", *["create", "get", "delete"] * bool(options.get("volumes"))]
    found.append(_rule("", "pods", *pods))
    if options.get("volumes"):
        found.append(_rule("", "pods/proxy", "get"))
    if options.get("queue"):
        found.append(_rule("kueue.x-k8s.io", "workloads", "list"))
    if options.get("network_policy"):
        found.append(_rule("networking.k8s.io", "networkpolicies", "create", "get"))
    return found


def _rule(group: str, resource: str, *verbs: str) -> Rule:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
