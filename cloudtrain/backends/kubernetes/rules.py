"""What a Kubernetes server refuses and schemas let through: names, enums, quantities, and fields that exclude each other.

Pure. The rules are those that a real 1.36 server was seen to enforce on Jobs; the simulator enforces the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

MAX_CONFIG_BYTES = 1 << 20
MAX_JOB_NAME = 57  # a pod's host name, <job>-<index>, is a label of at most 63
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?\d+)?")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class Rule(NamedTuple):
    """One field that breaks a rule: its path below the object, and what is wrong with it."""

    path: str
    said: str


def is_label(key: str, value: str) -> Rule | None:
    """Return why a pair is no label, None when it is one."""
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253)):
        return Rule(key, "is no label's name: letters, digits, - _ and ., at most 63")
    if value and not _NAME.fullmatch(value):
        return Rule(key, f"has a value that is no label's: {value[:80]!r} (letters, digits, - _ and ., at most 63)")
    return None


def of_job(job: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield what a server would refuse in a Job of type batch/v1."""
    yield from _metadata(job, MAX_JOB_NAME)
    spec = job.get("spec") or {}
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in ("NonIndexed", "Indexed"):
        yield Rule("spec.completionMode", f"must be Indexed or NonIndexed, not {mode}")
    completions = spec.get("completions")
    if mode == "Indexed" and completions is None:
        yield Rule("spec.completions", "is needed with completionMode Indexed")
    for name in ("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if isinstance(spec.get(name), int) and spec[name] < 0:
            yield Rule(f"spec.{name}", "must not be negative")
    failed = spec.get("maxFailedIndexes")
    if failed is not None and completions is not None and failed > completions:
        yield Rule("spec.maxFailedIndexes", f"is more than the {completions} completions")
    if failed is not None and spec.get("backoffLimitPerIndex") is None:
        yield Rule("spec.backoffLimitPerIndex", "is needed where maxFailedIndexes is set")
    template = spec.get("template") or {}
    for name, value in ((template.get("metadata") or {}).get("labels") or {}).items():
        if rule := is_label(str(name), str(value)):
            yield Rule(f"spec.template.metadata.labels.{rule.path}", rule.said)
    pod = template.get("spec") or {}
    restart = pod.get("restartPolicy", "Always")
    if restart not in ("Never", "OnFailure"):
        yield Rule("spec.template.spec.restartPolicy", f"must be Never or OnFailure in a Job, not {restart}")
    if spec.get("podFailurePolicy"):
        yield from _failure_policy(spec, restart, pod)
    yield from _pod(pod, "spec.template.spec")


def of_service(service: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield what a server would refuse in a Service."""
    yield from _metadata(service, 63)
    name = str((service.get("metadata") or {}).get("name", ""))
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield Rule("metadata.name", "must begin with a letter: it becomes a DNS label")


def of_config_map(found: Mapping[str, Any], size_bytes: int = 0) -> Iterator[Rule]:
    """Yield what a server would refuse in a ConfigMap whose data have that many bytes."""
    yield from _metadata(found, 253)
    if size_bytes > MAX_CONFIG_BYTES:
        yield Rule("", f"holds {size_bytes:,} bytes; at most {MAX_CONFIG_BYTES:,} are possible")


def _metadata(found: Mapping[str, Any], longest: int) -> Iterator[Rule]:
    metadata = found.get("metadata") or {}
    name = str(metadata.get("name", ""))
    if not SUBDOMAIN.fullmatch(name) or len(name) > longest:
        yield Rule("metadata.name", f"is no name here: {name!r} (small letters, digits and -, at most {longest})")
    for key, value in (metadata.get("labels") or {}).items():
        if rule := is_label(str(key), str(value)):
            yield Rule(f"metadata.labels.{rule.path}", rule.said)


def _failure_policy(spec: Mapping[str, Any], restart: str, pod: Mapping[str, Any]) -> Iterator[Rule]:
    if restart != "Never":
        yield Rule("spec.podFailurePolicy", "needs restartPolicy Never")
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield Rule("spec.podReplacementPolicy", "must be Failed beside podFailurePolicy")
    names = {str(item.get("name")) for kind in ("containers", "initContainers") for item in pod.get(kind) or ()}
    for number, rule in enumerate(spec["podFailurePolicy"].get("rules") or ()):
        at = f"spec.podFailurePolicy.rules[{number}]"
        if rule.get("action") not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield Rule(f"{at}.action", f"is no action: {rule.get('action')}")
        codes = rule.get("onExitCodes")
        if bool(codes) == bool(rule.get("onPodConditions")):
            yield Rule(at, "needs either onExitCodes or onPodConditions")
        if codes and codes.get("operator") not in ("In", "NotIn"):
            yield Rule(f"{at}.onExitCodes.operator", "must be In or NotIn")
        if codes and codes.get("operator") == "In" and 0 in (codes.get("values") or ()):
            yield Rule(f"{at}.onExitCodes.values", "must not hold 0")
        if codes and codes.get("containerName") not in (None, *names):
            yield Rule(f"{at}.onExitCodes.containerName", f"names no container: {codes['containerName']}")


def _pod(pod: Mapping[str, Any], at: str) -> Iterator[Rule]:
    volumes = {str(volume.get("name")) for volume in pod.get("volumes") or ()}
    for number, volume in enumerate(pod.get("volumes") or ()):
        if len(volume) != 2 or not LABEL.fullmatch(str(volume.get("name", ""))):
            yield Rule(f"{at}.volumes[{number}]", "needs a name of small letters, digits and -, and one kind of volume")
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None and not QUANTITY.fullmatch(str(limit)):
            yield Rule(f"{at}.volumes[{number}].emptyDir.sizeLimit", f"is no quantity: {limit}")
    if not pod.get("containers"):
        yield Rule(f"{at}.containers", "must not be empty")
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(kind) or ()):
            yield from _container(container, f"{at}.{kind}[{number}]", volumes)


def _container(container: Mapping[str, Any], at: str, volumes: set[str]) -> Iterator[Rule]:
    if not LABEL.fullmatch(str(container.get("name", ""))):
        yield Rule(f"{at}.name", f"is no name: {container.get('name')!r}")
    if not container.get("image") or str(container["image"]) != str(container["image"]).strip():
        yield Rule(f"{at}.image", "must name an image")
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        if str(mount.get("name")) not in volumes:
            yield Rule(f"{at}.volumeMounts[{number}].name", f"names no volume of the pod: {mount.get('name')}")
        if mount.get("mountPath") in paths:
            yield Rule(f"{at}.volumeMounts[{number}].mountPath", f"is mounted twice: {mount['mountPath']}")
        paths.append(str(mount.get("mountPath")))
    for number, item in enumerate(container.get("env") or ()):
        if not _ENV.fullmatch(str(item.get("name", ""))):
            yield Rule(f"{at}.env[{number}].name", f"is no variable's name: {item.get('name')!r}")
        if "value" in item and "valueFrom" in item:
            yield Rule(f"{at}.env[{number}]", "has both value and valueFrom")
    yield from _resources(container.get("resources") or {}, f"{at}.resources")


def _resources(resources: Mapping[str, Any], at: str) -> Iterator[Rule]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if not QUANTITY.fullmatch(str(value)):
                yield Rule(f"{at}.{kind}.{name}", f"is no quantity: {value}")
    for name in {**limits, **requests}:
        if "/" not in name:
            continue  # only extended resources cannot be overcommitted
        if str(requests.get(name, limits.get(name))) != str(limits.get(name)):
            yield Rule(f"{at}.limits.{name}", "must equal the request: such resources are not overcommitted")
        elif not re.fullmatch(r"\d+", str(limits.get(name))):
            yield Rule(f"{at}.limits.{name}", f"must be a whole number, not {limits.get(name)}")


def first(rules: Sequence[Rule]) -> str:
    """Return rules in the words of a server's answer."""
    return ", ".join(f"{rule.path}: {rule.said}" for rule in rules)
