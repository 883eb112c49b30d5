"""Write rules as a ValidatingAdmissionPolicy (Kubernetes 1.30 or newer): the API server refuses Jobs that break them.

https://kubernetes.io/docs/reference/access-authn-authz/validating-admission-policy/ (2026-11-25)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.backends.kubernetes.names import INSTANCE_TYPE
from cloudtrain.backends.kubernetes.pod import BEGIN_S, JOIN_S, UPLOAD_S
from cloudtrain.backends.plan import Requirement
from cloudtrain.job import units

GRACE_S = 600  # of limits.grace that a pod's deadline may hold over limits.max_runtime


def build_policy(rules: Sequence[Requirement], options: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the policy and its binding to the target's namespace ([] without a rule for them), and what they cannot hold."""
    validations, notes = [], []
    for rule, why, key, wanted in rules:
        found = list(_validations(key, wanted, options))
        if not found:
            notes.append(
                f"Kubernetes cannot enforce {key} (rule {rule} of the policy): cloudtrain alone checks it, at plan and submit"
            )
        for expression, message in found:
            text = f"rule {rule}: {message}" + (f" ({why})" if why else "")
            validations.append({"expression": expression, "message": text, "reason": "Forbidden"})
    if not validations:
        return [], notes
    namespace = str(options.get("namespace") or "default")
    name = f"cloudtrain-{namespace}"
    import yaml

    policy, binding = yaml.safe_load((Path(__file__).parent / "admission.yaml").read_text("utf-8"))
    policy["metadata"]["name"] = binding["metadata"]["name"] = binding["spec"]["policyName"] = name
    policy["spec"]["validations"] = validations
    selector = binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"]
    selector["kubernetes.io/metadata.name"] = namespace
    return [policy, binding], notes


def _validations(key: str, wanted: Any, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what must be true of an object, and the message where it is not."""
    if key == "labels":
        for name, patterns in wanted.items():
            held = _fits("object.metadata.labels", name, patterns)
            yield f"has(object.metadata.labels) && {held}", f"label {name} must be {' or '.join(patterns)}"
    elif key == "instance_types":
        held = f"has(p.nodeSelector) && {_fits('p.nodeSelector', INSTANCE_TYPE, wanted)}"
        yield _all_pods(held), f"resources.instance_type must be {' or '.join(wanted)}"
    elif key == "image_by_digest":
        yield _all_containers("c.image.contains('@sha256:')"), "images must be name@sha256:..."
    elif key == "images":
        yield _all_containers(f"c.image.matches({_any_of(wanted)})"), f"images must be {' or '.join(wanted)}"
    elif key == "max_runtime":
        seconds = units.duration_s(wanted) + BEGIN_S + JOIN_S + UPLOAD_S + GRACE_S
        held = f"has(p.activeDeadlineSeconds) && p.activeDeadlineSeconds <= {seconds}"
        yield _all_pods(held), f"limits.max_runtime must be at most {wanted}"
    elif key == "spot" and options.get("spot_selector"):
        tests = [_fits("p.nodeSelector", name, [value]) for name, value in options["spot_selector"].items()]
        yield _all_pods(" && ".join(["has(p.nodeSelector)", *tests])), "resources.use_spot must be true"


def _all_pods(held: str) -> str:
    return f"variables.pods.all(p, {held})"


def _all_containers(held: str) -> str:
    containers = "(p.containers + (has(p.initContainers) ? p.initContainers : []))"
    return _all_pods(f"{containers}.all(c, has(c.image) && {held})")


def _fits(table: str, name: str, patterns: Sequence[str]) -> str:
    """Return the expression that a map has a key with a value that fits a pattern."""
    key = _text(name)
    return f"{key} in {table} && {table}[{key}].matches({_any_of(patterns)})"


def _any_of(patterns: Sequence[str]) -> str:
    """Return the regular expression, as a text of CEL, that any of the patterns fits."""
    return _text("^(" + "|".join(map(_regex, patterns)) + ")$")


def _regex(pattern: str) -> str:
    """Return a pattern of a rule as RE2 takes it; `*` alone stands for any text but an empty one."""
    if not pattern.strip("*"):
        return ".+"
    made = ""
    for part in re.split(r"(\*|\?|\[!?[^\]]+\])", pattern):
        if part in ("*", "?"):
            made += ".*" if part == "*" else "."
        elif part.startswith("["):
            made += part.replace("[!", "[^", 1)
        else:
            made += re.escape(part)
    return made


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
