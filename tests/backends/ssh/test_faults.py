"""What befalls machines and clients while the backend ssh works: cut links, reboots, full disks, kills; on real hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cloudtrain.backends.ssh import backend as ssh_backend
from cloudtrain.backends.ssh.backend import SshBackend
from cloudtrain.backends.ssh.launch import SKEW_S
from cloudtrain.errors import BackendError, NotReached, Unreachable
from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.job.job import Job
from cloudtrain.job.units import unix_time
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from cloudtrain.source.bundle import Bundle
from tests.backends.ssh.test_backend import left_on, options
from tests.conftest import processes_of, wait_for
from tests.lab.connections import close_all
from tests.lab.network import Lab

BOUND_S = 240.0
SLEEPER = "import os, time\nprint('here', os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\ntime.sleep(600)\n"
# The first attempt waits for what befalls it; the next one says what it found and ends.
TWICE = """
import os, pathlib, time
folder = pathlib.Path(os.environ['CLOUDTRAIN_CHECKPOINT_DIR'])
rank, world, attempt = (os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'CLOUDTRAIN_ATTEMPT'))
print('here', rank, world, flush=True)
if attempt == '1':
    if rank == '0':
        (folder / 'step').write_text('7')
    time.sleep(600)
print('found', rank, world, (folder / 'step').read_text() if rank == '0' else '-', flush=True)
"""


@pytest.fixture(autouse=True)
def _connections(lab: Lab, census: Path):
    yield
    close_all()


@pytest.fixture
def prepare(tmp_path: Path):
    """Return a function: backend, script, changes to the job -> plan and bundle."""

    def prepare(backend: SshBackend, script: str, run_id: str = "fault-run", attempt: int = 1, **changes):
        source = tmp_path / "source"
        source.mkdir(exist_ok=True)
        (source / "script.py").write_text(script)
        job = Job.from_dict(job_of(source, **changes))
        bundle = Bundle.make(source, tmp_path / "bundles")
        return backend.plan(job, bundle, run_id, attempt), bundle

    return prepare


def job_of(source: Path, **changes) -> dict:
    requirements = {"environment": {"requirements": "none"}}
    return {"name": "fault", "source": str(source), "entrypoint": "script.py", **requirements, **changes}


def submitted(lab: Lab, tmp_path: Path, script: str, hosts: int = 2, **changes) -> Run:
    """Submit through the Python API, with a watcher of its own."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "script.py").write_text(script)
    return Submitter("ssh", **options(lab, hosts)).submit(job_of(source, **changes))


def said(run: Run, word: str) -> list[str]:
    return sorted(line.text for line in run.logs() if line.rank >= 0 and line.text.startswith(word))


def until_said(run: Run, word: str, times: int) -> None:
    wait_for(lambda: len(said(run, word)) >= times, f"{times} lines with {word}", BOUND_S)


def until_final(backend: SshBackend, handle: str):
    def final():
        try:
            status = backend.status(handle)
        except Unreachable:
            return None
        return status if status.state.final else None

    return wait_for(final, "the end", BOUND_S)


# -- nodes ------------------------------------------------------------------------------------------------------------


def test_rebooted_node_comes_back_and_a_new_attempt_goes_on_from_its_checkpoint(lab, tmp_path):
    run = submitted(lab, tmp_path, TWICE, num_nodes=2, retry={"max_attempts": 2})
    until_said(run, "here", 2)
    lab.hosts[0].reboot()  # node 0: all of its processes die, its disk stays
    assert run.wait(BOUND_S).state is State.SUCCEEDED
    assert [attempt.status.state for attempt in run.attempts] == [State.LOST, State.SUCCEEDED]
    assert said(run, "found") == ["found 0 2 7", "found 1 2 -"]
    assert left_on(lab) == []


def test_three_hosts_go_on_as_two_where_min_nodes_allows(lab, tmp_path):
    run = submitted(lab, tmp_path, TWICE, hosts=3, num_nodes=3, min_nodes=2, retry={"max_attempts": 2})
    until_said(run, "here", 3)
    assert said(run, "here") == [f"here {rank} 3" for rank in range(3)]
    lab.hosts[2].power_off()
    assert run.wait(BOUND_S).state is State.SUCCEEDED
    assert said(run, "found") == ["found 0 2 7", "found 1 2 -"]  # the attempt records its world:
    worlds = [
        (event.attempt, event.data["world_size"]) for event in run.store.events(run.run_id) if event.kind == "world"
    ]
    first, second = (attempt.attempt_id for attempt in run.attempts)
    assert set(worlds) == {(first, 3), (second, 2)}


@pytest.mark.long  # test_a_node_that_says_nothing_is_lost shows it with launchers alone
def test_cut_off_node_ends_itself_and_the_others_with_it(lab, prepare, home):
    backend = SshBackend(options(lab), home / "runs")
    handle = backend.submit(*prepare(backend, SLEEPER, num_nodes=2))
    wait_for(lambda: sum("here" in line.text for line in backend.logs(handle)) == 2, "both ranks")
    lab.hosts[1].cut()
    wait_for(lambda: left_on(lab) == [], "the end on both hosts", BOUND_S)  # without any word from here
    assert until_final(backend, handle).state is State.LOST
    with pytest.raises(Unreachable, match="cannot be reached"):
        backend.cancel(handle)  # it says what it cannot confirm
    lab.hosts[1].heal()
    wait_for(lambda: _reached(backend), "the node", BOUND_S)
    backend.cancel(handle)
    status = backend.status(handle)
    assert status.state is State.LOST and "no message arrived" in status.reason
    assert sorted(line.text for line in backend.logs(handle) if line.text.startswith("here")) == [
        "here 0 2",
        "here 1 2",
    ]


def _reached(backend: SshBackend) -> bool:
    try:
        return bool([machine.agent.ask("facts", root="/root") for machine in backend.machines])
    except Unreachable:
        return False


def test_a_lone_node_that_nobody_reaches_is_lost_after_the_stated_time_only(lab, prepare, home):
    backend = SshBackend(options(lab, 1, lost_after_s=6.0), home / "runs")
    handle = backend.submit(*prepare(backend, SLEEPER, distributed_env="always"))
    wait_for(lambda: any("here" in line.text for line in backend.logs(handle)), "the rank")
    lab.hosts[0].cut()
    with pytest.raises(Unreachable):
        backend.status(handle)
    status = until_final(backend, handle)
    assert status.state is State.LOST and "could not be reached for 6 s" in status.reason
    assert left_on(lab) != []  # a client that hears nothing does the job no harm
    lab.hosts[0].heal()
    wait_for(lambda: _reached(backend), "the node", BOUND_S)
    assert backend.status(handle).state is State.RUNNING
    # The next attempt of the run ends what is left of this one before it begins.
    plan, bundle = prepare(backend, "print('second')", attempt=2)
    second = backend.submit(plan, bundle)
    assert until_final(backend, second).state is State.SUCCEEDED
    assert until_final(backend, handle).state is State.CANCELLED
    wait_for(lambda: left_on(lab) == [], "the end of the guard, which reports and then leaves")


@pytest.mark.parametrize("shared", [True, False], ids=["with an output", "without"])
def test_the_next_attempt_of_a_lone_node_whose_host_died_runs_on_the_spare_host(shared, lab, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    script = "import os, time\nprint('here', flush=True)\ntime.sleep(600 if os.environ['CLOUDTRAIN_ATTEMPT'] == '1' else 0)\n"
    (source / "script.py").write_text(script)
    changes = {"retry": {"max_attempts": 2}, **({"output": str(lab.shared)} if shared else {})}
    run = Submitter("ssh", **options(lab, 2, lost_after_s=6.0)).submit(job_of(source, **changes))
    until_said(run, "here", 1)
    lab.hosts[0].power_off()
    assert run.wait(BOUND_S).state is State.SUCCEEDED
    first, second = run.attempts
    assert first.status.state is State.LOST and "could not be reached for 6 s" in first.status.reason
    assert first.handle.startswith(f"root@{lab.hosts[0].address}:") and lab.hosts[1].address in second.handle
    assert len(said(run, "here")) == 2


# Which host has which files: two attempts on two hosts, and a third one that needs what the second one has saved.
def test_a_later_attempt_goes_where_the_newest_files_are(lab, prepare, home):
    backend = SshBackend(options(lab, 2), home / "runs")
    plan, bundle = prepare(backend, "print('one')")
    assert lab.hosts[0].address in (first := backend.submit(plan, bundle))
    assert until_final(backend, first).state is State.SUCCEEDED
    lab.hosts[0].cut()
    backend = SshBackend(options(lab, 2), home / "runs")
    close_all()
    plan, _ = prepare(backend, "print('one')", attempt=2)
    with pytest.raises(NotReached, match="no node that may have the checkpoints"):
        backend.submit(backend.plan_after(plan, 1), bundle)
    assert lab.hosts[1].address in (second := backend.submit(backend.plan_after(plan, 0), bundle))
    assert until_final(backend, second).state is State.SUCCEEDED
    lab.hosts[0].heal()
    plan, _ = prepare(backend, "print('one')", attempt=3)
    assert lab.hosts[1].address in (third := backend.submit(backend.plan_after(plan, 2), bundle))
    assert until_final(backend, third).state is State.SUCCEEDED
    wait_for(lambda: left_on(lab) == [], "the end of the guard, which reports and then leaves")


def test_full_disk_on_one_node(lab, prepare, home):
    backend = SshBackend(options(lab), home / "runs")
    lab.hosts[1].fill()
    plan, bundle = prepare(backend, "print('room')", num_nodes=2)
    with pytest.raises(BackendError, match="No space left on device") as caught:
        backend.submit(plan, bundle)
    assert lab.hosts[1].address in caught.value.message
    assert any(lab.hosts[1].address in p.message and "MiB are free" in p.message for p in backend.check())
    lab.hosts[1].free()
    handle = backend.submit(plan, bundle)
    assert until_final(backend, handle).state is State.SUCCEEDED


# -- clients ----------------------------------------------------------------------------------------------------------


def test_killed_between_the_starts_of_two_nodes(lab, tmp_path, home):
    """Law 3: whoever submits the same again finishes what was begun, and nothing runs twice."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "script.py").write_text("import os\nprint('once', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    given = json.dumps([options(lab), job_of(source, num_nodes=2)])
    begun = (
        "import json, os, signal, sys\n"
        "from cloudtrain.backends.ssh import backend as ssh\n"
        "from cloudtrain.runs.submit import Submitter\n"
        "launch = ssh.launch_node\n"
        "def half(plan, machines, rank, control, given):\n"
        "    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return launch(plan, machines, rank, control, given)\n"
        "ssh.launch_node = half\n"
        "options, job = json.load(sys.stdin)\n"
        "Submitter('ssh', **options).submit(job)\n"
    )
    killed = subprocess.run([sys.executable, "-c", begun], input=given, text=True, timeout=BOUND_S)
    assert killed.returncode == -signal.SIGKILL
    assert [len(host.processes(containing="launch.py")) for host in lab.hosts[:2]] == [2, 0]
    run = Submitter("ssh", **options(lab)).submit(job_of(source, num_nodes=2))
    assert run.adopted and len(Store(home).runs()) == 1 and len(run.attempts) == 1
    assert run.wait(BOUND_S).state is State.SUCCEEDED
    assert said(run, "once") == ["once 0 2", "once 1 2"]
    # Another machine, whose history knows nothing, finds the same attempt.
    assert SshBackend(options(lab), home / "elsewhere").find(run.attempts[0].attempt_id) == run.attempts[0].handle


def test_an_attempt_that_is_discarded_has_ended_when_that_returns(lab, prepare, home, monkeypatch):
    """Node 1 was never started; node 0 stands still, so that its end takes until it is allowed to go."""
    backend, launch = SshBackend(options(lab), home / "runs"), ssh_backend.launch_node

    def lost(plan, machines, rank, *more):
        if rank:
            raise Unreachable("the connection broke")
        return launch(plan, machines, rank, *more)

    monkeypatch.setattr(ssh_backend, "launch_node", lost)
    plan, bundle = prepare(backend, SLEEPER, num_nodes=2)
    with pytest.raises(Unreachable):
        backend.submit(plan, bundle)
    assert backend.find(plan.attempt_id) is None
    folder = str(plan.request["folder"]).replace("~", "/root", 1)
    launchers = lab.hosts[0].processes(containing="launch.py")
    assert launchers
    for pid in launchers:
        os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        discarded = pool.submit(backend.discard, plan.attempt_id)
        wait_for(lambda: (lab.hosts[0].path(folder) / "node-0" / "cancel").exists(), "its cancel")
        with pytest.raises(TimeoutError):
            discarded.result(timeout=2.0)
        for pid in launchers:
            os.kill(pid, signal.SIGCONT)
        discarded.result(timeout=BOUND_S)
    assert left_on(lab) == []


def test_dead_client_changes_nothing(lab, tmp_path, home):
    script = (
        "import os, time\nprint('begun', flush=True)\n"
        "while not os.path.exists('/root/go'): time.sleep(0.05)\nprint('done')\n"
    )
    run = submitted(lab, tmp_path, script, num_nodes=2)
    until_said(run, "begun", 2)
    for text in processes_of(home):  # the watcher
        os.kill(int(text.split(":")[0]), signal.SIGKILL)
    close_all()
    for host in lab.hosts[:2]:
        host.run(["touch", "/root/go"])
    wait_for(lambda: left_on(lab) == [], "the job's own end", BOUND_S)
    again = Run(run.run_id, Store(home), watch=False)
    assert again.wait(BOUND_S).state is State.SUCCEEDED
    assert said(again, "done") == ["done", "done"]


def test_lease_of_the_client(lab, prepare, home):
    backend = SshBackend(options(lab, 2, lease="client", lease_s=5.0), home / "runs")
    handle = backend.submit(*prepare(backend, SLEEPER, num_nodes=2))
    for _ in range(30):  # 6 s and more: whoever looks keeps it
        assert not backend.status(handle).state.final
        subprocess.run(["sleep", "0.2"])
    wait_for(lambda: left_on(lab) == [], "its end when nobody looks", BOUND_S)
    assert backend.status(handle).state is State.PREEMPTED
    assert any("no cloudtrain process has contacted" in line.text for line in backend.logs(handle))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_host_keys_are_never_learnt(lab, prepare, home, tmp_path):
    empty = tmp_path / "known_hosts"
    empty.touch()
    backend = SshBackend({**options(lab), "known_hosts": str(empty)}, home / "runs")
    with pytest.raises(BackendError, match="host key of .* is not in") as caught:
        backend.submit(*prepare(backend, "print(1)"))
    assert "ssh-keyscan" in caught.value.message and empty.read_text() == "", "the history keeps the message alone"
    lab.hosts[0].new_host_key()
    backend = SshBackend(options(lab, 1), home / "runs")
    with pytest.raises(BackendError, match="the host key of .* differs from the one in") as caught:
        backend.submit(*prepare(backend, "print(1)"))
    assert not isinstance(caught.value, Unreachable)
    (problem,) = backend.check()
    assert f"{problem.message} ({problem.hint})" == caught.value.message


def test_an_output_that_is_not_the_same_folder_everywhere(lab, prepare, home):
    backend = SshBackend(options(lab), home / "runs")
    script = "import os, pathlib\n(pathlib.Path(os.environ['CLOUDTRAIN_OUTPUT_DIR']) / os.environ['RANK']).touch()\n"
    with pytest.raises(BackendError, match="is not the same folder on") as caught:
        backend.submit(*prepare(backend, script, "private", num_nodes=2, output="/root/out"))
    assert lab.hosts[1].address in caught.value.message and left_on(lab) == []
    plan, bundle = prepare(backend, script, "shared", num_nodes=2, output=f"{lab.shared}/out")
    assert until_final(backend, backend.submit(plan, bundle)).state is State.SUCCEEDED
    assert sorted(path.name for path in (lab.shared / "out" / "shared" / "outputs").iterdir()) == ["0", "1"]


# -- what is sent -----------------------------------------------------------------------------------------------------


def test_the_plan_is_what_is_sent_and_secrets_lie_nowhere(lab, prepare, home, monkeypatch):
    monkeypatch.setenv("PLANTED", "pl4nted-s3cret")
    backend = SshBackend(options(lab), home / "runs")
    script = (
        "import os, time\nprint('has it', os.environ['TOKEN'] == 'pl4nted-' + 's3cret', flush=True)\ntime.sleep(600)\n"
    )
    plan, bundle = prepare(backend, script, num_nodes=2, secrets={"TOKEN": ["env:PLANTED"]})
    handle = backend.submit(plan, bundle)
    wait_for(lambda: sum(line.text == "has it True" for line in backend.logs(handle)) == 2, "both ranks")
    for rank, host in enumerate(lab.hosts[:2]):
        guards, ranks = 0, 0
        for pid, line in host.processes().items():
            environ = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"pl4nted" not in line.encode()
            if b"\0RANK=" in b"\0" + environ:
                ranks += b"pl4nted" in environ
                continue
            assert b"pl4nted" not in environ, line
            if "launch.py" in line:
                guards += 1
                seen = dict(text.partition("=")[::2] for text in environ.decode().split("\0") if text)
                sent = {name: text for name, text in seen.items() if name.startswith("CLOUDTRAIN_")}
                known = {"${node.rank}": str(rank), "${node.address}": host.address, "${nodes}": "2", "~/": "/root/"}
                want = dict(plan.request["env"])
                for name, text in want.items():
                    for word, value in known.items():
                        text = text.replace(word, value)
                    want[name] = text
                control = sent.pop("CLOUDTRAIN_CONTROL", None)
                assert want.pop("CLOUDTRAIN_CONTROL") == "${node-0.control}"
                assert sent == want and (control is None) == (rank == 0)
        assert (guards, ranks) == (2, 1)  # the guard and the supervisor
    backend.cancel(handle)
    assert until_final(backend, handle).state is State.CANCELLED
    for host in lab.hosts[:2]:
        for name in host.files("/root"):
            assert b"pl4nted-s3cret" not in host.path(f"/root/{name}").read_bytes(), name


def test_unchanged_source_ships_nothing_and_the_environment_of_the_machine_is_there(lab, prepare, home):
    host = lab.hosts[0]
    more = {"setup": ["export FROM_SETUP='a b'", "echo noise"]}
    backend = SshBackend(options(lab, 1, **more), home / "runs")
    script = "import os; print(os.environ['FROM_SETUP'], sorted(os.listdir('.')))"
    first = backend.submit(*prepare(backend, script, run_id="ship-1"))
    assert until_final(backend, first).state is State.SUCCEEDED
    (kept,) = host.files("/root/.cloudtrain/src")
    before = host.path(f"/root/.cloudtrain/src/{kept}").stat()
    second = backend.submit(*prepare(backend, script, run_id="ship-2"))
    assert until_final(backend, second).state is State.SUCCEEDED
    after = host.path(f"/root/.cloudtrain/src/{kept}").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for handle in (first, second):
        texts = [line.text for line in backend.logs(handle) if line.rank == 0]
        assert texts == ["a b ['.cloudtrain', 'script.py']"]


# -- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor(lab, home):
    backend = SshBackend(options(lab, 3), home / "runs")
    assert [
        problem for problem in backend.check() if "MiB are free" not in problem.message
    ] == []  # their disks are small
    late = lab.hosts[1]
    late.run(["mkdir", "-p", "/root/clock"])
    # Nobody can set one host's clock here: its Python is told another time, as every Python on it would be.
    late.path("/root/clock/sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 100\n"
    )
    wrong = options(lab, 3)
    wrong["hosts"][0] |= {"internal": "127.0.0.1"}  # an address that the others do not reach it by
    wrong["hosts"][1] |= {"setup": ["export PYTHONPATH=/root/clock"]}
    wrong["hosts"][2] |= {"python": "/usr/bin/python3", "internal": "10.255.0.9"}
    checked = SshBackend(wrong, home / "runs")
    found = [problem.message for problem in checked.check()]
    lines = checked.checked_machines()
    assert len(lines) == 3 and all(line.startswith("reached: Python 3.") for line in lines.values())
    assert "its clock differs by 100 s" in lines[f"root@{late.address}"]
    assert "no torch, 0 GPUs" in lines[f"root@{lab.hosts[2].address}"]
    for part in (
        f"{late.address}: its clock differs by 100 s from this machine's",
        f"{lab.hosts[2].address}: /usr/bin/python3 cannot import torch",
        "cannot listen on any port of 10.255.0.9",
        f"root@{late.address} does not reach 127.0.0.1",
    ):
        assert any(part in message for message in found), (part, found)


def test_skewed_clocks_train_all_the_same(lab, prepare, home):
    host = lab.hosts[1]
    host.run(["mkdir", "-p", "/root/clock"])
    host.path("/root/clock/sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 100\n"
    )
    given = options(lab)
    given["hosts"][1] |= {"setup": ["export PYTHONPATH=/root/clock"]}
    backend = SshBackend(given, home / "runs")
    script = (
        "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(41)\ntry: time.sleep(600)\nfinally: sys.exit(9)\n"
    )
    handle = backend.submit(*prepare(backend, script, num_nodes=2))
    status = until_final(backend, handle)
    assert (status.state, status.exit_code) == (State.FAILED, 41)  # the first failure, by whichever clock


@pytest.mark.parametrize("off_s", [300, -300])
def test_a_clock_that_is_off_never_shows_in_durations(lab, prepare, home, off_s):
    host = lab.hosts[0]
    host.run(["mkdir", "-p", "/root/clock"])
    host.path("/root/clock/sitecustomize.py").write_text(
        f"import time\nreal = time.time\ntime.time = lambda: real() + {off_s}\n"
    )
    backend = SshBackend(options(lab, 1, setup=["export PYTHONPATH=/root/clock"]), home / "runs")
    began = time.time()
    handle = backend.submit(*prepare(backend, "print('here')"))
    status = until_final(backend, handle)
    times = [status.started_at, *(line.at for line in backend.logs(handle)), status.ended_at]
    assert len(times) > 4 and began - SKEW_S <= min(map(unix_time, times)), times
    assert max(map(unix_time, times)) <= time.time() + SKEW_S, times


@pytest.mark.parametrize(("share", "others"), [(None, "/077"), ("group", "/027")])
def test_what_lies_on_a_machine_that_others_use_is_private(lab, prepare, home, share, others):
    script = "import os\nopen(os.environ['CLOUDTRAIN_MODEL_DIR'] + '/weights', 'w').write('1')\nopen('beside', 'w')\n"
    backend = SshBackend(options(lab, 1) | ({"share": share} if share else {}), home / "runs")
    handle = backend.submit(*prepare(backend, script))
    assert until_final(backend, handle).state is State.SUCCEEDED
    run = "/root" + handle.partition(":~")[2].rpartition("/")[0]
    host = lab.hosts[0]
    assert {"weights", "beside", "log"} <= set(host.run(["find", run, "-type", "f", "-printf", "%f\n"]).split())
    assert host.run(["find", run, "-not", "-type", "l", "-perm", others]) == ""
    if share:
        for name in ("weights", "log"):
            assert host.run(["find", run, "-name", name, "-perm", "640"]).count("\n") == 1
