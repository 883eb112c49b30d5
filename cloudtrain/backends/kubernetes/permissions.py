"""The Role that a target's options need: for who submits, follows, cancels, fetches and removes; and what an account lacks of it.

The rules are in role.yaml. Their verbs are those of the calls that the backend makes; a test compares them with the calls
that a cluster receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.kinds import KINDS, RUNTIMES

NAME = "cloudtrain"
GROUP = "rbac.authorization.k8s.io"
REVIEWS = "authorization.k8s.io/v1"


class Permission(NamedTuple):
    """A verb on a kind of objects of a namespace."""

    verb: str
    group: str  # "" for the core API
    resource: str  # with its part: pods/log


def build_role(options: Mapping[str, Any], *, inside: bool = False) -> list[dict[str, Any]]:
    """Return a Role and the RoleBinding of the group `cloudtrain`, in the target's namespace.

    With `inside` it has what `exec`, `stack` and `forward` need: whoever has that reads the secrets of all pods there.
    """
    rules = [{**rule, "verbs": list(rule["verbs"])} for rule in _rules(options, inside)]
    head = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Role",
        "metadata": {"name": NAME, "namespace": str(options.get("namespace") or "default")},
    }
    subject = {"kind": "Group", "name": NAME, "apiGroup": GROUP}
    role = {"apiGroup": GROUP, "kind": "Role", "name": NAME}
    objects = [{**head, "rules": rules}, {**head, "kind": "RoleBinding", "roleRef": role, "subjects": [subject]}]
    if options.get("kind") == "trainjob":  # runtimes belong to no namespace
        group, plural = RUNTIMES.split("/")[2::2]
        reads = {"apiGroups": [group], "resources": [plural], "verbs": ["get"]}
        wide = {**head, "metadata": {"name": f"{NAME}-runtimes"}}
        role = {"apiGroup": GROUP, "kind": "ClusterRole", "name": f"{NAME}-runtimes"}
        objects += [
            {**wide, "kind": "ClusterRole", "rules": [reads]},
            {**wide, "kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]},
        ]
    return objects


def purposes(options: Mapping[str, Any]) -> dict[Permission, str]:
    """Return what each permission of the role is for, without those that may be left out."""
    return {
        Permission(verb, rule["apiGroups"][0], resource): why
        for rule in _rules(options)
        for resource in rule["resources"]
        for verb, why in rule["verbs"].items()
        if why
    }


def _rules(options: Mapping[str, Any], inside: bool = False) -> Iterator[dict[str, Any]]:
    import yaml

    has: dict[str | None, bool] = {
        None: True,
        **{kind: kind == (options.get("kind") or "job") for kind in KINDS},
        "controller": options.get("kind") not in (None, "job"),
        "no volumes": not options.get("volumes"),
        "inside": inside,
    }
    for rule in yaml.safe_load((Path(__file__).parent / "role.yaml").read_text("utf-8")):
        if has.get(needs := rule.pop("for", None), bool(options.get(needs))):
            yield rule


def find_missing(api: KubeApi, namespace: str, wanted: Iterable[Permission]) -> list[Permission]:
    """Return the permissions that the account lacks, [] where that cannot be asked: one call where RBAC alone decides.

    Blocking. Raises Unreachable.
    """
    spec = {"namespace": namespace}
    try:
        known = _review(api, "SelfSubjectRulesReview", spec)
        rules = known.get("resourceRules") or ()
        missing = [each for each in wanted if not any(_allows(rule, each) for rule in rules)]
        if not known.get("incomplete"):
            return missing
        return [each for each in missing if not _is_allowed(api, namespace, each)]  # a webhook may allow more
    except KubeError as error:
        if error.status in (403, 404):
            return []
        raise


def _is_allowed(api: KubeApi, namespace: str, permission: Permission) -> bool:
    name, _, part = permission.resource.partition("/")
    attributes = {"namespace": namespace, "verb": permission.verb, "group": permission.group, "resource": name}
    spec = {"resourceAttributes": {**attributes, **({"subresource": part} if part else {})}}
    return bool(_review(api, "SelfSubjectAccessReview", spec).get("allowed"))


def _review(api: KubeApi, kind: str, spec: Mapping[str, Any]) -> Mapping[str, Any]:
    body = {"apiVersion": REVIEWS, "kind": kind, "spec": spec}
    answer = api.call("POST", f"/apis/{REVIEWS}/{kind.lower()}s", "permissions cannot be checked", body=body)
    return dict(answer.json.get("status") or {})


def _allows(rule: Mapping[str, Any], permission: Permission) -> bool:
    if rule.get("resourceNames"):
        return False
    fields = (("verbs", permission.verb), ("apiGroups", permission.group), ("resources", permission.resource))
    return all(value in (given := rule.get(name) or ()) or "*" in given for name, value in fields)
