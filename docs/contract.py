"""The tables of mutants in docs/tables-evidence.md: which fault of a backend each test of the contract suite found.

python docs/contract.py --run               run each mutant against the whole suite (an hour), then docs/generate.py
python docs/contract.py --run -k "cancel"   only some of them; the others keep what they had
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import strategies

DOCS = Path(__file__).parent
FIGURES = DOCS / "contract.json"
TESTS = "tests/testing/test_contract.py"
CALLS = {
    "nothing": "does nothing",
    "twice": "is done twice",
    "another": "of another attempt",
}  # operator -> end of the name


def table() -> list[str]:
    """Return the sentence above the table, and the table's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
    found = {name: case for name, case in found.items() if case["operator"] not in CALLS}
    caught = sum(bool(case["caught by"]) for case in found.values())
    rows = [
        f"{len(found)} mutants, {caught} caught:",
        "",
        "| operator | mutant | caught by | on |",
        "| --- | --- | --- | --- |",
    ]
    told = ""
    for name, case in sorted(found.items(), key=lambda item: (item[1]["operator"], item[0])):
        operator = "" if case["operator"] == told else f"**{case['operator']}**: {case['meaning']}"
        told = case["operator"]
        rows.append(f"| {operator} | {name} | {_outcome(case)} | {case['date']} |")
    return rows


def _outcome(case: dict[str, Any]) -> str:
    """Return the tests that found a mutant, or why it survives."""
    tests = ", ".join(f"`{test.removeprefix('test_')}`" for test in case["caught by"])
    return tests or f"survives: {case['survives']}"


def calls() -> list[str]:
    """Return the table of the calls of the interface: the kinds of fault, and the test that fails."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
    of_calls = {name: case for name, case in found.items() if case["operator"] in CALLS}
    caught = sum(bool(case["caught by"]) for case in of_calls.values())
    rows = [
        f"{len(of_calls)} mutants, {caught} caught:",
        "",
        "| call | it does nothing | it is done twice | it is another attempt's |",
    ]
    rows.append("| --- | --- | --- | --- |")
    for call in dict.fromkeys(name.partition(" ")[0] for name in of_calls):
        cells = [of_calls.get(f"{call} {end}") for end in CALLS.values()]
        shown = " | ".join(_outcome(cell) if cell else "not tried" for cell in cells)
        rows.append(f"| `{call}` | {shown} |")
    return rows


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    words = sys.argv[sys.argv.index("--run") + 1 :]
    sys.exit(strategies.run([*words, "-m", "long"], TESTS, FIGURES, "mutant"))
