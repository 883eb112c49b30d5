"""docs/promises.md is current, names every law, and names no test that is not there."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import WAIT_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def promises():
    spec = importlib.util.spec_from_file_location("promises", ROOT / "docs" / "promises.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["promises"] = module
    spec.loader.exec_module(module)
    return module


@cache
def functions(path: str) -> set[str]:
    """Return the tests of a file, those that its classes inherit from the contract suite among them."""
    text = (ROOT / path).read_text()
    names = {node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    suite = (ROOT / "cloudtrain" / "testing" / "suite").glob("*.py") if "(BackendContract)" in text else ()
    return names.union(*(functions(str(module.relative_to(ROOT))) for module in suite))


def test_the_page_is_current():
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "promises.py", "--check"], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_law_has_its_entry_and_its_figures(promises):
    text = promises.PAGE.read_text()
    assert re.findall(r"^## (\d+)\. ", text, re.MULTILINE) == [str(number) for number in range(1, 11)]
    assert "not run yet" not in text
    for law in promises.LAWS:
        assert f". {law.name}\n" in text and law.tests


def test_every_test_that_is_named_is_there(promises):
    for law in (*promises.LAWS, promises.STORE):
        for test in law.tests:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), test
            assert not name or name in functions(path), test
    for test in json.loads(promises.FIGURES.read_text()):
        path, _, name = test.partition("::")
        assert name in functions(path), f"{test} has figures and is gone: make promises"


def test_every_file_of_this_folder_proves_something(promises):
    named = {test.partition("::")[0] for law in (*promises.LAWS, promises.STORE) for test in law.tests}
    mine = {f"tests/laws/{path.name}" for path in Path(__file__).parent.glob("test_*.py")}
    assert mine - named == {"tests/laws/test_promises.py"}


def test_figures_are_summed_over_the_cases_of_a_test(promises, tmp_path):
    (tmp_path / "noted").write_text(
        "".join(
            json.dumps({"test": f"tests/laws/test_promises.py::test_x[{n}]", "what": "kills", "value": 25}) + "\n"
            for n in "ab"
        )
    )
    (tmp_path / "report.xml").write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.laws.test_promises" name="test_x[a]"/>'
        '<testcase classname="tests.laws.test_promises" name="test_x[b]"/>'
        '<testcase classname="tests.laws.test_promises.TestY" name="test_y"/>'
        '<testcase classname="tests.laws.test_promises" name="test_z"><skipped/></testcase>'
        "</testsuite></testsuites>"
    )
    found = promises._figures(tmp_path / "noted", tmp_path / "report.xml")
    assert {name: (item["passed"], item["figures"]) for name, item in found.items()} == {
        "tests/laws/test_promises.py::test_x": (2, {"kills": 50}),
        "tests/laws/test_promises.py::test_y": (1, {}),
    }
