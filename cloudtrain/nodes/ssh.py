"""SSH connections: one for each host, kept open and reopened when it breaks; run commands, translate errors.

asyncssh runs on an event loop in its own thread; the functions here are synchronous and safe to call from any thread. A
host key that is not in known_hosts is always refused. Options that a Host leaves out come from ~/.ssh/config.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, CloudtrainError, MissingExtra, NoService, Unreachable
from cloudtrain.nodes import event_loop, ssh_config
from cloudtrain.nodes.agents import ANSWER_S

if TYPE_CHECKING:
    from asyncssh import SSHClientConnection, SSHClientProcess

CONNECT_S = 10.0  # timeout of the connection, and again of the login
KEEPALIVE_S = 4.0  # interval of keepalives; a connection is lost after three without an answer
PAUSE_S = 3.0  # after a failure, the host is not tried again for this time
CHUNK_BYTES = 1 << 16  # bytes of output at a time
_T = TypeVar("_T")


@dataclass(frozen=True)
class Host:
    """Address and login of a machine; for None, ~/.ssh/config and its defaults decide."""

    address: str
    port: int | None = None
    user: str | None = None
    jump: str | None = None  # [user@]host[:port], the nearest first, joined by commas
    identity: str | None = None  # path of a private key
    known_hosts: str | None = None  # path

    @property
    def label(self) -> str:
        """The host as user@address:port, without the parts that are None."""
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        return (f"{self.user}@" if self.user else "") + address + (f":{self.port}" if self.port else "")

    @property
    def jump_host(self) -> Host | None:
        """The jump host, reached with the same keys."""
        if not self.jump:
            return None
        before, _, last = self.jump.rpartition(",")
        user, _, host = last.rpartition("@")
        address, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        if not colon:
            address, port = host, ""
        return replace(self, address=address.strip("[]"), port=int(port) if port else None, user=user or None,
                       jump=before or None)  # fmt: skip


class Completed(NamedTuple):
    """Exit code and output of a command; `code` is 128+n for signal n."""

    code: int
    out: bytes
    err: bytes


class Remote:
    """One machine. Every method raises Unreachable if it cannot be reached, and BackendError if it refuses the login."""

    def __init__(self, host: Host, clock: Clock = SYSTEM) -> None:
        self.host, self._clock = host, clock
        self.last_failure: tuple[float, CloudtrainError] | None = None  # when the last try failed, and why
        self._unreachable_since: float | None = None
        self._connection: SSHClientConnection | None = None
        self._opening: asyncio.Lock | None = None
        self.keys = ssh_config.HostKeys(None, None)  # of the last try

    @property
    def unreachable_s(self) -> float:
        """Seconds since the first of the failed tries to reach the machine; 0.0 if the last try succeeded."""
        return 0.0 if self._unreachable_since is None else self._clock.monotonic() - self._unreachable_since

    def run(self, command: str | Sequence[str], *, given: bytes = b"", timeout_s: float = ANSWER_S) -> Completed:
        """Run a command to its end with `given` on standard input; blocking. A list is quoted for the shell."""

        async def work() -> Completed:
            async with self.process(command) as process:
                try:
                    out, err = await process.communicate(given)
                except BrokenPipeError:  # it ended before it read its input
                    out, err = await process.communicate()
                assert isinstance(out, bytes) and isinstance(err, bytes)
                code = process.returncode
                return Completed(255 if code is None else 128 - code if code < 0 else code, out, err)

        return event_loop.run_blocking(self.translate_errors(work(), timeout_s))

    def stream(self, command: str | Sequence[str], *, given: bytes = b"") -> Iterator[bytes]:
        """Yield a command's standard output as it arrives; closing the generator closes the channel, not the connection."""

        async def begin() -> tuple[Any, SSHClientProcess[bytes]]:
            context = self.process(command)
            process = await context.__aenter__()
            with suppress(BrokenPipeError):  # as above
                process.stdin.write(given)
                process.stdin.write_eof()
            return context, process

        context, process = event_loop.run_blocking(self.translate_errors(begin(), ANSWER_S))
        try:
            while piece := event_loop.run_blocking(self.translate_errors(process.stdout.read(CHUNK_BYTES), None)):
                yield piece
        finally:
            event_loop.run_blocking(context.__aexit__(None, None, None))

    def drop(self, connection: SSHClientConnection) -> None:
        """Use a connection for nothing new: the next call opens another one. What runs over it continues."""
        if self._connection is connection:
            self._connection = None

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            event_loop.running().call_soon_threadsafe(connection.abort)

    # -- on the loop's thread ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def process(self, command: str | Sequence[str]) -> AsyncIterator[SSHClientProcess[bytes]]:
        """Start a command over the connection."""
        line = command if isinstance(command, str) else shlex.join(command)
        connection = await self.connection()
        process: SSHClientProcess[bytes] = await connection.create_process(line, encoding=None)
        try:
            yield process
        finally:
            process.close()

    async def connection(self) -> SSHClientConnection:
        """Return the connection, opening it if necessary."""
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._open()
            return self._connection

    async def _open(self) -> SSHClientConnection:
        check_installed()
        import asyncssh

        host = self.host
        config = await asyncio.to_thread(ssh_config.read, host.address, host.port, host.user, host.known_hosts)
        given = config.options() if config else ssh_config.plain_options(host)
        if host.identity is not None:
            given |= {"client_keys": [str(Path(host.identity).expanduser())], "ignore_encrypted": True}
            given.pop("agent_identities", None)
        self.keys = ssh_config.HostKeys(config, host.known_hosts)
        options = await asyncssh.SSHClientConnectionOptions.construct(
            connect_timeout=CONNECT_S, login_timeout=CONNECT_S, keepalive_interval=KEEPALIVE_S, keepalive_count_max=3,
            compression_algs=None, client_factory=self.keys.client_factory(), **given)  # fmt: skip
        if (config.checks and config.no_files) if config else options.known_hosts is None:  # UserKnownHostsFile none
            raise BackendError(
                f"{host.label}: ~/.ssh/config turns off host key checking, which cloudtrain needs",
                "set known_hosts of this host to a file of host keys in cloudtrain.toml",
            )
        jump_host = host.jump_host
        if jump_host is None and config and config.jump:
            jump_host = Host("", jump=config.jump).jump_host  # with the keys that the configuration has for it
        tunnel = await connect_lazily(jump_host).connection() if jump_host else ()
        return await asyncssh.connect(given["host"], options=options, tunnel=tunnel)

    async def translate_errors(self, work: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
        """Await work on the connection and translate its errors into ours."""
        if self.last_failure is not None and self._clock.monotonic() - self.last_failure[0] < PAUSE_S:
            work.close()
            raise self.last_failure[1]
        try:
            value = await asyncio.wait_for(work, timeout_s)
        except CloudtrainError as error:
            if not isinstance(error, Unreachable):
                self.last_failure = self._unreachable_since = None  # the machine was reached: the error is its answer
            raise
        except BaseException as error:
            translated = self._translate(error, timeout_s)
            if translated is None:
                raise
            self.last_failure = (self._clock.monotonic(), translated)
            if isinstance(translated, Unreachable):
                self._unreachable_since = self._unreachable_since or self._clock.monotonic()
                if self._connection is not None:
                    self._connection.abort()
                self._connection = None
            raise translated from None
        self.last_failure = self._unreachable_since = None
        return value

    def _translate(self, error: BaseException, timeout_s: float | None) -> CloudtrainError | None:
        """Return our error for an error of asyncssh or the system, None for any other."""
        import asyncssh

        label, port_option = self.host.label, f"-p {self.host.port} " if self.host.port else ""
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            file = self.keys.file
            scan_command = f"ssh-keyscan {port_option}{self.host.address} >> {file}"
            if self.keys.differs:
                return BackendError(
                    f"the host key of {label} differs from the one in {file}",
                    f"if the machine was reinstalled, remove its old line from that file and run: {scan_command}; "
                    "otherwise the connection may be intercepted",
                )
            return BackendError(
                f"the host key of {label} is not in {file}",
                f"run: {scan_command}, and compare the fingerprint with the machine's own (ssh-keygen -lf)",
            )
        if isinstance(error, asyncssh.PermissionDenied):
            locked = ssh_config.encrypted_key((self.host.identity,) if self.host.identity else self.keys.identities)
            add = f"{locked} has a passphrase: ssh-add {locked}; or " if locked else ""
            return BackendError(
                f"{label} accepts none of your SSH keys",
                f"{add}run ssh-copy-id or ssh-add, or set identity to another key",
            )
        prohibited = asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED  # a broken connection has other codes
        if isinstance(error, asyncssh.ChannelOpenError) and error.code == prohibited and self.host.jump is None:
            return BackendError(f"{label} refuses to open an SSH session: {error.reason}")
        if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyExportError | asyncssh.ConfigParseError):
            return BackendError(f"{label}: {error}")
        if isinstance(error, TimeoutError):
            return Unreachable(f"{label} did not answer within {timeout_s or CONNECT_S:g} s")
        if isinstance(error, asyncssh.Error):
            return Unreachable(f"{label} cannot be reached: {error.reason}")
        if isinstance(error, OSError | EOFError | asyncio.IncompleteReadError):
            if isinstance(error, socket.gaierror):  # its numbers are no errnos
                passing = error.errno == socket.EAI_AGAIN  # this machine is offline, or its name server is
                return (Unreachable if passing else NoService)(
                    f"{label} cannot be reached: no address was found for the name {self.host.address}",
                    "correct the address, or add a Host entry to ~/.ssh/config",
                )
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            text = f"{label} cannot be reached: {reason}"
            if isinstance(error, ConnectionRefusedError):
                return NoService(text, "start sshd there, or correct the address and port")
            return Unreachable(text)
        return None


def check_installed() -> None:
    """Raise MissingExtra without the library that connects."""
    from importlib.util import find_spec

    if find_spec("asyncssh") is None:
        raise MissingExtra("SSH", "ssh")


def connect(host: Host) -> Remote:
    """Connect to a host and return it; blocking. Raises Unreachable, BackendError, MissingExtra."""
    remote = connect_lazily(host)
    event_loop.run_blocking(remote.translate_errors(remote.connection(), CONNECT_S * 3))
    return remote


def connect_lazily(host: Host) -> Remote:
    """Return this process's Remote for a host; it connects on first use."""
    with _LOCK:
        return _MACHINES.setdefault(host, Remote(host))


_LOCK = threading.Lock()
_MACHINES: dict[Host, Remote] = {}
