"""A followed run on the simulator: how often SageMaker is asked, and followers that see each line once, whoever is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cloudtrain.history.spool import FRESH_S
from cloudtrain.history.store import Store
from cloudtrain.simulators.sagemaker.server import Fault, Simulator
from tests.backends.sagemaker.test_backend import simulator  # noqa: F401 - a fixture
from tests.backends.sagemaker.test_quickstart import ROOT, cloudtrain, target  # noqa: F401 - a fixture
from tests.conftest import WAIT_S, processes_of, wait_for

pytestmark = pytest.mark.usefixtures("census")
SCRIPT = """
import os, sys, time
node, gate = os.environ["NODE_RANK"], sys.argv[1]
number = 0
while number < 400 or not os.path.exists(gate):
    print(f"node {node} line {number}", flush=True)
    number += 1
    time.sleep(0.02)
"""


def submit(folder: Path, gate: Path) -> str:
    script = folder / "project" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    sets = ["--set", "num_nodes=2", "--set", "environment.requirements=none", "--set", "processes_per_node=1"]
    output = cloudtrain("submit", str(script), "-t", "prod", *sets, "--json", "--", str(gate))
    return str(json.loads(output.splitlines()[-1])["run_id"])


def follow(run_id: str, into: Path) -> subprocess.Popen[bytes]:
    with into.open("wb") as file:
        return subprocess.Popen([sys.executable, "-m", "cloudtrain.cli", "logs", "-f", run_id], cwd=ROOT, stdout=file)


def watchers(home: Path) -> list[int]:
    return [int(line.partition(":")[0]) for line in processes_of(home) if "cloudtrain.runs.watching.watch" in line]


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.mark.usefixtures("target")
def test_sagemaker_is_asked_once_in_five_seconds_for_all_readers(simulator: Simulator, home, tmp_path):  # noqa: F811
    gate, logs = tmp_path / "gate", [tmp_path / "first.log", tmp_path / "second.log"]
    run_id = submit(tmp_path, gate)
    followers = [follow(run_id, path) for path in logs]
    waiter = subprocess.Popen(
        [sys.executable, "-m", "cloudtrain.cli", "wait", run_id], cwd=ROOT, stdout=subprocess.PIPE
    )
    wait_for(lambda: all(count(path) > 300 for path in logs), "its lines", 2 * WAIT_S)
    wait_for(lambda: Store(home).find(run_id).status.state.value == "RUNNING", "its state")

    def running() -> set[int]:
        events = Store(home).events(run_id, "state")
        return {event.node for event in events if event.data["state"] == "RUNNING"}

    wait_for(lambda: running() == {0, 1}, "what both nodes say of it: the platform is asked again then")

    def questions() -> int:
        return sum(call.endswith(("DescribeTrainingJob", "ListTrainingJobs")) for call in simulator.calls)

    def paused() -> bool:
        before = questions()
        time.sleep(0.8 * FRESH_S)
        return questions() == before

    wait_for(paused, "the pause between two questions: it is asked more often because something has changed")
    began, before = time.monotonic(), questions()
    for words in (["ls"], ["show", run_id], ["logs", run_id], ["ls"]):
        cloudtrain(*words)
    time.sleep(2 * FRESH_S)
    number, seconds = questions() - before, time.monotonic() - began
    assert number <= 1 + seconds / FRESH_S, f"{simulator.calls[-20:]} in {seconds:.1f} s"
    assert number >= 1, "it is watched"
    gate.touch()
    assert [process.wait(WAIT_S) for process in (*followers, waiter)] == [0, 0, 0]
    assert by_node(logs[0].read_text()) == by_node(logs[1].read_text()) == by_node(cloudtrain("logs", run_id))


@pytest.mark.usefixtures("target")
def test_a_watcher_that_is_killed_loses_and_doubles_no_line(simulator: Simulator, home, tmp_path):  # noqa: F811
    gate, log = tmp_path / "gate", tmp_path / "followed.log"
    run_id = submit(tmp_path, gate)
    follower = follow(run_id, log)
    killed: set[int] = set()
    for seen in (100, 500, 900):
        wait_for(lambda seen=seen: count(log) > seen, "its lines", 2 * WAIT_S)
        for pid in wait_for(lambda: [pid for pid in watchers(home) if pid not in killed], "a watcher"):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    gate.touch()
    assert follower.wait(2 * WAIT_S) == 0
    nodes = by_node(log.read_text())
    for node in ("0", "1"):
        assert nodes[node] == [f"node {node} line {number}" for number in range(len(nodes[node]))]
        assert len(nodes[node]) >= 400
    assert nodes == by_node(cloudtrain("logs", run_id))


def by_node(text: str) -> dict[str, list[str]]:
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        words = line.partition("] ")[2]
        if words.startswith("node "):
            lines.setdefault(words.split()[1], []).append(words)
    assert Counter(map(len, lines.values())).total() == 2
    return lines


@pytest.mark.usefixtures("target")
def test_an_outage_is_reported_and_ends_no_command(simulator: Simulator, home, tmp_path):  # noqa: F811
    gate, log, errors = tmp_path / "gate", tmp_path / "followed.log", tmp_path / "errors"
    run_id = submit(tmp_path, gate)
    words = [[sys.executable, "-m", "cloudtrain.cli", *words, run_id] for words in (["logs", "-f"], ["wait"])]
    with log.open("wb") as out, errors.open("wb") as err:
        readers = [subprocess.Popen(line, cwd=ROOT, stdout=out, stderr=err) for line in words]
    wait_for(lambda: count(log) > 100, "its lines", 2 * WAIT_S)
    actions = ("DescribeTrainingJob", "ListTrainingJobs", "DescribeLogStreams", "GetLogEvents")
    simulator.faults += [Fault(action, status=0, times=10_000) for action in actions]
    wait_for(lambda: errors.read_text().count("sagemaker has not answered since") == 2, "two sentences", 2 * WAIT_S)
    assert "last asked" in cloudtrain("show", run_id) and "RUNNING" in cloudtrain("ls")
    assert [reader.poll() for reader in readers] == [None, None]
    simulator.faults.clear()
    wait_for(lambda: errors.read_text().count("sagemaker answers again") == 2, "two more", 2 * WAIT_S)
    gate.touch()
    assert [reader.wait(2 * WAIT_S) for reader in readers] == [0, 0]
    assert errors.read_text().count("has not answered") == errors.read_text().count("answers again") == 2
    assert by_node(log.read_text()) == by_node(cloudtrain("logs", run_id))
