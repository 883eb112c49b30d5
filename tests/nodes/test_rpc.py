"""Agents that do not start: an SSH server in this process whose shell prints and ends as real ones do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from cloudtrain.backends.ssh.machines import Machine
from cloudtrain.errors import BackendError, CloudtrainError, Unreachable
from cloudtrain.nodes import event_loop, rpc, ssh, ssh_config
from cloudtrain.nodes.rpc import RemoteAgent, telling_line
from tests.lab.connections import close_all

# What shells have printed (2026-11-29): fish 3.6.0 and tcsh 6.24.07 on Debian 12, nologin of util-linux, Python 3.11
FISH = b"fish: Unknown command: python9\nfish: \nexec python9 -c 'import sys; exec(sys.stdin.buffer.read())'\n     ^~~~~~^\n"
TCSH = b"python9: Command not found.\n"
NOLOGIN = b"This account is currently not available.\n"
TRACE = b'Traceback (most recent call last):\n  File "x", line 1, in <module>\nOSError: [Errno 28] No space left on device\n'


class Server:
    """An SSH server on the loopback address; `answer` is what each command prints, and its exit code."""

    def __init__(self) -> None:
        self.answer: tuple[bytes, bytes, int | None] = b"", b"", 0
        self.connections = 0
        self.key = asyncssh.generate_private_key("ssh-ed25519")
        self._listener = event_loop.run_blocking(self._listen())
        self.port = self._listener.get_port()

    async def _listen(self) -> Any:
        server = self

        class Login(asyncssh.SSHServer):
            def begin_auth(self, username: str) -> bool:
                server.connections += 1
                return False

        async def shell(process: Any) -> None:
            out, err, code = server.answer
            process.stdout.write(out)
            process.stderr.write(err)
            if code is None:
                process.channel.get_connection().abort()
            else:
                process.exit(code)

        return await asyncssh.create_server(
            Login, "127.0.0.1", 0, server_host_keys=[self.key], process_factory=shell, encoding=None
        )

    def close(self) -> None:
        async def work() -> None:
            self._listener.close()

        event_loop.run_blocking(work())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(ssh_config, "read", lambda *_: None)  # no process
    monkeypatch.setattr(ssh, "PAUSE_S", 0.0)
    made = Server()
    yield made
    close_all()
    made.close()


@pytest.fixture
def agent(server: Server, tmp_path: Path) -> RemoteAgent:
    known = tmp_path / "known_hosts"
    known.write_bytes(f"[127.0.0.1]:{server.port} ".encode() + server.key.export_public_key())
    return RemoteAgent(ssh.Host("127.0.0.1", server.port, "ada", known_hosts=str(known)), "python3")


@pytest.mark.parametrize(
    ("out", "err", "code", "kind", "said"),
    [
        (NOLOGIN, b"", 1, BackendError, "ended with exit code 1 before Python started: This account is currently not"),
        (b"", b"", 1, BackendError, "ended with exit code 1 before Python started: it printed nothing"),
        (b"welcome\n", FISH, 127, BackendError, "its Python does not start: fish: Unknown command: python9"),
        (b"", TCSH, 1, BackendError, "its Python does not start: python9: Command not found."),
        (b"", TRACE, 1, BackendError, "its Python does not start: OSError: [Errno 28] No space left on device"),
        (b"", b"", None, Unreachable, "cannot be reached"),
    ],
)
def test_why_no_agent_starts(server: Server, agent: RemoteAgent, out, err, code, kind, said) -> None:
    for number in (1, 2):
        server.answer = out, err, code
        with pytest.raises(CloudtrainError) as caught:
            agent.ask("clock")
        assert isinstance(caught.value, kind) and isinstance(caught.value, Unreachable) is (kind is Unreachable)
        assert code is None or said in caught.value.message
        assert server.connections == number, "a connection that has failed is not used again"


def test_a_connection_over_which_something_runs_is_left_to_it(server: Server, agent: RemoteAgent, monkeypatch) -> None:
    server.answer = NOLOGIN, b"", 1
    monkeypatch.setattr(rpc, "_is_live", lambda task: True)
    connections = []
    for number in (1, 2):
        with pytest.raises(BackendError):
            agent.ask("clock")
        monkeypatch.setattr(
            agent.remote, "drop", lambda each, drop=agent.remote.drop: (connections.append(each), drop(each))
        )
        assert server.connections == number
    assert [each.is_closed() for each in connections] == [False]
    event_loop.running().call_soon_threadsafe(connections[0].abort)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (FISH, "fish: Unknown command: python9"),
        (TRACE, "OSError: [Errno 28] No space left on device"),
        (b"first\nlast words\n  ^~~\n", "last words"),
        (b"", ""),
        (b"\xff\xfe\n", ""),
    ],
)
def test_the_line_that_says_something(output: bytes, line: str) -> None:
    assert telling_line(output) == line


def test_other_nodes_see_a_host_by_the_address_of_its_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "hostname 10.0.0.5\nport 22\nuser ada\n"
    monkeypatch.setattr(ssh_config, "read", lambda *_: ssh_config.parse(text))
    machine = Machine({}, {"address": "gpu1"})
    assert machine.internal == "10.0.0.5" == Machine({}, machine.to_dict()).internal, "as a plan has it"
    assert Machine({}, {"address": "gpu1", "internal": "192.168.7.1"}).internal == "192.168.7.1"
    monkeypatch.setattr(ssh_config, "read", lambda *_: None)
    assert Machine({}, {"address": "gpu1"}).internal == "gpu1"
    assert Machine({}, {"address": "gpu1"}).to_dict()["internal"] == "gpu1", "the plan asks no process"
