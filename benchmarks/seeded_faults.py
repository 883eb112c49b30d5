"""Which of forty seeded faults do the tests catch? At places chosen by a seed, over all packages.

    python benchmarks/seeded_faults.py [--seed N] [--count N] [--tier N] [--work FOLDER] [PLACE ...]

A fault negates the condition of an `if` or `while`, or drops a call whose result nobody uses. It is made in a copy of the
tree. One run of the tests up to that tier, with a mark at each fault, says which tests come by. Then each fault is made alone,
and the tests that came by it run, the lower tiers first, until one fails. That one must pass without the fault. With --work
the copy stays there, and so does what that run has written. A fault that survives is for a person to judge.
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
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from measure import ROOT, report, table

sys.path.insert(0, str(ROOT))
from tests.extent import tier_of_name

SEED = 20
COUNT = 40
BACKENDS = ("akash", "attached", "kubernetes", "local", "sagemaker", "slurm", "ssh", "vertex")
FIRST = ("job", "source", "nodes", "history", "diagnosis", "runs", "cli", "console", "backends")
SECOND = ("forecast", "metrics", "policy", "report", "simulators", "sweeps", "testing", "training")
PLACES = [  # the second round of faults begins again with the first place
    *(f"cloudtrain/backends/{name}" for name in BACKENDS),
    *(f"cloudtrain/{name}" for name in FIRST),
    *(f"cloudtrain/runs/{name}" for name in ("planning", "sending", "watching", "submit.py")),
    *(f"cloudtrain/{name}" for name in SECOND),
    *(f"entrypoints/launcher{name}" for name in ("", "/output", "/prepare", "/world")),
    *(f"entrypoints/trainer{name}" for name in ("", "/checkpoints", "/data", "/strategies")),
    *(f"entrypoints/{name}" for name in ("runtime.py", "train.py")),
]
BOUND_S = 3600.0  # for the tests of one fault
MARKS = """
import os
_seen = set()
def mark(number):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    if (number, test) not in _seen:
        _seen.add((number, test))
        end = os.open({reached!r}, os.O_WRONLY | os.O_APPEND)
        os.write(end, f"{{number}} {{test}}\\n".encode())
        os.close(end)
"""


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


def choose_fault(place: str, seed: str) -> Fault:
    """Return the fault of a place: each possible one is as likely as any other."""
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    return random.Random(f"{seed} {place}").choice([fault for file in files for fault in find_faults(file)])


def tests_that_come_by(faults: Sequence[Fault], work: Path, tier: str) -> dict[int, list[str]]:
    """Run all tests with a mark at each fault; return the tests by the fault's number, the lower tiers first.

    A process that a test has started writes the test's name too, where it has its environment.
    """
    tree, reached = work / "marked", work / "reached.txt"
    if not reached.exists():
        copy_tree(tree)
        reached.touch()
        reached.chmod(0o666)  # a test runs some code as another user
        (work / "fault_marks.py").write_text(MARKS.format(reached=str(reached)))
        for file in {fault.file for fault in faults}:
            (tree / file.relative_to(ROOT)).write_bytes(
                marked(file.read_bytes(), [(n, f) for n, f in enumerate(faults) if f.file == file], work)
            )
        run_tests(tree, "--tier", tier, "--maxfail=1000000", "tests")
    found: dict[int, set[str]] = defaultdict(set)
    for line in reached.read_text().splitlines():
        number, _, test = line.partition(" ")
        if test:
            found[int(number)].add(test)
    return {number: sorted(tests, key=lambda test: (tier_of(test), test)) for number, tests in found.items()}


def marked(source: bytes, faults: Sequence[tuple[int, Fault]], work: Path) -> bytes:
    """Return a file with a mark at each of its faults."""
    for number, fault in sorted(faults, key=lambda each: -each[1].begin):
        piece = source[fault.begin : fault.end]
        source = source[: fault.begin] + b"(_mark(%d), %s)[1]" % (number, piece) + source[fault.end :]
    lines = source.splitlines(keepends=True)
    first = next(
        node.lineno
        for node in ast.parse(source).body
        if not (isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"))
    )
    imports = f"import sys as _sys; _sys.path.append({str(work)!r}); from fault_marks import mark as _mark\n"
    return b"".join([*lines[: first - 1], imports.encode(), *lines[first - 1 :]])


def tier_of(test: str) -> int:
    return tier_of_name(test.removeprefix("tests/"))


def run_tests(tree: Path, *words: str) -> str:
    """Run tests of a tree until one fails; return its id, "" where all pass."""
    # PYTHONPATH: the tree's own package goes before the one that is installed; commands started by tests inherit it.
    env = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", *words]
    command.append(f"--basetemp={tree.parent / 'tmp'}")
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=BOUND_S)
    except subprocess.TimeoutExpired:
        return f"(not known after {BOUND_S:.0f} s)"
    if done.returncode in (0, 5):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed[1] if failed else "pytest cannot start: " + (done.stdout + done.stderr).strip()[-200:]


def catch(tree: Path, fault: Fault, tests: Sequence[str]) -> str:
    """Return the first of the tests that fails with a fault and passes without it; "" where none does."""
    file, source = tree / fault.file.relative_to(ROOT), fault.file.read_bytes()
    while tests:
        file.write_bytes(source[: fault.begin] + fault.text + source[fault.end :])
        failed = run_tests(tree, *tests)
        file.write_bytes(source)
        if failed not in tests or not run_tests(tree, failed):
            return failed
        tests = tests[tests.index(failed) + 1 :]
    return ""


def copy_tree(to: Path) -> None:
    """Copy the files of this tree that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--tier", choices=("0", "1", "2", "3"), default="2", help="tests up to this tier")
    parser.add_argument("--work", type=Path, help="a folder that keeps which tests come by")
    parser.add_argument("places", nargs="*", default=PLACES, metavar="PLACE", help=", ".join(PLACES))
    given = parser.parse_args()
    faults = []
    for number in range(given.count):
        turn, place = divmod(number, len(given.places))
        faults.append(choose_fault(given.places[place], f"{given.seed} {turn}"))
    with tempfile.TemporaryDirectory(prefix="cloudtrain-faults-") as folder:
        work = (given.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        work.chmod(0o755)  # a test reads it as another user
        tests = tests_that_come_by(faults, work, given.tier)
        tree = work / "tree"
        copy_tree(tree)
        rows, caught = [], [0, 0, 0, 0]
        for number, fault in enumerate(faults):
            name = fault.file.relative_to(ROOT)
            near = [test for test in tests.get(number, []) if tier_of(test) <= int(given.tier)]
            failed = catch(tree, fault, near) if near else "(no test comes by)"
            if failed and not failed.startswith("("):
                caught[tier_of(failed)] += 1
            rows.append(
                (f"`{name}:{fault.line}`", fault.what.replace("|", "\\|"), failed.removeprefix("tests/") or "-")
            )
            print(*rows[-1], flush=True)
    title = f"Seeded faults, seed {given.seed}: {sum(caught)} of {len(rows)} caught"
    said = [f"by tier {tier}: {count}" for tier, count in enumerate(caught) if count]
    print(title, *said, sep="\n")
    if given.places != PLACES:
        return 0
    return report("seeded_faults", title, table(rows, ("place", "fault", "caught by")), [])


if __name__ == "__main__":
    sys.exit(main())
