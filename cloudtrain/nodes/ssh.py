"""Other machines over SSH: one connection for a host and process, kept, and opened again when it broke.

asyncssh does the work on a loop of its own thread; what is here is synchronous and may be called from any thread. A host
key that known_hosts does not hold is refused, always: nobody is asked, nothing is learnt by itself. What a Host leaves
open is the user's ~/.ssh/config, agent and keys.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cloudtrain.errors import BackendError, CloudtrainError, MissingExtra, Unreachable

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncssh import SSHClientConnection, SSHClientProcess

CONNECT_S = 10.0  # for the connection, and once more for the login
KEEPALIVE_S = 4.0  # a connection that three of them do not answer is lost
ANSWER_S = 60.0  # how long a command may take, unless its caller knows better
PAUSE_S = 3.0  # after a failure the host is not tried again for so long
PIECE = 1 << 16  # bytes of output at a time
MOST_AT_ONCE = 64  # hosts
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Host:
    """How a machine is reached; None leaves the choice to ~/.ssh/config and its defaults."""

    address: str
    port: int | None = None
    user: str | None = None
    jump: str | None = None  # [user@]host[:port], the nearest first, joined by commas
    identity: str | None = None  # path of a private key
    known_hosts: str | None = None  # path

    @property
    def label(self) -> str:
        """The host as a person writes it: user@address:port, without what is left open."""
        address = f"[{self.address}]" if ":" in self.address and self.port else self.address
        return (f"{self.user}@" if self.user else "") + address + (f":{self.port}" if self.port else "")

    @property
    def through(self) -> Host | None:
        """The host to jump from, reached by the same keys."""
        if not self.jump:
            return None
        before, _, last = self.jump.rpartition(",")
        user, _, place = last.rpartition("@")
        address, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
        if not colon:
            address, port = place, ""
        return replace(self, address=address.strip("[]"), port=int(port) if port else None, user=user or None,
                       jump=before or None)  # fmt: skip


class Done(NamedTuple):
    """What a command came to; `code` is 128+n for a signal."""

    code: int
    out: bytes
    err: bytes


class Remote:
    """One machine. Every method raises Unreachable when it cannot be reached, and BackendError when it refuses us."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.refused: tuple[float, CloudtrainError] | None = None  # when it was last tried in vain, and why
        self._since: float | None = None
        self._connection: SSHClientConnection | None = None
        self._opening: asyncio.Lock | None = None

    @property
    def silent_s(self) -> float:
        """How long the machine has not been reached, for as long as somebody tried; 0.0 when the last try succeeded."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def run(self, command: str | Sequence[str], *, given: bytes = b"", timeout_s: float = ANSWER_S) -> Done:
        """Run a command to its end, with `given` on its standard input; blocking. A list is quoted for the shell."""

        async def work() -> Done:
            async with self.process(command) as process:
                try:
                    out, err = await process.communicate(given)
                except BrokenPipeError:  # it ended before it read what it was given
                    out, err = await process.communicate()
                assert isinstance(out, bytes) and isinstance(err, bytes)
                code = process.returncode
                return Done(255 if code is None else 128 - code if code < 0 else code, out, err)

        return wait(self.explained(work(), timeout_s))

    def stream(self, command: str | Sequence[str], *, given: bytes = b"") -> Iterator[bytes]:
        """Yield a command's standard output as it comes; closing the generator ends its channel, not the connection."""

        async def begin() -> tuple[Any, SSHClientProcess[bytes]]:
            context = self.process(command)
            process = await context.__aenter__()
            with suppress(BrokenPipeError):  # as above
                process.stdin.write(given)
                process.stdin.write_eof()
            return context, process

        context, process = wait(self.explained(begin(), ANSWER_S))
        try:
            while piece := wait(self.explained(process.stdout.read(PIECE), None)):
                yield piece
        finally:
            wait(context.__aexit__(None, None, None))

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _loop().call_soon_threadsafe(connection.abort)

    # -- on the loop's thread ------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def process(self, command: str | Sequence[str]) -> AsyncIterator[SSHClientProcess[bytes]]:
        """Begin a command over the connection."""
        line = command if isinstance(command, str) else shlex.join(command)
        connection = await self.connection()
        process: SSHClientProcess[bytes] = await connection.create_process(line, encoding=None)
        try:
            yield process
        finally:
            process.close()

    async def connection(self) -> SSHClientConnection:
        """Return the open connection, or open it."""
        self._opening = self._opening or asyncio.Lock()
        async with self._opening:
            if self._connection is None or self._connection.is_closed():
                self._connection = await self._open()
            return self._connection

    async def _open(self) -> SSHClientConnection:
        try:
            import asyncssh
        except ModuleNotFoundError:
            raise MissingExtra("SSH", "ssh") from None
        asked = {"port": self.host.port, "username": self.host.user, "known_hosts": self.host.known_hosts}
        given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        if self.host.identity is not None:
            given["client_keys"] = [str(Path(self.host.identity).expanduser())]
            given["ignore_encrypted"] = True  # the agent has it then
        if self.host.known_hosts is not None:
            given["known_hosts"] = str(Path(self.host.known_hosts).expanduser())
        options = await asyncssh.SSHClientConnectionOptions.construct(
            host=self.host.address, config=(), connect_timeout=CONNECT_S, login_timeout=CONNECT_S, keepalive_interval=KEEPALIVE_S,
            keepalive_count_max=3, compression_algs=None, **given)  # fmt: skip
        if options.known_hosts is None:  # ~/.ssh/config says `UserKnownHostsFile none`
            raise BackendError(
                f"{self.host.label}: ~/.ssh/config turns the check of host keys off", "name a file: known_hosts"
            )
        through = self.host.through
        tunnel = await connect_lazily(through).connection() if through else ()
        return await asyncssh.connect(self.host.address, options=options, tunnel=tunnel)

    async def explained(self, work: Coroutine[Any, Any, _T], timeout_s: float | None) -> _T:
        """Wait for work on the connection, and turn what went wrong into an error of ours."""
        if self.refused is not None and time.monotonic() - self.refused[0] < PAUSE_S:
            work.close()
            raise self.refused[1]
        try:
            found = await asyncio.wait_for(work, timeout_s)
        except CloudtrainError as error:
            if not isinstance(error, Unreachable):
                self.refused = self._since = None  # it was the machine that said so
            raise
        except BaseException as error:
            known = self._explain(error, timeout_s)
            if known is None:
                raise
            self.refused = (time.monotonic(), known)
            if isinstance(known, Unreachable):
                self._since = self._since or time.monotonic()
                if self._connection is not None:
                    self._connection.abort()
                self._connection = None
            raise known from None
        self.refused = self._since = None
        return found

    def _explain(self, error: BaseException, timeout_s: float | None) -> CloudtrainError | None:
        """Return our error for one of asyncssh or the system, None for any other. The only place that knows theirs."""
        import asyncssh

        label, place = self.host.label, f"-p {self.host.port} " if self.host.port else ""
        if isinstance(error, asyncssh.HostKeyNotVerifiable):
            file = self.host.known_hosts or "~/.ssh/known_hosts"
            scan = f"ssh-keyscan {place}{self.host.address} >> {file}"
            if self._is_known():
                return BackendError(
                    f"{label} shows another host key than the one in {file}",
                    f"if the machine was made anew, remove the old line, then {scan}; otherwise somebody stands between",
                )
            return BackendError(
                f"{label} shows a host key that {file} does not hold",
                f"{scan}, and compare its fingerprint with the machine's own",
            )
        if isinstance(error, asyncssh.PermissionDenied):
            return BackendError(
                f"{label} accepts none of the keys that were offered", "ssh-copy-id, ssh-add, or name one: identity"
            )
        prohibited = (
            asyncssh.OPEN_ADMINISTRATIVELY_PROHIBITED
        )  # any other code is also that of a connection that breaks
        if isinstance(error, asyncssh.ChannelOpenError) and error.code == prohibited and self.host.jump is None:
            return BackendError(f"{label} opens no session: {error.reason}")
        if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyExportError | asyncssh.ConfigParseError):
            return BackendError(f"{label}: {error}")
        if isinstance(error, TimeoutError):
            return Unreachable(f"{label} does not answer within {timeout_s or CONNECT_S:g} s")
        if isinstance(error, asyncssh.Error):
            return Unreachable(f"{label} cannot be reached: {error.reason}")
        if isinstance(error, OSError | EOFError | asyncio.IncompleteReadError):
            said = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
            return Unreachable(f"{label} cannot be reached: {said}")
        return None

    def _is_known(self) -> bool:
        """Return whether known_hosts holds some key of this host."""
        import asyncssh

        file = Path(self.host.known_hosts or "~/.ssh/known_hosts").expanduser()
        try:
            return bool(asyncssh.match_known_hosts(str(file), self.host.address, "", self.host.port or 22)[0])
        except (OSError, ValueError):
            return False


def connect(host: Host) -> Remote:
    """Return the connection to a host, open; blocking. Raises Unreachable, BackendError, MissingExtra."""
    remote = connect_lazily(host)
    wait(remote.explained(remote.connection(), CONNECT_S * 3))
    return remote


def connect_lazily(host: Host) -> Remote:
    """Return this process's connection to a host; it is opened when it is needed."""
    with _GUARD:
        return _REMOTES.setdefault(host, Remote(host))


def close_all() -> None:
    """Close every connection of this process."""
    with _GUARD:
        remotes = list(_REMOTES.values())
        _REMOTES.clear()
    for remote in remotes:
        remote.close()


def everywhere(function: Callable[[_R], _T], items: Iterable[_R]) -> list[_T | CloudtrainError]:
    """Call a function for several items at once; returns its results in order, an error of ours as a result."""

    def call(item: _R) -> _T | CloudtrainError:
        try:
            return function(item)
        except CloudtrainError as error:
            return error

    whole = list(items)
    if len(whole) < 2:
        return [call(item) for item in whole]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(whole), MOST_AT_ONCE)) as pool:
        return list(pool.map(call, whole))


def begin(work: Coroutine[Any, Any, _T]) -> Future[_T]:
    """Begin something on the loop's thread."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def result(future: Future[_T]) -> _T:
    """Wait for what was begun; a Ctrl-C here ends it there."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def wait(work: Coroutine[Any, Any, _T]) -> _T:
    """Do something on the loop's thread and wait for it."""
    return result(begin(work))


_GUARD = threading.Lock()
_REMOTES: dict[Host, Remote] = {}
_LOOPS: list[asyncio.AbstractEventLoop] = []


def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process's connections; its thread ends with the process."""
    with _GUARD:
        if not _LOOPS:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="cloudtrain-ssh", daemon=True).start()
            _LOOPS.append(loop)
        return _LOOPS[0]
