"""The command that opens a shell in a training job, and what must be switched on before."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.backends.sagemaker.remote_debug import shell
from cloudtrain.errors import BackendError
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from cloudtrain.simulators.sagemaker.server import Simulator
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_quickstart import cloudtrain, target  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, wait_for

JOB = {
    "TrainingJobName": "run-x-a1",
    "SecondaryStatus": "Training",
    "ResourceConfig": {"InstanceCount": 2, "InstanceType": "ml.g5.xlarge"},
    "RemoteDebugConfig": {"EnableRemoteDebug": True},
}


def test_the_address_of_each_node():
    found = shell(JOB, 1, "eu-west-1", None)
    assert found.address == "aws ssm start-session --target sagemaker-training-job:run-x-a1_algo-2 --region eu-west-1"
    assert "session-manager-plugin" in found.note and not found.argv and found.stream is None
    assert shell(JOB, 0, "eu-west-1", "my team").address.endswith(" --profile 'my team'")
    with pytest.raises(BackendError, match="there is no node 2"):
        shell(JOB, 2, "eu-west-1", None)


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"RemoteDebugConfig": {}}, "options.sagemaker.remote_debug: true"),
        ({"SecondaryStatus": "Downloading"}, "only in the phase Training"),
    ],
)
def test_what_must_be_there_first(change: dict, note: str):
    found = shell({**JOB, **change}, 0, "eu-west-1", None)
    assert not found.address and note in found.note


@pytest.mark.usefixtures("census")
def test_stack_and_forward_say_why_they_cannot_work(target: str, simulator: Simulator, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "waits.py").write_text("import time\nprint('waits', flush=True)\ntime.sleep(600)\n")
    words = ["submit", str(tmp_path / "source" / "waits.py"), "-t", target, "--set", "environment.requirements=none"]
    run = Run.find(json.loads(cloudtrain(*words, "--json").splitlines()[-1])["run_id"])
    try:
        wait_for(lambda: run.refresh().state is State.RUNNING, "the start")
        command = [sys.executable, "-m", "cloudtrain.cli"]
        for words, why in (
            (["forward", run.run_id, "6006"], "runs on sagemaker, where cloudtrain cannot forward ports"),
            (["stack", run.run_id], "options.sagemaker.remote_debug: true"),
            (["exec", run.run_id, "--", "true"], "options.sagemaker.remote_debug: true"),
        ):
            said = subprocess.run([*command, *words], capture_output=True, text=True, timeout=WAIT_S)
            assert said.returncode != 0 and why in said.stdout + said.stderr, (words, said)
    finally:
        run.cancel()
        run.wait(WAIT_S)
