"""exec and forward over real connections: a server in a rank, and what a cut connection leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.backends import shell
from cloudtrain.runs.inside import Forward, Inside
from cloudtrain.runs.run import Run
from cloudtrain.runs.submit import Submitter
from tests.backends.forwarded import COMMAND, check_forward
from tests.backends.ssh.test_backend import options
from tests.backends.ssh.test_faults import SLEEPER, job_of
from tests.cli.test_inside import Terminal
from tests.conftest import WAIT_S, wait_for
from tests.lab.connections import close_all
from tests.lab.host import Host
from tests.lab.network import Lab


@pytest.fixture
def target(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, census: Path) -> Iterator[str]:
    """A target of one real host."""
    folder = tmp_path / "configuration"
    folder.mkdir()
    given = options(lab, 1)
    lines = [f"{name} = {json.dumps(value)}" for name, value in given.items() if name != "hosts"]
    hosts = f'hosts = [{{address = "{given["hosts"][0]["address"]}"}}]'
    (folder / "cloudtrain.toml").write_text("\n".join(["[targets.machine]", 'backend = "ssh"', *lines, hosts]) + "\n")
    monkeypatch.setenv("CLOUDTRAIN_CONFIG_HOME", str(folder))
    yield "machine"
    close_all()


@pytest.fixture
def run(target: str, tmp_path: Path) -> Iterator[Run]:
    source = tmp_path / "source"
    source.mkdir()
    (source / "script.py").write_text(SLEEPER)
    run = Submitter(target).submit(job_of(source))
    wait_for(lambda: any("here 0" in line.text for line in run.logs()), "the rank")
    yield run
    run.cancel()
    run.wait(WAIT_S)


def test_a_server_in_a_rank_is_reached(target: str, tmp_path: Path):
    check_forward(tmp_path, target)


def begun(run: Run, *words: str) -> subprocess.Popen[str]:
    """Start a command beside the rank, and wait until it has printed a line."""
    argv = [*COMMAND, "exec", run.run_id, *words]
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout.readline() == "begun\n", process.communicate()
    return process


def kill_connections(host: Host) -> None:
    """Kill what serves the connections on a host; its sshd takes new ones."""
    host.run(["pkill", "-KILL", "-f", "sshd: root"])


@pytest.mark.parametrize("cut", [kill_connections, Host.cut])
def test_a_cut_connection_is_reported_and_the_command_runs_on(run: Run, lab: Lab, cut: Callable[[Host], None]):
    host = lab.hosts[0]
    process = begun(run, "-i", "--", "sh", "-c", "echo begun; cat; sleep 611; exit 3")
    cut(host)
    process.stdin.close()
    process.stdin = None
    _, errors = process.communicate(timeout=WAIT_S)
    said = f"ssh exited with 255: the connection to root@{host.address} was lost, or the command itself exited with 255"
    assert process.returncode == 255 and said in errors and "the command may still run there" in errors
    host.heal()
    wait_for(lambda: "sleep 611" in host.processes().values(), "the command, which reads the end of its input")
    host.kill("sleep 611")
    wait_for(lambda: call(run, "true").returncode == 0, "the next command")


def call(run: Run, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [*COMMAND, "exec", run.run_id, "--", *words]
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S)


def test_a_cut_terminal_ends_its_programs(run: Run, lab: Lab):
    terminal = Terminal([*COMMAND, "exec", run.run_id, "-it", "--", "sh"], rows=20, columns=80)
    terminal.type("echo be''gun; sleep 612\n")
    terminal.until("begun")
    wait_for(lambda: lab.hosts[0].processes(containing="sleep 612"), "the program")
    kill_connections(lab.hosts[0])
    terminal.until("the connection to root@.* was lost")
    assert terminal.end() == 255
    wait_for(lambda: not lab.hosts[0].processes(containing="sleep 612"), "its end by SIGHUP")


def test_a_command_that_exits_with_255_is_not_said_to_be_lost_only(run: Run):
    done = call(run, "sh", "-c", "exit 255")
    assert done.returncode == 255 and "was lost, or the command itself exited with 255" in done.stderr
    assert (call(run, "sh", "-c", "exit 254").returncode, call(run, "sh", "-c", "exit 254").stderr) == (254, "")


def test_who_ends_the_command_here_ends_ssh(run: Run, lab: Lab):
    for number in (signal.SIGTERM, signal.SIGINT):
        process = begun(run, "-i", "--", "sh", "-c", "echo begun; cat")
        if number is signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_S)
        assert (process.returncode, errors) == (128 + number, "")
        wait_for(lambda: not lab.hosts[0].processes(containing="echo begun"), "the end of the command")


def test_a_cut_connection_is_what_forward_complains_of(run: Run, lab: Lab):
    """Nothing is printed by ssh itself when it gives up after unanswered messages."""
    slow = shell.Shell(
        tuple(word.replace("exec ", "sleep 613; exec ", 1) for word in stack_argv(run)), host="root@there"
    )
    said: list[str] = []
    forward = Forward(lambda: slow, said.append, 0)
    thread = threading.Thread(target=forward.serve, daemon=True)
    thread.start()
    with socket.create_connection(("127.0.0.1", forward.port), timeout=WAIT_S) as here:
        wait_for(lambda: "sleep 613" in lab.hosts[0].processes().values(), "the program")
        lab.hosts[0].cut()
        assert here.recv(1) == b""
    wait_for(lambda: said, "the complaint")
    assert said[0].startswith("ssh exited with 255: the connection to root@there was lost")
    forward.close()
    lab.hosts[0].heal()
    lab.hosts[0].kill("sleep 613")


def stack_argv(run: Run) -> tuple[str, ...]:
    return Inside.of(run).program("stack", 0, stdin=True).argv
