"""exec, stack, forward and top as commands: a run here, a terminal, what is recorded, what is refused."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import CLI, Cli
from tests.conftest import WAIT_S, wait_for

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are found in /proc")
WAITS = """\
import os, time
def wait_here():
    print('waits', os.environ.get('RANK'), flush=True)
    time.sleep(600)
wait_here()
"""


@pytest.fixture
def run(project: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A run of two ranks that wait, with a secret."""
    monkeypatch.setenv("MY_TOKEN", "a-secret-value-of-nobody")
    (project / "waits.py").write_text(WAITS)
    sent = cli("submit", "waits.py", "--processes", "2", "--set", "secrets.MY_TOKEN=env:MY_TOKEN", "--json")
    assert sent.code == 0, sent.err
    run_id = sent.json["run_id"]
    wait_for(lambda: cli("logs", run_id).out.count("waits") == 2, "both ranks")
    yield run_id
    cli("cancel", run_id)


def call(*words: str, given: bytes | None = None) -> subprocess.CompletedProcess:
    """Run a command as a process of its own: exec replaces it."""
    stdin = {"input": given} if given is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run([*CLI, *words], capture_output=True, timeout=WAIT_S, **stdin)


def test_exec_passes_streams_and_its_code(run: str, cli: Cli):
    done = call("exec", run, "--rank", "1", "--", "sh", "-c", 'echo "$RANK $MY_TOKEN"; echo errors >&2; exit 9')
    assert (done.returncode, done.stdout, done.stderr) == (9, b"1 a-secret-value-of-nobody\n", b"errors\n")
    every = bytes(range(256)) * 100
    assert call("exec", run, "-i", "--", "cat", given=every).stdout == every
    assert call("exec", run, "--", "cat", given=every).stdout == b"", "without -i it reads nothing"
    killed = call("exec", run, "--", "sh", "-c", "kill -KILL $$")
    assert killed.returncode == -9, "the process is the command"
    written = call("exec", run, "--", "sh", "-c", "yes | head -1; kill -PIPE $$")
    assert written.returncode == -13, "SIGPIPE ends what exec starts, as in a shell"


def test_each_use_is_an_event_without_secrets(run: str, cli: Cli):
    call("exec", run, "--", "echo", "a-secret-value-of-nobody", "--password", "hf_" + "a" * 34, "two words")
    call("exec", run, "-i", "--", "cat", given=b"what was typed in")
    assert cli("stack", run).code == 0
    shown = cli("show", run).out
    lines = [line for line in shown.splitlines() if " user  " in line]
    assert re.search(r"user  exec by=\S+@\S+  command=echo '\*\*\*' --password '\*\*\*' 'two words'  on=0", lines[0]), (
        lines
    )
    assert "command=cat" in lines[1] and "stack by=" in lines[2]
    history = b"".join(path.read_bytes() for path in Path(os.environ["CLOUDTRAIN_HOME"]).glob("*.sqlite*"))
    assert b"two words" in history
    for secret in (b"a-secret-value-of-nobody", b"hf_aaaa", b"what was typed in"):
        assert secret not in history


def test_stack_prints_each_rank(run: str, cli: Cli):
    printed = cli("stack", run)
    assert printed.code == 0 and printed.out.count("in wait_here") == 2
    assert [row["rank"] for row in cli("stack", run, "--json").rows] == [0, 1]
    assert [row["rank"] for row in cli("stack", run, "--rank", "1", "--json").rows] == [1]


def test_what_is_refused(run: str, cli: Cli):
    for words, said in (
        (["exec", run, "--rank", "2", "--", "true"], "there is no rank 2"),
        (["exec", run, "--node", "1", "--", "true"], "there is no node 1"),
        (["exec", run, "-it", "--", "true"], "-t needs a terminal"),
        (["exec", run], "a command is missing"),
        (["forward", run, "web"], "is not a port"),
        (["forward", run, "70000"], "is not a port"),
        (["forward", run, "80:70000"], "is not a port"),
    ):
        refused = call(*words)
        assert refused.returncode == 2 and said in refused.stderr.decode(), (words, refused)
    cli("cancel", run)
    for words in (["exec", run, "--", "true"], ["stack", run], ["forward", run, "80"]):
        refused = call(*words)
        assert refused.returncode == 2 and "has ended (CANCELLED)" in refused.stderr.decode()


def test_a_terminal_with_its_size_and_ctrl_c(run: str):
    terminal = Terminal([*CLI, "exec", run, "-it"], rows=33, columns=111)
    terminal.type("stty size; echo rank=$RANK\n")
    terminal.until(r"33 111\s+rank=0")
    terminal.resize(44, 99)
    terminal.type("stty size\n")
    terminal.until("44 99")
    # the child says that it runs: before that, Ctrl-C reaches the shell alone, which then waits for the child
    terminal.type("sh -c 'echo be\"\"gun; exec sleep 600'; echo not-printed\n")
    terminal.until("begun")
    terminal.type("\x03")
    terminal.until(
        r"(?s)\^C.*[#$] "
    )  # a shell that changes its terminal's mode may lose what is typed before its prompt
    terminal.type("echo co''de=$?\n")
    terminal.until("code=130")
    terminal.type("exit 5\n")
    assert terminal.end() == 5


def test_a_port_is_reached_here(run: str, project: Path):
    page = "b" * 300_000
    serve = (
        "import http.server\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        f"    def do_GET(self):\n        self.send_response(200); self.end_headers(); self.wfile.write(b'b' * {len(page)})\n"
        "    def log_message(self, *_): pass\n"
        "server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)\n"
        "print(server.server_port, flush=True)\nserver.serve_forever()\n"
    )
    server = subprocess.Popen([*CLI, "exec", run, "--", sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
    forwards = []
    try:
        port = int(server.stdout.readline())
        for there in (port, 1):  # nothing listens on port 1
            command = [*CLI, "forward", run, f"{there}:0", "--json"]
            forwards.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        here = [json.loads(forward.stdout.readline())["address"] for forward in forwards]
        assert all(address.startswith("127.0.0.1:") for address in here)
        for _ in range(3):
            assert urllib.request.urlopen(f"http://{here[0]}/", timeout=WAIT_S).read().decode() == page
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{here[1]}/", timeout=WAIT_S)
        assert "node 0: nothing accepts connections on port 1" in forwards[1].stderr.readline()
        taken = call("forward", run, f"{port}:{here[0].partition(':')[2]}")
        assert taken.returncode == 2 and b"cannot be used: Address already in use" in taken.stderr
        for forward in forwards:
            forward.send_signal(2)
            assert forward.wait(WAIT_S) == 0
    finally:
        for process in (server, *forwards):
            process.kill()
            process.communicate()


def test_top_prints_what_the_nodes_measured(run: str, cli: Cli):
    wait_for(lambda: '"node"' in cli("top", run, "--json").out, "the first measurement")
    (row,) = cli("top", run, "--json").rows
    assert row["node"] == 0 and row["memory_bytes"] > 1e6 and row["processes"] >= 2 and row["gpus"] == []
    heads, cells = cli("top", run).out.splitlines()
    assert heads.split()[:5] == ["node", "host", "cpu", "memory", "processes"]
    assert cells.split()[1] == row["host"]


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, argv: list[str], rows: int, columns: int) -> None:
        pid, self._master = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a terminal, also where the tests run in the background
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
            os.environ.update(TERM="xterm", PS1="$ ")
            os.execv(argv[0], argv)
        self._pid, self.seen = pid, ""

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def until(self, pattern: str) -> str:
        """Wait for a pattern in what is printed after the last one that was waited for; return the matching text."""
        deadline = time.monotonic() + WAIT_S
        while (match := re.search(pattern, self.seen)) is None:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self._master], [], [], left)[0], f"{pattern} is not in {self.seen!r}"
            self.seen += os.read(self._master, 65536).decode(errors="replace")
        self.seen = self.seen[match.end() :]
        return match[0]

    def end(self) -> int:
        try:
            while os.read(self._master, 65536):
                pass
        except OSError:
            pass  # the last process has closed it
        _, status = os.waitpid(self._pid, 0)
        os.close(self._master)
        return os.waitstatus_to_exitcode(status)
