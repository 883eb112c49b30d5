"""A run that goes on elsewhere: the same run on another target and layout, its losses those of an unbroken run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloudtrain.errors import BadRequest
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.backends.kubernetes.clusters import ground
from tests.backends.ssh.test_training import QUICKSTART, SMALL
from tests.conftest import WAIT_S

pytestmark = pytest.mark.usefixtures("census")
# Saves at its first attempt and fails; says afterwards where it goes on.
SCRIPT = """
import os, pathlib, sys
folder = pathlib.Path(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"])
print("FOUND", sorted(path.name for path in folder.glob("*.txt")), os.environ["WORLD_SIZE"], flush=True)
if os.environ["CLOUDTRAIN_ATTEMPT"] == "1":
    (folder / "step.txt").write_text("5")
    sys.exit(3)
"""
CONFIG = '[targets.here]\nbackend = "local"\n\n[targets.there]\nbackend = "local"\n'
# A rank dies once a checkpoint of that step is whole.
FAULT = """
import glob, os, signal, threading, time
step = int(os.environ.get("DIES_BEHIND") or 0)
def wait():
    saved = []
    while not any(int(os.path.basename(os.path.dirname(mark))[5:13]) >= step for mark in saved):
        time.sleep(0.001)
        saved = glob.glob(os.environ["CLOUDTRAIN_CHECKPOINT_DIR"] + "/step-*/COMPLETE")
    os.kill(os.getpid(), signal.SIGKILL)
if step and os.environ.get("RANK") == "0":
    threading.Thread(target=wait, daemon=True).start()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "cloudtrain.toml").write_text(CONFIG)
    monkeypatch.chdir(folder)
    return folder


def failed(home: Path, **changes) -> Run:
    data = {"name": "moves", "source": ".", "entrypoint": "train.py", "distributed_env": "always", **changes}
    run = Submitter("here", home=home).submit(data)
    run.acknowledge()
    assert run.wait(WAIT_S).exit_code == 3
    return run


def test_a_run_goes_on_under_another_target_with_more_ranks(project, home, tmp_path):
    run = failed(home, output=str(tmp_path / "shared"))
    run.resume(target="there", sets=["processes_per_node=2"])
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    lines = [line.text for line in run.logs() if line.text.startswith("FOUND")]
    assert sorted(lines) == ["FOUND ['step.txt'] 2", "FOUND ['step.txt'] 2", "FOUND [] 1"]
    assert (run.record.target, [attempt.plan.target for attempt in run.attempts]) == ("there", ["here", "there"])
    assert any("the world size was 1 and is 2" in note for note in run.notes)


def test_a_folder_that_is_another_one_there_is_refused_on_the_node(project, home, tmp_path):
    """The path is the same and the folder is not: another machine's, say."""
    run = failed(home, output=str(tmp_path / "shared"))
    (tmp_path / "shared").rename(tmp_path / "elsewhere")
    run.resume(target="there")
    assert run.wait(WAIT_S).exit_code == 78
    assert "has no checkpoint of an earlier attempt" in run.record.status.reason


def test_what_cannot_go_along_is_refused_before_anything_is_sent(project, home):
    run = failed(home)
    with pytest.raises(BadRequest, match="the run's folder on here, which slurm does not read"):
        run.resume(target="slurm", sets=["options.slurm.folder=/scratch"])
    with pytest.raises(BadRequest, match="not hyperparameters.lr=1"):
        run.resume(target="there", sets=["hyperparameters.lr=1"])
    assert len(run.attempts) == 1 and run.record.target == "here"


@pytest.mark.train
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_trained_here_in_a_cluster_and_here_again(tmp_path, home, monkeypatch):
    """Two ranks here, one rank in a pod, four ranks here: one run, and the losses of two ranks that nothing disturbs."""
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "sitecustomize.py").write_text(FAULT)
    with ground(tmp_path / "ground") as place:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", place.store.url)
        monkeypatch.setenv("CLOUDTRAIN_SYNC_EVERY_S", "0.2")
        given = {"kubeconfig": str(place.cluster.kubeconfig), "server": place.cluster.url, "poll_s": 0.2}
        lines = ['[targets.cluster]\nbackend = "kubernetes"\nimage = "any:1"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        (tmp_path / "cloudtrain.toml").write_text("\n".join(lines) + "\n")
        monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(tmp_path))
        changes = {
            **SMALL,
            "num_nodes": 1,
            "processes_per_node": 2,
            "output": "gs://local/out",
            "retry.max_attempts": 1,
        }
        changes |= {"hyperparameters.per_device_train_batch_size": 1, "hyperparameters.global_batch_size": 4}
        sets = [f"{name}={value}" for name, value in changes.items()]
        submitter = Submitter("local", home=home)
        unbroken = submitter.submit(QUICKSTART, sets=sets, key="unbroken")
        assert unbroken.wait(5 * WAIT_S).state is State.SUCCEEDED, unbroken.record.status
        faults = [f"env.PYTHONPATH={tmp_path / 'faults'}", "env.DIES_BEHIND='10'"]
        run = submitter.submit(QUICKSTART, sets=[*sets, *faults])
        assert run.wait(5 * WAIT_S).state is State.FAILED
        run.resume(target="cluster", sets=["processes_per_node=1", "env.DIES_BEHIND='25'"])
        assert run.wait(5 * WAIT_S).state is State.FAILED, run.record.status
        run.resume(target="local", sets=["processes_per_node=4", "env.DIES_BEHIND=''"])
        assert run.wait(5 * WAIT_S).state is State.SUCCEEDED, run.record.status
    events = Store(home).events(run.run_id, "world")
    assert [event.data["world_size"] for event in events if "processes" in event.data] == [2, 1, 4]
    expected = {row.step: row.value for row in unbroken.metrics("loss")}
    rows = run.metrics("loss")
    steps = {number: [row.step for row in rows if row.attempt == number] for number in (1, 2, 3)}
    assert steps[1][0] == 1 and steps[2][0] in (11, 16) and steps[3][0] in (26, 31) and steps[3][-1] == 40
    assert all(row.value == pytest.approx(expected[row.step], abs=1e-5) for row in rows)
    assert [row.value for row in rows if row.attempt == 1] == [expected[step] for step in steps[1]]
