"""Every job and every command of docs/scripts.md can be planned as it is written."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import WAIT_S

PAGE = (Path(__file__).parents[1] / "docs" / "scripts.md").read_text()
JOBS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines() if line]


@pytest.fixture
def project(tmp_path: Path, home: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "package").mkdir(parents=True)
    for name in ("train.py", "run_clm.py", "package/train.py"):
        (folder / name).write_text("print('hello')\n")
    return folder


def plan(project: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain", "plan", *words],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_has_jobs_and_commands():
    assert len(JOBS) >= 5 and len(COMMANDS) >= 4


@pytest.mark.parametrize("job", JOBS, ids=lambda text: text.splitlines()[0])
def test_a_job_of_the_page_is_planned(project: Path, job: str):
    (project / "job.yaml").write_text(job.replace("s3://bucket/texts", str(project)))
    assert "runs" in plan(project)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_planned(project: Path, command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_API_KEY", "not-a-key")
    program, verb, *words = shlex.split(command)
    assert (program, verb) == ("cloudtrain", "submit")
    shown = plan(project, *[word for word in words if word != "--follow"])
    assert "runs" in shown and "not-a-key" not in shown
