"""What runs on a node: ranks are found in /proc, a process without a handler gets no signal, ports are reached."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cloudtrain.backends.shell import program
from cloudtrain.nodes import inside
from cloudtrain.source.bundle import runtime_files
from tests.conftest import WAIT_S, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are found in /proc")
Start = Callable[..., subprocess.Popen]
ATTEMPT = ""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder as `.cloudtrain/path` of a bundle is."""
    (tmp_path / "path").mkdir()
    (file,) = (at for name, at in runtime_files() if name.endswith("path/sitecustomize.py"))
    (tmp_path / "path" / "sitecustomize.py").write_bytes(file.read_bytes())
    return tmp_path / "path"


@pytest.fixture
def start(path: Path, tmp_path: Path) -> Iterator[Start]:
    """Start a process as a rank of another attempt for each test, and wait for its first line."""
    global ATTEMPT
    ATTEMPT = f"inside-{uuid.uuid4().hex}-a1"
    started = []

    def begin(argv: list[str], rank: int | None = 0, **env: str) -> subprocess.Popen:
        marks = {"CLOUDTRAIN_ATTEMPT_ID": ATTEMPT, "CLOUDTRAIN_CHECKPOINT_DIR": "c", "PYTHONPATH": str(path)}
        ranked = {} if rank is None else {"RANK": str(rank), "NODE_RANK": "0"}
        process = subprocess.Popen(
            argv,
            env={**os.environ, **marks, **ranked, **env},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def run(*words: str, given: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *program(words[0], ATTEMPT, 0, *words[1:])], input=given, capture_output=True, timeout=WAIT_S
    )


def stacks() -> dict[int, dict]:
    done = run("stack")
    assert done.returncode == 0, done.stderr
    return {row["rank"]: row for row in map(json.loads, done.stdout.splitlines())}


def python(body: str, *options: str) -> list[str]:
    return [sys.executable, *options, "-c", f"import time\nsay = lambda: print('ready', flush=True)\n{body}"]


SLEEPS = "def wait_here():\n    say()\n    time.sleep(600)\nwait_here()"


def test_a_process_without_a_handler_is_never_signalled(start: Start):
    shell = start(["sh", "-c", "echo ready; exec sleep 600"], 0)
    isolated = start(python(SLEEPS, "-I"), 1)
    reset = start(python("import signal\nsignal.signal(signal.SIGRTMIN + 7, signal.SIG_DFL)\n" + SLEEPS), 2)
    kept = start(python(SLEEPS), 3)
    wait_for(lambda: not inside.handles(reset.pid, signal.SIGRTMIN + 7), "the script's own default action")
    rows = stacks()
    assert [rows[rank]["stack"] for rank in (0, 1, 2)] == ["", "", ""]
    assert "no Python of this attempt" in rows[0]["why"] and "no Python of this attempt" in rows[1]["why"]
    assert "no longer handles signal" in rows[2]["why"]
    assert "in wait_here" in rows[3]["stack"]
    assert all(process.poll() is None for process in (shell, isolated, reset, kept))


def test_a_node_folder_of_another_name(start: Start):
    """A backend of a package of its own may call the folder of a node as it likes."""
    rank = start(python(SLEEPS), CLOUDTRAIN_NODE_DIR="/somewhere/a1")
    assert {number: row["pid"] for number, row in stacks().items()} == {0: rank.pid}
    named = start(python(SLEEPS), 1, CLOUDTRAIN_NODE_DIR="/somewhere/node-1", NODE_RANK="1")
    assert not stacks(), "where folders have numbers, those count"
    assert named.poll() is None


def test_the_stacks_of_all_threads_without_what_was_before(start: Start):
    body = (
        "import threading\ndef load():\n    time.sleep(600)\nthreading.Thread(target=load, daemon=True).start()\n"
        + SLEEPS
    )
    start(python(body))
    for _ in range(3):
        text = stacks()[0]["stack"]
        assert text.count("in wait_here") == 1 and text.count("in load") == 1


def test_a_rank_that_is_busy_or_stopped(start: Start):
    busy = start(python("import re\nsay()\nre.match('(a+)+$', 'a' * 40 + 'b')"), 0)
    stopped = start(python(SLEEPS), 1)
    os.kill(stopped.pid, signal.SIGSTOP)
    rows = stacks()
    assert "in match" in rows[0]["stack"], "C code that never returns to the interpreter"
    assert rows[1]["why"] == "it did not answer within 5 s: it is stopped"
    os.kill(stopped.pid, signal.SIGCONT)
    assert busy.poll() is None and stopped.poll() is None
    assert "in wait_here" in stacks()[1]["stack"]


def test_workers_of_a_rank_are_no_ranks(start: Start):
    body = "import os\nif os.fork() == 0:\n    time.sleep(600)\n" + SLEEPS
    rank = start(python(body))
    assert {number: row["pid"] for number, row in stacks().items()} == {0: rank.pid}


def test_ranks_that_a_launcher_of_the_script_has_started(start: Start):
    body = (
        "import os, subprocess, sys\n"
        "for rank in (0, 1):\n"
        "    env = {**os.environ, 'RANK': str(rank)}\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], env=env)\n" + SLEEPS
    )
    outer = start(python(body), None)
    wait_for(lambda: sorted(stacks()) == [0, 1], "both ranks")
    assert outer.pid not in {row["pid"] for row in stacks().values()}
    done = run("exec", "1", "-", "sh", "-c", "echo $RANK")
    assert done.stdout == b"1\n"


def test_a_command_that_runs_beside_a_rank_is_none_itself(start: Start):
    rank = start(python(SLEEPS))
    command = [sys.executable, *program("exec", ATTEMPT, 0, "-", "-", "sh", "-c", "echo there; exec sleep 600")]
    beside = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert beside.stdout.readline() == b"there\n"
    rank.kill()
    rank.wait()
    done = run("exec", "-", "-", "true")
    assert done.returncode == 2 and b"it has ended, or has not started" in done.stderr
    assert beside.poll() is None
    beside.kill()
    beside.communicate()


def test_a_sitecustomize_of_the_user_runs_too(start: Start, path: Path, tmp_path: Path):
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import sys\nsys.seen_by_own = __file__\nKEPT = 1\n")
    check = "import sys, sitecustomize\nassert sitecustomize.KEPT == 1 and sys.seen_by_own == sitecustomize.__file__\n"
    done = subprocess.run(
        [sys.executable, "-c", check], env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{own}"}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    (own / "sitecustomize.py").write_text("raise ValueError('of the user')\n")
    start(python(SLEEPS), PYTHONPATH=f"{path}{os.pathsep}{own}")
    assert "in wait_here" in stacks()[0]["stack"], "what fails is what would fail without ours"


def test_nothing_is_printed_and_no_file_is_inherited(path: Path):
    script = (
        "import subprocess; print(subprocess.run(['ls', '-l', '/proc/self/fd'], capture_output=True, text=True).stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(path)}, capture_output=True
    )
    assert done.stderr == b"" and b"memfd" not in done.stdout and b"/proc/" in done.stdout


def test_a_port_of_the_node(start: Start, held: socket.socket):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                data = b""
                while piece := connection.recv(1 << 16):
                    data += piece
                connection.sendall(data[::-1])

        thread = threading.Thread(target=answer)
        thread.start()
        sent = bytes(range(256)) * 3000
        done = run("connect", str(server.getsockname()[1]), given=sent)
        thread.join(WAIT_S)
    assert (done.returncode, done.stdout) == (0, sent[::-1])
    done = run("connect", str(held.getsockname()[1]))
    assert done.returncode == 2 and b"nothing accepts connections on port" in done.stderr


def test_it_runs_on_python_3_9():
    """No syntax and no name that 3.9 lacks: a node's Python may be that old."""
    import ast

    for name in ("nodes/inside.py",):
        ast.parse((Path(inside.__file__).parents[1] / name).read_text(), feature_version=(3, 9))
