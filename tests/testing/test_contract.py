"""The contract suite itself: mutants of a reference backend, of which it finds all but those that are named as survivors.

`python docs/contract.py` runs each against the whole suite, for the table of docs/tables-evidence.md. CI runs a sample, with
the tests that found the mutant.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from cloudtrain.backends.api import Backend, LogLine, State, Status
from cloudtrain.testing import fixtures
from cloudtrain.testing.clock import VirtualClock
from tests.testing.mutants import MUTANTS, OPERATORS, SURVIVORS, suite

ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs" / "contract.json").read_text())
SAMPLE = (
    "cancel is ignored while QUEUED or STARTING",
    "the secret in a file of the run",
    "the last lines are lost after a cancel",
    "hyperparameters become numbers",
    "exec joins arguments in a shell",
    "exec succeeds always",
    "stack loses all ranks but the first",
)


def run_suite(folder: Path, body: str, *options: str, operator: str = "", wait_s: int = 40) -> tuple[list[str], str]:
    """Run the suite against a class; return the tests that failed, and what pytest printed."""
    (folder / "mutant_contract.py").write_text(suite(body, operator))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "-m",
        "not train",
        *options,
    ]
    command += ["--rootdir", str(folder), "--basetemp", str(folder / "t"), str(folder / "mutant_contract.py")]
    paths = os.pathsep.join([str(folder), str(ROOT), str(ROOT / "tests" / "plugin")])
    env = {**os.environ, "CLOUDTRAIN_CONTRACT_WAIT_S": str(wait_s), "PYTHONPATH": paths}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    failed = re.findall(r"^(?:FAILED|ERROR) \S+::(test_\w+)", ended.stdout, re.MULTILINE)
    assert bool(failed) == bool(ended.returncode), ended.stdout
    return list(dict.fromkeys(failed)), ended.stdout


@pytest.mark.parametrize("name", SAMPLE)
def test_a_mutant_is_caught(tmp_path: Path, name: str):
    first = FOUND[name]["caught by"][0]
    failed, printed = run_suite(tmp_path, MUTANTS[name].body, "-k", first, operator=MUTANTS[name].operator, wait_s=10)
    assert first in failed, printed


def test_a_backend_that_takes_paths_and_ignores_output_is_caught(tmp_path: Path):
    body = "from cloudtrain.backends.api import Paths\ntraits = replace(Reference.traits, paths=Paths.NODES)\n"
    failed, printed = run_suite(tmp_path, body, "-k", "output_says")
    assert failed == ["test_results_are_where_output_says"], printed


class Failed:
    """A backend whose attempt failed before its script printed a line."""

    def status(self, _: str) -> Status:
        return Status(State.FAILED, exit_code=1, reason="the secret TOKEN was not found")

    def logs(self, _: str) -> Iterator[LogLine]:
        return iter(())


def test_a_wait_for_a_line_ends_soon_after_the_attempt_and_says_why(monkeypatch: pytest.MonkeyPatch):
    clock = VirtualClock()
    monkeypatch.setattr(fixtures, "SYSTEM", clock)
    began = clock.monotonic()
    with pytest.raises(AssertionError, match="the attempt ended.*the secret TOKEN was not found"):
        fixtures.ContractFixtures().until_line(cast("Backend", Failed()), "attempt", "there")
    assert clock.monotonic() - began < fixtures.WAIT_S / 2


def test_without_a_fault_those_tests_pass(tmp_path: Path):
    tests = {FOUND[name]["caught by"][0] for name in SAMPLE}
    failed, printed = run_suite(tmp_path, "pass", "-k", " or ".join(sorted(tests)))
    assert not failed, printed


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["the reference itself", *MUTANTS])
def test_a_mutant_against_the_whole_suite(tmp_path: Path, figure, name: str):
    """Up to the first test that fails. It is noted whatever came of it; no mutant is left out after its first run."""
    operator, body = MUTANTS.get(name, ("", "pass"))
    failed, printed = run_suite(tmp_path, body, "-x", operator=operator)
    if operator:
        meaning, survives = OPERATORS[operator], SURVIVORS.get(name, "")
        found = {"name": name, "operator": operator, "meaning": meaning, "caught by": failed, "survives": survives}
        figure("mutant", found)
    assert bool(failed) == (name in MUTANTS and name not in SURVIVORS), printed


def test_the_kit_is_worth_its_name():
    assert {mutant.operator for mutant in MUTANTS.values()} == set(OPERATORS)
    assert FOUND.keys() == MUTANTS.keys() and len(FOUND) >= 40, "python docs/contract.py --run"
    survivors = {name for name, found in FOUND.items() if not found["caught by"]}
    assert survivors == set(SURVIVORS)
    assert sum(MUTANTS[name].operator != "twice" for name in survivors) <= len(FOUND) // 20
