"""Merge `options.vertex.raw` into a CustomJob, and check the result with the messages of Google's own package."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from typing import Any

from cloudtrain.errors import Problem

_DURATION = re.compile(r"-?\d+(\.\d{1,9})?s")
_FREE = ("google.protobuf.Struct", "google.protobuf.Value", "google.protobuf.Timestamp", "google.rpc.Status")


def merge_raw(custom_job: dict[str, Any], raw: Mapping[str, Any], path: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return a CustomJob with `raw` merged into it, and the problems of the result; `path` is the option's.

    Objects are merged by key, lists of objects by position, anything else is replaced; null leaves a field out, as in
    Google's JSON. Without raw, or without google-cloud-aiplatform, nothing is checked. Blocking with both: the import
    takes a second.
    """
    if not raw:
        return custom_job, []
    merged = _merge(custom_job, raw)
    return merged, [Problem(message, path, hint) for message, hint in _check(merged)]


def _check(custom_job: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        if find_spec("google.cloud.aiplatform_v1") is None:
            return
    except ModuleNotFoundError:
        return
    from google.cloud.aiplatform_v1 import CustomJob

    yield from _walk(custom_job, CustomJob.pb().DESCRIPTOR, "")


def _walk(value: Any, kind: Any, at: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a message in JSON, and what to do."""
    if kind.full_name == "google.protobuf.Duration":
        if not (isinstance(value, str) and _DURATION.fullmatch(value)):
            yield f"sets {at} to {value!r}, which is not a duration", 'seconds with an s: "3600s"'
        return
    if kind.full_name in _FREE:
        return
    if not isinstance(value, Mapping):
        yield f"sets {at} to {value!r}, which is not an object", f"an object with the fields of {kind.name}"
        return
    fields = {name: field for field in kind.fields for name in (field.json_name, field.name)}
    for name, item in value.items():
        place = f"{at}.{name}" if at else name
        field = fields.get(name)
        if field is None:
            near = get_close_matches(name, [field.json_name for field in kind.fields], 1)
            hint = f"did you mean {near[0]}?" if near else f"its fields: {', '.join(f.json_name for f in kind.fields)}"
            yield f"sets {place}, and Vertex AI's {kind.name} has no such field", hint
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            if not isinstance(item, Mapping):
                yield f"sets {place} to {item!r}, which is not an object", "name: value"
        elif _is_list(field):
            if not isinstance(item, list):
                yield f"sets {place} to {item!r}, which is not a list", "write it as a list"
                continue
            for number, each in enumerate(item):
                yield from _value(each, field, f"{place}[{number}]")
        else:
            yield from _value(item, field, place)


def _is_list(field: Any) -> bool:
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == field.LABEL_REPEATED)  # protobuf before 6.31


def _value(value: Any, field: Any, at: str) -> Iterator[tuple[str, str]]:
    if field.message_type is not None:
        yield from _walk(value, field.message_type, at)
    elif field.enum_type is not None:
        names = list(field.enum_type.values_by_name)
        if value not in names:
            longer = [name for name in names if name.startswith(str(value).upper())]
            near = longer or get_close_matches(str(value).upper(), names, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(names)}"
            yield f"sets {at} to {value!r}, which is none of its values", hint
    else:
        wanted = {field.CPPTYPE_STRING: str, field.CPPTYPE_BOOL: bool}.get(field.cpp_type)
        number = not isinstance(value, bool) and re.fullmatch(r"-?\d+(\.\d+)?", str(value))
        if not (isinstance(value, wanted) if wanted else number):
            name = {str: "a text", bool: "true or false"}.get(wanted or int, "a number")
            yield f"sets {at} to {value!r}, which is not {name}", f"write {name}"


def _merge(base: Any, override: Any) -> Any:
    if isinstance(override, Mapping):
        base = base if isinstance(base, Mapping) else {}
        merged = {**base, **{key: _merge(base.get(key), value) for key, value in override.items()}}
        return {key: value for key, value in merged.items() if value is not None}
    if _is_list_of_objects(base) and _is_list_of_objects(override):
        longer = range(max(len(base), len(override)))
        return [
            _merge(base[n], override[n]) if n < min(len(base), len(override)) else (base[n:] + override[n:])[0]
            for n in longer
        ]
    return override


def _is_list_of_objects(value: Any) -> bool:
    return (
        isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(item, Mapping) for item in value)
    )
