"""Law 7 through the real command line: killed in mid-training and resumed, the losses are an unbroken run's, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, processes_of, wait_for

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]
CLOUDTRAIN = [sys.executable, "-m", "cloudtrain.cli"]
JOB = """
name: resume
trainer: true
source: .
hyperparameters:
  dataset: python-stdlib
  max_train_bytes: 60000
  max_eval_samples: 4
  tokenizer: bpe:300
  hidden_size: 32
  num_hidden_layers: 2
  num_attention_heads: 2
  block_size: 32
  dropout: 0.1
  per_device_train_batch_size: 2
  gradient_accumulation_steps: 2
  dataloader_num_workers: 1
  max_steps: 40
  learning_rate: 3e-3
  logging_steps: 1
  sample_tokens: 0
processes_per_node: 2
parallelism: {strategy: ddp}
checkpoint: {every: 5 steps, keep: 2}
env: {OMP_NUM_THREADS: "1"}
"""


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLOUDTRAIN, *arguments], cwd=project, capture_output=True, text=True, timeout=5 * WAIT_S)


def losses(run_id: str, project: Path) -> list[tuple[int, float]]:
    shown = run(project, "metrics", run_id, "--name", "loss", "--json")
    assert shown.returncode == 0, shown.stderr
    return [(row["step"], row["value"]) for row in map(json.loads, shown.stdout.splitlines())]


def test_killed_in_mid_training_and_resumed(tmp_path, home):
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.yaml").write_text(JOB)
    unbroken = run(project, "submit", "job.yaml", "--wait", "--key", "unbroken")
    assert unbroken.returncode == 0, unbroken.stdout + unbroken.stderr
    store = Store(home)
    reference = losses(store.runs()[0].run_id, project)
    assert [step for step, _ in reference] == list(range(1, 41))

    assert run(project, "submit", "job.yaml", "--key", "broken").returncode == 0
    broken = Run(store.runs()[0].run_id, store)
    assert len(store.runs()) == 2
    wait_for(lambda: any(" 13/40 " in line.text for line in broken.logs()), "step 13", 5 * WAIT_S)
    for text in processes_of(home):  # what the loss of a machine leaves: nothing
        try:
            os.kill(int(text.split(":")[0]), signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert broken.wait(5 * WAIT_S).state is State.LOST
    before = losses(broken.run_id, project)

    resumed = run(project, "resume", broken.run_id, "--wait")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [attempt.status.state for attempt in broken.attempts] == [State.LOST, State.SUCCEEDED]
    after = losses(broken.run_id, project)[len(before) :]
    assert after[0][0] in (6, 11, 16, 21, 26, 31, 36), "it went on behind a checkpoint, it did not begin anew"
    assert before == reference[: len(before)]
    assert after == reference[after[0][0] - 1 :], "bit-equal, dropout on"
