"""Which of ten seeded faults do the quick tests catch? One fault in each of ten packages, at a place chosen by a seed.

    python benchmarks/seeded_faults.py [--seed N] [--all] [PLACE ...]

A fault negates the condition of an `if` or `while`, or drops a call whose result nobody uses. It is made in a copy of the
tree. The tests of `make test` beside that package run until one fails (--all: all of `make test`). That one must pass
without the fault. A fault that survives is for a person to judge: would a user on one machine have met it?
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from measure import ROOT, report, table

SEED = 20
PLACES = {  # a file or folder -> the tests beside it
    "cloudtrain/job": ("tests/job", "tests/golden", "tests/runs/test_submit.py"),
    "cloudtrain/source": ("tests/source", "tests/runs/test_submit.py", "tests/test_usage.py"),
    "cloudtrain/nodes": ("tests/nodes", "tests/backends/local", "tests/cli/test_submit.py", "tests/runs"),
    "cloudtrain/backends/local": ("tests/backends/local", "tests/cli/test_submit.py", "tests/runs"),
    "cloudtrain/history": ("tests/history", "tests/runs", "tests/cli"),
    "cloudtrain/diagnosis": ("tests/diagnosis", "tests/cli"),
    "cloudtrain/runs/sending/send.py": ("tests/runs",),
    "cloudtrain/runs/sending/outcomes.py": ("tests/runs",),
    "cloudtrain/runs/submit.py": ("tests/runs", "tests/cli/test_submit.py"),
    "cloudtrain/cli": ("tests/cli", "tests/runs"),
    "entrypoints/launcher": ("tests/entrypoints/launcher", "tests/entrypoints", "tests/backends/local"),
}
BOUND_S = 1800.0  # a fault that makes the tests hang is caught, too


class Fault(NamedTuple):
    """A changed piece of a file: bytes `begin` to `end` become `text`."""

    file: Path
    line: int
    what: str
    begin: int
    end: int
    text: bytes


def find_faults(file: Path) -> Iterator[Fault]:
    """Yield every fault that can be made in a file."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.If | ast.While):
            part, what = node.test, "negated"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            part, what = node, "dropped"
        else:
            continue
        begin = starts[part.lineno - 1] + part.col_offset
        end = starts[part.end_lineno - 1] + part.end_col_offset
        piece = source[begin:end]
        if piece in (b"TYPE_CHECKING", b"True"):
            continue
        shown = " ".join(piece.decode().split())
        text = b"not (" + piece + b")" if what == "negated" else b"pass"
        yield Fault(file, part.lineno, f"{what} `{shown[:60]}`", begin, end, text)


def choose_fault(place: str, seed: int) -> Fault:
    """Return the fault of a place: each possible one is as likely as any other."""
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return random.Random(f"{seed} {place}").choice([fault for file in files for fault in find_faults(file)])


def run_tests(tree: Path, tests: tuple[str, ...]) -> str:
    """Run quick tests of a tree until one fails; return its id, "" where all pass."""
    # PYTHONPATH: the tree's own package goes before the one that is installed; commands started by tests inherit it.
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "--tier", "1", *tests]
    command.append(f"--basetemp={tree.parent / 'tmp'}")
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        return "they hang"
    if done.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "pytest cannot start: " + (done.stdout + done.stderr).strip()[-200:]


def copy_tree(to: Path) -> None:
    """Copy the files of this tree that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--all", action="store_true", help="run all of `make test` for each fault")
    parser.add_argument("places", nargs="*", default=list(PLACES), metavar="PLACE", help=", ".join(PLACES))
    given = parser.parse_args()
    rows, caught = [], 0
    with tempfile.TemporaryDirectory(prefix="cloudtrain-faults-") as folder:
        Path(folder).chmod(0o755)  # a test reads it as another user
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for place in given.places:
            fault = choose_fault(place, given.seed)
            name = fault.file.relative_to(ROOT)
            source = fault.file.read_bytes()
            (tree / name).write_bytes(source[: fault.begin] + fault.text + source[fault.end :])
            failed = run_tests(tree, ("tests",) if given.all else PLACES[place])
            (tree / name).write_bytes(source)
            if "::" in failed and run_tests(tree, (failed,)):
                failed = f"(fails without the fault, too: {failed})"
            caught += bool(failed) and not failed.startswith("(")
            rows.append(
                (f"`{name}:{fault.line}`", fault.what.replace("|", "\\|"), failed.removeprefix("tests/") or "-")
            )
            print(*rows[-1], flush=True)
    if set(given.places) != set(PLACES):
        return 0
    body = table(rows, ("place", "fault", "caught by"))
    return report("seeded_faults", f"Seeded faults, seed {given.seed}: {caught} of {len(rows)} caught", body, [])


if __name__ == "__main__":
    sys.exit(main())
