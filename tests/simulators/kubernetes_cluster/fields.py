"""Drops the fields that Kubernetes 1.36 does not know, as its API server does: silently, with a warning, or refused.

The schemas are those of the package kubernetes-validate. Objects of operators (JobSet, Kueue) are stored as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from tests.simulators.kubernetes_cluster.objects import StatusError

SCHEMA = "kubernetes-json-schema/v1.36.0-local-strict/_definitions.json"


def drop_unknown(resource: dict[str, Any], validation: str) -> dict[str, str]:
    """Delete unknown fields of an object, and return the headers of its answer.

    Args:
        resource: The object as it was sent, with apiVersion and kind.
        validation: The query's fieldValidation: Strict, Ignore, or Warn, which is the server's default
            (https://kubernetes.io/docs/reference/using-api/api-concepts/#field-validation, 2026-11-23).

    Raises:
        StatusError: 400 where `validation` is Strict and a field is unknown.
    """
    group, _, version = str(resource["apiVersion"]).rpartition("/")
    definition = f"io.k8s.api.{group.partition('.')[0] or 'core'}.{version}.{resource['kind']}"
    dropped = list(_drop(resource, {"$ref": definition}, ""))
    notes = [f'unknown field "{path}"' for path in dropped]
    if notes and validation == "Strict":
        text = ", ".join(notes)
        kind = resource["kind"]
        message = f'{kind} in version "{version}" cannot be handled as a {kind}: strict decoding error: {text}'
        raise StatusError(400, message)
    warned = ", ".join(f"299 - {json.dumps(note)}" for note in notes)
    return {"Warning": warned} if notes and validation != "Ignore" else {}


def _drop(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Delete what a schema has no property for; yield the paths of it."""
    if "$ref" in schema:
        schema = _definitions().get(schema["$ref"].rpartition("/")[2], {})
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _drop(item, schema.get("items", {}), f"{path}[{number}]")
    elif isinstance(value, dict):
        known, rest = schema.get("properties"), schema.get("additionalProperties")
        for name in list(value):
            at = f"{path}.{name}" if path else name
            if known is not None and name in known:
                yield from _drop(value[name], known[name], at)
            elif known is not None:
                del value[name]
                yield at
            elif isinstance(rest, Mapping):
                yield from _drop(value[name], rest, at)


@cache
def _definitions() -> dict[str, Any]:
    text = resources.files("kubernetes_validate").joinpath(SCHEMA).read_text(encoding="utf-8")
    return dict(json.loads(text)["$defs"])
