"""The quickstart over Slurm by the command line: preempted and requeued, then a node lost, with an unbroken run's losses."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, wait_for
from tests.lab.slurm import Slurm

pytestmark = [pytest.mark.train, pytest.mark.timeout(900), pytest.mark.usefixtures("census")]
ROOT = Path(__file__).parents[3]
STEPS = 60
SETS = shlex.split(
    "num_nodes=2 processes_per_node=1 retry.max_attempts=3 env.OMP_NUM_THREADS=1 checkpoint.every='10 steps' "
    f"hyperparameters.max_steps={STEPS} hyperparameters.max_train_bytes=60000 hyperparameters.max_eval_samples=4 "
    "hyperparameters.tokenizer=bpe:300 hyperparameters.hidden_size=32 hyperparameters.num_hidden_layers=2 "
    "hyperparameters.num_attention_heads=2 hyperparameters.block_size=32 hyperparameters.per_device_train_batch_size=2 "
    "hyperparameters.logging_steps=1 hyperparameters.sample_tokens=0"
)


def cloudtrain(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cloudtrain.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=5 * WAIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def submitted(target: str, *more: str) -> str:
    sets = [word for pair in SETS for word in ("--set", pair)]
    said = cloudtrain("submit", "examples/quickstart/job.yaml", "-t", target, *sets, *more, "--json")
    return json.loads(said.splitlines()[-1])["run_id"]


def newest(log: Path) -> int:
    """Return the last step of which a log tells."""
    if not log.exists():
        return 0
    return max((int(step) for step in re.findall(r'"kind":"metric","step":(\d+),"loss"', log.read_text())), default=0)


@pytest.mark.long
def test_quickstart_survives_a_preemption_and_the_loss_of_a_node(
    slurm: Slurm, home: Path, tmp_path: Path, monkeypatch
) -> None:
    config = tmp_path / "config" / "cloudtrain"
    config.mkdir(parents=True)
    options = {"folder": str(slurm.shared), "python": sys.executable, "partition": "low"}
    lines = [
        "[targets.cluster]",
        'backend = "slurm"',
        *(f"{key} = {json.dumps(value)}" for key, value in options.items()),
    ]
    (config / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(config))

    store = Store(home)
    run = Run(submitted("cluster"), store)
    log = slurm.shared / "runs" / run.run_id / "a1" / "node-0" / "log"  # the store is some seconds behind it

    def reached(step: int) -> bool:
        return newest(log) >= step

    wait_for(lambda: reached(15), "step 15", 5 * WAIT_S)
    for host in slurm.nodes:  # they wait for what is about to come: Slurm wakes them with its notice
        for pid in host.processes(containing=".cloudtrain/train.py"):
            os.kill(pid, signal.SIGSTOP)
    slurm.ask("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    wait_for(lambda: '"state":"PREEMPTED"' in log.read_text(), "the end of the first start", 5 * WAIT_S)
    stopped = newest(log)
    wait_for(lambda: reached(stopped + 12), "a checkpoint after the preemption", 5 * WAIT_S)
    slurm.nodes[1].power_off()
    assert newest(log) < STEPS, "it was lost in mid-training"
    wait_for(lambda: len(run.attempts) == 2 or run.state.final, "the second attempt", 5 * WAIT_S)
    slurm.nodes[1].reboot()
    assert run.wait(5 * WAIT_S).state is State.SUCCEEDED, "\n".join(line.text for line in run.logs())
    assert [attempt.status.state for attempt in run.attempts] == [State.LOST, State.SUCCEEDED]

    events = [event for event in store.events(run.run_id) if "platform" in event.data]
    assert [(event.data["world_size"], event.data["nodes"], event.data["platform"]) for event in events] == [
        (2, 2, "slurm")
    ] * 6
    assert {event.data["hostname"] for event in events} == {"node-2", "node-3"}
    reference = submitted("local")
    assert Run(reference, store).wait(5 * WAIT_S).state is State.SUCCEEDED
    unbroken = {row.step: row.value for row in store.metrics(reference) if row.name == "loss"}
    assert sorted(unbroken) == list(range(1, STEPS + 1))
    rows = [(row.step, row.value) for row in store.metrics(run.run_id) if row.name == "loss"]
    assert {step for step, _ in rows} == set(unbroken)
    assert [(step, value, unbroken[step]) for step, value in rows if value != unbroken[step]] == [], "bit-equal"
    assert len(rows) < 2 * STEPS, "no start began anew"
