"""Who imports whom in entrypoints/: no circle, and the launcher needs nothing but Python 3.9 and itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS

FILES = sorted(path for path in ENTRYPOINTS.rglob("*.py") if "__pycache__" not in path.parts)


def name_of(path: Path) -> str:
    parts = path.relative_to(ENTRYPOINTS).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, anywhere in it: in functions and for type checkers too."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else base for name in names)


def edges() -> dict[str, set[str]]:
    return {name: set(imported(path)) & MODULES.keys() - {name} for name, path in MODULES.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return modules of which each imports the next and the last the first; empty where there are none."""
    done: set[str] = set()

    def walk(name: str, way: list[str]) -> list[str]:
        if name in way:
            return way[way.index(name) :]
        if name in done:
            return []
        for other in sorted(graph[name]):
            if found := walk(other, [*way, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def packages(graph: dict[str, set[str]], top: str) -> dict[str, set[str]]:
    """Return the same between what lies directly below a package."""

    def below(name: str) -> str:
        return ".".join(name.split(".")[:2])

    made: dict[str, set[str]] = {}
    for name, others in graph.items():
        if name.startswith(f"{top}."):
            inner = {below(other) for other in others if other.startswith(f"{top}.")}
            made.setdefault(below(name), set()).update(inner - {below(name)})
    return made


def test_a_circle_is_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_relative_imports_are_understood():
    graph = edges()
    assert (
        "launcher.manifest" in graph["launcher.supervisor"]
        and "launcher.world.outcome" in graph["launcher.world.worker"]
    )
    assert "trainer.errors" in graph["trainer.strategies"] and "trainer.strategies" in graph["train"]
    assert len(graph) > 60


def test_no_module_imports_itself_by_way_of_others():
    assert circle(edges()) == []


@pytest.mark.parametrize("top", ["launcher", "trainer"])
def test_no_package_imports_itself_by_way_of_others(top: str):
    """As above with each package as one: `output` does not import what imports `output`."""
    made = packages(edges(), top)
    assert len(made) > 8
    assert circle(made) == []


LAUNCHER = [path for name, path in MODULES.items() if name == "launch" or name.split(".")[0] == "launcher"]
CLIENTS = {  # of stores and secrets: imported where a job names one
    "fsspec",
}


@pytest.mark.parametrize("path", LAUNCHER, ids=name_of)
def test_the_launcher_needs_the_standard_library_only(path: Path):
    foreign = {name.partition(".")[0] for name in imported(path)} - sys.stdlib_module_names - {"launcher"}
    assert foreign <= (CLIENTS if name_of(path) == "launcher.output.store" else set())


@pytest.mark.parametrize("path", [*LAUNCHER, ENTRYPOINTS / "runtime.py"], ids=name_of)
def test_the_launcher_and_the_runtime_are_python_3_9(path: Path):
    ast.parse(path.read_text(), feature_version=(3, 9))


def test_the_runtime_stands_alone():
    assert {name.partition(".")[0] for name in imported(ENTRYPOINTS / "runtime.py")} <= sys.stdlib_module_names


def test_no_strategy_or_checkpoint_knows_the_script():
    """train.py and pickled.py are at the top: nobody imports them, but the one that trains with the other's loop."""
    users = {name for name, others in edges().items() if {"train", "trainer.pickled", "launch"} & others}
    assert users <= {"trainer.pickled", "shipped"}
