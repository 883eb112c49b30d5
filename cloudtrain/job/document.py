"""A document: plain values, and where and how each of them was written."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from cloudtrain.errors import BadJob, Problem

Path = tuple[str | int, ...]


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
