"""Runs that the history has lost are found on their platforms, by the label of the home: the simulators, Slurm, sshd."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from cloudtrain.cli import main
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job import homes as homefolder
from cloudtrain.job import targets
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.simulators.sagemaker import server
from cloudtrain.simulators.vertex import server as vertex
from cloudtrain.simulators.vertex.lifecycle import Behavior
from tests.backends.kubernetes.clusters import ground
from tests.backends.ssh.test_backend import options as ssh_options
from tests.conftest import WAIT_S
from tests.lab.connections import close_all

ENDS = "import os, pathlib\npathlib.Path(os.environ['CLOUDTRAIN_MODEL_DIR'], 'weights').write_text('3')\nprint('it ends')\n"
STAYS = "import time\nprint('it stays')\ntime.sleep(600)\n"


class Person:
    """Somebody with a home and a target `prod`, in a folder of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, backend: str, options: dict, **job: Any) -> None:
        self.folder, self.home, self.patch = folder, folder / "home", monkeypatch
        self.job = {"name": "lost", "source": str(folder / "source"), "environment": {"requirements": "none"}, **job}
        (folder / "source").mkdir(parents=True)
        (folder / "source" / "ends.py").write_text(ENDS)
        (folder / "source" / "stays.py").write_text(STAYS)
        values = [f"{name} = {toml(value)}" for name, value in options.items()]
        (folder / "cloudtrain.toml").write_text("\n".join(["[targets.prod]", f'backend = "{backend}"', *values]))

    def __enter__(self) -> Person:
        self.patch.chdir(self.folder)
        self.patch.setenv("CLOUDTRAIN_HOME", str(self.home))
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, script: str) -> Run:
        with self:
            return Submitter("prod", home=self.home, watch=False).submit({**self.job, "entrypoint": script})

    def lose(self) -> None:
        """Lose the whole home but its id."""
        kept = (self.home / homefolder.HOME_FILE).read_text()
        shutil.rmtree(self.home)
        self.home.mkdir()
        (self.home / homefolder.HOME_FILE).write_text(kept)

    def command(self, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[Any, str]:
        capsys.readouterr()
        with self:
            main([*words, "--json"])
        shown = capsys.readouterr()
        return json.loads(shown.out), shown.err


def toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {toml(inner)}' for name, inner in value.items())}}}"
    return json.dumps(value)


def check_found(me: Person, other: Person, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lose a home with two runs; `doctor` finds both, and not that of another home, and they can be followed."""
    theirs = other.submit("ends.py")
    ended, live = me.submit("ends.py"), me.submit("stays.py")
    assert ended.wait(WAIT_S).state is State.SUCCEEDED and theirs.wait(WAIT_S).state is State.SUCCEEDED
    me.lose()
    assert me.command(capsys, "ls")[0] == []
    findings, _ = me.command(capsys, "doctor", "prod")
    said = [finding["said"] for finding in findings if finding["what"] == "runs there"]
    assert said == ["2 runs were missing in the history and added again: `cloudtrain ls` shows them"], findings
    assert {run["run_id"] for run in me.command(capsys, "ls")[0]} == {ended.run_id, live.run_id}
    again, _ = me.command(capsys, "doctor", "prod")
    assert not any(finding["what"] == "runs there" for finding in again)
    with me:
        found = Run(ended.run_id, Store(me.home), watch=False)
        assert found.wait(WAIT_S).state is State.SUCCEEDED
        assert "it ends" in [line.text for line in found.logs()]
        folder = found.fetch(tmp_path / "fetched")
        assert (folder / "model" / "weights").read_text() == "3"
        shown, _ = me.command(capsys, "show", ended.run_id)
        assert shown["state"] == "SUCCEEDED" and shown["backend"] == ended.record.backend
        found = Run(live.run_id, Store(me.home), watch=False)
        assert next(line.text for line in found.logs(follow=True)) == "it stays"
        assert found.cancel(WAIT_S).state is State.CANCELLED
        assert len(found.attempts) == 1


@pytest.fixture
def sagemaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[server.Simulator, dict]]:
    for name, value in server.KEYS.items():
        monkeypatch.setenv(name, value)
    simulator = server.Simulator(tmp_path / "simulated")

    def reset() -> None:
        with urlopen(Request(f"{simulator.url}/moto-api/reset", method="POST"), timeout=WAIT_S):
            pass

    reset()
    simulator.make_bucket("training")
    trust = {
        "Statement": [
            {"Effect": "Allow", "Action": "sts:AssumeRole", "Principal": {"Service": "sagemaker.amazonaws.com"}}
        ]
    }
    simulator.call("iam", "create_role", RoleName="training", AssumeRolePolicyDocument=json.dumps(trust))
    place = {"role": server.ROLE, "bucket": "training", "region": server.REGION, "image": "any", "client": "boto3"}
    yield simulator, {**place, "endpoint": simulator.url}
    reset()
    simulator.close()


def test_sagemaker(sagemaker, tmp_path, monkeypatch, capsys):
    people = [Person(tmp_path / name, monkeypatch, "sagemaker", sagemaker[1]) for name in ("me", "other")]
    check_found(*people, tmp_path, capsys)


def test_vertex(tmp_path, monkeypatch, capsys):
    simulator = vertex.Simulator(tmp_path / "simulated")
    place = {"project": "local", "bucket": "local", "endpoint": simulator.url, "image": "any:1", "client": "rest"}
    try:
        people = [Person(tmp_path / name, monkeypatch, "vertex", place) for name in ("me", "other")]
        check_found(*people, tmp_path, capsys)
    finally:
        simulator.close()


def test_kubernetes(tmp_path, monkeypatch, capsys):
    with ground(tmp_path / "simulated") as place:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", place.store.url)
        options = {"kubeconfig": str(place.cluster.kubeconfig), "image": "any:1", "poll_s": 0.1}
        job = {"output": "gs://local/out"}
        people = [Person(tmp_path / name, monkeypatch, "kubernetes", options, **job) for name in ("me", "other")]
        check_found(*people, tmp_path, capsys)


def test_slurm(slurm, tmp_path, monkeypatch, capsys):
    options = {"folder": str(slurm.shared / "labelled"), "python": sys.executable}
    people = [Person(tmp_path / name, monkeypatch, "slurm", options) for name in ("me", "other")]
    check_found(*people, tmp_path, capsys)


def test_ssh(lab, tmp_path, monkeypatch, capsys):
    people = [Person(tmp_path / name, monkeypatch, "ssh", ssh_options(lab, 1)) for name in ("me", "other")]
    try:
        check_found(*people, tmp_path, capsys)
    finally:
        close_all()


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[vertex.Simulator, Person]]:
    """A platform whose jobs never begin, and a person who uses it."""
    simulator = vertex.Simulator(tmp_path / "simulated", behavior=Behavior(execute=False))
    place = {"project": "local", "bucket": "local", "endpoint": simulator.url, "image": "any:1", "client": "rest"}
    yield simulator, Person(tmp_path / "me", monkeypatch, "vertex", place, retry={"max_attempts": 3})
    simulator.close()


def spoil(me: Person, run: Run) -> None:
    """Damage the history, and lose the journal."""
    run.store.database.close()
    for path in me.home.glob("history.*"):
        path.unlink()
    (me.home / "history.sqlite3").write_bytes(b"no database " * 500)


def test_the_command_that_repairs_a_history_asks_no_platform(waiting, capsys):
    simulator, me = waiting
    run = me.submit("stays.py")
    spoil(me, run)
    asked = len(simulator.server.requests)
    shown, errors = me.command(capsys, "ls")
    assert shown == [] and "the history was damaged" in errors and len(simulator.server.requests) == asked
    me.command(capsys, "doctor", "prod")
    assert [found["run_id"] for found in me.command(capsys, "ls")[0]] == [run.run_id]


def test_a_run_that_was_found_is_not_submitted_again(waiting, capsys):
    """Another user may have written the record of a job, and have copied the label."""
    _, me = waiting
    run = me.submit("stays.py")
    with me:
        planned = Store(me.home).attempts(run.run_id)[0].plan
    spoil(me, run)
    me.command(capsys, "doctor", "prod")
    (found,) = Store(me.home).attempts(run.run_id)
    assert planned.job["retry"]["max_attempts"] == 3 and found.plan.job["retry"] == {"max_attempts": 1}
    assert found.plan.retries == "platform" and found.plan.job["options"] == planned.job["options"]
    assert found.plan.job["args"] == planned.job["args"] and found.plan.manifest["argv"] == list(
        planned.manifest["argv"]
    )


def test_a_run_that_was_deleted_is_not_found(waiting, capsys):
    _, me = waiting
    run = me.submit("stays.py")
    with me:
        run.cancel(WAIT_S)
        Store(me.home).delete(run.run_id)
    assert not any(finding["what"] == "runs there" for finding in me.command(capsys, "doctor", "prod")[0])
    assert me.command(capsys, "ls")[0] == []


def test_the_id_of_a_home_is_made_once(tmp_path):
    made = homefolder.home_id(tmp_path)
    assert len(made) == 12 and homefolder.home_id(tmp_path) == made
    (tmp_path / homefolder.HOME_FILE).write_text("")
    assert homefolder.home_id(tmp_path) not in ("", made)
    assert {path.name for path in tmp_path.iterdir()} == {homefolder.HOME_FILE, homefolder.PLACE_FILE}


def test_two_homes_send_the_same_request_for_a_key(tmp_path, monkeypatch):
    """What says whose a job is are its labels alone: a platform compares requests where an answer was lost."""
    options = {"role": server.ROLE, "bucket": "training", "region": "us-east-1", "image": "any", "client": "boto3"}
    requests = []
    for name in ("me", "other"):
        monkeypatch.setenv("CLOUDTRAIN_HOME", str(tmp_path / name))
        person = Person(tmp_path / name, monkeypatch, "sagemaker", options)
        with person:
            job = {**person.job, "entrypoint": "ends.py", "source": str(tmp_path / "me" / "source")}
            requests.append(Submitter("prod", home=person.home).plan(job, key="one").request)
    tags = [{tag["Key"]: tag["Value"] for tag in request.pop("Tags")} for request in requests]
    homes = [each.pop(targets.HOME_LABEL) for each in tags]
    assert requests[0] == requests[1] and tags[0] == tags[1]
    assert homes == [homefolder.home_id(tmp_path / name / "home") for name in ("me", "other")] and homes[0] != homes[1]
