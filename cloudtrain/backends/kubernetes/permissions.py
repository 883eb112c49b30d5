"""Write the Role that a target's options need: for who submits, follows, cancels, fetches and removes. Pure data.

The rules are in role.yaml. Their verbs are those of the calls that the backend makes; a test compares them with the calls
that a cluster receives.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "cloudtrain"
GROUP = "rbac.authorization.k8s.io"


def build_role(options: Mapping[str, Any], *, inside: bool = False) -> list[dict[str, Any]]:
    """Return a Role and the RoleBinding of the group `cloudtrain`, in the target's namespace.

    With `inside` it has what `exec`, `stack` and `forward` need: whoever has that reads the secrets of all pods there.
    """
    import yaml

    has = {
        None: True,
        "job": options.get("kind") != "jobset",
        "jobset": options.get("kind") == "jobset",
        "no volumes": not options.get("volumes"),
        "inside": inside,
    }
    rules = yaml.safe_load((Path(__file__).parent / "role.yaml").read_text("utf-8"))
    needed = [rule for rule in rules if has.get(needs := rule.pop("for", None), bool(options.get(needs)))]
    head = {
        "apiVersion": f"{GROUP}/v1",
        "kind": "Role",
        "metadata": {"name": NAME, "namespace": str(options.get("namespace") or "default")},
    }
    subject = {"kind": "Group", "name": NAME, "apiGroup": GROUP}
    role = {"apiGroup": GROUP, "kind": "Role", "name": NAME}
    return [{**head, "rules": needed}, {**head, "kind": "RoleBinding", "roleRef": role, "subjects": [subject]}]
