"""The types of a job's keys for editors and type checkers: cloudtrain/job/keys.pyi, from the job file's schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

HEAD = '''\
# Written by docs/generate.py; a test checks that it is current.
"""The keys of a job and of its sections, as `Job(...)` takes them; for editors and type checkers only."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from cloudtrain.job import sections
'''
PATHS = {"source", "output"}  # a Path will do
KINDS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}


def stub() -> str:
    """Return the text of the stub."""
    from cloudtrain.job.job import schema

    whole = schema()
    parts = [HEAD.rstrip()]
    for name, part in whole["$defs"].items():
        mapping = next((choice for choice in part.get("anyOf", ()) if "properties" in choice), part)
        parts += ["", *_keys(name, mapping)]
    parts += ["", *_keys("Job", whole)]
    return "\n".join(parts) + "\n"


def _keys(name: str, part: dict[str, Any]) -> Iterator[str]:
    yield f"class {name}Keys(TypedDict, total=False):"
    for key, value in part["properties"].items():
        kind = _type(value)
        if name == "Job" and key in PATHS:
            kind = kind.replace("str", "str | os.PathLike[str]", 1)
        yield f"    {key}: {kind}"
        if text := value.get("description"):
            yield f'    """{" ".join(text.split())}"""' if not text.endswith('"') else f"    '''{text}'''"


def _type(value: dict[str, Any]) -> str:
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"{name}Keys | sections.{name}" + (" | str" if name == "Input" else "")
    if "enum" in value:
        return f"Literal[{', '.join(map(_quoted, value['enum']))}]"
    if "const" in value:
        return f"Literal[{_quoted(value['const'])}]"
    if choices := value.get("anyOf") or value.get("allOf") or value.get("oneOf"):
        return " | ".join(dict.fromkeys(_type(choice) for choice in choices))
    kind = value.get("type")
    if kind == "array":
        return f"Sequence[{_type(value.get('items', {}))}]"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"Mapping[str, {_type(inner) if isinstance(inner, dict) else 'Any'}]"
    return KINDS.get(str(kind), "Any")


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
