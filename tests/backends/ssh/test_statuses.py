"""Many attempts on real machines of a lab: one request to each machine, whatever befalls one of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.events import ENDED, State
from cloudtrain.nodes import directory
from tests.backends.ssh.test_backend import count_requests, options
from tests.conftest import wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab

MANY = 50
# What a node's folder holds, and the state that it gives
DRAWN = [
    ({}, "QUEUED"),
    ({"cancel": ""}, "CANCELLED"),
    ({"started": ""}, "LOST"),
    *(({"started": "", "status.json": json.dumps({"state": state, "exit_code": 3})}, state)
      for state in ("SUCCEEDED", "FAILED", "TIMED_OUT", "PREEMPTED")),
    ({"started": "", "status.json": json.dumps({"state": "RUNNING", "pid": 1, "boot": "of another boot"})}, "LOST"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _connections(lab: Lab):
    yield
    close_all()


@pytest.fixture
def backend(lab: Lab, tmp_path: Path) -> SshBackend:
    return SshBackend(options(lab), tmp_path)


def draw(lab: Lab, backend: SshBackend, hosts: list[int], run_id: str, rng: random.Random) -> str:
    """Write the folders of an attempt on some hosts, in drawn states; return its handle."""
    labels = [backend.machines[host].label for host in hosts]
    for rank, host in enumerate(hosts):
        attempt = lab.hosts[host].path(f"/root/.cloudtrain/runs/{run_id}/a1")
        (attempt / f"node-{rank}").mkdir(parents=True)
        (attempt / "request.json").write_text(json.dumps({"hosts": labels, "run_dir": "/x"}))
        for name, text in rng.choice(DRAWN)[0].items():
            (attempt / f"node-{rank}" / name).write_text(text)
    return f"{','.join(labels)}:~/.cloudtrain/runs/{run_id}/a1"


def test_many_attempts_are_one_request_to_each_machine(lab: Lab, backend: SshBackend, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(7)
    places = [[0], [1], [0, 1], [1, 0]]
    handles = [draw(lab, backend, rng.choice(places), f"drawn-{n}", rng) for n in range(MANY)]
    missing = f"{backend.machines[0].label}:~/.cloudtrain/runs/nothing/a1"
    elsewhere = "10.0.0.1:~/.cloudtrain/runs/elsewhere/a1"
    sent = count_requests(monkeypatch)
    found = backend.statuses([*handles, missing, elsewhere])
    assert sent() == 2
    assert found == {handle: backend.status(handle) for handle in [*handles, missing]}
    states = {status.state for status in found.values()}
    assert states >= {State.QUEUED, State.CANCELLED, State.LOST, State.SUCCEEDED, State.FAILED, State.TIMED_OUT}
    assert found[missing].state is State.LOST and elsewhere not in found


def test_a_machine_that_is_cut_off_keeps_nobody_waiting(lab: Lab, backend: SshBackend):
    rng = random.Random(7)
    handles = [draw(lab, backend, [host], f"cut-{host}", rng) for host in (0, 1)]
    assert set(backend.statuses(handles)) == set(handles)
    lab.hosts[1].cut()  # its connection is open, and nothing comes through
    assert set(backend.statuses(handles)) == {handles[0]}
    lab.hosts[1].heal()
    wait_for(lambda: len(backend.statuses(handles)) == 2, "the machine", 240)


def test_without_any_machine_there_is_no_answer(lab: Lab, backend: SshBackend):
    handle = draw(lab, backend, [0], "off", random.Random(7))
    assert set(backend.statuses([handle])) == {handle}
    lab.hosts[0].power_off()
    with pytest.raises(Unreachable):
        backend.statuses([handle])


def test_a_folder_that_cannot_be_read_leaves_out_its_attempt_only(lab: Lab, backend: SshBackend):
    rng = random.Random(7)
    handles = [draw(lab, backend, [0], f"broken-{n}", rng) for n in range(3)]
    node = lab.hosts[0].path("/root/.cloudtrain/runs/broken-1/a1/node-0")
    (node / "status.json").unlink(missing_ok=True)
    (node / "started").touch()
    (node / "lock").mkdir()
    assert set(backend.statuses(handles)) == {handles[0], handles[2]}
    with pytest.raises(BackendError, match="lock"):
        backend.statuses(handles[1:2])


def test_the_end_of_a_loss_is_not_known_while_a_machine_of_it_cannot_be_reached():
    raw = {"state": "LOST", "exit_code": None, "reason": "no progress", "started_at": "1", "ended_at": "2"}
    answer = {"request": {}, "state": {**raw, "raw": raw}}
    silent = SimpleNamespace(label="b", agent=SimpleNamespace(unreachable_s=2 * directory.CUT_OFF_S))
    assert directory.merge_reports([answer], []).event == ENDED
    found = directory.merge_reports([answer, Unreachable("b")], [silent])
    assert (found.state, found.event) == (State.LOST, "")
