"""What pydantic found wrong, in plain words: one Problem each, with its place in the file and the nearest name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

from cloudtrain.errors import BadJob, Problem
from cloudtrain.job import other_tools, placeholders

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import PydanticCustomError

    from cloudtrain.job.document import Document

_QUIET = {"secrets", "env"}  # what stands there may be a secret: it is never repeated in a message
_QUIET_OPTION = re.compile(r"key|token|secret|password|env|raw", re.IGNORECASE)  # the same of the options of a target
KNOWN = "choose from "
NUMBER = "the number "
ONE, SEVERAL = "[one]", "[several]"  # pydantic's names of the two forms of fields.OneOrMore; no part of a path
_BOOLS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "dict": "a mapping (key: value)",
    "mapping": "a mapping (key: value)",
    "model": "a mapping (key: value)",
    "model_attributes": "a mapping (key: value)",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "frozen_set": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def wrong(message: str, hint: str = "") -> PydanticCustomError:
    """Return what a validator raises: one sentence that follows the path, and a hint."""
    from pydantic_core import PydanticCustomError

    return PydanticCustomError("cloudtrain", "{message}", {"message": message, "hint": hint})


def explain(
    error: ValidationError, model: type[BaseModel], document: Document | None = None, prefix: Sequence[str] = ()
) -> list[Problem]:
    """Return every problem of a validation, in the file's order; `prefix` is where the model stands in the job.

    Raises BadJob with one problem for a file of another tool.
    """
    items = error.errors(include_url=False)
    if document is not None and not prefix:
        unknown = {item["loc"][0] for item in items if item["type"] == "extra_forbidden" and len(item["loc"]) == 1}
        if tool := other_tools.recognise(unknown, document.value):
            raise BadJob([located(other_tools.problem(tool), document)])  # what follows from that is not said too
    problems: list[Problem] = []
    for item in items:
        loc = tuple(part for part in item["loc"] if part not in ("[key]", ONE, SEVERAL))
        path = (*prefix, *loc)
        name = ".".join(map(str, path[2:]))
        private = path[:1] == ("options",) and (not name or _QUIET_OPTION.search(name))
        message, hint = _describe(item, model, loc, quiet=bool(private or _QUIET & set(path[:3])))
        if hint.startswith(KNOWN) and any(hint == problem.hint for problem in problems):
            hint = ""  # the same long list once
        problems.append(located(Problem(message, dotted(path), hint), document, path))
    return sorted(problems, key=lambda problem: problem.line or 0)


def located(problem: Problem, document: Document | None, path: Sequence[str | int] | None = None) -> Problem:
    """Return the problem with the file and line at which its path was written."""
    if document is None or problem.line is not None:
        return problem
    if path is None:
        names = {dotted(marked_path): marked_path for marked_path in document.marks}
        name = problem.path
        while name and name not in names:
            name = re.sub(r"(^|\.)[^.]*$|\[\d+\]$", "", name)
        path = names.get(name, ())
    mark = document.mark(tuple(path))
    return replace(problem, file=problem.file or mark.file, line=mark.line if path else None)


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as people write it: inputs.train.uri, args[0]."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def quote(value: Any) -> str:
    """Return how a wrong value is called in a message."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{NUMBER}{str(value)[:40]}" if abs(value) < 10**40 or value != value else "a number of over 40 digits"
    if isinstance(value, str):
        from cloudtrain.source import secrets

        if secrets.search(value.encode("utf-8", "surrogateescape")):
            return "what looks like a credential"
        return f'the text "{value if len(value) <= 40 else value[:37] + "..."}"'
    if isinstance(value, list | tuple):
        return "a list"
    if name := placeholders.unquoted(value):
        return f'a mapping: write "{name}" with its quotes'
    return "a mapping" if isinstance(value, dict) else f"a value of type {type(value).__name__}"


def example(value: float) -> float | str:
    """Return a number for the hint of its message; another one for a number that nobody would write."""
    return value if abs(value) < 10**12 else "15"


def _describe(item: Any, model: type[BaseModel], loc: tuple[Any, ...], *, quiet: bool) -> tuple[str, str]:
    kind, value, context = str(item["type"]), item["input"], item.get("ctx", {})
    got = "what is written there" if quiet and isinstance(value, str | int | float) else quote(value)
    if kind == "cloudtrain":
        return context["message"], context["hint"]
    if kind == "extra_forbidden":
        return _unknown(model, loc)
    if kind == "missing":
        return "is missing", ""
    if kind in ("too_short", "string_too_short") and context.get("min_length") == 1:
        return "must not be empty", ""
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]}, not {got}", ""
    if kind in ("literal_error", "enum"):
        names = re.findall(r"'([^']*)'", str(context.get("expected", "")))
        near = nearest(str(value), names)
        return f"must be one of {', '.join(names)}, not {got}", f"did you mean {near}?" if near else ""
    kind_text = _KINDS.get(re.sub(r"_(type|parsing|from_float|exact|parsing_size|attributes_type)$", "", kind))
    if kind_text is not None:
        hint = ""
        if kind_text == "true or false" and isinstance(value, str) and value.lower() in _BOOLS:
            hint = f"write {_BOOLS[value.lower()]}; yes, no, on and off are text in YAML 1.2"
        return f"must be {kind_text}, not {got}", hint
    message = str(item["msg"]).removeprefix("Value error, ")
    return f"{message[:1].lower()}{message[1:]}, not {got}", ""


SYNONYMS = {
    "tag": "labels",
    "tags": "labels",
    "gpu": "accelerators",
    "gpus": "accelerators",
}  # other tools' words, which are spelt like a key of another meaning


def nearest(text: str, names: Collection[str]) -> str:
    """Return the known word that is most like another, or the empty text."""
    from difflib import get_close_matches

    if (meant := SYNONYMS.get(text)) and meant in names:
        return meant
    return next(iter(get_close_matches(text, names, 1)), "")


def fit_name(text: str) -> str:
    """Return the nearest text that is fit for a job's name."""
    fit = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not fit[:1].isalpha():
        fit = f"job-{fit}".rstrip("-")
    return fit[:30].rstrip("-")


_NOT_OF_A_ROLE = {  # keys that people look for in a role: what is so, and what to do
    "min_nodes": ("is not there for roles: all nodes of all roles start, or none", "remove it"),
}


def _unknown(model: type[BaseModel], loc: tuple[Any, ...]) -> tuple[str, str]:
    here: type[BaseModel] | None = model
    for part in loc[:-1]:
        here = _inner(here, part) if here is not None else None
    keys = {field.alias or name for name, field in here.model_fields.items()} if here else set()
    key = str(loc[-1])
    if loc[0] == "roles" and key in _NOT_OF_A_ROLE:
        return _NOT_OF_A_ROLE[key]
    meant = SYNONYMS.get(key, key)
    elsewhere = [name for name in _names(model) if name.rsplit(".", 1)[-1] == meant and meant not in keys]
    if near := "" if elsewhere else nearest(key, keys):
        return "is not a known key", f"did you mean {near}?"
    if key in elsewhere and len(loc) > 1:
        return "is not a known key here", f"move {key} out of {loc[0]}: it is for the whole"
    if elsewhere:
        return "is not a known key here", f"did you mean {elsewhere[0]}?"
    return "is not a known key", f"{KNOWN}{', '.join(sorted(keys))}" if keys else ""


def _inner(model: type[BaseModel], part: Any) -> type[BaseModel] | None:
    """Return the model that stands at a key of a model, also as an item of a list or a mapping there."""
    field = model.model_fields.get(part) if isinstance(part, str) else None
    return model if field is None else next(_models(field.annotation), None)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = field.annotation
        if isinstance(inner, type) and hasattr(inner, "model_fields"):
            yield from _names(inner, f"{prefix}{name}.")
