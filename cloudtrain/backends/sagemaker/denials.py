"""Write rules as an IAM policy that denies what they refuse: for a team's role, a permission set, or an organisation's SCP.

A request without a key passes a condition such as ForAnyValue:StringNotLike or NumericGreaterThan: for each key a second
statement denies requests that lack it (Null). Keys of CreateTrainingJob (2026-11-25):
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazonsagemaker.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cloudtrain.backends.plan import Requirement
from cloudtrain.backends.sagemaker.request import MARGIN_S
from cloudtrain.job import units

Statement = dict[str, Any]
ACTION = "sagemaker:CreateTrainingJob"


def build_denials(rules: Sequence[Requirement]) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the policy (None where IAM can hold no rule) and what IAM cannot hold, one sentence each."""
    statements: list[Statement] = []
    notes = []
    for rule, _why, key, wanted in rules:
        found = list(_conditions(key, wanted))
        if not found:
            notes.append(
                f"IAM cannot enforce {key} (rule {rule} of the policy): cloudtrain alone checks it, at plan and submit"
            )
        for condition in found:
            statements.append(_deny(f"{_sid(rule)}{_sid(key)}{len(statements) + 1}", condition))
    return ({"Version": "2012-10-17", "Statement": statements} if statements else None), notes


def _conditions(key: str, wanted: Any) -> Iterator[dict[str, Any]]:
    """Yield what a denied request has, for one requirement."""
    if key == "instance_types":
        yield from _unless("ForAnyValue:StringNotLike", "sagemaker:InstanceTypes", wanted)
    elif key == "max_runtime":
        seconds = units.duration_s(wanted) + MARGIN_S
        yield from _unless("NumericGreaterThan", "sagemaker:MaxRuntimeInSeconds", str(seconds))
    elif key == "network_isolation":
        yield from _unless("Bool", "sagemaker:NetworkIsolation", "false")
    elif key == "regions":
        yield from _unless("StringNotLike", "aws:RequestedRegion", wanted)
    elif key == "accounts":
        yield from _unless("StringNotLike", "aws:PrincipalAccount", wanted)
    elif key == "labels":
        for name, patterns in wanted.items():
            # `*` alone stands for any text but an empty one.
            texts = [pattern if pattern.strip("*") else "?*" for pattern in patterns]
            yield from _unless("StringNotLike", f"aws:RequestTag/{name}", texts)


def _unless(test: str, key: str, values: Any) -> Iterator[dict[str, Any]]:
    yield {test: {key: values}}
    yield {"Null": {key: "true"}}


def _deny(sid: str, condition: dict[str, Any]) -> Statement:
    return {"Sid": sid, "Effect": "Deny", "Action": [ACTION], "Resource": ["*"], "Condition": condition}


def _sid(text: str) -> str:
    return "".join(part.capitalize() for part in "".join(c if c.isalnum() else " " for c in text).split())
