"""Pod Security "restricted": the security contexts that it asks for, and what in a pod breaks it.

https://kubernetes.io/docs/concepts/security/pod-security-standards (2026-11-23). A real 1.36 server enforces it on pods.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.backends.kubernetes.rules import Violation

VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
SECCOMP = ("RuntimeDefault", "Localhost")
HOST_FIELDS = ("hostNetwork", "hostPID", "hostIPC")


def pod_context(user: int) -> dict[str, Any]:
    """Return the security context of a restricted pod; its volumes belong to the user's group."""
    ids = {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return {"runAsNonRoot": True, **ids, "seccompProfile": {"type": SECCOMP[0]}}


def container_context() -> dict[str, Any]:
    """Return the security context of a restricted pod's container."""
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def check_restricted(pod: Mapping[str, Any], path: str = "spec") -> Iterator[Violation]:
    """Yield what a namespace that enforces "restricted" refuses in a pod's spec."""
    for field in HOST_FIELDS:
        if pod.get(field):
            yield Violation(f"{path}.{field}", "is not allowed in a restricted pod")
    for number, volume in enumerate(pod.get("volumes") or ()):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield Violation(f"{path}.volumes[{number}].{min(kinds)}", "is not allowed in a restricted pod")
    outer = pod.get("securityContext") or {}
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(kind) or ()):
            yield from _check_container(container, outer, f"{path}.{kind}[{number}]")


def _check_container(container: Mapping[str, Any], outer: Mapping[str, Any], path: str) -> Iterator[Violation]:
    own = container.get("securityContext") or {}
    inherited, capabilities = {**outer, **own}, own.get("capabilities") or {}
    context = f"{path}.securityContext"
    if own.get("privileged"):
        yield Violation(f"{context}.privileged", "is not allowed in a restricted pod")
    if own.get("allowPrivilegeEscalation") is not False:
        yield Violation(f"{context}.allowPrivilegeEscalation", "must be false in a restricted pod")
    if "ALL" not in (capabilities.get("drop") or ()):
        yield Violation(f"{context}.capabilities.drop", "must hold ALL in a restricted pod")
    if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
        yield Violation(f"{context}.capabilities.add", "may only hold NET_BIND_SERVICE in a restricted pod")
    if inherited.get("runAsNonRoot") is not True:
        yield Violation(f"{context}.runAsNonRoot", "must be true in a restricted pod")
    if inherited.get("runAsUser") == 0:
        yield Violation(f"{context}.runAsUser", "must not be 0 (root) with security: restricted")
    if (inherited.get("seccompProfile") or {}).get("type") not in SECCOMP:
        yield Violation(f"{context}.seccompProfile.type", f"must be {' or '.join(SECCOMP)} in a restricted pod")
    if any(port.get("hostPort") for port in container.get("ports") or ()):
        yield Violation(f"{path}.ports", "must not set hostPort in a restricted pod")
