"""A document: plain values, and where and how each of them was written; read from YAML 1.2 and JSON.

PyYAML parses; what its events mean is decided here by the core schema of YAML 1.2, so that `on`, `no`, `1:30` and dates
stay text and `0123` is a number whose written text is kept. Keys are always text and never doubled.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from cloudtrain.errors import BadJob, Problem

Path = tuple[str | int, ...]
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 64  # libyaml itself overflows the stack at some ten thousand levels
MAX_VALUES = 100_000  # after anchors are expanded: what a "billion laughs" file runs into

_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS = {"": None, "~": None, "null": None, "Null": None, "NULL": None,
          "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}  # fmt: skip
_TAG = "tag:yaml.org,2002:"
# Ordinary characters in YAML 1.2 that libyaml takes for line breaks or refuses; hidden from it, then put back.
_ODD = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
HALF = re.compile("[\ud800-\udfff]")
_PAIR = r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"
_HINTS = {
    "mapping values are not allowed": "quote a value that contains ': '",
    "cannot start any token": "indent with spaces, and quote a value that begins with @, ` or %",
    "did not find expected": "check the indentation and the quotes of the lines above",
    "could not find expected ':'": "a key is followed by a colon and a space",
    "found undefined alias": "quote a value that begins with *",
    "while scanning an anchor": "quote a value that begins with &",
    "while scanning an alias": "quote a value that begins with *",
    "unexpected end of stream": "close the quote",
    "unknown escape character": "in double quotes a backslash is written \\\\",
}


class Mark(NamedTuple):
    """Where a value was written, and for a scalar also how."""

    file: str
    line: int | None = None  # 1-based; of the key where there is one
    text: str | None = None  # None for a mapping or a list


@dataclass
class Document:
    """A value (mappings, lists, text, numbers, true, false, null) and the mark of everything in it."""

    value: Any = None
    marks: dict[Path, Mark] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)  # what is wrong in it, but leaves the rest readable
    notes: list[str] = field(default_factory=list)  # what of it has no effect, for the plan

    @classmethod
    def of(cls, value: Any, file: str, lines: Mapping[Path, int] | None = None) -> Self:
        """Return a document with a copy of Python values, marked with the file and the lines that are known."""
        marks: dict[Path, Mark] = {}

        def walk(item: Any, path: Path, line: int | None) -> Any:
            line = (lines or {}).get(path, line)
            if isinstance(item, dict):
                marks[path] = Mark(file, line)
                return {key: walk(child, (*path, key), line) for key, child in item.items()}
            if isinstance(item, list | tuple):
                marks[path] = Mark(file, line)
                return [walk(child, (*path, at), line) for at, child in enumerate(item)]
            item = os.fspath(item) if isinstance(item, os.PathLike) else item
            marks[path] = Mark(file, line, written(item))
            return item

        return cls(walk(value, (), None), marks)

    def mark(self, path: Path) -> Mark:
        """Return the mark of a value, or of the nearest one around it."""
        for size in range(len(path), -1, -1):
            if path[:size] in self.marks:
                return self.marks[path[:size]]
        return Mark("")

    def put(self, path: tuple[str, ...], other: Document) -> None:
        """Set the value at a path of keys, making the mappings on the way; raises BadJob where a scalar stands."""
        if not isinstance(self.value, dict):
            self.value = {}
        at = self.value
        for depth, key in enumerate(path[:-1]):
            if at.get(key) is None:
                at[key] = {}
                self.marks[path[: depth + 1]] = other.mark(())._replace(text=None)
            at = at[key]
            if not isinstance(at, dict):
                name = ".".join(path[: depth + 1])
                raise BadJob([Problem(f"{name} is not a mapping", hint=f"set {name} itself", file=other.mark(()).file)])
        at[path[-1]] = other.value
        self.marks = {old: mark for old, mark in self.marks.items() if old[: len(path)] != path}
        self.marks.update({path + old: mark for old, mark in other.marks.items()})

    def overlay(self, strong: Document) -> None:
        """Lay another document over this one: mappings are merged, anything else is replaced."""
        replaced: set[Path] = set()

        def merge(weak: dict[str, Any], new: Mapping[str, Any], path: Path) -> None:
            for key, value in new.items():
                if isinstance(value, dict) and isinstance(weak.get(key), dict):
                    merge(weak[key], value, (*path, key))
                else:
                    weak[key] = value
                    replaced.add((*path, key))

        merge(self.value, deepcopy(strong.value), ())
        kept = {p: m for p, m in self.marks.items() if not any(p[:size] in replaced for size in range(1, len(p) + 1))}
        self.marks = kept | strong.marks
        self.problems += strong.problems


def written(value: Any) -> str:
    """Return the text of a scalar as YAML and JSON write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def read_yaml(source: str | bytes, file: str = "") -> Document:
    """Return the one document of a YAML 1.2 or JSON text.

    Raises BadJob for what cannot be parsed; a key given twice and the like stand in the document's `problems`.
    """
    if isinstance(source, bytes):
        try:
            source = source.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadJob([Problem(f"this is not UTF-8 text (byte {error.start})", file=file)]) from None
    if len(source) > MAX_CHARACTERS:
        raise BadJob(
            [Problem(f"the file holds {len(source):,} characters; at most {MAX_CHARACTERS:,} are allowed", file=file)]
        )
    reader = _Reader(file)
    try:
        value = reader.document(_joined_surrogates(source.removeprefix("\ufeff")))
    except _Stop as stop:
        reader.problem(*stop.args)
        raise BadJob(reader.problems) from None
    return Document(value, reader.marks, reader.problems)


def scalar(text: str, file: str) -> Document:
    """Return what a value on the command line means: YAML behind [ { \" or ', else one plain scalar, verbatim."""
    if text[:1] in ("[", "{", '"', "'"):
        document = read_yaml(text, file)
        if document.problems:
            raise BadJob(document.problems)
        document.marks = {path: mark._replace(line=None) for path, mark in document.marks.items()}
        return document
    try:
        return Document(_core(text), {(): Mark(file, None, text)})
    except ValueError:
        return Document(text, {(): Mark(file, None, text)})


class _Stop(Exception):
    """What ends the reading: message, line, hint."""


class _Node(NamedTuple):
    line: int
    tag: str | None  # as written; None: decided by the text
    plain: bool
    value: Any  # str, list of nodes, or tuple of pairs of nodes


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: dict[Path, Mark] = {}
        self.problems: list[Problem] = []
        self.left = MAX_VALUES

    def problem(self, message: str, line: int | None = None, hint: str = "") -> None:
        problem = Problem(message, hint=hint, file=self.file, line=line)
        if problem not in self.problems:  # an anchor's content is read once for every use
            self.problems.append(problem)

    def document(self, text: str) -> Any:
        import yaml

        loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        hidden = sorted(set(_ODD.findall(text)))
        free = (code for code in range(0x10FFFD, 0x100000, -1) if chr(code) not in text)
        cover = {ord(odd): next(free) for odd in hidden}
        self.uncover = {code: odd for odd, code in cover.items()}
        try:
            text.encode()
            events = (event for event in yaml.parse(text.translate(cover), Loader=loader))
            root = self.compose(events)
        except UnicodeEncodeError as error:
            raise _Stop(
                "contains an invalid character (a lone surrogate)", text.count("\n", 0, error.start) + 1
            ) from None
        except yaml.MarkedYAMLError as error:
            opened = error.context_mark if re.search("flow|quoted", error.context or "") else None
            mark = opened or error.problem_mark or error.context_mark  # what is never closed is found at its beginning
            message = f"{error.context or ''} {error.problem or ''}".strip()
            hint = next((hint for key, hint in _HINTS.items() if key in message), "")
            line = mark.line + 1 if mark else None
            raise _Stop(f"this is not valid YAML: {message}", line, hint) from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1 if isinstance(error.position, int) else None
            at = next((i for i, c in enumerate(text) if c < " " and c not in "\t\n\r"), None)
            if at is not None:
                line = text.count("\n", 0, at) + 1
            raise _Stop(
                "a control character is not valid YAML", line, 'write it in double quotes, as "\\x07"'
            ) from None
        return None if root is None else self.build(root, (), root.line)

    def compose(self, events: Iterator[Any]) -> _Node | None:
        import yaml

        anchors: dict[str, _Node | None] = {}
        root: _Node | None = None

        def node(event: Any, depth: int) -> _Node:
            line: int = event.start_mark.line + 1
            if depth > MAX_DEPTH:
                raise _Stop(f"values are nested deeper than {MAX_DEPTH} levels", line)
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in anchors:
                    raise _Stop(f"no anchor &{event.anchor} is defined above", line, "quote a value that begins with *")
                anchored = anchors[event.anchor]
                if anchored is None:
                    raise _Stop(f"the anchor &{event.anchor} contains itself", line)
                return anchored
            if event.anchor is not None:
                anchors[event.anchor] = None
            if isinstance(event, yaml.ScalarEvent):
                tag = None if event.tag == "!" else event.tag
                made = _Node(line, tag, event.implicit[0] and event.tag is None, event.value.translate(self.uncover))
                if HALF.search(made.value):
                    self.problem("contains an invalid character (a lone surrogate)", line)
            else:
                items = []
                while not isinstance(inner := next(events), yaml.CollectionEndEvent):
                    items.append(node(inner, depth + 1))
                is_list = isinstance(event, yaml.SequenceStartEvent)
                value = items if is_list else tuple(zip(items[::2], items[1::2], strict=True))
                if event.tag not in (None, "!", _TAG + ("seq" if is_list else "map")):
                    self.problem(f"the tag {_short(event.tag)} is not supported", line, "remove it")
                made = _Node(line, None, False, value)
            if event.anchor is not None:
                anchors[event.anchor] = made
            return made

        for event in events:
            if isinstance(event, yaml.NodeEvent):
                second = root is not None
                root = node(event, 0)
                if second:
                    raise _Stop(
                        "a second YAML document begins here", root.line, "keep one document and remove the line ---"
                    )
        return root

    def build(self, node: _Node, path: Path, line: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise _Stop(f"with its anchors expanded the file holds over {MAX_VALUES:,} values", line)
        if isinstance(node.value, str):
            self.marks[path] = Mark(self.file, line, node.value)
            return self.scalar(node)
        self.marks[path] = Mark(self.file, line)
        if isinstance(node.value, list):
            return [self.build(item, (*path, at), item.line) for at, item in enumerate(node.value)]
        return self.mapping(node, path, line)

    def mapping(self, node: _Node, path: Path, line: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        first: dict[str, int] = {}
        for key, value in self.pairs(node):
            if not isinstance(key.value, str):
                self.problem("a key must be text", key.line, "quote a key that begins with [, { or ?")
                continue
            if key.value in first:
                self.problem(
                    f"the key {key.value!r} is given twice",
                    key.line,
                    f"the first is in line {first[key.value]} already",
                )
                continue
            first[key.value] = key.line
            result[key.value] = self.build(value, (*path, key.value), key.line)
        for name, item in self.merged(node, set(first)).items():
            result[name] = self.build(item, (*path, name), line)
        return result

    def pairs(self, node: _Node) -> list[tuple[_Node, _Node]]:
        return [(key, value) for key, value in node.value if not _is_merge(key)]

    def merged(self, node: _Node, taken: set[str]) -> Mapping[str, _Node]:
        """Return what `<<` brings into a mapping beside its own keys; of several sources the first wins."""
        entries: dict[str, _Node] = {}
        for key, value in node.value:
            if not _is_merge(key):
                continue
            for source in value.value if isinstance(value.value, list) else [value]:
                if not isinstance(source.value, tuple):
                    self.problem("<< takes a mapping, or a list of mappings", key.line, "write <<: *name")
                    continue
                self.left -= len(source.value)
                if self.left < 0:
                    raise _Stop(f"with its anchors expanded the file holds over {MAX_VALUES:,} values", key.line)
                own = {k.value: v for k, v in self.pairs(source) if isinstance(k.value, str)}
                for name, item in {**self.merged(source, set(own)), **own}.items():
                    if name not in taken:
                        entries.setdefault(name, item)
        return entries

    def scalar(self, node: _Node) -> Any:
        if node.plain:
            return self.number(node, None)
        if node.tag is None or node.tag == _TAG + "str":
            return node.value
        return self.number(node, node.tag)

    def number(self, node: _Node, tag: str | None) -> Any:
        try:
            value = _core(node.value)
        except ValueError:
            self.problem(f"the number {node.value[:20]}... is too long", node.line)
            return None
        if tag is None:
            return value
        kind = {"int": int, "float": float, "bool": bool, "null": type(None)}.get(tag.removeprefix(_TAG))
        if kind is float and type(value) is int:
            value = float(value)
        if kind is None or type(value) is not kind:
            self.problem(f"the tag {_short(tag)} is not supported here", node.line, "remove it")
        return value


def _core(text: str) -> Any:
    """Return the value of a plain scalar in the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if _FLOAT.fullmatch(text):
        return float(text.replace(".", "", 1) if text[-1] in "fFnN" else text)
    return text


def _is_merge(key: _Node) -> bool:
    return key.plain and key.value == "<<"


def _short(tag: str | None) -> str:
    return (tag or "").replace(_TAG, "!!")


def _joined_surrogates(text: str) -> str:
    """Return JSON with its escaped surrogate pairs as one character; YAML, which knows no such pairs, as it is."""
    if "\\u" not in text or text.lstrip()[:1] not in ("{", "[", '"') or not re.search(_PAIR, text):
        return text
    try:
        json.loads(text)
    except ValueError:
        return text
    return re.sub(_PAIR, lambda pair: pair[1] + json.loads(f'"\\u{pair[2]}\\u{pair[3]}"'), text)
