"""Validation rules for Job, Service and ConfigMap that the schemas do not cover: names, enums, quantities, exclusive fields.

Pure functions. A real 1.36 server enforces these rules on Jobs; the simulator enforces the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from cloudtrain.backends.kubernetes.kinds import child_names, specs_of

MAX_CONFIG_BYTES = 1 << 20
MAX_JOB_NAME = 57  # a pod's host name, <job>-<index>, is a DNS label of at most 63 characters
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"\+?(\d+(\.\d*)?|\.\d+)(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E|[eE][+-]?\d+)?")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9]")
POWERS = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_ENV = re.compile(r"[-._a-zA-Z][-._a-zA-Z0-9]*")


class Violation(NamedTuple):
    """A field that breaks a rule: its path in the object, and what is wrong."""

    path: str
    message: str


def check_label(key: str, value: str) -> Violation | None:
    """Return why a key and value are not a valid label, None if they are."""
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not (SUBDOMAIN.fullmatch(prefix) and len(prefix) <= 253)):
        return Violation(key, "is not a valid label name: letters, digits, - _ and ., at most 63")
    if value and not _NAME.fullmatch(value):
        return Violation(
            key, f"has a value that is not valid for a label: {value[:80]!r} (letters, digits, - _ and ., at most 63)"
        )
    return None


def check_job(job: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what a server refuses in a batch/v1 Job."""
    yield from _metadata(job, MAX_JOB_NAME)
    spec = job.get("spec") or {}
    mode = spec.get("completionMode", "NonIndexed")
    if mode not in ("NonIndexed", "Indexed"):
        yield Violation("spec.completionMode", f"must be Indexed or NonIndexed, not {mode}")
    completions = spec.get("completions")
    if mode == "Indexed" and completions is None:
        yield Violation("spec.completions", "is needed with completionMode Indexed")
    for name in ("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        if isinstance(spec.get(name), int) and spec[name] < 0:
            yield Violation(f"spec.{name}", "must not be negative")
    max_failed = spec.get("maxFailedIndexes")
    if max_failed is not None and completions is not None and max_failed > completions:
        yield Violation("spec.maxFailedIndexes", f"is more than the {completions} completions")
    if max_failed is not None and spec.get("backoffLimitPerIndex") is None:
        yield Violation("spec.backoffLimitPerIndex", "is needed where maxFailedIndexes is set")
    template = spec.get("template") or {}
    for name, value in ((template.get("metadata") or {}).get("labels") or {}).items():
        if violation := check_label(str(name), str(value)):
            yield Violation(f"spec.template.metadata.labels.{violation.path}", violation.message)
    pod = template.get("spec") or {}
    restart = pod.get("restartPolicy", "Always")
    if restart not in ("Never", "OnFailure"):
        yield Violation("spec.template.spec.restartPolicy", f"must be Never or OnFailure in a Job, not {restart}")
    if spec.get("podFailurePolicy"):
        yield from _failure_policy(spec, restart, pod)
    yield from _pod(pod, "spec.template.spec")


def check_set_name(manifest: Mapping[str, Any]) -> Violation | None:
    """Return why the name of a JobSet or TrainJob is refused, None if it is not, or for a Job.

    The names of a set's pods must be DNS labels (its webhook).
    """
    names, specs = child_names(manifest), specs_of(manifest)
    made = (f"{name}-{spec['completions'] - 1}-abcde" for name, spec in zip(names, specs, strict=False))
    longest = max(made, key=len, default="a")  # a Job makes none
    if len(longest) <= 63 and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", longest):
        return None
    return Violation("metadata.name", f"makes names of pods that are no DNS labels of at most 63 characters: {longest}")


def check_service(service: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield what a server refuses in a Service."""
    yield from _metadata(service, 63)
    name = str((service.get("metadata") or {}).get("name", ""))
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield Violation("metadata.name", "must begin with a letter: it becomes a DNS label")


def check_config_map(config_map: Mapping[str, Any], size_bytes: int = 0) -> Iterator[Violation]:
    """Yield what a server refuses in a ConfigMap whose data have `size_bytes` bytes."""
    yield from _metadata(config_map, 253)
    if size_bytes > MAX_CONFIG_BYTES:
        yield Violation("", f"holds {size_bytes:,} bytes; at most {MAX_CONFIG_BYTES:,} are allowed")


def _metadata(manifest: Mapping[str, Any], max_length: int) -> Iterator[Violation]:
    metadata = manifest.get("metadata") or {}
    name = str(metadata.get("name", ""))
    if not SUBDOMAIN.fullmatch(name) or len(name) > max_length:
        yield Violation(
            "metadata.name", f"is not a valid name: {name!r} (lower-case letters, digits and -, at most {max_length})"
        )
    for key, value in (metadata.get("labels") or {}).items():
        if violation := check_label(str(key), str(value)):
            yield Violation(f"metadata.labels.{violation.path}", violation.message)


def _failure_policy(spec: Mapping[str, Any], restart: str, pod: Mapping[str, Any]) -> Iterator[Violation]:
    if restart != "Never":
        yield Violation("spec.podFailurePolicy", "needs restartPolicy Never")
    if spec.get("podReplacementPolicy", "Failed") != "Failed":
        yield Violation("spec.podReplacementPolicy", "must be Failed together with podFailurePolicy")
    names = {str(item.get("name")) for kind in ("containers", "initContainers") for item in pod.get(kind) or ()}
    for number, rule in enumerate(spec["podFailurePolicy"].get("rules") or ()):
        path = f"spec.podFailurePolicy.rules[{number}]"
        if rule.get("action") not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield Violation(f"{path}.action", f"is not a valid action: {rule.get('action')}")
        codes = rule.get("onExitCodes")
        if bool(codes) == bool(rule.get("onPodConditions")):
            yield Violation(path, "needs either onExitCodes or onPodConditions")
        if codes and codes.get("operator") not in ("In", "NotIn"):
            yield Violation(f"{path}.onExitCodes.operator", "must be In or NotIn")
        if codes and codes.get("operator") == "In" and 0 in (codes.get("values") or ()):
            yield Violation(f"{path}.onExitCodes.values", "must not hold 0")
        if codes and codes.get("containerName") not in (None, *names):
            yield Violation(
                f"{path}.onExitCodes.containerName", f"is not a container of the pod: {codes['containerName']}"
            )


def _pod(pod: Mapping[str, Any], path: str) -> Iterator[Violation]:
    volumes = {str(volume.get("name")) for volume in pod.get("volumes") or ()}
    for number, volume in enumerate(pod.get("volumes") or ()):
        if len(volume) != 2 or not LABEL.fullmatch(str(volume.get("name", ""))):
            yield Violation(
                f"{path}.volumes[{number}]", "needs a name of small letters, digits and -, and one kind of volume"
            )
        limit = (volume.get("emptyDir") or {}).get("sizeLimit")
        if limit is not None and not QUANTITY.fullmatch(str(limit)):
            yield Violation(f"{path}.volumes[{number}].emptyDir.sizeLimit", f"is not a valid quantity: {limit}")
    if not pod.get("containers"):
        yield Violation(f"{path}.containers", "must not be empty")
    for kind in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(kind) or ()):
            yield from _container(container, f"{path}.{kind}[{number}]", volumes)


def _container(container: Mapping[str, Any], path: str, volumes: set[str]) -> Iterator[Violation]:
    if not LABEL.fullmatch(str(container.get("name", ""))):
        yield Violation(f"{path}.name", f"is not a valid name: {container.get('name')!r}")
    if not container.get("image") or str(container["image"]) != str(container["image"]).strip():
        yield Violation(f"{path}.image", "must name an image")
    paths: list[str] = []
    for number, mount in enumerate(container.get("volumeMounts") or ()):
        if str(mount.get("name")) not in volumes:
            yield Violation(f"{path}.volumeMounts[{number}].name", f"is not a volume of the pod: {mount.get('name')}")
        if mount.get("mountPath") in paths:
            yield Violation(f"{path}.volumeMounts[{number}].mountPath", f"is mounted twice: {mount['mountPath']}")
        paths.append(str(mount.get("mountPath")))
    for number, variable in enumerate(container.get("env") or ()):
        if not _ENV.fullmatch(str(variable.get("name", ""))):
            yield Violation(f"{path}.env[{number}].name", f"is not a valid variable name: {variable.get('name')!r}")
        if "value" in variable and "valueFrom" in variable:
            yield Violation(f"{path}.env[{number}]", "has both value and valueFrom")
    yield from _resources(container.get("resources") or {}, f"{path}.resources")


def _resources(resources: Mapping[str, Any], path: str) -> Iterator[Violation]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    for kind, values in (("limits", limits), ("requests", requests)):
        for name, value in values.items():
            if not QUANTITY.fullmatch(str(value)):
                yield Violation(f"{path}.{kind}.{name}", f"is not a valid quantity: {value}")
    for name in {**limits, **requests}:
        if "/" not in name:
            continue  # only extended resources cannot be overcommitted
        if str(requests.get(name, limits.get(name))) != str(limits.get(name)):
            yield Violation(f"{path}.limits.{name}", "must equal the request: such resources are not overcommitted")
        elif not re.fullmatch(r"\d+", str(limits.get(name))):
            yield Violation(f"{path}.limits.{name}", f"must be a whole number, not {limits.get(name)}")


def join_violations(violations: Sequence[Violation]) -> str:
    """Return violations as one message, as a server words it."""
    return ", ".join(f"{violation.path}: {violation.message}" for violation in violations)


def parse_quantity(text: object) -> Decimal:
    """Return the number that a quantity such as 500m, 2Gi or 1e3 means; raises ValueError."""
    match = QUANTITY.fullmatch(str(text))
    if not match:
        raise ValueError(f"{text} is not a valid quantity")
    number, suffix = match[1], match[3] or ""
    if suffix.endswith("i"):
        return Decimal(number) * Decimal(1024 ** ("KMGTPE".index(suffix[0]) + 1))
    if suffix not in POWERS:
        return Decimal(f"{number}{suffix}")
    return Decimal(number).scaleb(POWERS[suffix])


def usage_of(spec: Mapping[str, Any]) -> Counter[str]:
    """Return what a pod counts for in quotas: requests.cpu, limits.memory, requests.nvidia.com/gpu, pods."""
    usage: Counter[str] = Counter({"pods": 1})
    for container in spec["containers"]:  # init containers of ours ask for no more
        for kind, amounts in (container.get("resources") or {}).items():
            for name, amount in amounts.items():
                usage[f"{kind}.{name}"] += parse_quantity(amount)  # type: ignore[assignment]
    return usage
