"""Values of expressions in a script's text, as far as they follow from literals and from the script's own path."""

from __future__ import annotations

import ast
import json
import posixpath
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudtrain.errors import BadRequest

_SAME = ("abspath", "realpath", "normpath", "expanduser", "fspath", "relpath", "str", "resolve", "absolute", "as_posix")
_PATHS = ("Path", "PurePath", "PosixPath", "join", "joinpath")
_FOLDERS = {"pardir": "..", "curdir": "."}
_DEEPEST = 20  # names that are looked up for one value


def read_code(path: Path) -> str:
    """Return a script's text, or the code cells of a notebook; raises BadRequest."""
    try:
        text = path.read_text("utf-8")
        if path.suffix != ".ipynb":
            return text
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadRequest(
            f"{path} cannot be read: {error}", "correct the line; the file must be a Python script or a notebook"
        ) from None
    lines = "\n".join(cell if isinstance(cell, str) else "".join(cell) for cell in cells).splitlines()
    return "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in lines)


def name_of(node: ast.AST | None) -> str:
    """Return the last word of a name: init_process_group of torch.distributed.init_process_group."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def constant(node: ast.AST | None) -> str | None:
    """Return the text of a literal; None for anything else."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class Literals:
    """The values of one file. Paths are relative to the source, in which the script starts.

    Args:
        path: the file's own path, the value of `__file__`.
        nodes: those of its tree that run.
    """

    def __init__(self, path: str, nodes: Iterable[ast.AST]) -> None:
        self._path = path
        self._assigned: dict[str, ast.expr] = {}  # the first value of a name
        for node in nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._assigned.setdefault(node.targets[0].id, node.value)

    def value(self, node: ast.AST | None, depth: int = 0) -> str | None:
        """Return the text or path that an expression stands for; None where its text does not say."""
        if node is None or depth > _DEEPEST:
            return None
        if (text := constant(node)) is not None:
            return text
        if isinstance(node, ast.Name):
            return self._path if node.id == "__file__" else self.value(self._assigned.get(node.id), depth + 1)
        if isinstance(node, ast.Attribute):
            return self._above(node.value, 1, depth) if node.attr == "parent" else _FOLDERS.get(node.attr)
        if (
            isinstance(node, ast.Subscript)
            and name_of(node.value) == "parents"
            and isinstance(node.slice, ast.Constant)
        ):
            owner = node.value.value if isinstance(node.value, ast.Attribute) else None
            return self._above(owner, node.slice.value + 1, depth) if isinstance(node.slice.value, int) else None
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Add):
            return self._joined([node.left, node.right], depth, "/" if isinstance(node.op, ast.Div) else "")
        if isinstance(node, ast.JoinedStr):
            return self._joined(map(_unwrapped, node.values), depth)
        return self._called(node, depth) if isinstance(node, ast.Call) else None

    def _called(self, node: ast.Call, depth: int) -> str | None:
        called = name_of(node.func)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if called in ("getcwd", "cwd"):
            return "."
        if called == "dirname" and node.args:
            return self._above(node.args[0], 1, depth)
        if called in _SAME:
            return self.value(node.args[0] if node.args and called not in ("resolve", "absolute") else owner, depth + 1)
        if called in _PATHS and (node.args or called == "joinpath"):
            return self._joined([owner, *node.args] if called == "joinpath" else node.args, depth, "/")
        return None

    def _above(self, node: ast.AST | None, levels: int, depth: int) -> str | None:
        path = self.value(node, depth + 1)
        return None if path is None else posixpath.normpath(posixpath.join(path, *[".."] * levels))

    def _joined(self, nodes: Iterable[ast.AST | None], depth: int, separator: str = "") -> str | None:
        parts = [self.value(node, depth + 1) for node in nodes]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return posixpath.join("", *known) if separator else "".join(known)

    def beginning(self, node: ast.AST | None, depth: int = 0) -> str:
        """Return the text with which a value begins that is not known as a whole: models. of f"models.{name}"."""
        if depth > _DEEPEST:
            return ""
        if isinstance(node, ast.JoinedStr) and node.values:
            return self.value(node.values[0]) or ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.value(node.left) or self.beginning(node.left, depth + 1)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
            return (self.value(node.func.value) or "").partition("{")[0]
        return self.beginning(self._assigned.get(node.id), depth + 1) if isinstance(node, ast.Name) else ""

    def parts(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes of an expression, and those of the values of its names."""
        for part in ast.walk(node):
            yield part
            if isinstance(part, ast.Name) and part.id in self._assigned:
                yield from ast.walk(self._assigned[part.id])


def _unwrapped(node: ast.AST) -> ast.AST:
    return node.value if isinstance(node, ast.FormattedValue) else node
