"""Does a test fail when a call of a backend does nothing, is done twice, or is done for another attempt? And without a trait?

    python benchmarks/call_faults.py [--tier N] [--tests PATH ...] [--work FOLDER] [--minutes N] [CALL ...]

Each call of `Backend`, each of its attributes and each trait is broken on one backend that has it, the first one of BACKENDS.
A call that only asks is not done twice, and one that knows no attempt is not done for another. The tests that come by run,
as for other seeded faults (seeded_faults.py). The table is results/call_faults.md; a run of some calls keeps the others.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from fault_sample import Fault
from measure import HERE, ROOT, report, table
from seeded_faults import is_caught, outcomes

sys.path.insert(0, str(ROOT))
from cloudtrain.backends.traits import Traits

BACKENDS = ("local", "ssh", "slurm", "sagemaker", "kubernetes", "vertex", "akash", "azureml", "attached")
KINDS = ("does nothing", "is done twice", "is another attempt's")
ACT = {
    "submit",
    "cancel",
    "fetch",
    "logs",
    "labelled",
    "discard",
    "remove",
    "delete_cancelled",
    "expect",
    "image_registry",
}
OTHER = "[re.sub(r'\\d+(?=\\D*$)', lambda found: str(int(found[0]) + 1), each) for each in {}]"
OF_ANOTHER = {  # parameter -> what it becomes
    "handle": f"handle, = {OTHER.format('[handle]')}",
    "handles": f"handles = {OTHER.format('handles')}",
    "attempt_id": f"attempt_id, = {OTHER.format('[attempt_id]')}",
    "newest": "newest += 1",
    "attempt": "attempt += 1",
}
DEFAULTS = {
    "poll_s": "3600.0",
    "follow_s": "None",
    "logs_per_s": "5.0",
    "calls_per_s": "50.0",
    "has_marks": "False",
    "lost_after_s": "None",
    "variables": "None",
}
BY_TYPE = {"Paths": "Paths.NONE", "Mapping[str, str]": "{}", "bool": "False", "str": '""', "Path | None": "None"}
FILE = HERE / "results" / "call_faults.json"


class Cell(NamedTuple):
    """A cell of the table: a call, attribute or trait, the backend, the kind of fault, and the fault."""

    name: str
    backend: str
    kind: str
    fault: Fault


def class_of(backend: str) -> tuple[Path, str, ast.ClassDef]:
    """Return where the class of a backend is: the last one of its module."""
    file = ROOT / "cloudtrain" / "backends" / backend / "backend.py"
    text = file.read_text()
    return file, text, [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)][-1]


def cells() -> Iterator[Cell]:
    """Yield all cells that can be tried, each on the first backend that has the call, attribute or trait."""
    tree = ast.parse((ROOT / "cloudtrain" / "backends" / "api.py").read_text())
    base = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Backend")
    calls = [node.name for node in base.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    classes = {backend: class_of(backend) for backend in BACKENDS}
    folder = ROOT / "cloudtrain" / "backends" / "folder.py"
    shared = next(node for node in ast.parse(folder.read_text()).body if isinstance(node, ast.ClassDef))
    for name in calls:
        for backend, (file, text, kind) in (*classes.items(), ("local", (folder, folder.read_text(), shared))):
            if node := next((at for at in kind.body if isinstance(at, ast.FunctionDef) and at.name == name), None):
                yield from faults_of(backend, file, text, node)
                break
    names = {field.name: BY_TYPE[str(field.type)] for field in fields(Traits)} | {"account": '"account"'}
    for name in names:
        for backend, (file, text, kind) in classes.items():
            value = next((at for at in kind.body if isinstance(at, ast.Assign) and name_of(at) == "traits"), None)
            given = (
                dict(zip(names, value.value.args, strict=False)) if value and isinstance(value.value, ast.Call) else {}
            )
            given |= {each.arg: each.value for each in value.value.keywords} if given or value else {}
            if name in given:
                yield Cell(name, backend, "trait", changed(file, text, given[name], names[name], f"trait {name}"))
                break
    for name, default in DEFAULTS.items():
        for backend, (file, text, kind) in classes.items():
            if node := next((at for at in kind.body if name_of(at) == name), None):
                assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value
                yield Cell(name, backend, "attribute", changed(file, text, node.value, default, f"attribute {name}"))
                break


def name_of(node: ast.stmt) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""


def changed(file: Path, text: str, node: ast.expr, value: str, what: str) -> Fault:
    """Return the fault that an expression has another value."""
    lines = text.splitlines(keepends=True)
    assert node.end_lineno and node.end_col_offset
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return Fault("calls", file, node.lineno, f"{what} is {value}", text, text[:begin] + value + text[end:])


def faults_of(backend: str, file: Path, text: str, node: ast.FunctionDef) -> Iterator[Cell]:
    """Yield the faults of a call, each in its body."""
    name, parts = node.name, [*node.args.posonlyargs, *node.args.args]
    first, *params = [each.arg for each in parts]
    words = [*params, *(f"{each.arg}={each.arg}" for each in node.args.kwonlyargs)]
    yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    nothing = "return"
    if not yields:
        call = (
            f"Backend.{name}({', '.join([first, *words])})"
            if first == "self"
            else f"Backend.{name}({', '.join(words)})"
        )
        nothing = f"from cloudtrain.backends.api import Backend\nreturn {call}"
    bodies = {KINDS[0]: nothing}
    if name in ACT:
        call = f"once({', '.join([first, *words])})"
        inner = ast.FunctionDef("once", node.args, node.body, [], None, None)
        steps = f"yield from {call}\nyield from {call}" if yields or name == "logs" else f"{call}\nreturn {call}"
        bodies[KINDS[1]] = f"{ast.unparse(ast.fix_missing_locations(inner))}\n{steps}"
    if others := [OF_ANOTHER[param] for param in params if param in OF_ANOTHER]:
        bodies[KINDS[2]] = "\n".join(["import re", *others, ast.unparse(ast.Module(node.body, []))])
    lines = text.splitlines()
    begin, end = node.body[0].lineno - 1, node.end_lineno
    for kind, body in bodies.items():
        indented = [" " * 8 + line for line in body.splitlines()]
        broken = "\n".join([*lines[:begin], *indented, *lines[end:]]) + "\n"
        yield Cell(name, backend, kind, Fault("calls", file, begin + 1, f"{name} {kind}", text, broken))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=("0", "1", "2", "3"), default="1", help="tests up to this tier")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="only these tests")
    parser.add_argument("--work", type=Path, required=True, help="a folder that keeps which test caught a fault")
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("names", nargs="*", metavar="CALL", help="calls, attributes or traits; default: all")
    given = parser.parse_args()
    every = list(cells())
    chosen = [cell for cell in every if not given.names or cell.name in given.names]
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    found = outcomes([cell.fault for cell in chosen], work, given)
    kept |= {f"{cell.name} {cell.kind}": outcome for cell, outcome in zip(chosen, found, strict=True)}
    keys = [f"{cell.name} {cell.kind}" for cell in every]
    kept = {key: kept.get(key, "not run") for key in keys}
    caught = sum(map(is_caught, kept.values()))

    def shown(name: str, kind: str) -> str:
        outcome = kept.get(f"{name} {kind}", "-").removeprefix("tests/")
        return f"`{outcome}`" if "::" in outcome else outcome or "**survives**"

    of_calls = {cell.name: cell.backend for cell in every if cell.kind in KINDS}
    rows = [(f"`{name}`", at, *(shown(name, kind) for kind in KINDS)) for name, at in of_calls.items()]
    others = [(f"`{cell.name}`", cell.backend, shown(cell.name, cell.kind)) for cell in every if cell.kind not in KINDS]
    body = table(rows, ("call", "on", *(f"it {kind}" for kind in KINDS)))
    body += "\n\n" + table(others, ("attribute or trait", "on", "it is left at its default"))
    report("call_faults", f"Faults of calls, attributes and traits: {caught} of {len(kept)} caught", body, [])
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
