"""How many files of cloudtrain one submit enters: a bound that only goes down."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("target", ["local", "sagemaker"])
def test_a_submit_enters_no_more_files_than_before(target: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bound = importlib.import_module("path").BOUND
    command = [sys.executable, str(BENCHMARKS / "path.py"), "--list", "--target", target]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[0] == f"{target}: {len(lines) - 1} files with code"
    assert len(lines) - 1 <= bound[target], "\n".join(lines)
