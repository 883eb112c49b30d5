"""Which seeded faults do the tests catch? Forty at places chosen by a seed, or a sample of some places.

    python benchmarks/seeded_faults.py [--seed N] [--count N] [--tier N] [--tests PATH ...] [--work FOLDER] [PLACE ...]

The operators of mutmut make them. One run of the tests, in a copy of the tree with a mark at each fault, says which tests
come by and how long they take. Then each fault is made alone, and the tests that came by it run, those of lower tiers and the
quicker ones first, until one fails that passes without the fault. A fault in a function is made in a fork of one process that
has collected the tests (fault_loop.py); one elsewhere, as in a signature, needs a process of its own. --work keeps the tests
that caught a fault: a further run with the same folder makes only the faults that survived, with new tests or a higher tier.
--minutes bounds how long faults are tried; the rest is `not run`, with 0 all that --work does not know. Given places have a
report each in results/.

With --listed the faults are those of `listed_faults.toml`, which people made in the code of a promise, each with the tests that
are to find it; the places are then the first words of `what`.

A fault that survives is for a person to judge. `equal_faults.txt` lists those that change nothing that anybody promises.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fault_loop import is_inside_functions
from fault_sample import Fault, chosen
from measure import HERE, ROOT, report, table

sys.path.insert(0, str(ROOT))
from tests.extent import tier_of_name
from tests.messages import literals, sentences

SEED = 20
COUNT = 40
BACKENDS = ("akash", "attached", "kubernetes", "local", "sagemaker", "slurm", "ssh", "vertex")
FIRST = ("job", "source", "nodes", "history", "diagnosis", "runs", "cli", "console", "backends")
SECOND = ("forecast", "functions", "metrics", "policy", "report", "simulators", "sweeps", "testing", "training")
PLACES = [  # the second round of faults begins again with the first place
    *(f"cloudtrain/backends/{name}" for name in BACKENDS),
    *(f"cloudtrain/{name}" for name in FIRST),
    *(f"cloudtrain/runs/{name}" for name in ("planning", "sending", "watching", "submit.py")),
    *(f"cloudtrain/{name}" for name in SECOND),
    *(f"entrypoints/launcher{name}" for name in ("", "/output", "/prepare", "/world")),
    *(f"entrypoints/trainer{name}" for name in ("", "/checkpoints", "/data", "/strategies")),
    *(f"entrypoints/{name}" for name in ("path", "train.py")),
]
TESTS_S = 40.0  # of one fault, as long as they took in the run with marks
FIRST_TESTS = 25  # in a process of their own: most faults need no more. The next process has ten times as many.
WAIT_S = 60.0  # of a test of the contract suite
DECLARED = ("tests/test_reference.py", "tests/test_traits.py")  # they read what classes and modules declare
NOT_RUN = "not run"
SENTENCES = "tests/test_messages.py::test_every_sentence_was_reviewed"
EQUAL = HERE / "equal_faults.txt"
LISTED = HERE / "listed_faults.toml"
MARKS = """
import os
_seen = set()
def mark(*numbers):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    for number in numbers:
        if (number, test) not in _seen:
            _seen.add((number, test))
            end = os.open({reached!r}, os.O_WRONLY | os.O_APPEND)
            os.write(end, f"{{number}} {{test}}\\n".encode())
            os.close(end)
"""


def tests_that_come_by(faults: Sequence[Fault], work: Path, tests: Sequence[str]) -> dict[int, list[tuple[str, float]]]:
    """Run tests with a mark at each fault; return them by the fault's number with their seconds, the lower tiers first.

    A process that a test has started writes the test's name too, where it has its environment.
    """
    tree, reached = work / "marked", work / "reached.txt"
    copy_tree(tree)
    reached.write_text("")
    reached.chmod(0o666)  # a test runs some code as another user
    (work / "fault_marks.py").write_text(MARKS.format(reached=str(reached)))
    for file in {fault.file for fault in faults}:
        lines = [(number, fault.line) for number, fault in enumerate(faults) if fault.file == file]
        (tree / file.relative_to(ROOT)).write_text(marked(file.read_text(), lines, work))
    printed = run_pytest(tree, "--maxfail=1000000", "--durations=0", "--durations-min=0", "-vv", *tests)
    seconds: dict[str, float] = defaultdict(float)
    for each in re.finditer(r"^([\d.]+)s (?:call|setup|teardown) +(.+)$", printed, re.MULTILINE):
        seconds[each[2].strip()] += float(each[1])
    for failed in FAILED.findall(printed):
        print("fails with marks:", failed, flush=True)
        seconds.pop(failed, None)
    found: dict[int, set[str]] = defaultdict(set)
    for line in reached.read_text().splitlines():
        at, _, test = line.partition(" ")
        if test in seconds:
            found[int(at)].add(test)
    for number, fault in enumerate(faults):
        if fault.line not in lines_of_functions(fault.source):  # outside of functions: an import executes it
            found[number] |= {test for test in seconds if test.startswith(DECLARED)}
    order = {
        number: sorted(near, key=lambda test: (tier_of(test), seconds[test], test)) for number, near in found.items()
    }
    return {number: [(test, seconds[test]) for test in near] for number, near in order.items()}


def marked(source: str, faults: Sequence[tuple[int, int]], work: Path) -> str:
    """Return a file with a mark before each statement of a function that has a fault; given are numbers and lines.

    One outside of functions has a mark in each function.
    """
    tree = ast.parse(source)
    statements = statements_of(tree)
    marks: dict[ast.stmt, list[int]] = defaultdict(list)
    for number, line in faults:
        if inside := [part for part in statements if part.lineno <= line <= (part.end_lineno or 0)]:
            marks[min(inside, key=lambda part: ((part.end_lineno or 0) - part.lineno, -part.lineno))].append(number)
        else:
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef):
                    marks[node.body[-1] if ast.get_docstring(node) else node.body[0]].append(number)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [part for each in block for part in (*_mark(marks.get(each, ())), each)])
    head = next(
        number
        for number, node in enumerate(tree.body)
        if not (isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__"))
    )
    imports = f"import sys as _sys; _sys.path.append({str(work)!r}); from fault_marks import mark as _mark"
    tree.body[head:head] = ast.parse(imports).body
    return ast.unparse(tree)


def statements_of(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of functions."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return list(
        {part: 0 for each in functions for part in ast.walk(each) if isinstance(part, ast.stmt) and part is not each}
    )


@cache
def lines_of_functions(source: str) -> set[int]:
    """Return the lines of a file that are in functions."""
    parts = statements_of(ast.parse(source))
    return {line for part in parts for line in range(part.lineno, (part.end_lineno or 0) + 1)}


def _mark(numbers: Sequence[int]) -> list[ast.stmt]:
    return ast.parse(f"_mark{(*numbers,)}").body if numbers else []


def tier_of(test: str) -> int:
    return tier_of_name(test.removeprefix("tests/"))


FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


def run_pytest(tree: Path, *words: str) -> str:
    """Run tests of a tree; return what pytest printed, "" where all pass."""
    # PYTHONPATH: the tree's own package goes before the one that is installed; commands started by tests inherit it.
    env = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree.parent}", "CLOUDTRAIN_CONTRACT_WAIT_S": str(WAIT_S)}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "no:xdist", *words]
    command.append(f"--basetemp={tree}-tmp")
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, errors="replace")
    return "" if done.returncode in (0, 5) and "-vv" not in words else done.stdout + done.stderr


def run_tests(tree: Path, *tests: str) -> str:
    """Run tests of a tree until one fails; return its id, "" where all pass."""
    printed = run_pytest(tree, "-x", "--timeout=200", *tests)
    failed = FAILED.search(printed)
    if printed and not failed and "Timeout" in printed and (stuck := re.search(r"tests/\S+::\S+", printed)):
        return stuck[0]
    return failed[1] if failed else printed and "pytest cannot start: " + printed.strip()[-200:]


def catch(tree: Path, fault: Fault, tests: Sequence[tuple[str, float]]) -> str:
    """Return the first of the tests that fails with a fault and passes without it; "" where none does."""
    file = tree / fault.file.relative_to(ROOT)
    left, size = [test for test, _ in within(tests)], FIRST_TESTS
    while left:
        began = time.monotonic()
        part, left, size = left[:size], left[size:], size * 10
        file.write_text(fault.text)
        failed = run_tests(tree, *part)
        file.write_text(fault.source)
        quick = time.monotonic() - began < WAIT_S or failed not in part
        if failed and (quick or not run_tests(tree, failed)):
            return failed
        if failed:
            left = part[part.index(failed) + 1 :] + left
    return ""


def try_listed(tree: Path, places: Sequence[str]) -> int:
    """Try the faults of LISTED in a copy of the tree, write which test finds each, and return 1 where one survives."""
    rows = []
    copy_tree(tree)
    for each in tomllib.loads(LISTED.read_text())["fault"]:
        if not str(each["what"]).startswith(tuple(places)):
            continue
        file, source = ROOT / each["file"], (tree / each["file"]).read_text()
        if source.count(each["old"]) != 1:
            sys.exit(f"{each['what']}: {each['file']} has {source.count(each['old'])} times {each['old']!r}")
        at = source.index(each["old"])
        fault = Fault("", file, source[:at].count("\n") + 1, "", source, source.replace(each["old"], each["new"]))
        found = catch(tree, fault, [(test, 0.0) for test in each["tests"]]) or "**survives**"
        rows.append((each["what"], f"`{each['file']}:{fault.line}`", found.removeprefix("tests/")))
        print(*rows[-1], flush=True)
    caught = sum("**" not in row[2] for row in rows)
    title = f"Faults made by hand: {caught} of {len(rows)} caught"
    if not places[0]:
        report("listed_faults", title, table(rows, ("promise: fault", "place", "caught by")), [])
    print(title)
    return int(caught < len(rows))


def copy_tree(to: Path) -> None:
    """Copy the files of this tree that git knows."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name, follow_symlinks=False)


def reasons() -> dict[str, str]:
    """Return why faults are equal, by their keys."""
    lines = [line.partition("  # ") for line in EQUAL.read_text().splitlines() if not line.startswith("#")]
    return {key: why for key, _, why in lines if why}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--tier", choices=("0", "1", "2", "3"), default="2", help="tests up to this tier")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="only these tests")
    parser.add_argument("--minutes", type=float, default=1e6, help="try faults for so long, after the run with marks")
    parser.add_argument("--work", type=Path, help="a folder that keeps which test caught a fault")
    parser.add_argument("--listed", action="store_true", help=f"the faults of {LISTED.name}")
    parser.add_argument(
        "places", nargs="*", default=PLACES, metavar="PLACE", help=f"such as {PLACES[0]}; FOLDER+FILE is one place"
    )
    given = parser.parse_args()
    os.chdir(ROOT)  # mutmut reads pyproject.toml
    with tempfile.TemporaryDirectory(prefix="cloudtrain-faults-") as folder:
        work = (given.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        work.chmod(0o755)  # a test reads it as another user
        if given.listed:
            return try_listed(work / "tree-0", given.places if given.places != PLACES else [""])
        faults = chosen(given.places, given.seed, given.count, work / "chosen.json")
        found = outcomes(faults, work, given)
    rows, counts = [], defaultdict[str, Counter[str]](Counter)
    for fault, outcome in zip(faults, found, strict=True):
        named = outcome.partition(":")[0] if outcome.startswith(("equal: ", NOT_RUN)) else "survives"
        counts[fault.place][f"tier {tier_of(outcome)}" if is_caught(outcome) else named] += 1
        where = f"`{fault.file.relative_to(ROOT)}:{fault.line}`"
        what = fault.what[:300].replace("|", "\\|")
        rows.append((fault.place, is_caught(outcome), where, what, outcome.removeprefix("tests/") or "-"))
        print(*rows[-1][2:], flush=True)
    used = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) / 60
    titles = {}
    for place, kinds in {**counts, "": sum(counts.values(), Counter())}.items():
        caught = sum(count for name, count in kinds.items() if name.startswith("tier "))
        shown = ", ".join(f"{name}: {count}" for name, count in sorted(kinds.items()))
        titles[place] = (
            f"Seeded faults {place and f'of {place}'}, seed {given.seed}: {caught} of {kinds.total()} caught ({shown})"
        )
        print(titles[place])
    print(f"{used:.1f} CPU minutes")
    if given.places == PLACES:
        return report(
            "seeded_faults", titles[""], table([row[2:] for row in rows], ("place", "fault", "caught by")), []
        )
    for place in counts:
        shown_rows = [row[2:] for row in rows if row[:2] == (place, False)]
        name = "seeded_faults_" + "_".join(Path(place.partition("+")[0]).parts[1:])
        body = table(shown_rows, ("place", "fault", "not caught")) + f"\n\nThe run took {used:.1f} CPU minutes."
        report(name, titles[place], body, [])
    return 0


def is_caught(outcome: str) -> bool:
    """Return whether an outcome names a test, or a file of tests that cannot be imported with the fault."""
    return outcome.startswith("tests/")


def outcomes(faults: Sequence[Fault], work: Path, given: argparse.Namespace, *, by_sentences: bool = True) -> list[str]:
    """Return for each fault the test that caught it, `equal: ` and why, `not run`, or why it survives.

    With `by_sentences` a fault that changes what is printed is caught by the test of all sentences.
    """
    results = work / "results.jsonl"
    results.touch()
    known = {str(each["key"]): str(each["test"]) for each in map(json.loads, results.read_text().splitlines())}
    equal, everywhere, said = reasons(), Counter(literals()), cache(lambda text: set(sentences(text)))
    for fault in faults:
        if fault.key in equal:
            known[fault.key] = "equal: " + equal[fault.key]
        elif fault.key in known or not by_sentences:
            continue
        elif any(everywhere[text] < 2 for text in said(fault.text) ^ said(fault.source)):
            known[fault.key] = SENTENCES  # it compares every sentence, so it need not run
    left = [fault for fault in faults if fault.key not in known and given.minutes]
    near = tests_that_come_by(left, work, ["--tier", given.tier, *given.tests]) if left else {}
    tree, ends = work / "tree-0", time.monotonic() + given.minutes * 60
    copy_tree(tree)
    in_one = in_forks(left, near, tree, given)
    tried = {left[number].key: failed for number, failed in in_one.items() if not failed.startswith("(cannot")}
    for number, fault in enumerate(left):
        if not near.get(number):
            tried[fault.key] = "(no test comes by)"
        elif fault.key not in tried and time.monotonic() < ends:
            tried[fault.key] = catch(tree, fault, near[number])
        if is_caught(tried.get(fault.key, "")):
            with results.open("a") as file:
                file.write(json.dumps({"key": fault.key, "test": tried[fault.key]}) + "\n")
    return [{**tried, **known}.get(fault.key, NOT_RUN) for fault in faults]


def in_forks(
    faults: Sequence[Fault], near: dict[int, list[tuple[str, float]]], tree: Path, given: argparse.Namespace
) -> dict[int, str]:
    """Try the faults in bodies of functions, in forks of one process; return what came of each by its number."""
    tries = [
        {
            "number": number,
            "file": str(tree / fault.file.relative_to(ROOT)),
            "source": fault.source,
            "text": fault.text,
            "tests": within(near[number]),
        }
        for number, fault in enumerate(faults)
        if near.get(number) and is_inside_functions(fault.source, fault.text)
    ]
    answers, loop = tree.with_name("answers.jsonl"), tree.with_name("loop.json")
    answers.write_text("")
    loop.write_text(json.dumps({"faults": tries, "answers": str(answers), "minutes": given.minutes}))
    os.environ["FAULT_LOOP"] = str(loop)
    files = sorted({test.partition("::")[0] for each in tries for test, _ in each["tests"]})
    if files:
        shutil.copy2(HERE / "fault_loop.py", tree.parent)
        printed = run_pytest(tree, "-vv", "-p", "fault_loop", "--tier", given.tier, *files)
        tree.with_name("loop.txt").write_text(printed)
    del os.environ["FAULT_LOOP"]
    return {each["number"]: each["test"] for each in map(json.loads, answers.read_text().splitlines())}


def within(tests: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Return the first tests, as many as take TESTS_S, and those that read what is declared."""
    left: list[tuple[str, float]] = []
    for test, seconds in tests:
        if not left or test.startswith(DECLARED) or sum(each for _, each in left) + seconds < TESTS_S:
            left.append((test, seconds))
    return left


if __name__ == "__main__":
    sys.exit(main())
