"""SSH hosts that cannot be reached: a closed port, an unknown name, a wrong host key, a denied key; on real sshds."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cloudtrain.errors import BackendError, NotReached
from cloudtrain.events import State
from cloudtrain.job.job import Job
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.runs.watching.watch import Watcher
from tests.backends.ssh.test_backend import left_on, options
from tests.lab.connections import close_all
from tests.lab.network import Lab

BOUND_S = 240.0
PATIENT = {"limits": {"max_wait": "1h"}}


@pytest.fixture
def closed() -> Iterator[dict[str, Any]]:
    """Return the address of a port of this machine on which nothing listens, and nothing else can."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield {"address": "127.0.0.1", "port": holder.getsockname()[1]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text("print('trained')\n")
    return folder


@pytest.fixture(autouse=True)
def _connections(lab: Lab, census: Path):
    yield
    close_all()


def job_of(source: Path, **changes: Any) -> dict[str, Any]:
    environment = {"environment": {"requirements": "none"}}
    return {"name": "reach", "source": str(source), "entrypoint": "train.py", **environment, **changes}


def configure(source: Path, hosts: list[dict[str, Any]], lab: Lab, **more: Any) -> None:
    """Write the targets `far`, with these hosts, and `here` into the project's cloudtrain.toml."""
    login = {key: value for key, value in options(lab, 1, **more).items() if key != "hosts"}
    lines = ["[targets.far]", 'backend = "ssh"', *(f"{key} = '{value}'" for key, value in login.items())]
    rows = ", ".join("{" + ", ".join(f"{k} = {v!r}" for k, v in host.items()) + "}" for host in hosts)
    here = ["[targets.here]", 'backend = "local"']
    (source / "cloudtrain.toml").write_text("\n".join([*lines, f"hosts = [{rows}]", *here]) + "\n")


def look(run: Run, *, may_send: bool = True) -> None:
    """What the watcher does in one turn."""
    with run.store.database.write() as db:
        db.execute("UPDATE attempts SET tried_at = NULL")  # its pause after a failure is over
    Watcher(run.store, run.run_id, complain=lambda _: None, may_send=may_send).refresh()


def make_older(run: Run, hours: float) -> None:
    before = (datetime.now(UTC) - timedelta(hours=hours)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    with run.store.database.write() as db:
        db.execute("UPDATE attempts SET created_at = ?", (before,))


def _closed(lab: Lab, closed: dict[str, Any], tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return [closed], {}


def _unknown(lab: Lab, closed: dict[str, Any], tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    return [{"address": "no-such-host.invalid"}], {}


def _wrong_key(lab: Lab, closed: dict[str, Any], tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    others = tmp_path / "known_hosts"
    others.write_text(f"{lab.hosts[0].address} {lab.hosts[1].host_key}\n")
    return [{"address": lab.hosts[0].address}], {"known_hosts": str(others)}


def _denied(lab: Lab, closed: dict[str, Any], tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    key = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    return [{"address": lab.hosts[0].address}], {"identity": str(key)}


FAULTS = {
    "closed": (_closed, "Connection refused (start sshd there, or correct the address and port)"),
    "unknown": (_unknown, "no address was found for the name no-such-host.invalid (correct the address"),
    "host key": (_wrong_key, "ssh-keyscan"),
    "denied": (_denied, "accepts none of your SSH keys (run ssh-copy-id"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_next_candidate_is_tried(fault, lab, closed, source, tmp_path, monkeypatch):
    monkeypatch.chdir(source)
    make, said = FAULTS[fault]
    hosts, more = make(lab, closed, tmp_path)
    configure(source, hosts, lab, **more)
    run = Submitter().submit(job_of(source, target=["far", "here"], prefer="order"))
    assert run.wait(BOUND_S).state is State.SUCCEEDED
    first, second = run.attempts
    assert (first.plan.target, second.plan.target) == ("far", "here")
    assert first.status.state is State.FAILED and said in first.status.reason
    assert left_on(lab) == []


@pytest.mark.parametrize("fault", ["closed", "host key", "denied"])
def test_without_another_candidate_the_run_fails_at_once(fault, lab, closed, source, tmp_path, monkeypatch):
    monkeypatch.chdir(source)
    make, said = FAULTS[fault]
    hosts, more = make(lab, closed, tmp_path)
    configure(source, hosts, lab, **more)
    submitter = Submitter(watch=False)
    with pytest.raises(BackendError) as caught:
        submitter.submit(job_of(source, target="far"))
    assert said.partition(" (")[0] in f"{caught.value.message} ({caught.value.hint})"
    assert submitter.store.runs()[0].status.state is State.FAILED


def test_a_closed_port_is_waited_for_as_long_as_the_job_says(lab, closed, source, monkeypatch, cli):
    monkeypatch.chdir(source)
    configure(source, [closed], lab)
    run = Submitter(watch=False).submit(job_of(source, target="far", **PATIENT))
    assert run.state is State.QUEUED and run.record.status.reason.startswith(
        "not sent yet: 0 of 1 nodes can be reached"
    )
    look(run)
    assert run.state is State.QUEUED and "tried 2 times" in run.record.status.reason
    assert "not sent yet (tries: 2)" in cli("show", run.run_id)[1]
    make_older(run, 2)
    look(run)
    assert run.state is State.FAILED
    assert run.record.status.reason.endswith("; not tried again after 1h (limits.max_wait)")


def test_a_cancel_ends_a_run_that_reached_no_host(lab, closed, source, monkeypatch, cli):
    monkeypatch.chdir(source)
    configure(source, [closed], lab)
    run = Submitter(watch=False).submit(job_of(source, target="far", **PATIENT))
    code, printed, _ = cli("cancel", run.run_id)
    assert (code, run.record.status.state) == (0, State.CANCELLED) and "CANCELLED" in printed


def test_it_starts_once_the_machine_listens(lab, source, monkeypatch):
    monkeypatch.chdir(source)
    lab.hosts[0].power_off()  # it answers nothing at all
    configure(source, [{"address": lab.hosts[0].address}], lab)
    run = Submitter(watch=False).submit(job_of(source, target="far"))
    assert run.state is State.QUEUED and "not sent yet" in run.record.status.reason
    lab.hosts[0].reboot()
    lab.write_known_hosts()
    run.watch = True
    assert run.wait(BOUND_S).state is State.SUCCEEDED and len(run.attempts) == 1
    assert [line.text for line in run.logs() if line.rank >= 0] == ["trained"]


def test_a_silent_machine_is_given_up_after_a_while_without_asking_it(lab, source, monkeypatch):
    monkeypatch.chdir(source)
    lab.hosts[0].power_off()
    configure(source, [{"address": lab.hosts[0].address}], lab)
    run = Submitter(watch=False).submit(job_of(source, target="far"))
    make_older(run, 1)
    look(run, may_send=False)
    assert run.state is State.FAILED and "not tried again after 15 min" in run.record.status.reason


def test_a_sender_that_died_after_the_first_try_leaves_an_open_question(lab, closed, source, monkeypatch):
    """The mark `unsent` is taken away before anything is sent: who dies then may have sent it."""
    monkeypatch.chdir(source)
    configure(source, [closed], lab)
    run = Submitter(watch=False).submit(job_of(source, target="far", **PATIENT))
    assert run.store.claim_unsent(run.attempts[0].attempt_id)
    run.store.request_cancel(run.run_id)
    look(run)
    assert run.state is State.QUEUED  # whether it runs there cannot be asked


def test_the_error_says_what_is_wrong_with_each_machine(lab, closed, source, monkeypatch):
    monkeypatch.chdir(source)
    configure(source, [closed, {"address": lab.hosts[0].address}], lab)
    with pytest.raises(
        NotReached, match=r"^1 of 2 nodes can be reached: root@127\.0\.0\.1:\d+ cannot be reached: Conn"
    ):
        Submitter(watch=False).submit(Job.from_dict(job_of(source, target="far", num_nodes=2)))
    assert left_on(lab) == []


def test_show_has_the_fix_and_no_other_cause(lab, source, tmp_path, monkeypatch, cli):
    monkeypatch.chdir(source)
    hosts, more = _wrong_key(lab, {}, tmp_path)
    configure(source, hosts, lab, **more)
    code, _, printed = cli("submit", "train.py", "-t", "far")
    assert code == 5 and "ssh-keyscan" in printed
    shown = cli("show")[1]
    assert "differs from the one in" in shown and "ssh-keyscan" in shown and "(unknown)" not in shown
    ended = "".join(cli("wait")[1:])
    assert "ssh-keyscan" in ended and "give no reason" not in ended and "(unknown)" not in ended


@pytest.mark.parametrize("keyed", [(), ("--key", "nightly")], ids=["", "key"])
def test_a_submit_that_waits_ends_with_zero(keyed, lab, closed, source, monkeypatch, cli):
    monkeypatch.chdir(source)
    configure(source, [closed], lab)
    words = ("submit", "train.py", "-t", "far", "--set", "limits.max_wait=1h", *keyed)
    code, printed, _ = cli(*words)
    assert code == 0 and "waits for far (ssh)" in printed
    run_id = printed.split()[0]
    assert cli("cancel", run_id)[0] == 0
    shown = cli("show", run_id)[1]
    assert "not sent" in shown and "refused" not in shown.replace("Connection refused", "")


def test_doctor_has_a_line_for_each_machine(lab, closed, source, monkeypatch, cli):
    monkeypatch.chdir(source)
    configure(source, [closed, {"address": lab.hosts[0].address}], lab)
    code, printed, _ = cli("doctor", "far")
    lines = {line.split()[2]: line for line in printed.splitlines() if line.split()[1:2] == ["machine"]}
    assert code == 1 and len(lines) == 2
    assert lines[f"root@127.0.0.1:{closed['port']}"].endswith("not reached")
    assert "reached: Python 3." in lines[f"root@{lab.hosts[0].address}"]
