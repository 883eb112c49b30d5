"""An oracle that is not ours: a request walked along botocore's service model, with maxima, patterns and enums."""

from __future__ import annotations

import re
from typing import Any

# Java's classes of letters, which Python's expressions lack.
JAVA = {r"\p{L}": r"^\W\d_", r"\p{Z}": r"\s", r"\p{N}": r"\d", r"\p{Alnum}": "a-zA-Z0-9"}


def violations(request: Any, operation: str = "CreateTrainingJob") -> list[str]:
    """Return everything in a request that the service model does not allow, one sentence each."""
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    shape = model.operation_model(operation).input_shape
    return list(_walk(request, shape, operation))


def _walk(value: Any, shape: Any, at: str):
    kind, limits = shape.type_name, shape.metadata
    if kind == "structure":
        if not isinstance(value, dict):
            yield f"{at} is no structure"
            return
        yield from (f"{at} lacks {name}" for name in shape.required_members if name not in value)
        for name, item in value.items():
            if name not in shape.members:
                yield f"{at} has no member {name}"
            else:
                yield from _walk(item, shape.members[name], f"{at}.{name}")
        return
    size = len(value) if kind in ("string", "list", "map") else value
    if "min" in limits and size < limits["min"]:
        yield f"{at} is less than {limits['min']}: {value!r}"
    if "max" in limits and size > limits["max"]:
        yield f"{at} is more than {limits['max']}: {str(value)[:80]!r}"
    if kind == "list":
        for number, item in enumerate(value):
            yield from _walk(item, shape.member, f"{at}[{number}]")
    elif kind == "map":
        for name, item in value.items():
            yield from _walk(name, shape.key, f"{at} key")
            yield from _walk(item, shape.value, f"{at}.{name}")
    elif kind == "string":
        if not isinstance(value, str):
            yield f"{at} is no string: {value!r}"
        elif limits.get("enum") and value not in limits["enum"]:
            yield f"{at} is none of its values: {value!r}"
        elif limits.get("pattern") and not _fits(limits["pattern"], value):
            yield f"{at} does not match {limits['pattern']}: {value!r}"
    elif kind in ("integer", "long") and (not isinstance(value, int) or isinstance(value, bool)):
        yield f"{at} is no integer: {value!r}"
    elif kind == "boolean" and not isinstance(value, bool):
        yield f"{at} is no boolean: {value!r}"


def _fits(pattern: str, value: str) -> bool:
    if r"\p{L}" in pattern:  # of tags: [\p{L}\p{Z}\p{N}_.:/=+\-@]*
        return all(
            letter in "_.:/=+-@" or letter.isalpha() or letter.isnumeric() or letter.isspace() for letter in value
        )
    for java, ours in JAVA.items():
        pattern = pattern.replace(java, ours)
    return re.fullmatch(pattern, value) is not None
