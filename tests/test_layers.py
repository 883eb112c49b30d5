"""Who may import whom: packages, in the order of docs/design.md, and no circle between modules."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.imports import circle, files, graph, import_statements, imported

ROOT = Path(__file__).parents[1]
# A package imports its own layer and those before it.
LAYERS = [
    "__about__ clock errors events metrics",
    "job source",
    "nodes",
    "backends simulators",
    "history diagnosis",
    "report forecast policy",
    "runs sweeps functions",
    "training testing cli console __main__",
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}

# What modules of runs/ import of each other in functions only, and what the import costs where it is not needed.
LATE = {
    ("runs", "runs.listing"): "a package imports none of its modules",
    ("runs.planning.plan", "runs.planning.fit_check"): "pydantic",
    ("runs.run", "runs.sending.resume"): "pydantic",
    ("runs.run", "runs.evaluation"): "pydantic",
    ("runs.state", "runs.watching.watch"): "all that a watcher does, where one is alive already",
    ("runs.state", "runs.live_card"): "what a notebook shows",
    ("runs.results", "runs.live_card"): "what a notebook shows",
    ("runs.state", "runs.attached_history"): "readers of event files, for attached runs alone",
}
PYDANTIC = {"job.job", "job.model", "job.sections", "job.fields"}  # and every backend's options.py
PROCESS = "backends.sagemaker.local_job"  # a process of its own, which prints into its own file
LAZY = {
    "torch",
    "transformers",
    "accelerate",
    "boto3",
    "botocore",
    "sagemaker",
    "google",
    "kubernetes",
    "asyncssh",
    "plotly",
    "nicegui",
    "rich",
    "platformdirs",
}


def module(path: Path) -> str:
    """Return a module's name below cloudtrain; "" is cloudtrain itself."""
    parts = path.relative_to(ROOT / "cloudtrain").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module(path): path for path in files(ROOT / "cloudtrain")}


def imports(path: Path, *, top_only: bool = False) -> Iterator[str]:
    """Yield the dotted names that a file imports (inside `if TYPE_CHECKING` too: types are knowledge as well).

    `top_only` leaves out what functions import.
    """
    for node, in_function in import_statements(path):
        if top_only and in_function:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_the_top(path: Path) -> set[str]:
    """Return the top-level packages that are imported whenever a file is: not for types, not in functions."""
    nodes = ast.parse(path.read_text()).body
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in names}


@cache
def ours(name: str, top_only: bool = False) -> frozenset[str]:
    """Return the modules of cloudtrain that one of them imports; of a package and a module in it, the module."""
    found = {each.removeprefix("cloudtrain.") for each in imports(modules()[name], top_only=top_only)}
    found = {each for each in found if each in modules() and each}
    packages = {each for each in found if modules()[each].name == "__init__.py"}
    return frozenset(each for each in found if not (each in packages and any(o.startswith(f"{each}.") for o in found)))


def family(name: str) -> str:
    """Return the provider of a module below backends/ or simulators/, "" for what they share."""
    parts = name.split(".")
    return parts[1] if parts[0] in ("backends", "simulators") and len(parts) > 2 and parts[1] != "store" else ""


def edges(*, top_only: bool = False) -> set[tuple[str, str]]:
    return {(name, found) for name in modules() for found in ours(name, top_only)}


def test_there_are_at_most_seventeen_names_at_the_top():
    """Dunder files and py.typed do not count; with clock, forecast, sweeps and policy there are 21."""
    names = {path.name.removesuffix(".py") for path in (ROOT / "cloudtrain").iterdir()}
    top = {name for name in names if not name.startswith("__")} - {"py.typed"}
    assert top <= LAYER.keys(), "a package without a layer"
    assert len(top - {"clock", "forecast", "sweeps", "policy"}) <= 17


def test_nobody_reaches_upwards():
    upwards = {
        (name, found) for name, found in edges() if name and LAYER[found.split(".")[0]] > LAYER[name.split(".")[0]]
    }
    assert upwards == set()


def test_packages_of_runs_import_only_downwards():
    """Modules at the top of runs/ import all of them; imports inside functions and for types count."""
    floors = ["planning", "sending", "watching", "top"]

    def floor(name: str) -> int:
        package, _, rest = name.removeprefix("runs.").partition(".")
        return floors.index(package if rest or package in floors else "top")

    inside = {pair for pair in edges() if all(name.startswith("runs.") for name in pair)}
    assert {floor(name) for pair in inside for name in pair} == {0, 1, 2, 3}
    assert {(name, found) for name, found in inside if floor(found) > floor(name)} == set()


def test_a_circle_is_noticed():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_imports_in_functions_and_of_packages_and_for_types_count(tmp_path):
    sources = {
        "p/__init__.py": "def f():\n    from p.a import g\n",
        "p/a.py": "from . import b\nTYPE_CHECKING = False\nif TYPE_CHECKING:\n    from p.c import g\n",
        "p/b.py": "def f():\n    import q.d\n",
        "p/c.py": "import p.a as a\nfrom p import name\n",
        "q/__init__.py": "",
        "q/d.py": "if not TYPE_CHECKING:\n    from p.b import f\n",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    edges = {
        "p": {"p.a"},
        "p.a": {"p.b", "p.c"},
        "p.b": {"q", "q.d"},
        "p.c": {"p", "p.a"},
        "q": set(),
        "q.d": {"p", "p.b"},
    }
    assert graph(tmp_path, tmp_path) == edges


@pytest.mark.parametrize(("folder", "root"), [("cloudtrain", "."), ("entrypoints", "entrypoints")])
def test_no_circle_between_modules(folder, root):
    """Imports inside functions count, and those that only type checkers read."""
    edges = graph(ROOT / folder, ROOT / root)
    assert len(edges) > 60
    assert circle(edges) == [], "modules that import each other"


def test_modules_of_runs_do_not_import_the_package_that_calls_one_of_them():
    """`from cloudtrain.runs import listing` runs the package first, which is a circle to tools that count it."""
    below = [path for path in files(ROOT / "cloudtrain" / "runs") if path != ROOT / "cloudtrain/runs/__init__.py"]
    assert len(below) > 30
    assert [path.name for path in below for found, _ in imported(path, ROOT) if found == "cloudtrain.runs"] == []


def test_modules_of_runs_import_each_other_at_the_top():
    late = edges() - edges(top_only=True)
    assert {pair for pair in late if all(name.split(".")[0] == "runs" for name in pair)} == LATE.keys()


def test_a_family_imports_no_other_family():
    assert [
        f"{name} imports {found}"
        for name, found in edges()
        if family(name) and family(found) and family(name) != family(found)
    ] == []


def test_backends_know_neither_the_history_nor_the_terminal():
    wrong = []
    for path in files(ROOT / "cloudtrain" / "backends"):
        for name in imports(path):
            if name.startswith(("cloudtrain.history.", "click", "rich")):
                wrong.append((module(path), name.removeprefix("cloudtrain.")))
        if module(path) != PROCESS and any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
            for n in ast.walk(ast.parse(path.read_text()))
        ):
            wrong.append((module(path), "prints"))
    assert wrong == []


def test_only_the_registry_knows_the_backends_names():
    assert {
        (name, found)
        for name, found in edges()
        if found.startswith("backends.")
        and family(found) not in ("", family(name), "attached")  # no job names that one
    } == set()


def test_packages_import_none_of_their_modules():
    for path in files(ROOT / "cloudtrain"):
        if path.name == "__init__.py" and module(path):
            assert ours(module(path), top_only=True) == set(), path


def test_heavy_packages_are_imported_inside_functions():
    wrong = []
    for name, path in modules().items():
        for found in at_the_top(path):
            if found in LAZY:
                wrong.append(f"{name} imports {found} at its top")
            options = name.startswith("backends.") and name.endswith(".options")
            if found == "pydantic" and name not in PYDANTIC and not options:
                wrong.append(f"{name} imports {found} at its top")
    assert wrong == []


def test_entrypoints_import_nothing_of_cloudtrain():
    for path in files(ROOT / "entrypoints"):
        assert not [name for name in imports(path) if name.split(".")[0] == "cloudtrain"], path


def test_the_launcher_and_the_runtime_start_with_the_standard_library_only():
    entrypoints = ROOT / "entrypoints"
    launcher = entrypoints / "launcher"
    scripts = files(entrypoints / "path")
    own = {path.stem for path in (*entrypoints.iterdir(), *scripts)} | {"cloudtrain_fence"}
    found = [entrypoints / "launch.py", *scripts, *files(launcher)]
    assert len(found) > 3
    for path in found:
        assert at_the_top(path) - sys.stdlib_module_names - own == set(), path


def test_there_are_no_modules_for_everything():
    names = {path.stem for folder in ("cloudtrain", "entrypoints") for path in files(ROOT / folder)}
    assert names.isdisjoint({"utils", "util", "helpers", "helper", "base", "common", "misc"})
