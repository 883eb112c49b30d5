"""Who may import whom (docs/design.md): a module imports its own layer or lower ones."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = [
    "errors state events installed images usage process importing",
    "job spec sending sections provenance foreign jobfile yaml12 arguments quantities problems conflicts bundle"
    " bytecode archive source checkout git ignore"
    " guard statcache sizes survey writing"
    " engine localmode localstore aws awsaccount cloudwatch ecr huggingfaceestimator s3files trainingjobs"
    " vertexoptions googleapi googleimages bucket customjobs joblog"
    " outputfiles sharedrun kubernetesoptions kubeapi kubeclaims kubeconfig kubejobs kubelogs kubestatus kubestore podlog"
    " document manifest backend machines nodes places agent supervision nodefiles rpc remote transfer inspection sshoptions"
    " slurmoptions sagemakeroptions batch jobfolder tail requests simulators",
    "backends store history records curves database migrations config configfile",
    "verdict verdictproof verdictranks verdictrules verdictsentences verdictsigns tracebacks",
    "attached attempts planner submitter run spawn watch headway resuming registry plots comparison notebook notify diagnosis",
    "cli console report training testing __init__ __main__",
]
STORE = ("cloudtrain.store", "cloudtrain.history", "cloudtrain.records", "cloudtrain.database", "cloudtrain.curves")
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
PYDANTIC = {
    "job",
    "sections",
    "spec",
    "sshoptions",
    "slurmoptions",
    "sagemakeroptions",
    "vertexoptions",
    "kubernetesoptions",
}  # the spec's own rooms
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
}


def modules(folder: Path):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imports(path: Path, *, top_only: bool = False):
    """Yield the dotted names that a file imports (inside `if TYPE_CHECKING` too: types are knowledge as well)."""
    tree = ast.parse(path.read_text())
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(path: Path) -> str:
    first = path.relative_to(ROOT / "cloudtrain").parts[0]
    return first.removesuffix(".py")


def test_every_module_has_a_layer():
    assert {room(path) for path in modules(ROOT / "cloudtrain")} - LAYER.keys() == set()


def test_nobody_reaches_upwards():
    wrong = []
    for path in modules(ROOT / "cloudtrain"):
        for name in imports(path):
            parts = name.split(".")
            if (
                parts[0] == "cloudtrain"
                and len(parts) > 1
                and parts[1] in LAYER
                and LAYER[parts[1]] > LAYER[room(path)]
            ):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []


def test_backends_know_neither_each_other_nor_the_store_nor_the_terminal():
    wrong = []
    for path in modules(ROOT / "cloudtrain" / "backends"):
        for name in imports(path):
            if name.startswith(("cloudtrain.backends.", *STORE, "click", "rich")):
                wrong.append(f"{path.name} imports {name}")
        if any(
            isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
            for n in ast.walk(ast.parse(path.read_text()))
        ):
            wrong.append(f"{path.name} prints")
    assert wrong == []


def test_only_the_registry_knows_the_backends_names():
    wrong = []
    for path in modules(ROOT / "cloudtrain"):
        if room(path) not in {"registry", "backends", "testing"}:
            wrong += [
                f"{path.relative_to(ROOT)} imports {name}"
                for name in imports(path)
                if name.startswith("cloudtrain.backends.")
            ]
    assert wrong == []


def test_heavy_packages_are_imported_inside_functions():
    wrong = []
    for path in modules(ROOT / "cloudtrain"):
        for name in imports(path, top_only=True):
            if name.split(".")[0] in LAZY | ({"rich", "platformdirs"}):
                wrong.append(f"{path.relative_to(ROOT)} imports {name} at its top")
            if name.split(".")[0] == "pydantic" and room(path) not in PYDANTIC:
                wrong.append(f"{path.relative_to(ROOT)} imports {name} at its top")
    assert wrong == []


def test_entrypoints_import_nothing_of_cloudtrain():
    for path in modules(ROOT / "entrypoints"):
        assert not [name for name in imports(path) if name.split(".")[0] == "cloudtrain"], path


def test_the_launcher_and_the_runtime_start_with_the_standard_library_only():
    ours = {path.stem for path in (ROOT / "entrypoints").iterdir()}
    files = [
        ROOT / "entrypoints" / "launch.py",
        ROOT / "entrypoints" / "runtime.py",
        *modules(ROOT / "entrypoints" / "launcher"),
    ]
    assert len(files) > 3
    for path in files:
        foreign = {name.split(".")[0] for name in imports(path, top_only=True)} - sys.stdlib_module_names - ours
        assert foreign == set(), path


def test_there_are_no_rooms_for_everything():
    names = {path.stem for folder in ("cloudtrain", "entrypoints") for path in modules(ROOT / folder)}
    assert names.isdisjoint({"utils", "util", "helpers", "helper", "base", "common", "misc"})
