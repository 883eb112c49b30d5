"""Does a test fail when a call of a backend does nothing, is done twice, or is done for another attempt? And without a trait?

    python benchmarks/call_faults.py --work FOLDER [--tier N] [--tests PATH ...] [--minutes N]

Each call of `Backend` is broken on the backends of the contract suite that run here (memory, local, ssh, and their base), and
on azureml, whose simulator answers here too, where each trait is left out as well; a call that none of them has, and each
trait, on the first backend that has it. Tests run as for other faults (seeded_faults.py): --work keeps those that caught one.
Of the calls that are not idempotent only those that yield are done twice: another one only asks. A call that is given no
attempt is not done for another.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from fault_sample import Fault
from measure import ROOT, report, table
from seeded_faults import is_caught, outcomes

sys.path.insert(0, str(ROOT))
from cloudtrain.backends.traits import Traits

BACKENDS = ROOT / "cloudtrain" / "backends"
FIRST = [ROOT / "cloudtrain" / "testing" / "memory.py", BACKENDS / "folder.py"]
FIRST += [BACKENDS / name / "backend.py" for name in ("local", "ssh")]
SIMULATED = BACKENDS / "azureml" / "backend.py"
NAMES = ("slurm", "kubernetes", "sagemaker", "vertex", "akash", "azureml", "attached")
REST = [BACKENDS / name / "backend.py" for name in NAMES]
KINDS = ("nothing", "twice", "another")
IDEMPOTENT = (
    "submit",
    "cancel",
    "fetch",
    "discard",
    "remove",
    "delete_cancelled",
)  # the contract suite does them twice
YIELDS = ("logs", "labelled")
EMPTY = {  # what a call returns that every backend has; others return what the base class does
    "plan": "None",
    "submit": "''",
    "find": "None",
    "status": "Status(State.QUEUED)",
    "cancel": "None",
    "fetch": "into",
    "options": "__import__('pydantic').create_model('Options')",
}
NEXT = "[re.sub(r'\\d+(?=\\D*$)', lambda found: str(int(found[0]) + 1), each) for each in {}]"
OF_ANOTHER = {  # a parameter, and what makes it that of the next attempt
    "handle": f"handle, = {NEXT.format('[handle]')}",
    "handles": f"handles = {NEXT.format('handles')}",
    "attempt_id": f"attempt_id, = {NEXT.format('[attempt_id]')}",
    "newest": "newest += 1",
    "attempt": "attempt += 1",
}


def class_of(file: Path) -> ast.ClassDef:
    """Return the backend of a file: the last class of it that has a base."""
    return [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef) and node.bases][-1]


def methods(of: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in of.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}


def faults() -> Iterator[Fault]:
    """Yield the faults of all calls and traits; `place` is the kind of fault, the call or trait, and the backend."""
    classes = {file: class_of(file) for file in (*FIRST, *REST)}
    for name in methods(class_of(BACKENDS / "api.py")):
        have = [file for file in classes if name in methods(classes[file])]
        whole = [file for file in have if file in FIRST] or have[:1]
        for file in dict.fromkeys([*whole, *({SIMULATED} & {*have})]):
            yield from faults_of(file, methods(classes[file])[name])
    for at, trait in enumerate(fields(Traits)):
        default = repr(getattr(Traits(), trait.name)) if trait.name != "paths" else "Paths.NONE"
        values = {file: value for file, of in classes.items() if (value := value_of(of, at, trait.name))}
        for file in dict.fromkeys([*list(values)[:1], *({SIMULATED} & {*values})]):
            yield changed(file, values[file], default, ("trait", trait.name))


def value_of(of: ast.ClassDef, at: int, name: str) -> ast.expr | None:
    """Return what a backend sets a trait to."""
    made = next((node for node in ast.walk(of) if isinstance(node, ast.Call) and name_of(node) == "Traits"), None)
    values = dict(enumerate(made.args)) | {each.arg: each.value for each in made.keywords} if made else {}
    return values.get(at) or values.get(name)


def name_of(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def changed(file: Path, node: ast.expr, value: str, kind: Sequence[str]) -> Fault:
    """Return the fault that an expression has another value."""
    text = file.read_text()
    was = ast.get_source_segment(text, node) or ""
    head = "".join(text.splitlines(keepends=True)[: node.lineno - 1])
    at = len(head) + node.col_offset
    return fault(file, node.lineno, kind, text[:at] + value + text[at + len(was) :])


def fault(file: Path, line: int, kind: Sequence[str], text: str) -> Fault:
    on = file.stem if file in FIRST[:2] else file.parent.name
    place = " ".join((*kind, on))
    return Fault(place, file, line, place, file.read_text(), text)


def faults_of(file: Path, node: ast.FunctionDef) -> Iterator[Fault]:
    """Yield the faults of a call, each of them in its body."""
    name, before = node.name, "from cloudtrain.backends.api import Backend, State, Status\nimport re\n"
    first, *names = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]
    given = ", ".join([*names, *(f"{each.arg}={each.arg}" for each in node.args.kwonlyargs)])
    base = f"Backend.{name}({'self, ' if first == 'self' else ''}{given})"
    empty = "return\nyield" if name in YIELDS else f"return {EMPTY.get(name, base)}"
    bodies = {"nothing": before + empty}
    if name in YIELDS:
        once = ast.fix_missing_locations(ast.FunctionDef("once", node.args, node.body, [], None, None))
        bodies["twice"] = ast.unparse(once) + f"\nyield from once({first}, {given})" * 2
    if others := [OF_ANOTHER[each] for each in names if each in OF_ANOTHER]:
        bodies["another"] = before + "\n".join([*others, *map(ast.unparse, node.body)])
    lines = file.read_text().splitlines()
    begin = node.body[0].lineno
    for kind, body in bodies.items():
        broken = [f"        {line}" for line in body.splitlines()]
        yield fault(file, begin, (kind, name), "\n".join([*lines[: begin - 1], *broken, *lines[node.end_lineno :], ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tier", choices=("0", "1", "2", "3"), default="1", help="tests up to this tier")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="only these tests")
    parser.add_argument("--work", type=Path, required=True, help="a folder that keeps which test caught a fault")
    parser.add_argument("--minutes", type=float, default=1e6, help="try faults for so long, after the run with marks")
    parser.add_argument("on", nargs="*", metavar="BACKEND", help="only faults of these, such as folder")
    given = parser.parse_args()
    every = [each for each in faults() if not given.on or each.place.rpartition(" ")[2] in given.on]
    work = given.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    found = outcomes(every, work, given, by_sentences=False)  # what it did is to be missed, not what it said
    calls: dict[tuple[str, str], dict[str, str]] = {}
    traits = []
    for each, outcome in zip(every, found, strict=True):
        kind, name, on = each.place.split()
        shown = f"`{outcome.removeprefix('tests/')}`" if is_caught(outcome) else outcome or "**survives**"
        if kind == "trait":
            traits.append((f"`{name}`", on, shown))
        else:
            row = calls.setdefault((name, on), {"twice": "idempotent"} if name in IDEMPOTENT else {})
            row[kind] = shown
    rows = [(f"`{name}`", on, *(row.get(kind, "-") for kind in KINDS)) for (name, on), row in calls.items()]
    body = table(rows, ("call", "on", "it does nothing", "it is done twice", "it is another attempt's"))
    body += "\n\n" + table(traits, ("trait", "on", "it is left out"))
    caught = sum(map(is_caught, found))
    equal = sum(outcome.startswith("equal: ") for outcome in found)
    title = f"Faults of calls and traits: {caught} of {len(found)} caught, {equal} change nothing that is promised"
    return report("call_faults", title, body, [])


if __name__ == "__main__":
    sys.exit(main())
