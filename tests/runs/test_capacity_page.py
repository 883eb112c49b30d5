"""docs/capacity.md: its plan is what the command prints, and it leads through on simulators that refuse capacity."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.runs.planning import attempts, candidates
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.http import Fault
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.kubernetes.clusters import ground
from tests.backends.sagemaker.test_backend import options, simulator
from tests.backends.vertex.bench import CREATE, Bench
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


Refusing = dict[str, object]  # the target `prod`


@pytest.fixture
def sagemaker(simulator: Simulator) -> Refusing:  # noqa: F811
    """It accepts the job and ends it for lack of capacity."""
    simulator.behavior.capacity_errors = 1
    return {"backend": "sagemaker", **options(simulator), "image": "any"}


@pytest.fixture
def vertex(tmp_path: Path) -> Iterator[Refusing]:
    """It refuses the job: a quota is used up."""
    made = Bench(tmp_path / "vertex")
    message = "RESOURCE_EXHAUSTED: The following quotas are exceeded: CustomModelTrainingCPUsPerProjectPerRegion"
    made.simulator.server.faults.append(Fault("POST", CREATE, 429, message, times=10**6))
    place = {"project": "local", "bucket": "local", "image": "any:1", "client": "rest"}
    yield {"backend": "vertex", **place, "endpoint": made.simulator.url}
    made.simulator.close()


@pytest.fixture
def kubernetes(tmp_path: Path) -> Iterator[Refusing]:
    """Its pod stays pending: no node has the labels that it asks for."""
    with ground(tmp_path / "ground") as made:
        given = {"kubeconfig": str(made.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}
        yield {"backend": "kubernetes", **given, "node_selector": {"pool": "gpus"}}
        assert made.cluster.objects.all("jobs") == [], "the Job that found no node is deleted"


@pytest.mark.usefixtures("census")
@pytest.mark.parametrize(
    ("which", "reason"),
    [
        ("sagemaker", "capacity"),
        ("vertex", "CustomModelTrainingCPUsPerProjectPerRegion"),
        ("kubernetes", "no machines within 1s (limits.max_wait)"),
    ],
)
def test_a_run_that_finds_no_machines_goes_on_here(which: str, reason: str, project: Path, home: Path, request):
    """Each platform says in its own way that it has no machines; a process of this machine is the next candidate."""
    refusing: Refusing = request.getfixturevalue(which)
    lines = [f"{name} = {toml(value)}" for name, value in refusing.items()]
    (project / "cloudtrain.toml").write_text(
        "\n".join(["[targets.prod]", *lines, '[targets.here]\nbackend = "local"\n'])
    )
    job = {"source": ".", "entrypoint": "train.py", "target": ["prod", "here"], "prefer": "order"}
    job |= {"limits": {"max_wait": "1s"}} if which == "kubernetes" else {}
    run = Submitter(home=home, watch=False).submit(job)
    assert run.wait(WAIT_S).state is State.SUCCEEDED, run.record.status
    assert [attempt.plan.target for attempt in run.attempts] == ["prod", "here"]
    assert [attempt.status.event for attempt in run.attempts] == ["capacity", ""]
    assert reason in run.attempts[0].status.reason
    assert "trained" in [line.text for line in run.logs()]


def toml(value: object) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml(inner)}' for name, inner in value.items())}}}"
    return json.dumps(value)


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
