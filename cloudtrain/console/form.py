"""The model of the form New job: parse a job file into fields, edit them as text, write the job file again.

Keys without a field are kept as they were written. A value that was not edited keeps its text, and the file its comments.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.console import jobtext
from cloudtrain.console.fields import Field
from cloudtrain.console.jobtext import Node, Plain, Table
from cloudtrain.errors import BadJob, Problem
from cloudtrain.job import job as jobs
from cloudtrain.job.document import Document, read_yaml
from cloudtrain.job.problems import dotted

KeyPath = tuple[str, ...]
JOB_FILE = "job.yaml"


class Form:
    """The values of one job file; its relative paths start at `folder`."""

    def __init__(self, table: Table, folder: Path, written: tuple[str, Table] | None = None) -> None:
        self.table = table
        self.folder = folder
        self.written = written  # the file's text and values, as they were opened
        self.problems: dict[KeyPath, list[Problem]] = {}  # of typed texts that cannot be parsed

    @classmethod
    def blank(cls, folder: Path) -> Form:
        """Return the form of an empty job file in a folder."""
        return cls(Table(), folder)

    @classmethod
    def load(cls, path: Path) -> Form:
        """Return the form of a job file; blocking. Raises BadRequest, or BadJob where it cannot be parsed."""
        document, folder = jobs.read(path)
        if document.problems:
            raise BadJob(document.problems)
        text = path.read_text("utf-8-sig")
        written = None if text.lstrip().startswith("{") else (text, jobtext.from_document(document))
        short = {("parallelism", "auto"): Table([("strategy", "auto")])}
        table = Table((key, short.get((key, str(node)), node)) for key, node in jobtext.from_document(document))
        return cls(table, folder, written)

    @classmethod
    def of_job(cls, data: Mapping[str, Any], folder: Path) -> Form:
        """Return the form of a job's plain data, as `Job.to_dict` returns it."""
        table = jobtext.from_document(Document.of(dict(data), "Job"))
        return cls(Table((key, _numbers(node) if key == "hyperparameters" else node) for key, node in table), folder)

    def copy(self) -> Form:
        """Return an independent copy."""
        from copy import deepcopy

        return deepcopy(self)

    # -- the job file -------------------------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the text of the job file."""
        return jobtext.edit(*self.written, self.table) if self.written else jobtext.dump(self.table)

    def document(self) -> tuple[Document, Path]:
        """Return the parsed job file and its folder; raises BadJob for typed texts that cannot be parsed."""
        typed = [problem for problems in self.problems.values() for problem in problems]
        if typed:
            raise BadJob(typed)
        return read_yaml(self.text(), JOB_FILE), self.folder

    def moved_to(self, folder: Path) -> Form:
        """Return the form of the same job in another folder, with relative paths rewritten."""
        form = self.copy()
        form.folder = folder
        if folder == self.folder:
            return form
        paths: list[KeyPath] = [("source",), ("output",)]
        inputs = self.get(("inputs",))
        for name, node in inputs if isinstance(inputs, Table) else ():
            paths.append(("inputs", name, "uri") if isinstance(node, Table) else ("inputs", name))
        for path in paths:
            value = self.get(path) if path != ("source",) else self.get(path) or "."
            if isinstance(value, str) and value and not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://|[/~]|git\+", value):
                slash = "/" if value.endswith("/") else ""
                form._set(path, os.path.relpath(self.folder / value, folder) + slash)
        return form

    # -- its values ---------------------------------------------------------------------------------------------------

    def get(self, path: KeyPath) -> Node | None:
        """Return the node at a path of keys, None where it is not set."""
        node: Node | None = self.table
        for key in path:
            node = node.get(key) if isinstance(node, Table) else None
        return node

    def field_text(self, field: Field) -> str:
        """Return a field's value as text to edit; "" where it is not set."""
        node = self.get(field.path)
        if node is None:
            return ""
        if isinstance(node, list) and all(isinstance(item, str) for item in node):
            texts = [str(item) for item in node]
            if field.kind == "words":
                return shlex.join(texts)
            if field.kind == "lines" and _are_lines(texts):
                return "\n".join(texts)
        if isinstance(node, str) and field.kind not in ("number", "yaml", "rows", "words", "lines"):
            return node
        return jobtext.format_node(node)

    def set_field(self, field: Field, text: str) -> None:
        """Set a field to the typed text; "" removes it. An unchanged text keeps the value as it was written."""
        if text == self.field_text(field) and field.path not in self.problems:
            return
        self.problems.pop(field.path, None)
        self._set(field.path, self._read(field, text) if text else None)

    def rows(self, path: KeyPath, without: Collection[str] = ()) -> list[tuple[str, str]]:
        """Return the names and values of a mapping as text, except `without`."""
        node = self.get(path)
        table = node if isinstance(node, Table) else ()
        return [(name, jobtext.format_node(value)) for name, value in table if name not in without]

    def set_rows(self, path: KeyPath, rows: Sequence[tuple[str, str]], without: Collection[str] = ()) -> None:
        """Set the names and values of a mapping; the entries of `without` keep their positions."""
        typed = [
            bad_path for bad_path in self.problems if bad_path[: len(path)] == path and bad_path[-1] not in without
        ]
        if not typed and list(rows) == self.rows(path, without):
            return
        current = self.get(path)
        old = current if isinstance(current, Table) else Table()
        for bad_path in typed:
            del self.problems[bad_path]
        fresh = []
        known_rows = [(name, jobtext.format_node(node), node) for name, node in old if name not in without]
        for name, text in rows:
            if not name and not text:
                continue  # an empty row
            index = next((index for index, row in enumerate(known_rows) if row[:2] == (name, text)), None)
            fresh.append((name, known_rows.pop(index)[2] if index is not None else self._parsed((*path, name), text)))
        table, remaining = Table(), iter(fresh)
        for name, node in old:
            table += [(name, node)] if name in without else [row for row in [next(remaining, None)] if row]
        table += list(remaining)
        self._set(path, table or None)

    def differs(self, other: Form, path: KeyPath) -> bool:
        """Return whether another form has a different value at a path."""
        return self.get(path) != other.get(path)

    def set_texts(self, texts: Mapping[str, str]) -> None:
        """Set keys of the job to texts."""
        for key, text in texts.items():
            self._set((key,), text)

    def _read(self, field: Field, text: str) -> Node:
        is_command = field.path == ("entrypoint",) and text.startswith("[")
        if field.kind in ("text", "choice") and not is_command:
            return text
        if field.path == ("keep",) and text in ("auto", "none"):
            return text
        if field.kind == "lines" and not text.startswith("["):
            return [line for line in text.split("\n") if line]
        if field.kind == "words" and not text.startswith("["):
            try:
                return list(shlex.split(text))
            except ValueError as error:
                message = f"is not valid shell quoting: {str(error).lower()}"
                self.problems[field.path] = [Problem(message, field.name, "close every quote")]
                return text
        return self._parsed(field.path, text)

    def _parsed(self, path: KeyPath, text: str) -> Node:
        try:
            return jobtext.parse(text, JOB_FILE)
        except BadJob as error:
            hint = "put text that begins with [, { or a quote in quotes"
            self.problems[path] = [Problem(p.message, dotted(path), p.hint or hint) for p in error.problems]
            return text

    def _set(self, path: KeyPath, value: Node | None) -> None:
        table = self.table
        for depth, key in enumerate(path[:-1]):
            inner = table.get(key)
            if not isinstance(inner, Table):
                if value is None:
                    return
                inner = Table()
                _put(table, key, inner, top=depth == 0)
            table = inner
        if value is not None:
            _put(table, path[-1], value, top=len(path) == 1)
            return
        table[:] = [row for row in table if row[0] != path[-1]]
        if not table and len(path) > 1:
            self._set(path[:-1], None)  # removes an empty section


def lean(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's plain data without default and derived values; it makes an equal job."""
    from cloudtrain.job.job import Job, Resources

    size = {key: data[key] for key in ("num_nodes", "processes_per_node", "resources") if key in data}
    defaults = Job(name="job", trainer=True, **size).to_dict()
    defaults.update(num_nodes=1, processes_per_node=None, resources=Resources().model_dump(mode="json"), name=None)
    defaults.update(source=None, trainer=False)
    kept: dict[str, Any] = {}
    for key, value in data.items():
        if key == "inputs":
            value = {name: _lean_input(item) for name, item in value.items()}
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            value = {
                name: item for name, item in value.items() if name not in defaults[key] or defaults[key][name] != item
            }
        if value != defaults.get(key) and value not in ({}, None):
            kept[key] = value
    return kept


def _lean_input(item: dict[str, Any]) -> Any:
    """Return an input as people write it: a text for a place, and of a run no place, which is found anew."""
    found = ("uri", "sha256") if "run" in item else ()
    kept = {key: value for key, value in item.items() if key not in found and (key, value) != ("mode", "copy")}
    return kept["uri"] if kept.keys() == {"uri"} else kept


class GitSource(NamedTuple):
    """The parts of a `git+...` address of a source."""

    address: str
    revision: str
    folder: str

    @classmethod
    def parse(cls, text: str) -> GitSource:
        """Return the parts; any other text becomes the address."""
        address, _, fragment = text.removeprefix("git+").partition("#")
        host = _match(r"[a-z]+://[^/]*", address)
        path, sign, revision = address[len(host) :].rpartition("@")
        if not sign:
            path, revision = revision, ""
        return cls(host + path, revision, fragment.removeprefix("subdirectory="))

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"git+{self.address}{revision}" + (f"#subdirectory={self.folder}" if self.folder else "")


def _put(table: Table, key: str, value: Node, *, top: bool) -> None:
    """Set a key in place. A new key is appended, or at the top level inserted in the order of the job's keys."""
    for index, (name, _) in enumerate(table):
        if name == key:
            table[index] = (key, value)
            return
    index = len(table)
    if top:
        from cloudtrain.job.job import Job

        order = {name: number for number, name in enumerate(Job.model_fields)}
        position = order.get(key, len(order))
        index = next((index for index, (name, _) in enumerate(table) if order.get(name, len(order)) > position), index)
    table.insert(index, (key, value))


def _numbers(node: Node) -> Node:
    """Return hyperparameters of a stored job with numeric texts as numbers; their text stays the same."""
    if isinstance(node, Table):
        return Table((key, _numbers(value)) for key, value in node)
    if isinstance(node, list):
        return [_numbers(item) for item in jobtext.items(node)]
    if isinstance(node, str) and re.fullmatch(r"[-+]?[0-9.][0-9.eE+-]*", node):
        read = jobtext.parse(node)
        return read if isinstance(read, Plain) and read.text == node else node
    return node


def _are_lines(texts: list[str]) -> bool:
    return not texts[:1] or (not texts[0].startswith("[") and all(text and "\n" not in text for text in texts))


def _match(pattern: str, text: str) -> str:
    match = re.match(pattern, text)
    return match[0] if match else ""
