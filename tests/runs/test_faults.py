"""Whatever is killed, the state is true and no process is left behind: the real command line on the local backend."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from cloudtrain.events import State
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import Process
from cloudtrain.runs.run import Run
from tests.conftest import WAIT_S, processes_of, wait_for
from tests.runs.test_watch_all import watchers

pytestmark = pytest.mark.usefixtures("census")
CLOUDTRAIN = [sys.executable, "-m", "cloudtrain.cli"]
SLEEPER = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(600)\n"
# Ends when the test says so, and measures something on its way.
GATED = """
import os, pathlib, sys, time
for n in range(100): print(f"{{'loss': {n}}}")
print('pid', os.getpid(), flush=True)
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)
print('through the gate')
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sleeper.py").write_text(SLEEPER)
    (folder / "gated.py").write_text(GATED)
    return folder


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CLOUDTRAIN, "submit", *arguments], cwd=project, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(command: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = command.communicate(timeout=WAIT_S)
    return command.returncode, output


def the_run(home: Path) -> Run:
    """Return the only run, as soon as its script has said its number."""
    store = Store(home)
    record = wait_for(lambda: store.runs(), "a run")[0]
    run = Run(record.run_id, store)
    wait_for(lambda: run.attempts and run.attempts[-1].handle, "a handle")
    wait_for(lambda: any(line.text.startswith("pid") for line in run.logs()), "the script's first line")
    return run


def pid_of_script(run: Run) -> int:
    return [int(line.text.split()[1]) for line in run.logs() if line.text.startswith("pid")][-1]


def node(run: Run) -> Path:
    handle = run.attempts[-1].handle
    assert handle is not None
    return Path(handle) / "node-0"


def watcher_of(home: Path, run: Run) -> int:
    def holder():
        with run.store.database.read() as db:
            row = db.execute("SELECT owner FROM leases WHERE run_id = ?", (run.run_id,)).fetchone()
        return row and Process.parse(row[0])

    return wait_for(holder, "a watcher").pid


def test_killed_command_line(home, project, tmp_path):
    command = start(project, "gated.py", "--follow", "--", str(tmp_path / "gate"))
    run = the_run(home)
    command.kill()
    command.wait()
    (tmp_path / "gate").touch()
    assert run.wait(WAIT_S).state is State.SUCCEEDED
    assert [line.text for line in run.logs() if line.rank == 0][-1] == "through the gate"


def test_closed_terminal(home, project, tmp_path):
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # below nohup it is ignored
        os.chdir(project)
        os.execv(sys.executable, [*CLOUDTRAIN, "submit", "gated.py", "--follow", "--", str(tmp_path / "gate")])
    run = the_run(home)
    os.close(terminal)  # the kernel sends SIGHUP to everything that is still attached to it
    os.waitpid(pid, 0)
    (tmp_path / "gate").touch()
    assert run.wait(WAIT_S).state is State.SUCCEEDED


def test_killed_watcher(home, project, tmp_path):
    command = start(project, "gated.py", "--wait", "--", str(tmp_path / "gate"))
    run = the_run(home)
    first = watcher_of(home, run)
    os.kill(first, signal.SIGKILL)
    (tmp_path / "gate").touch()
    code, output = finish(command)
    assert code == 0, output
    assert run.record.status.state is State.SUCCEEDED
    assert [row.value for row in run.metrics("loss")] == [float(n) for n in range(100)], "neither lost nor twice"


def test_killed_watcher_and_nobody_waiting(home, project, tmp_path):
    assert finish(start(project, "gated.py", "--", str(tmp_path / "gate")))[0] == 0
    run = the_run(home)
    os.kill(watcher_of(home, run), signal.SIGKILL)
    (tmp_path / "gate").touch()
    wait_for(lambda: (node(run) / "status.json").read_text().count("SUCCEEDED"), "the end")
    shown = subprocess.run([*CLOUDTRAIN, "show", "--json"], capture_output=True, text=True, check=True, timeout=WAIT_S)
    assert json.loads(shown.stdout)["state"] == "SUCCEEDED", "a reader takes over"


def test_a_chain_whose_submitter_and_watchers_are_killed_runs_once(home, project, tmp_path):
    """One watcher while the first run trains, one when it has just ended, one while the second run is begun."""
    assert finish(start(project, "gated.py", "--", str(tmp_path / "gate")))[0] == 0
    first = the_run(home)
    (project / "once.py").write_text("open(__import__('sys').argv[1], 'a').write('ran\\n')\n")
    command = start(project, "once.py", "--after", first.run_id, "--wait", "--", str(tmp_path / "ran"))
    store = first.store
    second = wait_for(lambda: next((run for run in store.runs() if run.run_id != first.run_id), None), "the held run")
    command.kill()
    command.communicate()
    assert store.get(second.run_id).status.state is State.QUEUED and not (tmp_path / "ran").exists()
    killed = {watcher_of(home, first)}
    os.kill(next(iter(killed)), signal.SIGKILL)
    (tmp_path / "gate").touch()
    wait_for(lambda: (node(first) / "status.json").read_text().count("SUCCEEDED"), "the end of the first run")
    for _ in range(3):  # `ls` starts another watcher
        subprocess.run([*CLOUDTRAIN, "ls"], capture_output=True, check=True, timeout=WAIT_S)
        for pid in set(watchers(home)) - killed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    assert len(killed) > 1
    waited = subprocess.run([*CLOUDTRAIN, "wait", second.run_id], capture_output=True, text=True, timeout=WAIT_S)
    assert waited.returncode == 0, waited.stdout + waited.stderr
    assert (tmp_path / "ran").read_text() == "ran\n" and len(store.attempts(second.run_id)) == 1


def test_killed_supervisor(home, project):
    command = start(project, "sleeper.py", "--wait")
    run = the_run(home)
    os.kill(json.loads((node(run) / "status.json").read_text())["pid"], signal.SIGKILL)
    code, output = finish(command)
    assert code == 69, output
    assert run.record.status.state is State.LOST
    assert "Traceback" not in output


def test_killed_supervisor_with_a_retry_left(home, project, tmp_path):
    command = start(
        project, "gated.py", "--set", "retry.max_attempts=2", "--wait", "--", str(tmp_path / "gate")
    )  # fmt: skip
    run = the_run(home)
    first = pid_of_script(run)
    os.kill(json.loads((node(run) / "status.json").read_text())["pid"], signal.SIGKILL)
    wait_for(lambda: len(run.attempts) == 2 and run.attempts[1].handle, "a second attempt")
    wait_for(lambda: pid_of_script(run) != first, "the second script")
    (tmp_path / "gate").touch()
    code, output = finish(command)
    assert code == 0, output
    assert [attempt.status.state for attempt in run.attempts] == [State.LOST, State.SUCCEEDED]


def test_preempted_with_a_retry_left(home, project, tmp_path):
    command = start(project, "gated.py", "--set", "retry.max_attempts=2", "--wait", "--", str(tmp_path / "gate"))
    run = the_run(home)
    first = pid_of_script(run)
    os.kill(json.loads((node(run) / "status.json").read_text())["pid"], signal.SIGTERM)  # what a platform does
    wait_for(lambda: pid_of_script(run) != first, "the second script")
    (tmp_path / "gate").touch()
    assert finish(command)[0] == 0
    assert [attempt.status.state for attempt in run.attempts] == [State.PREEMPTED, State.SUCCEEDED]


def test_killed_rank(home, project):
    command = start(project, "sleeper.py", "--set", "processes_per_node=2", "--wait")
    run = the_run(home)
    os.kill(pid_of_script(run), signal.SIGKILL)
    code, output = finish(command)
    assert code == 137, output
    assert run.record.status.state is State.FAILED and "137" in f"{run.record.status.exit_code}"


def test_everything_killed_at_once(home, project):
    command = start(project, "sleeper.py", "--wait")
    run = the_run(home)
    wait_for(lambda: len(processes_of(home)) >= 4, "watcher, guard, supervisor and rank")
    for pid in [int(text.split(":")[0]) for text in processes_of(home)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # the death of another was its own
    code, output = finish(command)
    assert code == 69, output
    assert run.record.status.state is State.LOST


def test_cancel_from_another_process(home, project):
    command = start(project, "sleeper.py", "--set", "num_nodes=2", "--wait")
    run = the_run(home)
    cancelled = subprocess.run([*CLOUDTRAIN, "cancel", run.run_id], capture_output=True, text=True, timeout=WAIT_S)
    assert cancelled.returncode == 0, cancelled.stderr
    assert finish(command)[0] == 130
    assert run.record.status.state is State.CANCELLED


def test_two_submits_at_once_are_two_runs(home, project, tmp_path):
    (tmp_path / "gate").touch()
    commands = [start(project, "gated.py", "--wait", "--", str(tmp_path / "gate")) for _ in range(4)]
    assert [finish(command)[0] for command in commands] == [0] * 4
    runs = Store(home).runs()
    assert len(runs) == 4 and {run.status.state for run in runs} == {State.SUCCEEDED}


def test_two_submits_at_once_with_one_key_are_one_run(home, project, tmp_path):
    (tmp_path / "gate").touch()
    commands = [start(project, "gated.py", "--wait", "--key", "k", "--", str(tmp_path / "gate")) for _ in range(4)]
    ends = [finish(command) for command in commands]
    assert [code for code, _ in ends] == [0] * 4, ends
    (record,) = Store(home).runs()
    run = Run(record.run_id, Store(home))
    assert len(run.attempts) == 1
    assert sum(line.text == "through the gate" for line in run.logs()) == 1
