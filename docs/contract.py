"""The table of mutants in docs/tables-evidence.md: which fault of a backend each test of the contract suite found.

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


def table() -> list[str]:
    """Return the sentence above the table, and the table's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
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
        tests = ", ".join(f"`{test.removeprefix('test_')}`" for test in case["caught by"])
        rows.append(f"| {operator} | {name} | {tests or 'survives: ' + case['survives']} | {case['date']} |")
    return rows


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    words = sys.argv[sys.argv.index("--run") + 1 :]
    sys.exit(strategies.run([*words, "-m", "long"], TESTS, FIGURES, "mutant"))
