"""Who imports whom below a folder, read from its source: at the top, in functions and for types, absolute and relative."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

Graph = dict[str, set[str]]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path, root: Path) -> str:
    """Return the dotted name of a module, as it is imported from root."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_statements(path: Path) -> list[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the import statements of a file, and of each whether it is in a function."""

    def below(nodes: Iterable[ast.AST], inside: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for node in nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node, inside
            elif not isinstance(node, ast.expr):
                within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from below(ast.iter_child_nodes(node), within)

    return list(below(ast.parse(path.read_text()).body, False))


def imported(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Yield module and name of each import of a file; the name is "" in `import module`."""
    package = name_of(path, root).split(".")[: None if path.name == "__init__.py" else -1]
    for node, _ in import_statements(path):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        else:
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def graph(folder: Path, root: Path) -> Graph:
    """Return the modules below a folder, and which of them each imports.

    Who imports a module imports the packages around it too, but for those that are around both: they are imported by then.
    """
    modules = {name_of(path, root): path for path in files(folder)}
    edges: Graph = {}
    for name, path in modules.items():
        edges[name] = set()
        for module, attribute in imported(path, root):
            target = f"{module}.{attribute}" if f"{module}.{attribute}" in modules else module
            parts = target.split(".")
            packages = {".".join(parts[:end]) for end in range(1, len(parts))}
            edges[name] |= {target} | {package for package in packages if not f"{name}.".startswith(f"{package}.")}
        edges[name] &= modules.keys() - {name}
    return edges


def circle(edges: Graph) -> list[str]:
    """Return modules of which each imports the next and the last the first; empty where there are none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(edges[name]):
            if members := walk(other, [*path, name]):
                return members
        done.add(name)
        return []

    return next((members for name in sorted(edges) if (members := walk(name, []))), [])
