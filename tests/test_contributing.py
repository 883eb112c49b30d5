"""CONTRIBUTING.md names files that exist, and one submit enters the files of its reading path."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from glob import glob
from pathlib import Path

from tests.conftest import WAIT_S
from tests.sample import TABLE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROVIDERS = ("kubernetes", "local", "sagemaker", "slurm", "ssh", "vertex")


def test_each_file_that_is_named_exists():
    names = set(re.findall(r"`((?:cloudtrain|entrypoints|tests|docs|benchmarks|\.ci)/[^` ]*)`", TEXT))
    assert sorted(name for name in names if not exists(name)) == [] and len(names) > 100


def exists(name: str) -> bool:
    """Return whether a file is there; one of each provider, where some have it."""
    if "<provider>" in name:
        return sum((ROOT / name.replace("<provider>", provider)).exists() for provider in PROVIDERS) > 1
    return "<" in name or (ROOT / name).exists()


def test_seeded_faults_have_every_package_among_their_places(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    places = {ROOT / place for place in importlib.import_module("seeded_faults").PLACES}
    assert [place for place in places if not place.exists()] == []
    packages = {file.parent for part in ("cloudtrain", "entrypoints") for file in (ROOT / part).glob("*/*.py")}
    assert packages - places == set() and len(packages) > 15


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


def test_each_backend_names_its_long_tests():
    """`.ci/run` runs them where a change touches the backend (tests/sample.py)."""
    packages = {path.parent.name for path in (ROOT / "cloudtrain/backends").glob("*/backend.py")}
    assert sorted(each for each in packages if not TABLE.get(f"cloudtrain/backends/{each}/")) == []
    assert sorted(path for path in TABLE if not glob(f"{ROOT / path}*")) == []
