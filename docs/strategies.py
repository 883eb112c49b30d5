"""The table of strategies in docs/tables-evidence.md, from what the tests' running jobs said of themselves.

python docs/strategies.py --run           run the matrix (tests/entrypoints/trainer/strategies/test_strategies.py, the long cases too; minutes)
python docs/strategies.py --run -k hsdp   only some of it; the others keep what they had
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
FIGURES = DOCS / "strategies.json"
MATRIX = "tests/entrypoints/trainer/strategies/test_strategies.py"


def table() -> list[str]:
    """Return the table's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    rows = ["| strategy | `parallelism` | model | ranks | wrapper | parameters on a rank | loss | gradient norm | on |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, case in sorted(
        found.items(), key=lambda item: (item[0].count(" x "), item[1]["model"] != "llama", item[0])
    ):
        said = ", ".join(f"{key}: {str(value).lower()}" for key, value in case["parallelism"].items())
        share = max(case["parameters_per_rank"]) / case["parameters"]
        rows.append(
            f"| {name} | `{{{said}}}` | {case['model']} | {case['world']} | {case['wrapper']} | {share:.0%} | "
            f"{case['loss']:.1e} | {case['norm']:.1e} | {case['date']} |"
        )
    return rows


def run(words: list[str], matrix: str, figures: Path, what: str) -> int:
    """Run a matrix of tests and keep what its cases noted of `what`, each after it passed; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "figures"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", matrix, *words]
        env = {**os.environ, "CLOUDTRAIN_FIGURES": str(noted)}
        code = subprocess.run(command, cwd=DOCS.parent, env=env, check=False).returncode
        notes = [json.loads(line) for line in noted.read_text().splitlines()]
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    found = json.loads(figures.read_text("utf-8")) if figures.exists() else {}
    for note in notes:
        if note["what"] == what:
            found[note["value"].pop("name")] = {**note["value"], "date": day}
    figures.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    return code


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    words = sys.argv[sys.argv.index("--run") + 1 :]
    sys.exit(run(words or ["-k", "one_process"], MATRIX, FIGURES, "strategy"))
