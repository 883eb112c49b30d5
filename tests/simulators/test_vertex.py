"""Google's own SDK runs against the simulator, in a script that imports nothing of cloudtrain."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from cloudtrain.simulators.vertex.server import Simulator
from tests.conftest import require, wait_for

SCRIPT = Path(__file__).with_name("googles.py")


@pytest.mark.train
def test_googles_sdk_agrees_with_it(tmp_path: Path):
    assert "cloudtrain" not in SCRIPT.read_text()
    with Simulator(tmp_path) as simulator:
        command = [sys.executable, str(SCRIPT), simulator.url]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, env=dict(os.environ))
    assert done.stdout.strip().endswith("\nall of it"), done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.timeout(900)
def test_gcloud_agrees_with_it(tmp_path: Path):
    """Create, list, describe, stream the log and cancel, where gcloud is installed."""
    require("gcloud")
    container = {"imageUri": "any:1", "command": ["python3", "-c", "print('heard of', flush=True)"]}
    pool = {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": 1, "containerSpec": container}
    waits = {**pool, "containerSpec": {**container, "command": ["sleep", "600"]}}
    for name, worker_pool in (("short", pool), ("long", waits)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"workerPoolSpecs": [worker_pool]}))
    with Simulator(tmp_path / "simulator") as simulator:
        settings = {
            "CONFIG": str(tmp_path / "gcloud"),
            "CORE_PROJECT": "local",
            "CORE_DISABLE_PROMPTS": "1",
            "CORE_DISABLE_USAGE_REPORTING": "true",
            "AUTH_DISABLE_CREDENTIALS": "true",
            "COMPONENT_MANAGER_DISABLE_UPDATE_CHECK": "true",
            "API_ENDPOINT_OVERRIDES_AIPLATFORM": f"{simulator.url}/",
            "API_ENDPOINT_OVERRIDES_LOGGING": f"{simulator.url}/",
        }
        env = {**os.environ, **{f"CLOUDSDK_{name}": value for name, value in settings.items()}}

        def jobs(*words: str) -> subprocess.CompletedProcess[str]:
            command = ["gcloud", "ai", "custom-jobs", *words, "--region=us-central1"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
            assert done.returncode == 0, done.stdout + done.stderr
            return done

        def created(name: str) -> str:
            created_job = jobs(
                "create", f"--display-name={name}", f"--config={tmp_path}/{name}.json", "--labels=of=gcloud"
            )
            match = re.search(r"customJobs/(\d+)", created_job.stderr)
            assert match, created_job.stderr
            return match[1]

        short, long = created("short"), created("long")
        streamed = jobs("stream-logs", short, "--polling-interval=1").stdout
        assert [line.split("\t")[-1] for line in streamed.splitlines() if "workerpool0-0" in line] == ["heard of"]
        described = json.loads(jobs("describe", short, "--format=json").stdout)
        assert (described["state"], described["labels"]) == ("JOB_STATE_SUCCEEDED", {"of": "gcloud"})
        assert sorted(jobs("list", "--format=value(displayName)").stdout.split()) == ["long", "short"]
        jobs("cancel", long)
        state = f"/v1/projects/local/locations/us-central1/customJobs/{long}"
        wait_for(lambda: _get(simulator.url + state)["state"] == "JOB_STATE_CANCELLED", "its end")


def _get(address: str) -> dict:
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.loads(answer.read())
