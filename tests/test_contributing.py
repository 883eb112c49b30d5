"""CONTRIBUTING.md names files that exist, and one submit enters the files of its reading path."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WAIT_S
from tests.extent import SLOW, SMOKE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROVIDERS = ("kubernetes", "local", "sagemaker", "slurm", "ssh", "vertex")


@pytest.mark.parametrize(
    "name", sorted(set(re.findall(r"`((?:cloudtrain|entrypoints|tests|docs|benchmarks|\.ci)/[^` ]*)`", TEXT)))
)
def test_each_file_that_is_named_exists(name):
    if "<provider>" in name:
        found = [provider for provider in PROVIDERS if (ROOT / name.replace("<provider>", provider)).exists()]
        assert len(found) > 1, name
    elif "<" not in name:
        assert (ROOT / name).exists(), name


def test_a_submit_enters_the_files_of_the_reading_path(tmp_path):
    """One submit on the command line enters each of the eight files."""
    path = re.findall(
        r"^\d\. `(cloudtrain/[^`]+)`", TEXT.partition("## One submit")[2].partition("\n## ")[0], re.MULTILINE
    )
    assert len(path) == 8
    (tmp_path / "train.py").write_text("print(1)\n")
    (tmp_path / "job.yaml").write_text("name: path\nentrypoint: train.py\n")
    script = f"""
import sys
entered = []
def enter(frame, event, _):
    name, function = frame.f_code.co_filename, frame.f_code.co_name
    if event == "call" and function != "<module>" and name.startswith({str(ROOT)!r}) and name not in entered:
        entered.append(name)
sys.setprofile(enter)
from cloudtrain.cli import main
code = main(["submit", "job.yaml"])
sys.setprofile(None)
print(*entered, sep="\\n")
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    entered = [line.removeprefix(f"{ROOT}/") for line in done.stdout.splitlines()]
    assert [name for name in path if name not in entered] == []
    assert min(path, key=entered.index) == "cloudtrain/cli/submit.py"


@pytest.mark.parametrize("name", (*SLOW, *SMOKE))
def test_each_slow_test_that_is_named_exists(name):
    path, _, test = name.partition("::")
    assert (ROOT / "tests" / path).exists(), name
    assert not test or f"def {test.partition('[')[0]}(" in (ROOT / "tests" / path).read_text()
