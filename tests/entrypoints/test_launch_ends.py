"""However a node ends, its state is true and no process is left: kills, escapes, requests, limits."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from launcher import guard, processes, status

from cloudtrain.nodes import supervisor
from tests.conftest import WAIT_S, wait_for
from tests.entrypoints.launching import Attempt

# A rank that leaves behind every kind of process that is hard to find, and says so: in one write each, as they share a pipe.
ESCAPES = """
import os, signal, subprocess, sys, time
deaf = "import os, signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
deaf += "os.write(1, b'deaf' + bytes([10])); time.sleep(600)"
subprocess.Popen(["setsid", "nohup", sys.executable, "-c", deaf])
subprocess.Popen(["sh", "-c", "setsid sleep 601 & setsid sleep 602 & echo shell"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(1, b"daemon\\n")
        time.sleep(603)
    os._exit(0)
"""
ESCAPED = ("deaf", "shell", "daemon")
STAYS = ESCAPES + "time.sleep(600)\n"


def started(attempt: Attempt, *lines: str) -> None:
    attempt.start()
    for node in range(len(attempt.folders)):
        for line in lines:
            attempt.heard(line, node, attempt.manifest.processes_per_node)


def nothing_left(attempt: Attempt) -> None:
    """The launchers have ended; what dies with them may take a moment to be gone from /proc."""
    wait_for(lambda: not attempt.left(), "the end of every process")


@pytest.mark.parametrize("code", [0, 7])
def test_what_a_rank_leaves_behind_is_ended_with_it(tmp_path: Path, code: int):
    """It also holds the rank's output open: the launcher must not wait for that."""
    wait = "\n".join(["time.sleep(0.5)", f"os._exit({code})"])
    with Attempt(tmp_path, ESCAPES + wait) as attempt:
        assert attempt.run() == [code]
        assert not attempt.left()  # at once: the launcher waits for them
        assert attempt.status()["state"] == ("FAILED" if code else "SUCCEEDED")


@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_a_killed_half_of_the_launcher_is_outlived_by_the_other(tmp_path: Path, victim: str):
    with Attempt(tmp_path, STAYS, processes=2) as attempt:
        started(attempt, *ESCAPED)
        guard, supervisor = attempt.guard(), attempt.supervisor()
        os.kill(supervisor if victim == "supervisor" else guard, signal.SIGKILL)
        code = attempt.wait()
        status = wait_for(lambda: attempt.status()["state"] == "LOST" and attempt.status(), "LOST")
        assert code == [69 if victim == "supervisor" else -9]
        assert status["reason"] == (
            "the supervisor was killed by signal 9"
            if victim == "supervisor"
            else "the launcher's guard process was killed"
        )
        assert status["exit_code"] is None and status["ended_at"]
        nothing_left(attempt)
        assert attempt.events("result")[0]["state"] == "LOST"
        assert [line[0] for line in attempt.lines()] == list(range(len(attempt.lines())))


MASKS = {
    "v2": "true",
    "v1": "mount -t tmpfs none /sys/fs/cgroup/unified 2> /dev/null || mount -t tmpfs none /sys/fs/cgroup",
    "a parent": "mount -t tmpfs none /sys/fs/cgroup",
}
# A daemon of its own session with an empty environment; its name is the folder's, and nothing else is known of it.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        program = "import time; print('up', flush=True); time.sleep(600)"
        os.execve(sys.executable, [sys.executable, "-c", program, "daemon of " + os.getcwd()], {})
    os._exit(0)
os.wait()
time.sleep(600)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes control groups, and hides them")
@pytest.mark.parametrize("way", MASKS)
def test_guard_and_supervisor_killed_together_leave_no_daemon(tmp_path: Path, way: str):
    """A client finds it by its control group; without one the guard's parent ends it, and nobody has to look."""
    folders = {"v2": ["unified", "."], "v1": ["freezer"], "a parent": []}[way]
    if not any(os.access(f"/sys/fs/cgroup/{name}/cgroup.procs", os.W_OK) for name in folders) and way != "a parent":
        pytest.skip(f"this machine has no control groups {way} that a process may make")
    with Attempt(tmp_path, DAEMON) as attempt:
        hidden, attempt.python = attempt.python, str(tmp_path / "masked")
        Path(attempt.python).write_text(
            f'#!/bin/sh\nexec unshare --mount sh -c \'{MASKS[way]}; exec "$0" "$@"\' {hidden} "$@"\n'
        )
        os.chmod(attempt.python, 0o755)
        started(attempt, "up")
        node = attempt.folders[0]
        group = (node / "cgroup").read_text() if (node / "cgroup").exists() else ""
        assert (not group) if way == "a parent" else ("/freezer/" in group) == (way == "v1")
        halves, daemon = (attempt.guard(), attempt.supervisor()), daemons(node)
        assert len(daemon) == 1
        for pid in halves:
            os.kill(pid, signal.SIGSTOP)
        for pid in reversed(halves):  # the guard last: its death would wake a supervisor that stands still (SIGCONT)
            os.kill(pid, signal.SIGKILL)
        assert attempt.wait() == [-signal.SIGKILL]
        if way != "a parent":
            wait_for(lambda: supervisor.read_state(node)["state"] == "LOST", "LOST")
            assert daemons(node) == daemon and supervisor.has_leftovers(node)
            assert supervisor.kill_leftovers(node) >= 1
            assert not Path(group).exists()
        assert not daemons(node) and not supervisor.has_leftovers(node)
        assert supervisor.read_state(node)["state"] == "LOST"


def daemons(node: Path) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (
                f"daemon of {node}/source".encode() in (entry / "cmdline").read_bytes()
                and state(int(entry.name)) != "Z"
            ):
                found.append(int(entry.name))
    return found


def test_a_run_that_has_ended_leaves_no_control_group(tmp_path: Path):
    with Attempt(tmp_path, "print(open('/proc/self/cgroup').read())") as attempt:
        assert attempt.run() == [0]
        group = attempt.folders[0] / "cgroup"
        assert not group.exists() or not Path(group.read_text()).exists()
        for group in Path("/sys/fs/cgroup").rglob(f"cloudtrain-{attempt.status()['pid']}-*"):
            pytest.fail(f"{group} is left")


def test_processes_that_are_never_the_same_are_ended(tmp_path: Path):
    """Three that hop: each forks a successor and leaves, so that no list of processes stays true. Never more than six."""
    script = """
import os, time
end = time.monotonic() + 60
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while time.monotonic() < end:
            if os.fork():
                os._exit(0)
            time.sleep(0.002)
        os._exit(0)
print("up", flush=True)
time.sleep(60)
"""
    for victim in ("supervisor", "guard"):
        with Attempt(tmp_path / victim, script) as attempt:
            started(attempt, "up")
            os.kill(getattr(attempt, victim)(), signal.SIGKILL)
            attempt.wait()
            nothing_left(attempt)
            assert attempt.status()["state"] == "LOST"


SAVES = """
import os, signal, sys, time
def leave(*_):
    print("saved", flush=True)
    sys.exit({code})
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True: time.sleep(0.05)
"""


@pytest.mark.parametrize("code", [0, 75, 3])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_reaches_the_ranks_and_is_no_success(tmp_path: Path, code: int, number: int):
    with Attempt(tmp_path, SAVES.format(code=code), processes=2) as attempt:
        started(attempt, "up")
        attempt.launchers[0].send_signal(number)
        assert attempt.wait() == [75]
        status = attempt.status()
        assert (status["state"], status["exit_code"], status["by"]) == ("PREEMPTED", 75, "launcher")
        assert attempt.texts(0)[-1] == attempt.texts(1)[-1] == "saved"
        assert [event["state"] for event in attempt.events("state")][-2:] == ["STOPPING", "PREEMPTED"]


def test_a_cancel_mark_makes_it_cancelled(tmp_path: Path):
    with Attempt(tmp_path, SAVES.format(code=75)) as attempt:
        started(attempt, "up")
        (attempt.folders[0] / "cancel").touch()
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75]
        assert (attempt.status()["state"], attempt.status()["reason"]) == ("CANCELLED", "cancelled")


def test_a_cancel_mark_is_seen_without_any_signal(tmp_path: Path):
    with Attempt(tmp_path / "a", SAVES.format(code=75)) as attempt:
        started(attempt, "up")
        (attempt.folders[0] / "cancel").touch()
        assert attempt.wait() == [75]
        assert attempt.status()["state"] == "CANCELLED"
    with Attempt(tmp_path / "b", "print('never')") as attempt:
        (attempt.folders[0] / "cancel").touch()
        assert attempt.run() == [75]
        assert attempt.status()["state"] == "CANCELLED" and not attempt.texts(0)


def test_a_cancel_mark_during_a_preemption_still_counts(tmp_path: Path):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Attempt(tmp_path, script, grace_s=3) as attempt:
        started(attempt, "up")
        attempt.launchers[0].send_signal(signal.SIGTERM)
        wait_for(lambda: attempt.status()["state"] == "STOPPING", "STOPPING")
        (attempt.folders[0] / "cancel").touch()
        assert attempt.wait() == [75]
        assert attempt.status()["state"] == "CANCELLED"


def test_max_runtime_ends_a_run(tmp_path: Path):
    with Attempt(tmp_path, SAVES.format(code=0), max_runtime_s=5) as attempt:  # its handler must be there before
        assert attempt.run() == [75]
        assert (attempt.status()["state"], attempt.status()["reason"]) == ("TIMED_OUT", "max_runtime (5 s) was over")
        assert attempt.texts(0)[-1] == "saved"


@pytest.mark.parametrize(
    ("state", "reason"), [("PREEMPTED", "stopped by SIGTERM"), ("TIMED_OUT", "max_runtime (86400 s) was over")]
)
def test_the_end_of_a_slice_ends_a_run(tmp_path: Path, state: str, reason: str):
    slice_end = {"CLOUDTRAIN_SLICE": f"{int(time.time()) + 2} {state}"}  # Slurm's batch script sets it
    with Attempt(tmp_path, "import time; time.sleep(600)", environ=slice_end) as attempt:
        assert attempt.run() == [75]
        assert attempt.status()["state"] == state and attempt.status()["reason"].startswith(reason)
        assert any("this time slice is over" in line for line in attempt.texts(-1)) == (state == "PREEMPTED")


def test_who_does_not_leave_is_killed_after_the_grace(tmp_path: Path):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Attempt(tmp_path, script, grace_s=1) as attempt:
        started(attempt, "up")
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75]
        assert attempt.status()["state"] == "PREEMPTED"


def test_a_second_request_does_not_wait_for_the_grace(tmp_path: Path):
    script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    with Attempt(tmp_path, script, grace_s=3600) as attempt:
        started(attempt, "up")

        def ended() -> bool:
            attempt.launchers[0].send_signal(signal.SIGTERM)
            return attempt.launchers[0].poll() is not None

        wait_for(ended, "the end")
        assert attempt.status()["state"] == "PREEMPTED"


def test_a_signal_to_every_process_at_once_is_a_request_too(tmp_path: Path):
    """Slurm does that: the ranks may die of it before their launcher has heard of it."""
    script = "import time; print('up', flush=True); time.sleep(600)"
    for number in range(5):
        with Attempt(tmp_path / str(number), script, processes=2) as attempt:
            started(attempt, "up")
            for pid in sorted(attempt.left(), reverse=True):  # ranks first
                with suppress(ProcessLookupError):  # what lists the packages may have ended since
                    os.kill(pid, signal.SIGTERM)
            assert attempt.wait() == [75], attempt.status()
            assert attempt.status()["state"] == "PREEMPTED"


def test_guard_and_supervisor_signalled_together_are_one_request(tmp_path: Path):
    """The guard passes its own on; that must not look like a second request, which would end the grace."""
    script = SAVES.format(code=0).replace('print("saved"', 'time.sleep(0.3); print("saved"')
    with Attempt(tmp_path, script, grace_s=600) as attempt:
        started(attempt, "up")
        for pid in (attempt.supervisor(), attempt.guard()):
            os.kill(pid, signal.SIGTERM)
        assert attempt.wait() == [75]
        assert attempt.texts(0)[-1] == "saved"


def test_a_rank_is_asked_and_its_children_are_not(tmp_path: Path):
    """A data loader's worker that is terminated would take the rank down before it can save."""
    script = """
import signal, subprocess, sys, time
def leave(*_):
    try:
        print("child ended with", child.wait(0.5), flush=True)
    except subprocess.TimeoutExpired:
        print("child lives", flush=True)
    sys.exit(0)
child = subprocess.Popen(["sleep", "600"])
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True: time.sleep(0.05)
"""
    with Attempt(tmp_path, script) as attempt:
        started(attempt, "up")
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75]
        assert attempt.texts(0)[-1] == "child lives"


def test_a_shell_script_passes_nothing_on_so_its_children_are_asked_too(tmp_path: Path):
    files = {"job.sh": "python3 -c 'import time; print(1, flush=True); time.sleep(600)'\necho not reached in time\n"}
    with Attempt(tmp_path, argv=("job.sh",), files=files, grace_s=600) as attempt:
        started(attempt, "1")
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.wait() == [75]


def test_a_last_word_is_not_taken_back(tmp_path: Path):
    """The supervisor may be killed between its last word and its exit."""
    status.Status(str(tmp_path), os.getpid()).set(state="FAILED", exit_code=3, reason="rank 0 exited with code 3")
    assert guard.record_loss(str(tmp_path), os.getpid(), 9) == 3
    assert status.read(str(tmp_path))["reason"] == "rank 0 exited with code 3"


def test_a_request_while_requirements_are_installed_ends_that_too(tmp_path: Path):
    # pip waits for an index that accepts the connection and never answers.
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        index = f"--index-url http://127.0.0.1:{silent.getsockname()[1]}/simple\nno-such-distribution\n"
        with Attempt(tmp_path, files={"requirements.txt": index}, requirements="requirements.txt") as attempt:
            attempt.start()
            wait_for(lambda: [text for text in attempt.texts(-1) if "Looking in indexes" in text], "pip")
            attempt.launchers[0].send_signal(signal.SIGTERM)
            assert attempt.wait() == [75]
            assert attempt.status()["reason"] == "stopped by SIGTERM before the ranks started"
            nothing_left(attempt)


def test_as_the_first_process_of_a_container_it_reaps_and_obeys(tmp_path: Path):
    """PID 1 gets no default signal actions, and inherits every orphan of its namespace."""
    script = (
        "import os\nfor _ in range(20):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n        os._exit(0)\n"
        + SAVES.format(code=0)
    )
    with Attempt(tmp_path, script) as attempt:
        python = attempt.python
        user = "" if os.geteuid() == 0 else "--user --map-root-user"
        attempt.python = str(tmp_path / "contained")
        Path(attempt.python).write_text(
            f'#!/bin/sh\nexec unshare {user} --pid --fork --mount-proc --kill-child {python} "$@"\n'
        )
        os.chmod(attempt.python, 0o755)
        started(attempt, "up")
        outer = attempt.launchers[0].pid
        first = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])
        assert attempt.status()["pid"] == 1
        zombies = [pid for pid in attempt_family(first) if state(pid) == "Z"]
        assert len(zombies) <= 20  # the rank's own first children, which it never waits for
        os.kill(first, signal.SIGTERM)
        assert attempt.wait() == [75]
        assert attempt.texts(0)[-1] == "saved"


def attempt_family(root: int) -> list[int]:
    return list(processes.descendants(root))


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"


def test_a_terminal_that_closes_is_survived_under_nohup(tmp_path: Path):
    with Attempt(tmp_path, SAVES.format(code=0)) as attempt:
        old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            started(attempt, "up")
        finally:
            signal.signal(signal.SIGHUP, old)
        attempt.launchers[0].send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert attempt.status()["state"] == "RUNNING"
        attempt.launchers[0].send_signal(signal.SIGTERM)
        assert attempt.launchers[0].wait(WAIT_S) == 75
