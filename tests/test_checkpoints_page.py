"""The script of docs/checkpoints.md resumes from its own checkpoint, and runs by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain import Run
from cloudtrain.cli import main
from tests.conftest import WAIT_S
from tests.test_task_pages import DOCS, blocks

SCRIPT = next(block.text for block in blocks(DOCS / "checkpoints.md") if block.title == "train.py")
WORK = "        folder = checkpoints"  # the first line of a save


@pytest.mark.usefixtures("census")
def test_the_script_of_the_page_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    fails = (
        f"        if step == 50 and os.environ['CLOUDTRAIN_ATTEMPT'] == '1':\n            raise SystemExit(3)\n{WORK}"
    )
    (tmp_path / "train.py").write_text(SCRIPT.replace(WORK, fails))
    monkeypatch.chdir(tmp_path)
    assert main(["submit", "train.py", "--name", "resumes", "--wait"]) == 3
    run_id = Run.find("resumes").run_id
    assert main(["resume", run_id, "--wait"]) == 0
    capsys.readouterr()
    assert main(["logs", run_id]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("starts after step")] == [
        "starts after step 0",
        "starts after step 40",
    ], printed


def test_the_script_of_the_page_runs_by_hand(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-I", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "starts after step 0\n"), done.stderr
    assert (tmp_path / "checkpoints" / "step-100" / "state.json").exists()
