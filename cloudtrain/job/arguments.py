r"""Hyperparameters as a script's arguments, in one of three styles.

argparse  `--lr 3.0e-4`, `--layers 2 4`, true is a bare `--bf16`, false and null are left out
hf        as argparse, but `--bf16 true` and `--bf16 false`, as HfArgumentParser reads them; a mapping is JSON text
hydra     `lr=3.0e-4`, `layers=[2,4]`, `bf16=false`, `seed=null`; other text is quoted by hydra's rules

A value that begins with - is written `--key=value`. In a list of several items that has no such form (argparse would
keep one of them), so that only negative numbers may begin with - there; `args` carries everything else verbatim. An
empty list is a bare `--layers`. Nested mappings become dotted keys, `--optim.lr 1`. In hydra, text that looks like a
number is one. A value that is `--` and nothing else is kept by argparse only from Python 3.13 on.
"""

from __future__ import annotations

import json
import numbers
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cloudtrain.job import placeholders

STYLES = ("argparse", "hf", "hydra")

# Patterns, not compiled ones: most jobs need none of them, and re keeps those that were used.
_KEY = r"[^\s=\-\x00][^\s=\x00]*"
_HYDRA_KEY = r"(\+\+?|~)?[A-Za-z0-9_$][A-Za-z0-9_$\-./@:]*"
_NEGATIVE = r"-[0-9]+|-[0-9]*\.[0-9]+"  # what every argparse takes for a negative number
_JSON_NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?"
_INT = r"(0|[1-9](_?[0-9])*)"
_DIGITS = r"[0-9](_?[0-9])*"
_HYDRA_NUMBER = rf"[+-]?(({_INT}?\.{_DIGITS}|{_INT}\.?)([eE][+-]?{_DIGITS})?|(?i:inf|nan))"
_HYDRA_WORD = r"[A-Za-z_][A-Za-z0-9_\-]*([./][A-Za-z0-9_\-]+)*"
_HYDRA_RESERVED = {"true", "false", "null", "inf", "nan"}


class Number(str):
    """The written text of a number, as a job file had it."""


def text_of(value: Any) -> str | bool | None:
    """Return a scalar as hyperparameters keep it: text, true, false or null; raises ValueError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, numbers.Number):  # numpy's, Decimal, Fraction
        return str(value)
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    raise ValueError(f"a value of type {type(value).__name__} cannot be written as an argument")


def normalised(value: Any, style: str) -> Any:
    """Return a hyperparameter as the job keeps it; raises ValueError when the style has no form for it."""
    if name := placeholders.unquoted(value):
        raise ValueError(f'is a mapping where {name} has no quotes: write "{name}"')
    if isinstance(value, Mapping):
        if style == "hf":
            return _json(value)
        for name in value:
            check_key(str(name), style)
        return {str(name): normalised(item, style) for name, item in value.items()}
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return text_of(value)
    if style == "hydra":
        for item in value:
            if isinstance(item, Mapping) and not all(re.fullmatch(_HYDRA_WORD, str(name)) for name in item):
                raise ValueError("inside a list, hydra's mappings have keys of letters, digits, _ and - only")
        return [normalised(item, style) for item in value]
    items = [
        text_of(item) if not isinstance(item, Sequence | Mapping) or isinstance(item, str) else item for item in value
    ]
    for item in items:
        if item is None or not isinstance(item, str | bool):
            kind = "null" if item is None else "a mapping" if isinstance(item, Mapping) else "a list"
            raise ValueError(f"{kind} inside a list cannot be written on a command line; write it as quoted text")
        if (
            len(items) > 1
            and isinstance(item, str)
            and item[:1] == "-"
            and item != "-"
            and not re.fullmatch(_NEGATIVE, item)
        ):
            raise ValueError(f"in a list, {item[:40]!r} would be read as an option; pass the list through args")
    return items


def flat(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested mappings as dotted keys, in order; raises ValueError when a key is given in both ways."""
    result: dict[str, Any] = {}
    for key, value in hyperparameters.items():
        inner = (
            {f"{key}.{name}": item for name, item in flat(value).items()}
            if isinstance(value, Mapping)
            else {key: value}
        )
        for name, item in inner.items():
            if name in result:
                raise ValueError(f"{name} is given twice, once with a dot and once nested")
            result[name] = item
    return result


def check_key(key: str, style: str) -> None:
    """Raise ValueError when a hyperparameter's name has no form in the style."""
    if style == "hydra":
        if not re.fullmatch(_HYDRA_KEY, key):
            raise ValueError(f"{key[:40]!r} is not a valid key of a hydra override")
    elif key.startswith("-"):
        raise ValueError("write the name without its dashes" + (f": {key.lstrip('-')}" if key.strip("-") else ""))
    elif not re.fullmatch(_KEY, key):
        raise ValueError("a name must not be empty and must not contain spaces or =")


def argv(hyperparameters: Mapping[str, Any], style: str) -> list[str]:
    """Return the arguments of normalised hyperparameters, in their order."""
    write = _hydra if style == "hydra" else _options
    return [argument for key, value in hyperparameters.items() for argument in write(key, value, style)]


def _options(key: str, value: Any, style: str) -> Iterator[str]:
    name = f"--{key}"
    if value is None or (value is False and style == "argparse"):
        return
    if value is True and style == "argparse":
        yield name
    elif isinstance(value, list) and len(value) != 1:
        yield name
        yield from map(_word, value)
    else:
        text = _word(value[0] if isinstance(value, list) else value)
        if text.startswith("-"):
            yield f"{name}={text}"
        else:
            yield name
            yield text


def _word(value: str | bool) -> str:
    return value if isinstance(value, str) else "true" if value else "false"


def _hydra(key: str, value: Any, style: str) -> Iterator[str]:
    yield f"{key}={_hydra_value(value)}"


def _hydra_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(map(_hydra_value, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_hydra_value(str(k))}:{_hydra_value(v)}" for k, v in value.items()) + "}"
    text = str(value)
    if re.fullmatch(_HYDRA_NUMBER, text) or (re.fullmatch(_HYDRA_WORD, text) and text.lower() not in _HYDRA_RESERVED):
        return text
    # Inside quotes only backslashes before a quote or the end are escapes; before ${ OmegaConf reads them as well.
    text = re.sub(r"(?<!\\)(\\*)\$\{", lambda m: m[1] * 2 + r"\${", text)
    return "'" + re.sub(r"(?<!\\)(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def _json(value: Any) -> str:
    """Return JSON text, numbers as they were written where JSON can write them so."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(k), ensure_ascii=False)}: {_json(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "[" + ", ".join(map(_json, value)) + "]"
    if isinstance(value, Number) and re.fullmatch(_JSON_NUMBER, value):
        return str(value)
    if isinstance(value, Number):
        return json.dumps(_number(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(text_of(value))
    return json.dumps(text_of(value), ensure_ascii=False)


def _number(text: str) -> int | float:
    try:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    except ValueError:
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)
