"""Law 1: the plan is what is sent, and it is made without network, credentials or SDK."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cloudtrain.backends.api import Plan
from cloudtrain.events import State
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S

# Loaded by Python itself before anything of ours: no socket can be made, no SDK be imported, no process be started, and
# each attempt is printed.
BLOCK = """
import importlib.abc, socket, sys
SDKS = {"boto3", "botocore", "google", "googleapiclient", "kubernetes", "sagemaker", "azure", "s3fs", "gcsfs", "paramiko",
        "requests", "urllib3", "httpx", "torch", "accelerate", "transformers", "datasets"}

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in SDKS:
            print("IMPORTED", name, file=sys.stderr)
            raise ImportError(f"{name} is not there")

class Refused(socket.socket):
    def __init__(self, *a, **k):
        print("SOCKET", file=sys.stderr)
        raise OSError("no network here")

def started(event, arguments):
    if event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.spawn", "os.exec", "os.fork", "os.forkpty"):
        print("PROCESS", event, arguments[:2], file=sys.stderr)
        raise OSError("no process here")

sys.addaudithook(started)
sys.meta_path.insert(0, Refusing())
socket.socket = Refused
"""


def plan(folder: Path, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cloudtrain.cli", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )


def test_the_plan_is_made_without_sockets_sdk_and_processes(home, tmp_path, figure):
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "sitecustomize.py").write_text(BLOCK)
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    tool = tmp_path / "block" / "nvidia-smi"  # on machines without one nobody would try to start it
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    path = f"{tool.parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "block"), "PATH": path}
    for mark, code in (("SOCKET", "import socket; socket.socket()"), ("PROCESS", "import os; os.system('true')")):
        probe = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert probe.returncode != 0 and mark in probe.stderr, "the block holds"
    jobs = [
        ["train.py"],
        ["train.py", "--nodes", "4", "--gpus", "A100-80GB:2"],
        ["train.py", "--set=secrets.TOKEN=gcp-secretmanager:name"],
    ]
    for words in jobs:
        done = plan(project, "plan", *words, "--json", env=env)
        assert done.returncode == 0, done.stderr
        assert not [mark for mark in ("SOCKET", "IMPORTED", "PROCESS") if mark in done.stderr], done.stderr
        assert Plan.from_json(done.stdout).request
    figure("jobs planned with sockets and processes blocked and no SDK", len(jobs))


def test_what_was_planned_is_what_arrives(home, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("print('hello')\n")
    file = tmp_path / "plan.json"
    env = dict(os.environ)
    assert plan(project, "plan", "train.py", "--nodes", "2", "-o", str(file), env=env).returncode == 0
    assert plan(project, "submit", str(file), "--wait", env=env).returncode == 0
    run = Run.find(home=home)
    (attempt,) = run.attempts
    assert run.record.status.state is State.SUCCEEDED and attempt.handle is not None
    planned = Plan.from_json(file.read_text())
    assert attempt.plan == planned
    assert json.loads((Path(attempt.handle) / "request.json").read_text()) == planned.request
