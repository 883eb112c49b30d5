"""Who imports whom in entrypoints/: no circle, and the launcher needs nothing but Python 3.9 and itself."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.entrypoints.training import ENTRYPOINTS
from tests.imports import Graph, circle, files, graph, imported, name_of

FILES = files(ENTRYPOINTS)


MODULES = {name_of(path, ENTRYPOINTS): path for path in FILES}


def packages(edges: Graph, top: str) -> Graph:
    """Return the same between what lies directly below a package."""

    def below(name: str) -> str:
        return ".".join(name.split(".")[:2])

    made: Graph = {}
    for name, others in edges.items():
        if name.startswith(f"{top}."):
            inner = {below(other) for other in others if other.startswith(f"{top}.")}
            made.setdefault(below(name), set()).update(inner - {below(name)})
    return made


def test_relative_imports_are_understood():
    edges = graph(ENTRYPOINTS, ENTRYPOINTS)
    assert (
        "launcher.manifest" in edges["launcher.supervisor"]
        and "launcher.world.outcome" in edges["launcher.world.worker"]
    )
    assert "trainer.errors" in edges["trainer.strategies"] and "trainer.strategies" in edges["train"]
    assert len(edges) > 60


@pytest.mark.parametrize("top", ["launcher", "trainer"])
def test_no_package_imports_itself_by_way_of_others(top: str):
    """As above with each package as one: `output` does not import what imports `output`."""
    made = packages(graph(ENTRYPOINTS, ENTRYPOINTS), top)
    assert len(made) > 8
    assert circle(made) == []


LAUNCHER = [path for name, path in MODULES.items() if name == "launch" or name.split(".")[0] == "launcher"]
FOREIGN = {
    "launcher.output.store": {"fsspec"},  # imported where a job names a store
    # a process of its own under the ranks' interpreter, which no module imports
    "launcher.prepare.accelerate_launch": {"accelerate", "torch", "yaml"},
    "launcher.health.measure": {"torch"},
    "launcher.ray_cluster": {"health"},  # beside it
}


def test_the_launcher_needs_the_standard_library_only():
    known = sys.stdlib_module_names | {"launcher", "cloudtrain_runtime"}
    foreign = {
        name_of(path, ENTRYPOINTS): {name.partition(".")[0] for name, _ in imported(path, ENTRYPOINTS)} - known
        for path in LAUNCHER
    }
    assert {name: found for name, found in foreign.items() if not found <= FOREIGN.get(name, set())} == {}


def test_what_runs_under_the_interpreter_of_the_ranks_is_imported_by_none():
    importing = {
        name
        for name, others in graph(ENTRYPOINTS, ENTRYPOINTS).items()
        if "accelerate_launch" in str(others) or "health.measure" in str(others)
    }
    assert importing == set()


RUNTIME = [*sorted((ENTRYPOINTS / "path").glob("cloudtrain_*.py")), ENTRYPOINTS / "launcher/fence.py"]


def test_the_launcher_and_the_runtime_are_python_3_9():
    assert [found for path in [*LAUNCHER, *RUNTIME] if (found := newer_syntax(path))] == []


def newer_syntax(path: Path) -> str | None:
    """Return what Python 3.9 does not parse of a file."""
    try:
        ast.parse(path.read_text(), feature_version=(3, 9))
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    return None


USED = {
    "cloudtrain_sampler": {"numpy", "torch"},
    "cloudtrain_trainer": {"torch", "accelerate", "transformers"},
}  # what scripts have


def test_the_runtime_stands_alone():
    for path in RUNTIME:
        own = {"cloudtrain_fence", *(other.stem for other in RUNTIME), *USED.get(path.stem, ())}
        assert {name.partition(".")[0] for name, _ in imported(path, ENTRYPOINTS)} <= sys.stdlib_module_names | own


def test_no_strategy_or_checkpoint_knows_the_script():
    """train.py and pickled.py are at the top: nobody imports them, but the one that trains with the other's loop."""
    users = {
        name
        for name, others in graph(ENTRYPOINTS, ENTRYPOINTS).items()
        if {"train", "trainer.pickled", "launch"} & others
    }
    assert users <= {"trainer.pickled", "shipped"}
