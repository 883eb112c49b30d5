"""A script that reads `wandb.config` gets its trial, by the real wandb package without network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.sweeps.conftest import command

SCRIPT = """
import json, wandb
run = wandb.init(mode="offline")
print("got", json.dumps({name: wandb.config[name] for name in ("lr", "optim")}, sort_keys=True), run.project, flush=True)
print(json.dumps({"step": 1, "loss": wandb.config["lr"]}), flush=True)
"""
SWEEP = """
program: train.py
command: ["${env}", "${interpreter}", "${program}"]
method: grid
metric: {name: loss, goal: maximize}
project: demo
parameters:
  lr: {values: [0.25, 0.5]}
  optim: {parameters: {name: {value: adam}}}
"""


@pytest.mark.timeout(600)
def test_the_trial_is_in_wandb_config(project: Path, census: Path):
    (project / "train.py").write_text(SCRIPT)
    (project / "sweep.yaml").write_text(SWEEP)
    command(project, "sweep", "sweep.yaml", "--wait")
    trials = json.loads(command(project, "sweep", "show", "--json"))["trials"]
    for trial, rate in zip(trials, (0.25, 0.5), strict=True):
        log = command(project, "logs", trial["run_id"])
        assert f'got {{"lr": {rate}, "optim": {{"name": "adam"}}}} demo' in log
    assert 'SWEEP_TRIAL: \'{"lr": 0.5' in command(project, "sweep", "best")
