"""Merge options.kubernetes.overlay over a Job's manifest, and check that it changes no protected field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from cloudtrain.backends.kubernetes.names import ATTEMPT, BESIDE, CANCELLED, FIRST_NODE, OUTPUT, RUN, STARTED
from cloudtrain.errors import Problem, page

# Fields that an overlay may not change: the number of pods, how the Job is found, how its pods start and end.
PROTECTED = (
    *("apiVersion", "kind", "metadata.name", "metadata.namespace", "spec.selector", "spec.manualSelector"),
    *("spec.completionMode", "spec.completions", "spec.parallelism", "spec.suspend", "spec.podFailurePolicy"),
    *("spec.backoffLimit", "spec.backoffLimitPerIndex", "spec.maxFailedIndexes", "spec.podReplacementPolicy"),
    *("spec.managedBy", "spec.successPolicy", "spec.template.spec.restartPolicy", "spec.template.spec.subdomain"),
    *("spec.template.spec.hostname", "spec.template.spec.setHostnameAsFQDN", "spec.template.spec.enableServiceLinks"),
)
PROTECTED_IN_CONTAINER = ("command", "args", "terminationMessagePolicy", "terminationMessagePath")


def merge_manifest(base: Any, overlay: Any) -> Any:
    """Merge a JSON value over another: objects by key, lists of named objects by name; anything else is replaced.

    null removes a field.
    """
    if isinstance(base, Mapping) and isinstance(overlay, Mapping):
        fields = {**base, **{key: merge_manifest(base.get(key), value) for key, value in overlay.items()}}
        return {key: value for key, value in fields.items() if value is not None}
    for key in ("name", "mountPath"):
        if _all_have_key(base, key) and _all_have_key(overlay, key):
            overlay_items = {item[key]: item for item in overlay}
            merged_items = [merge_manifest(item, overlay_items.pop(item[key], {})) for item in base]
            return [*merged_items, *overlay_items.values()]
    return overlay


def check_overlay(base: Mapping[str, Any], job: Mapping[str, Any], host_paths: Sequence[str] = ()) -> Iterator[Problem]:
    """Yield a problem for every protected field in which a Job with an overlay differs from the one without.

    Args:
        host_paths: folders of the host that volumes may mount, with what is below them.
    """
    prefix = "options.kubernetes.overlay"
    protected = [*(path.split(".") for path in PROTECTED)]
    protected += [["metadata", "annotations", name] for name in (OUTPUT, STARTED, CANCELLED)]
    protected.append(["spec", "template", "metadata", "annotations", BESIDE])
    for name in (RUN, ATTEMPT, FIRST_NODE):
        protected += [["metadata", "labels", name], ["spec", "template", "metadata", "labels", name]]
    for path in protected:
        if _get_path(job, path) != _get_path(base, path):
            hint = f"remove it; {page('kubernetes')} lists the fields that cannot be changed"
            yield Problem("may not be changed", f"{prefix}.{'.'.join(path)}", hint)
    pod = _get_path(job, ["spec", "template", "spec"])
    if not isinstance(pod, Mapping):
        hint = "write keys of a pod's spec there, such as nodeSelector or volumes, or remove it"
        yield Problem(f"must be a mapping (key: value), not {pod!r:.80}", f"{prefix}.spec.template.spec", hint)
        return
    for kind in ("initContainers", "containers"):
        for original in base["spec"]["template"]["spec"].get(kind, ()):
            yield from _check_container(f"{prefix}.spec.template.spec.{kind}", original, pod.get(kind) or ())
    for volume in pod.get("volumes") or ():
        folder = PurePosixPath(str((volume.get("hostPath") or {}).get("path", "/")))
        allowed = ".." not in folder.parts and any(folder.is_relative_to(each) for each in host_paths)
        if "hostPath" in volume and not allowed:
            hint = f"a persistent volume claim (options.kubernetes.volumes), or allow_host_paths: [{folder}]"
            yield Problem(f"mounts a path of the host: {folder}", f"{prefix}.spec.template.spec.volumes", hint)


def _check_container(
    prefix: str, original: Mapping[str, Any], containers: Sequence[Mapping[str, Any]]
) -> Iterator[Problem]:
    prefix = f"{prefix}.{original['name']}"
    changed: Mapping[str, Any] = next((item for item in containers if item.get("name") == original["name"]), {})
    for field in PROTECTED_IN_CONTAINER:
        if changed.get(field) != original.get(field):
            yield Problem("may not be changed", f"{prefix}.{field}")
    variables = {item["name"]: item for item in changed.get("env") or ()}
    for item in original["env"]:
        if variables.get(item["name"]) != item:
            yield Problem("may not be changed", f"{prefix}.env.{item['name']}")


def _all_have_key(value: Any, key: str) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and bool(value)
        and all(isinstance(item, Mapping) and key in item for item in value)
    )


def _get_path(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value
