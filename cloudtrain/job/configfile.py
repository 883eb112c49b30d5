"""Read cloudtrain.toml: its tables as documents with lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date, time
from pathlib import Path
from typing import Any

from cloudtrain.errors import BadJob, BadRequest, Problem
from cloudtrain.job.document import Document
from cloudtrain.job.providers import EXAMPLE
from cloudtrain.job.units import usd, usd_per_month

_TABLES = ("defaults", "targets", "notify", "budgets", "currency", "policy")
_NO_OPTIONS = (("backend",), ("defaults",))  # keys of a target that are no options of its backend
_NOTIFY = {"on": list, "command": str, "webhook": str}
_BUDGET = re.compile(r"all|(label\.\S+|target|user)=\S.*")
_CHOOSING = (("target",), ("resources", "accelerators"))  # what names a job's candidates, before its target is known
_CURRENCY = re.compile(r"[A-Z]{3}")
_AMOUNT = re.compile(r"\d+(?:\.\d+)?")
_DOLLARS = re.compile(rf"(?<![\d.,])({_AMOUNT.pattern}(?: to {_AMOUNT.pattern})?) USD\b")
_NEVER = re.compile(r"(?!)")
_ADDRESS = r"git\+\w+://\S+|https://[^\s/@]+/\S*|http://(127\.0\.0\.1|localhost)(:\d+)?/\S*"
_POLICY = {"from": re.compile(_ADDRESS), "sha256": re.compile(r"[0-9a-f]{64}")}
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_HEADER = re.compile(rf"\s*\[\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*\]\s*(?:#.*)?")
_ENTRY = re.compile(rf"\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")


@dataclass(frozen=True)
class Target:
    """A named place: a backend and its options, with where they were written."""

    name: str
    backend: str
    options: Document
    defaults: Document  # keys of the job file, for jobs on this target


class _Number(float):
    """A number that keeps its text."""

    text: str

    def __str__(self) -> str:
        return self.text


def read(path: Path) -> Document:
    """Return a file as a document of `defaults` and `targets`; raises BadRequest with one sentence and the line."""
    document = load(path)
    problems = list(_problems(document))
    if problems:
        raise BadJob(problems)
    tables = [document.value, *document.value.get("targets", {}).values()]
    for table in tables:
        _root_paths(table.get("defaults", {}), path.parent)
    return document


def load(path: Path) -> Document:
    """Return a TOML file as a document; raises BadRequest with one sentence and the line."""
    import tomllib

    try:
        text = path.read_text("utf-8")
        data = tomllib.loads(text, parse_float=_number)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", "check its permissions") from None
    except UnicodeDecodeError:
        raise BadRequest(f"{path} is not UTF-8 text", "save the file as UTF-8 in your editor") from None
    except tomllib.TOMLDecodeError as error:
        last = len(text.splitlines()) or 1
        message = str(error).replace("at end of document", f"at line {last}, the end of the file")
        hint = 'put text in quotes: key = "value"' if "Invalid value" in message else "see https://toml.io"
        raise BadRequest(f"{path} is not valid TOML: {message[:1].lower()}{message[1:]}", hint) from None
    return Document.of(_texts(data), str(path), _lines(text))


def part(document: Document, path: tuple[str, ...]) -> Document:
    """Return what stands at a path of keys as a document of its own, an empty one where nothing does."""
    value = document.value
    for key in path:
        value = value.get(key, {})
    size = len(path)
    return Document(value, {old[size:]: mark for old, mark in document.marks.items() if old[:size] == path})


def in_currency(text: str, paths: Iterable[Path]) -> str:
    """Return a text with the amount in the user's currency after each in USD; as it is where no file has [currency].

    Blocking: reads the files, of which the later ones win. Raises BadRequest.
    """
    rates: dict[str, float] = {}
    for path in paths if " USD" in text else ():
        rates = read(path).value.get("currency") or rates
    for name, rate in rates.items():

        def converted(found: re.Match[str], name: str = name, rate: float = float(rate)) -> str:
            amounts = _AMOUNT.sub(lambda amount: f"{float(amount[0]) * rate:.2f}", found[1])
            return f"{found[0]} ({amounts} {name})"

        text = _DOLLARS.sub(converted, text)
    return text


def targets(documents: list[Document]) -> dict[str, Target]:
    """Return the named targets of some files, of which the later ones win key by key; raises BadJob."""
    merged = Document.of({}, "")
    for document in documents:
        merged.overlay(part(document, ("targets",)))
    by_name = {}
    problems = []
    for name, entry in merged.value.items():
        mark = merged.mark((name,))
        if "backend" not in entry:
            problems.append(
                Problem("has no backend", f"targets.{name}", 'add backend = "..." to it', mark.file, mark.line)
            )
            continue
        options = part(merged, (name,))
        options.value = {key: value for key, value in entry.items() if key not in ("backend", "defaults")}
        options.marks = {path: mark for path, mark in options.marks.items() if path[:1] not in _NO_OPTIONS}
        by_name[name] = Target(name, entry["backend"], options, part(merged, (name, "defaults")))
    if problems:
        raise BadJob(problems)
    return by_name


def _problems(document: Document) -> list[Problem]:
    problems = []

    def add(message: str, path: tuple[str, ...], hint: str) -> None:
        mark = document.mark(path)
        problems.append(Problem(message, ".".join(path), hint, mark.file, mark.line))

    for table, entries in document.value.items():
        if table not in _TABLES:
            add(
                "is not a known table",
                (table,),
                "use [defaults], [targets.NAME], [notify], [budgets], [currency] or [policy]",
            )
        elif not isinstance(entries, dict):
            add("must be a table", (table,), "write [targets.NAME]" if table == "targets" else f"write [{table}]")
        elif table == "notify":
            for name, value in entries.items():
                if not isinstance(value, _NOTIFY.get(name, ())):
                    add("is not a known key, or its value has the wrong type", (table, name), 'use on = ["end", "failure",'
                        ' "preemption"], command = "..." and webhook = "..."')  # fmt: skip
        elif table == "policy":
            for name, value in entries.items():
                if not isinstance(value, str) or not _POLICY.get(name, _NEVER).fullmatch(value):
                    add("is not a known key, or its value has the wrong type", (table, name), 'use from = "git+https://host/repo@rev"'
                        ' or "https://host/policy.toml", and sha256')  # fmt: skip
            if "from" not in entries:
                add("names no policy", (table,), 'write from = "git+https://host/repo@rev"')
        elif table == "currency":
            for name, value in entries.items():
                rate = float(value) if isinstance(value, (int, _Number)) and not isinstance(value, bool) else 0.0
                if not _CURRENCY.fullmatch(name) or not 0 < rate < math.inf or len(entries) > 1:
                    add(
                        "is not a currency with its rate",
                        (table, name),
                        "write one, and what a USD is in it: EUR = 0.92",
                    )
        elif table == "budgets":
            for name, value in entries.items():
                amount = usd if name == "confirm_above" else usd_per_month
                if name != "confirm_above" and not _BUDGET.fullmatch(name):
                    hint = "use confirm_above, all, target=NAME, user=NAME or label.NAME=VALUE"
                    add("is not a valid budget", (table, name), hint)
                    continue
                try:
                    amount(value if isinstance(value, str) else "")
                except ValueError as error:
                    add("is not an amount of money", (table, name), str(error))
        elif table == "targets":
            for name, entry in entries.items():
                if not isinstance(entry, dict):
                    add("must be a table", (table, name), f'write [targets.{name}] and backend = "..." in it')
                elif not isinstance(entry.get("backend", ""), str):
                    add("must be the name of a backend", (table, name, "backend"), f'as in backend = "{EXAMPLE}"')
                elif not isinstance(defaults := entry.get("defaults", {}), dict):
                    add("must be a table", (table, name, "defaults"), "defaults = {resources = {use_spot = true}}")
                else:
                    for path in _CHOOSING:
                        if _has(defaults, path):
                            add(
                                "cannot be set for one target", (table, name, "defaults", *path), "set it in [defaults]"
                            )
    return problems


def _has(value: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return True


def _root_paths(defaults: dict[str, Any], folder: Path) -> None:
    """Make the local paths of default values stand below the file's own folder, not the job file's."""

    def rooted(value: Any) -> Any:
        if not isinstance(value, str) or "://" in value or value.startswith(("/", "~")) or not value:
            return value
        return f"{folder}/{value}"

    if "output" in defaults:
        defaults["output"] = rooted(defaults["output"])
    inputs: Any = defaults.get("inputs")
    for name, item in inputs.items() if isinstance(inputs, dict) else ():
        inputs[name] = {**item, "uri": rooted(item.get("uri"))} if isinstance(item, dict) else rooted(item)


def _number(text: str) -> _Number:
    number = _Number(text)
    number.text = text
    return number


def _texts(value: Any) -> Any:
    """Return TOML's values with dates and times as text, which is what they are in a job file."""
    if isinstance(value, dict):
        return {key: _texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_texts(item) for item in value]
    return str(value) if isinstance(value, date | time) else value


def _lines(text: str) -> Mapping[tuple[str | int, ...], int]:
    """Return the lines of tables and keys, as far as they begin a line (multi-line texts may add wrong ones)."""
    lines_by_path: dict[tuple[str | int, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.fullmatch(line):
            table = _keys(header[1])
            lines_by_path.setdefault(table, number)
        elif entry := _ENTRY.match(line):
            lines_by_path.setdefault((*table, *_keys(entry[1])), number)
    return lines_by_path


def table_lines(text: str, path: tuple[str, ...]) -> range:
    """Return the 0-based numbers of the lines of a table, its header's first; empty where it has no header."""
    lines = text.splitlines()
    start = next(
        (n for n, line in enumerate(lines) if (head := _HEADER.fullmatch(line)) and _keys(head[1]) == path), None
    )
    if start is None:
        return range(0)
    end = next((n for n in range(start + 1, len(lines)) if lines[n].lstrip().startswith("[")), len(lines))
    return range(start, end)


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in re.findall(_KEY, text))
