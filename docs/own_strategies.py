"""The table of docs/tables-evidence.md: which strategy ran in unmodified scripts, from what the tests found in their models.

python docs/own_strategies.py --run           run the scripts (minutes), then docs/generate.py
python docs/own_strategies.py --run -k hsdp   only some of them; the others keep what they had
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import strategies

DOCS = Path(__file__).parent
FIGURES = DOCS / "own_strategies.json"
TESTS = "tests/entrypoints/test_own_strategies.py"


def table() -> list[str]:
    """Return the table's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8"))
    rows = [
        "| script | `strategy` | ranks | wrapper | FSDP units | parameters on a rank | optimizer state on a rank | on |"
    ]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case in sorted(found.values(), key=lambda case: (case["script"], case["strategy"])):
        mesh = " x ".join(map(str, case["mesh"])) if case["mesh"] and len(case["mesh"]) > 1 else ""
        ranks = f"{case['ranks']} ({mesh})" if mesh else case["ranks"]
        rows.append(
            f"| {case['script']} | `{case['strategy']}` | {ranks} | {case['wrapper']} | {case['units'] or ''} | "
            f"{case['parameters']:.0%} | {case['optimizer']:.0%} | {case['date']} |"
        )
    return rows


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    sys.exit(strategies.run(sys.argv[sys.argv.index("--run") + 1 :], TESTS, FIGURES, "own strategy"))
