"""docs/capacity.md: its plan is what the command prints, and it leads through on a simulator that refuses capacity."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.runs import attempts, candidates
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.test_backend import options, simulator
from tests.conftest import WAIT_S

__all__ = ["simulator"]
PAGE = (Path(__file__).parents[2] / "docs" / "capacity.md").read_text()
JOB, CONFIG = (re.search(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[1] for kind in ("yaml", "toml"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    monkeypatch.chdir(folder)
    return folder


def test_the_plan_is_what_the_command_prints(project: Path, capsys: pytest.CaptureFixture[str]):
    (project / "job.yaml").write_text(JOB)
    (project / "cloudtrain.toml").write_text(CONFIG)
    table = re.search(r"```\n(candidate .*?)```", PAGE, re.DOTALL)[1]
    note = re.search(r"```\nnote +(.*?)\n```", PAGE)[1]
    assert main(["plan"]) == 0
    printed = capsys.readouterr().out
    assert table in printed and note in printed
    assert main(re.search(r"^cloudtrain (plan -t .*)$", PAGE, re.MULTILINE)[1].split()) == 0
    by_hand = capsys.readouterr().out
    assert "would go to gke (kubernetes)" in by_hand and "candidate " not in by_hand


@pytest.mark.usefixtures("census")
def test_a_run_that_finds_no_machines_goes_on_here(project: Path, simulator: Simulator, home: Path):  # noqa: F811
    """SageMaker accepts the job and ends it for lack of capacity; a process of this machine is the next candidate."""
    simulator.behavior.capacity_errors = 1
    lines = [f"{name} = {json.dumps(value)}" for name, value in options(simulator).items() if name != "image"]
    targets = ['[targets.prod]\nbackend = "sagemaker"', *lines, "[targets.here]", 'backend = "local"']
    (project / "cloudtrain.toml").write_text("\n".join(targets) + "\n")
    job = {"source": ".", "entrypoint": "train.py", "target": ["prod", "here"], "prefer": "order"}
    job["options"] = {"sagemaker": {"image": "any"}}
    run = Submitter(home=home, watch=False).submit(job)
    assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
    assert [attempt.plan.target for attempt in run.attempts] == ["prod", "here"]
    assert [attempt.status.event for attempt in run.attempts] == ["capacity", ""]
    assert "trained" in [line.text for line in run.logs()]


@pytest.mark.parametrize(("output", "away"), [("s3://bucket/runs", set()), (None, {"gke", "prod"})])
def test_the_plan_names_who_does_not_read_the_others_checkpoints(project: Path, output: str | None, away: set[str]):
    """All of them use a bucket that the job names; without one each has a place of its own."""
    (project / "job.yaml").write_text(JOB)
    (project / "cloudtrain.toml").write_text(CONFIG)
    plan = Submitter(watch=False).plan("job.yaml", sets=[f"output={output}"] if output else [])
    assert {row["target"] for row in plan.candidates if not row["reaches"]} == away
    moves = [base for base in candidates.bases(plan) if attempts.reaches(base, plan)]
    assert {base.target for base in moves} == {"lab", "gke", "prod"} - away
    keys = {
        base.target: attempts.carry_checkpoints(base.job["checkpoint"], base.backend, plan, saved=True)
        for base in moves
    }
    assert all(checkpoint["required"] for checkpoint in keys.values())
    folders = {target: checkpoint["folder"] for target, checkpoint in keys.items() if checkpoint["folder"]}
    assert folders == ({} if away else {"prod": "checkpoints"}), "on SageMaker too it is where the others have it"
