"""The matrices of docs/tables-evidence.md: which layout resumes from which, and which script on which target.

python docs/resume.py --run                      run the tests of resuming (long cases too; an hour), then docs/generate.py
python docs/resume.py --run -k "pp 2"            only some of them; the others keep what they had
python docs/resume.py --run -k "akash and loop"
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
FIGURES = DOCS / "resume.json"
TESTS = [
    "tests/entrypoints/test_train_resume.py",
    "tests/entrypoints/trainer/strategies/test_strategies_resume.py",
    "tests/backends/results/test_results.py",
]
RESULTS = DOCS / "results.json"
PLACES = ("local", "ssh", "slurm", "kubernetes", "sagemaker", "sagemaker-local", "vertex-local", "akash")


def results_table() -> list[str]:
    """Return a line for each script: the folders that it resumed from on each target, and how many files came home.

    A case that failed in its last run has no step, and is not counted.
    """
    noted: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    found = {name: case for name, case in noted.items() if "step" in case}
    rows = [f"| script | step | exit code | files | {' | '.join(PLACES)} |", "| --- " * (4 + len(PLACES)) + "|"]
    for script in dict.fromkeys(case["script"] for case in found.values()):
        cases = [case for case in found.values() if case["script"] == script]
        values = [", ".join(sorted({str(case[name]) for case in cases})) for name in ("step", "exit_code", "files")]
        folders = [len({case["folder"] for case in cases if case["place"] == place}) for place in PLACES]
        rows.append(f"| {' | '.join([script, *values, *(str(count or '') for count in folders)])} |")
    return rows


def table() -> list[str]:
    """Return the matrix's lines."""
    found: dict[str, Any] = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    rows = [
        "| saved as | resumes as | losses against the unbroken run | dropout | on |",
        "| --- | --- | --- | --- | --- |",
    ]
    for case in sorted(found.values(), key=lambda case: ("loss" in case, case["written"], case.get("read", ""))):
        read = case.get("read", "the same")
        result = "bit-equal, and the weights"
        if "loss" in case:
            result = f"{case['loss']:.1e} at most" if case["loss"] else "equal"
        rows.append(f"| {case['written']} | {read} | {result} | {'off' if 'loss' in case else 'on'} | {case['date']} |")
    return rows


def run(words: list[str]) -> int:
    """Run the tests and keep what they noted, each after it passed; returns pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "figures"
        noted.touch()
        command = [sys.executable, "-m", "pytest", "-q", *TESTS, *words]
        env = {**os.environ, "CLOUDTRAIN_FIGURES": str(noted)}
        code = subprocess.run(command, cwd=DOCS.parent, env=env, check=False).returncode
        notes = [json.loads(line) for line in noted.read_text().splitlines()]
    day = f"{datetime.now(UTC):%Y-%m-%d}"
    found = json.loads(FIGURES.read_text("utf-8")) if FIGURES.exists() else {}
    for note in notes:
        if note["what"] == "resume":
            value = note["value"]
            found[f"{value['written']} -> {value.get('read', 'the same')}"] = {**value, "date": day}
    FIGURES.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", "utf-8")
    results = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    for value in (note["value"] for note in notes if note["what"] == "results"):
        results[f"{value['script']}, {value['place']}, {value['folder']}"] = {**value, "date": day}
    RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n", "utf-8")
    return code


if __name__ == "__main__":
    if "--run" not in sys.argv:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[sys.argv.index("--run") + 1 :]))
