"""A home that 53b05dd wrote (make_old_home.py) is shown, resumed, run again and cancelled by the command line of today.

What these runs wrote is not to be changed by a later version, so it is compared exactly; sentences of the command line are
not. Nothing but the command line and the public API is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from cloudtrain import Run, State
from tests.conftest import WAIT_S, wait_for
from tests.history.make_old_home import unpack

pytestmark = pytest.mark.usefixtures("census")
ARCHIVE = Path(__file__).parent / "old_home_53b05dd.tar.gz"
LAUNCHER = "08935906036cd928"  # of the launcher's files in the stored bundle
FIRST = [f"attempt 1 starts at step 0, launcher {LAUNCHER}", "step 0 saved", "step 1 saved"]
REST = ["step 2 saved", "step 3 saved", "done"]
SECOND = [f"attempt 2 starts at step 2, launcher {LAUNCHER}", *REST]
LOSSES = [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.125)]


class Cli:
    """The command line over the unpacked home, in its source."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def __call__(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cloudtrain", *words],
            cwd=self.home.parent / "source",
            env=os.environ | {"CLOUDTRAIN_HOME": str(self.home)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done.stdout

    def show(self, name: str) -> dict[str, Any]:
        return json.loads(self("show", name, "--json"))

    def log(self, name: str) -> list[str]:
        return self("logs", name).splitlines()

    def losses(self, name: str) -> list[tuple[int, float]]:
        rows = map(json.loads, self("metrics", name, "--name", "loss", "--json").splitlines())
        return [(row["step"], row["value"]) for row in rows]

    def states(self, name: str) -> list[str]:
        return [attempt["state"] for attempt in self.show(name)["attempts"]]


@pytest.fixture
def cli(tmp_path: Path, home: Path) -> Cli:
    assert unpack(ARCHIVE, tmp_path) == home
    return Cli(home)


def test_the_launcher_is_that_of_the_stored_bundle(cli):
    (bundle,) = (cli.home / "bundles").glob("*.tar.gz")
    ours = hashlib.sha256()
    with tarfile.open(bundle) as tar:
        inside = {PurePosixPath(member.name): member for member in tar.getmembers() if member.isfile()}
        for path in sorted(inside):
            if path.parts[0] == ".cloudtrain" and path.suffix == ".py":
                ours.update(tar.extractfile(inside[path]).read())
    assert ours.hexdigest().startswith(LAUNCHER)


def test_all_runs_are_listed(cli):
    rows = {row["name"]: row for row in json.loads(cli("ls", "--json"))}
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "finished": "SUCCEEDED",
        "failed": "FAILED",
        "preempted": "PREEMPTED",
        "cancelled": "CANCELLED",
        "retried": "SUCCEEDED",
        "attached": "SUCCEEDED",
        "running": "LOST",
        "unsent": "FAILED",
    }
    assert {name for name, row in rows.items() if row["attached"]} == {"attached"}
    assert {row["name"] for row in json.loads(cli("ls", "--json", "--state", "FAILED"))} == {"failed", "unsent"}
    assert cli("ls").count("\n") == 1 + len(rows)


def test_a_finished_run(cli, tmp_path):
    shown = cli.show("finished")
    assert (shown["state"], shown["exit_code"], shown["reason"], shown["verdict"]) == ("SUCCEEDED", 0, "", None)
    assert shown["handle"] == str(cli.home / "runs" / shown["run_id"] / "a1")
    assert shown["job"]["entrypoint"] == "train.py" and shown["job"]["args"] == ["go"]
    assert shown["job"]["source"] == shown["provenance"]["source"] == str(tmp_path / "source")
    steps = [event["step"] for event in shown["events"] if event["kind"] == "checkpoint" and "step" in event]
    assert steps == [0, 1, 2, 3]
    text = cli("show", "finished")
    assert text.startswith(f"{shown['run_id']}  SUCCEEDED") and "train.py go" in text
    assert "torch==" in cli("show", "finished", "--requirements")
    assert cli.log("finished") == FIRST + REST
    assert cli("logs", "finished", "--tail", "1") == "done\n"
    lines = [json.loads(line) for line in cli("logs", "finished", "--json").splitlines()]
    saved = next(line for line in lines if line["text"] == "step 2 saved")
    after = [
        json.loads(line)["text"] for line in cli("logs", "finished", "--json", "--after", saved["cursor"]).splitlines()
    ]
    assert [text for text in after if not text.startswith("::")] == ["step 3 saved", "done"]
    assert cli.losses("finished") == LOSSES
    cli("fetch", "finished", "-o", str(tmp_path / "got"))
    assert (tmp_path / "got" / "model" / "weights.txt").read_text() == "0.125\n"
    assert (tmp_path / "got" / "outputs" / "result.txt").read_text() == "done\n"
    cli("cancel", "finished")
    cli("resume", "finished", code=2)
    cli("wait", "finished")
    assert cli.states("finished") == ["SUCCEEDED"]


def test_the_report_of_a_finished_run(cli, tmp_path):
    pytest.importorskip("plotly")
    cli("report", "finished", "-o", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert all(words in page for words in (cli.show("finished")["run_id"], FIRST[0], "step 3 saved", "0.125"))


def test_a_finished_run_runs_again(cli):
    first = cli.show("finished")
    again = json.loads(cli("rerun", first["run_id"], "--wait", "--json").splitlines()[-1])
    assert again["run_id"] != first["run_id"] and again["state"] == "SUCCEEDED"
    shown = cli.show(again["run_id"])
    assert (shown["parent"], shown["provenance"]["bundle"]) == (first["run_id"], first["provenance"]["bundle"])
    assert cli.log(again["run_id"]) == FIRST + REST
    assert cli.losses(again["run_id"]) == LOSSES
    assert cli.log(first["run_id"]) == FIRST + REST


def test_a_failed_run(cli):
    shown = cli.show("failed")
    assert (shown["state"], shown["exit_code"], shown["reason"]) == ("FAILED", 1, "rank 0 exited with code 1")
    verdict, error = shown["verdict"], "ModuleNotFoundError: No module named 'a_module_that_is_not_there'"
    assert (verdict["label"], verdict["deciding"], verdict["seq"]) == ("missing-module", error, 14)
    assert error in cli("show", "failed")
    log = cli.log("failed")
    assert log[:4] == [*FIRST, "Traceback (most recent call last):"]
    assert log[-2:] == [error, "[launcher] rank 0 exited with code 1"]
    assert cli.losses("failed") == LOSSES[:2]
    cli("wait", "failed", code=1)
    again = json.loads(cli("rerun", "failed", "--set", "args=[go]", "--wait", "--json").splitlines()[-1])
    assert cli.log(again["run_id"]) == FIRST + REST
    assert cli.show(again["run_id"])["parent"] == shown["run_id"]
    assert cli.show(shown["run_id"])["verdict"] == verdict


def test_a_preempted_run_goes_on_with_its_own_launcher(cli):
    shown = cli.show("preempted")
    assert (shown["state"], shown["reason"]) == ("PREEMPTED", "left on request")
    assert cli.log("preempted") == [*FIRST, "[launcher] left on request"]
    cli("wait", "preempted", code=75)
    cli("resume", "preempted", "--wait")
    assert cli.states("preempted") == ["PREEMPTED", "SUCCEEDED"]
    assert cli.log("preempted") == [*FIRST, "[launcher] left on request", *SECOND]
    assert cli.losses("preempted") == LOSSES
    assert (cli.home / "runs" / shown["run_id"] / "model" / "weights.txt").read_text() == "0.125\n"


def test_a_cancelled_run(cli):
    shown = cli.show("cancelled")
    assert (shown["state"], shown["cancel_requested"], shown["verdict"]) == ("CANCELLED", True, None)
    cli("wait", "cancelled", code=130)
    cli("cancel", "cancelled")
    cli("resume", "cancelled", "--wait")
    assert cli.states("cancelled") == ["CANCELLED", "SUCCEEDED"]
    assert cli.log("cancelled")[-4:] == SECOND


def test_a_run_of_two_attempts(cli):
    assert cli.states("retried") == ["PREEMPTED", "SUCCEEDED"]
    assert cli.log("retried") == [*FIRST, "[launcher] left on request", *SECOND]
    assert cli.losses("retried") == LOSSES
    second = json.loads(cli("logs", "retried", "--json").splitlines()[-1])
    assert second["cursor"].startswith("2/")


def test_an_attached_run(cli, tmp_path):
    shown = cli.show("attached")
    uri = tmp_path / "shared" / shown["run_id"]
    assert (shown["state"], shown["exit_code"], shown["attached"]) == ("SUCCEEDED", 0, str(uri))
    assert cli.log("attached") == FIRST + REST
    assert cli.losses("attached") == LOSSES
    for command in ("resume", "rerun"):
        cli(command, "attached", code=2)
    cli("cancel", "attached")
    assert json.loads(cli("attach", str(uri), "--json"))["run_id"] == shown["run_id"]
    assert (cli.show("attached"), cli.losses("attached")) == (shown, LOSSES)
    cli("fetch", "attached", "-o", str(tmp_path / "got"))
    assert (tmp_path / "got" / "model" / "weights.txt").read_text() == "0.125\n"


def test_a_run_that_went_on_when_its_machine_died(cli):
    assert cli.log("running") == FIRST
    shown = cli.show("running")
    assert (shown["state"], shown["reason"]) == ("LOST", "the supervisor of node-0 died")
    assert shown["verdict"]["label"] == "lost-node"
    assert cli.losses("running") == LOSSES[:2]
    cli("wait", "running", code=69)
    cli("resume", "running", "--wait")
    assert cli.states("running") == ["LOST", "SUCCEEDED"]
    assert cli.log("running") == FIRST + SECOND
    assert cli.losses("running") == LOSSES


@pytest.mark.parametrize("name", ["running", "unsent"])
def test_cancel_of_what_had_not_ended(cli, name):
    cli("cancel", name)
    wait_for(lambda: cli.show(name)["state"] == {"running": "LOST", "unsent": "CANCELLED"}[name], name)
    assert len(cli.states(name)) == 1


def test_a_reader_ends_an_interrupted_submit_that_is_old(cli):
    shown = cli.show("unsent")
    assert (shown["state"], shown["handle"]) == ("FAILED", None) and "was interrupted" in shown["reason"]
    assert cli.log("unsent") == []


def test_an_interrupted_submit_is_finished_by_the_next_one(cli):
    cli("submit", "unsent.yaml", code=2)
    done = json.loads(cli("submit", "unsent.yaml", "--adopt", "--wait", "--json").splitlines()[-1])
    assert done["state"] == "SUCCEEDED"
    rows = [row["run_id"] for row in json.loads(cli("ls", "--json")) if row["name"] == "unsent"]
    assert rows == [done["run_id"]], "no second run"
    assert cli.log("unsent") == FIRST + REST


def test_an_interrupted_submit_of_another_machine_ends_when_it_is_old(tmp_path, home):
    """Nobody here can see whether its sender lives; after 15 minutes it counts as gone."""
    cli = Cli(unpack(ARCHIVE, tmp_path, host="another-machine"))
    shown = cli.show("unsent")
    assert (shown["state"], shown["handle"]) == ("FAILED", None) and "was interrupted" in shown["reason"]
    assert cli.log("unsent") == []


def test_the_public_api(cli, home):
    assert home == cli.home
    run = Run.find("retried")
    assert run.state is State.SUCCEEDED and [attempt.number for attempt in run.attempts] == [1, 2]
    assert [line.text for line in run.logs() if line.rank == 0] == FIRST + SECOND
    assert [(row.step, row.value) for row in run.metrics("loss")] == LOSSES
    failed = Run.find("failed")
    assert failed.verdict().label == "missing-module"
    with pytest.raises(Exception, match="1"):
        failed.result()
    assert Run.find("preempted").resume().wait(WAIT_S).state is State.SUCCEEDED
    assert Run.find("finished").rerun().wait(WAIT_S).state is State.SUCCEEDED
