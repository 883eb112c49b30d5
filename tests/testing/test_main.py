"""`python -m cloudtrain.testing`: the table of what holds, what fails and what a backend does not offer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import WAIT_S
from tests.testing.mutants import MUTANTS, suite

ROOT = Path(__file__).parents[2]


def conformance(folder: Path, *words: str, only: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "plugin")])
    (folder / "usual").mkdir(exist_ok=True)
    usual = {"PYTEST_DEBUG_TEMPROOT": str(folder / "usual")}
    env = {**os.environ, "PYTHONPATH": paths, "PYTEST_ADDOPTS": f"-k '{only}'", **usual}
    command = [sys.executable, "-m", "cloudtrain.testing", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=WAIT_S)


def test_a_test_file_with_a_promise_that_does_not_hold(tmp_path: Path):
    (tmp_path / "mutant_contract.py").write_text(suite(MUTANTS["the clock in the plan"].body))
    ended = conformance(tmp_path, "mutant_contract.py", only="plan_is_pure or plan_survives or two_nodes")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "| plan | plan is pure | **failed** |" in ended.stdout
    assert "| plan | plan survives json | passed |" in ended.stdout
    assert "| nodes | ranks over two nodes | not offered: it does not offer more than one node |" in ended.stdout
    assert ended.stdout.startswith("1 of 4 promises of the contract hold, 1 fail.\n")


def test_a_name_with_options(tmp_path: Path):
    ended = conformance(tmp_path, "local", f"python={sys.executable}", only="plan and not elsewhere")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "| plan | plan is pure | passed |" in ended.stdout and "**failed**" not in ended.stdout
    assert f"`python -m cloudtrain.testing local python={sys.executable}`" in ended.stdout
    assert not list((tmp_path / "usual").iterdir()), "pytest's usual place has large old folders of others to delete"


def test_what_is_not_known(tmp_path: Path):
    for words, said in ((["locall"], "did you mean local?"), (["local", "pyton=x"], "pyton")):
        ended = conformance(tmp_path, *words, only="plan")
        assert ended.returncode == 2 and said in ended.stderr and not ended.stdout, ended.stderr
