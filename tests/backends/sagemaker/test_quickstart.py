"""The quickstart on SageMaker's simulator by the command line: listed, followed, preempted, resumed, cancelled, fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.runs.run import Run
from cloudtrain.simulators.sagemaker.server import REGION, ROLE, Simulator
from tests.backends.sagemaker.test_backend import BUCKET, simulator  # noqa: F401 - a fixture
from tests.backends.slurm.test_quickstart import SETS
from tests.conftest import WAIT_S, wait_for

ROOT = Path(__file__).parents[3]
STEPS = 40


@pytest.fixture
def target(simulator: Simulator, tmp_path: Path) -> str:  # noqa: F811
    options = {"role": ROLE, "bucket": BUCKET, "region": REGION, "image": "any", "endpoint": simulator.url}
    lines = ["[targets.prod]", 'backend = "sagemaker"', 'client = "boto3"', 'account = "123456789012"']
    config = tmp_path / "config" / "cloudtrain"
    config.mkdir(parents=True)
    (config / "cloudtrain.toml").write_text(
        "\n".join([*lines, *(f'{name} = "{text}"' for name, text in options.items())])
    )
    return "prod"


def cloudtrain(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=5 * WAIT_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def by_node(text: str) -> dict[str, list[str]]:
    """Return the lines of each node: they begin with [node:rank]."""
    lines_of_node: dict[str, list[str]] = {}
    for line in text.splitlines():
        lines_of_node.setdefault(line.partition(":")[0], []).append(line)
    assert set(lines_of_node) == {"[0", "[1"}, lines_of_node
    return lines_of_node


@pytest.mark.train
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("census")
def test_quickstart_survives_the_loss_of_its_spot_machines(target: str, simulator: Simulator, tmp_path: Path) -> None:  # noqa: F811
    sets = [*SETS, f"hyperparameters.max_steps={STEPS}", "resources.use_spot=true"]
    words = [word for pair in sets for word in ("--set", pair)]
    output = cloudtrain("submit", "examples/quickstart/job.yaml", "-t", target, *words, "--json")
    run_id = json.loads(output.splitlines()[-1])["run_id"]
    assert run_id in cloudtrain("ls", "-q")
    follower = subprocess.Popen(
        [sys.executable, "-m", "cloudtrain.cli", "logs", "-f", run_id], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    run = Run.find(run_id)
    wait_for(lambda: max((point.step for point in run.metrics("loss")), default=0) >= 12, "twelve steps", 4 * WAIT_S)
    simulator.preempt(f"{run_id}-a1")
    cloudtrain("wait", run_id)
    followed, _ = follower.communicate(timeout=WAIT_S)
    # Every line once and in order on each node; which node's comes first depends on when CloudWatch had it.
    assert by_node(followed) == by_node(cloudtrain("logs", run_id))
    resumed = [json.loads(row) for row in cloudtrain("metrics", run_id, "--json").splitlines()]
    steps = [row["step"] for row in resumed if row["name"] == "loss"]
    assert set(steps) == set(range(1, STEPS + 1))
    states = [change["Status"] for change in simulator.jobs[f"{run_id}-a1"].describe()["SecondaryStatusTransitions"]]
    assert states.count("Training") == 2 and "Interrupted" in states
    assert "resum" in followed.lower()
    cloudtrain("fetch", run_id, "-o", str(tmp_path / "out"))
    assert (tmp_path / "out" / "model" / "model.safetensors").stat().st_size > 10_000
    assert list((tmp_path / "out" / "checkpoints").rglob("COMPLETE"))


@pytest.mark.usefixtures("census")
def test_cancelled_by_the_command_line(target: str, simulator: Simulator, tmp_path: Path) -> None:  # noqa: F811
    script = tmp_path / "project" / "train.py"
    script.parent.mkdir()
    script.write_text("import time\nprint('there', flush=True)\ntime.sleep(600)\n")
    output = cloudtrain("submit", str(script), "-t", target, "--json")
    run_id = json.loads(output.splitlines()[-1])["run_id"]
    wait_for(lambda: "there" in cloudtrain("logs", run_id), "its first line")
    cloudtrain("cancel", run_id)
    cloudtrain("wait", run_id, code=130)
    shown = json.loads(cloudtrain("show", run_id, "--json"))
    assert shown["billable_s"] > 0 and "billed" in cloudtrain("show", run_id)
    assert shown["state"] == "CANCELLED" and simulator.jobs[f"{run_id}-a1"].status == "Stopped"
    described = simulator.jobs[f"{run_id}-a1"].describe()
    assert Run.find(run_id).model_artifacts == described["ModelArtifacts"]["S3ModelArtifacts"]


def test_only_submit_imports_the_sdk_and_plan_not_even_boto3(target: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print(1)\n")
    output = cloudtrain("submit", str(tmp_path / "train.py"), "-t", target, "--wait", "--json")
    run_id = json.loads(output.splitlines()[-1])["run_id"]
    # A module of that name that refuses to be imported stands for the SDK, which is not installed here.
    (tmp_path / "refuses" / "sagemaker").mkdir(parents=True)
    (tmp_path / "refuses" / "sagemaker" / "__init__.py").write_text("raise SystemExit('the SDK was imported')\n")
    look = (
        "import sys; from cloudtrain.cli import main; code = main({!r}); "
        "print({{m.split('.')[0] for m in sys.modules}} & {{'boto3', 'sagemaker'}}); sys.exit(code)"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "refuses")}
    for words, seen in (
        (["plan", str(tmp_path / "train.py"), "-t", target, "--json"], "set()"),
        (["ls"], "set()"),
        (["logs", run_id], "set()"),  # the watcher has kept it
        (["show", run_id], None),
    ):
        ran = subprocess.run(
            [sys.executable, "-c", look.format(words)],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        last = ran.stdout.splitlines()[-1]
        assert last == seen if seen else "sagemaker" not in last, words
