"""Write docs/promises.md: each law, the tests that prove it, and the figures that they proved it with.

python docs/promises.py             the page again from docs/promises.json, the figures of the last run
python docs/promises.py --run       run the tests first (minutes); --long runs the long forms too (an hour);
                                    --run 5 6 runs those of laws 5 and 6 only, 11 is the history
python docs/promises.py --check     only say whether the page is current
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PAGE, FIGURES = DOCS / "promises.md", DOCS / "promises.json"

HEAD = """\
# What is promised

Ten laws. Each is a set of tests that fail when it is broken, and every figure below was written down by those tests while
they ran. Where a test draws at random it prints its seed; `CLOUDTRAIN_SEED=... pytest TEST` repeats it.

<!-- Written by docs/promises.py (make promises); a test checks that it is current. -->
"""


class Law(NamedTuple):
    """A promise: its name, what it says, and the tests (path::function, or a whole file) that prove it."""

    name: str
    text: str
    tests: tuple[str, ...]


LAWS = (
    Law(
        "The plan is what is sent",
        "What a platform receives equals what `plan` printed. `plan` needs no network, no credentials and no SDK,"
        " and starts no process but git.",
        (
            "tests/laws/test_law1_plan.py",
            "tests/backends/local/test_backend.py::test_plan_is_pure",
            "tests/backends/local/test_backend.py::test_golden_plan",
        ),
    ),
    Law(
        "Arguments arrive as written",
        "Any argument, variable or hyperparameter is what the script sees: empty, with quotes, newlines, `$`, any character;"
        " `no`, `1.10`, `1e-4` and dates stay the text that stands in the file.",
        (
            "tests/laws/test_law2_arguments.py",
            "tests/backends/local/test_backend.py::test_arguments_arrive_as_written",
            "tests/backends/local/test_backend.py::test_environment_arrives_as_written",
        ),
    ),
    Law(
        "Submit is exactly once",
        "Killed anywhere and run again, one attempt exists, and it is run to its end. A lost answer never starts a second job,"
        " and never leaves one that cannot be cancelled. The same key is the same run.",
        (
            "tests/runs/test_exactly_once.py",
            "tests/runs/test_send.py",
            "tests/runs/test_adoption.py",
            "tests/laws/test_law3_commands.py",
            "tests/laws/test_law3_outcomes.py",
            "tests/laws/test_law3_outcomes_clusters.py",
            "tests/laws/test_law3_outcomes_sdk.py",
            "tests/runs/test_faults.py::test_two_submits_at_once_are_two_runs",
            "tests/runs/test_faults.py::test_two_submits_at_once_with_one_key_are_one_run",
        ),
    ),
    Law(
        "Packaging is git's",
        "The files are those that git would list, the same tree has the same digest on any machine, no link leads out of it,"
        " and credentials are refused.",
        (
            "tests/source/test_files.py",
            "tests/source/test_special_files.py",
            "tests/source/test_archive.py",
            "tests/source/test_bundle.py",
            "tests/source/test_secrets.py",
        ),
    ),
    Law(
        "Cancel is not success, and ends everything",
        "At whatever moment it comes, the run ends CANCELLED and no process of it is left on any node. A third of the drawn"
        " moments at least come while it starts, a third while it runs.",
        (
            "tests/laws/test_law5_cancel.py",
            "tests/backends/local/test_backend.py::test_cancel_is_not_success_and_ends_everything",
        ),
    ),
    Law(
        "A failure says why",
        "The script's exit code is the run's, a signal is 128 and its number, and the rank that failed first is reported first.",
        (
            "tests/laws/test_law6_failures.py",
            "tests/entrypoints/test_launch_nodes.py::test_of_two_failures_the_earlier_one_counts",
        ),
    ),
    Law(
        "Resume is exact",
        "For the shared trainer: killed at any step and resumed on the same layout, the samples and losses are bit-equal."
        " Of two live attempts the replaced one ends without a success, and costs the other one nothing.",
        (
            "tests/entrypoints/test_train_resume.py",
            "tests/runs/test_resume.py",
            "tests/entrypoints/trainer/checkpoints/test_two_starts.py",
        ),
    ),
    Law(
        "The world is what was asked",
        "An attempt whose nodes, processes or GPUs are not as many as asked for is refused (78) before any rank runs.",
        ("tests/laws/test_law8_world.py", "tests/entrypoints/test_launch_nodes.py::test_too_few_nodes_are_no_capacity"),
    ),
    Law(
        "Every log line once",
        "In order on each node, the last without a newline too; from a cursor on nothing is repeated or left out. What a full"
        " disk costs is said in the log.",
        (
            "tests/laws/test_law9_log.py",
            "tests/entrypoints/launcher/test_log.py",
            "tests/entrypoints/launcher/test_full_disk.py",
            "tests/runs/test_full_home.py",
        ),
    ),
    Law(
        "Secrets never land",
        "Not in a plan, a bundle, the store, an event, a log or a process list, nor URL-encoded, in base64 or escaped as in"
        " JSON; the environment of the job's own ranks excepted.",
        (
            "tests/laws/test_law10_secrets.py",
            "tests/entrypoints/launcher/test_masks.py",
            "tests/backends/local/test_backend.py::test_secret_stands_nowhere",
        ),
    ),
)
STORE = Law(
    "Beside the laws: the history",
    "It survives many writers, killed writers, damage to its file, a full disk and a network file system. How fast a long one answers is"
    " measured by `benchmarks/history.py` (`benchmarks/results/history.md`).",
    (
        "tests/laws/test_store_load.py",
        "tests/history/test_store.py",
        "tests/history/test_repair.py",
        "tests/history/test_labelled.py",
    ),
)


def main() -> int:
    """Do what the command line says."""
    if "--run" in sys.argv or "--long" in sys.argv:
        numbers = [int(word) for word in sys.argv[1:] if word.isdigit()]
        code = run([(*LAWS, STORE)[number - 1] for number in numbers] or [*LAWS, STORE], "--long" in sys.argv)
        if code:
            return code
    text = page(json.loads(FIGURES.read_text("utf-8")))
    if "--check" in sys.argv:
        current = PAGE.exists() and PAGE.read_text("utf-8") == text
        if not current:
            sys.stdout.write("docs/promises.md is not current: run python docs/promises.py\n")
        return int(not current)
    PAGE.write_text(text, "utf-8")
    return 0


def run(laws: list[Law], long: bool) -> int:
    """Run the tests and keep what they note; returns pytest's exit code, and keeps nothing unless all have passed."""
    tests = [test for law in laws for test in law.tests]
    with tempfile.TemporaryDirectory() as folder:
        noted, report = Path(folder) / "figures", Path(folder) / "report.xml"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", "-n", os.environ.get("WORKERS", "auto"), "--dist", "worksteal"]
        command += [f"--junitxml={report}", *([] if long else ["-m", "not long"]), *_collected(tests)]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CLOUDTRAIN_FIGURES": str(noted)}, check=False)
        if done.returncode:
            return done.returncode
        figures = _figures(noted, report)
    old = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    FIGURES.write_text(json.dumps(old | figures, indent=1, sort_keys=True, ensure_ascii=False) + "\n", "utf-8")
    return 0


def _collected(tests: list[str]) -> list[str]:
    """Return what pytest is to run: whole files, and of the others the tests that are named, whatever their class."""
    whole = sorted({test for test in tests if "::" not in test})
    named = {tuple(test.split("::")) for test in tests if "::" in test}
    if not named:
        return whole
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted({path for path, _ in named})]
    listed = subprocess.run(collect, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    plain = [(line, line.partition("[")[0].split("::")) for line in listed if "::" in line]
    return [*whole, *(line for line, parts in plain if (parts[0], parts[-1]) in named)]


def _figures(noted: Path, report: Path) -> dict[str, Any]:
    """Return by test function how many cases of it passed and what they noted, summed up over its cases."""
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    found: dict[str, Any] = defaultdict(lambda: {"passed": 0, "date": day, "figures": {}})
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if case.find("skipped") is None:
            path = case.get("classname", "").split(".")
            while path and not (ROOT / f"{'/'.join(path)}.py").exists():
                path.pop()  # a class in the file
            found[f"{'/'.join(path)}.py::{case.get('name', '').partition('[')[0]}"]["passed"] += 1
    for line in noted.read_text().splitlines():
        note = json.loads(line)
        path, _, name = note["test"].partition("[")[0].partition("::")
        figures = found[f"{path}::{name.rpartition('::')[2]}"]["figures"]
        figures[note["what"]] = figures.get(note["what"], 0) + note["value"]
    return dict(found)


def page(figures: dict[str, Any]) -> str:
    """Return the page."""
    parts = [HEAD]
    for number, law in enumerate(LAWS, start=1):
        parts += _section(f"## {number}. {law.name}", law, figures)
    parts += _section(f"## {STORE.name}", STORE, figures)
    return "\n".join(parts).rstrip() + "\n"


def _section(title: str, law: Law, figures: dict[str, Any]) -> list[str]:
    lines = [title, "", law.text, "", "| test | proven with | on |", "| --- | --- | --- |"]
    for test in law.tests:
        path = test.partition("::")[0]
        mine = {name: item for name, item in figures.items() if name == test or name.startswith(f"{test}::")}
        told = {name: item for name, item in mine.items() if item["figures"] or "::" in test}
        for name, item in sorted(told.items()):
            said = [
                f"{value:,} {what}" for what, value in sorted(item["figures"].items(), key=lambda pair: -pair[1])
            ] or [_cases(item["passed"])]
            lines.append(f"| `{path}::{name.rpartition('::')[2]}` | {'; '.join(said)} | {item['date']} |")
        others = [item for name, item in mine.items() if name not in told]
        if others:
            words = (
                f"{_cases(sum(item['passed'] for item in others))} of {len(others)} {'further ' if told else ''}tests"
            )
            lines.append(f"| `{path}` | {words} | {max(item['date'] for item in others)} |")
        if not mine:
            lines.append(f"| `{path}` | not run yet | |")
    return [*lines, ""]


def _cases(count: int) -> str:
    return f"{count:,} case{'' if count == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
