"""The operations on a node's folder (agent.py), asked for in this process or on a machine behind SSH.

The machine's own Python runs agent.py, which is sent as text: nothing is installed there. One agent serves a connection
for as long as it is asked; several threads may ask it at once, answers come in the order of the questions.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import agent, ssh
from cloudtrain.nodes.ssh import ANSWER_S, Host, Remote

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncssh import SSHClientProcess

CHUNK = 1 << 20  # bytes of a log in one answer
# What arrives first: a program that finds the modules which came with it, compiling those that are imported.
_BOOT = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
_PROGRAM = """
import json, sys
if sys.version_info < (3, 9):
    sys.exit("Python 3.9 or newer is needed, this is " + sys.version.split()[0])
from importlib.machinery import ModuleSpec
texts = json.loads({modules!r})
class Sent:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=not texts[name]) if name in texts else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(texts[module.__name__], module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Sent())
from cloudtrain.nodes import agent
sys.stdout.buffer.write(b"ready\\n")
sys.stdout.buffer.flush()
agent.serve()
"""
SENT = (
    "nodes.agent",
    "nodes.supervisor",
    "nodes.files",
    "nodes.process",
    "source.archive",
    "errors",
)  # modules of cloudtrain that an agent may import
EMPTY = ("cloudtrain", "cloudtrain.nodes", "cloudtrain.source")  # their packages


class Answer(NamedTuple):
    """What an operation returned: a value, or bytes."""

    value: Any
    data: bytes = b""


class Asked(Protocol):
    """A place whose node folders can be asked for."""

    @property
    def label(self) -> str: ...

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        """Ask without waiting for the answer; several questions are on their way at once."""
        ...

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        """Do an operation of agent.OPERATIONS there and return what it returned; blocking. Raises BackendError."""
        ...


class Here:
    """This machine."""

    label = "this machine"

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        from concurrent.futures import Future

        future: Future[Answer] = Future()
        try:
            future.set_result(self.ask(operation, given, **arguments))
        except BackendError as error:
            future.set_exception(error)
        return future

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        if given is not None:
            arguments["given"] = given
        try:
            value = agent.OPERATIONS[operation](**arguments)
        except (OSError, ValueError) as error:
            raise BackendError(f"{operation} failed: {error}") from None
        return Answer(None, value) if isinstance(value, bytes) else Answer(value)


class There:
    """Another machine. `setup` are shell lines before its Python is looked for (module load, conda activate)."""

    def __init__(self, host: Host, python: str = "python3", setup: Sequence[str] = ()) -> None:
        self.host = host
        self._command = f"exec {shlex.quote(python)} -c {shlex.quote(_BOOT)}"
        if setup:
            lines = "\n".join(setup)
            self._command = "exec bash -lc " + shlex.quote(f"{{ {lines}\n}} </dev/null >&2\n{self._command}")

    @property
    def label(self) -> str:
        return self.host.label

    @property
    def remote(self) -> Remote:
        return ssh.connect_lazily(self.host)

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        return ssh.result(self.begin(operation, given, timeout_s=timeout_s, **arguments))

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        request = {"operation": operation, "arguments": arguments, "size": len(given) if given is not None else 0}
        data = json.dumps(request).encode() + b"\n" + (given or b"")
        return ssh.begin(self.remote.explained(self._ask(data), timeout_s))

    async def _ask(self, data: bytes) -> Answer:
        for again in (True, False):
            session = await self._session()
            try:
                return await session.ask(data)
            except Ended as ended:
                # An agent that was idle for long has gone; every operation may be asked for twice.
                if not again or not session.answered:
                    raise Unreachable(f"{self.host.label}: its Python ended: {ended}") from None
        raise AssertionError

    async def _session(self) -> _Session:
        connection = await self.remote.connection()
        sessions: dict[str, asyncio.Task[_Session]] = connection.__dict__.setdefault("cloudtrain_sessions", {})
        task = sessions.get(self._command)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().over)):
            task = sessions[self._command] = asyncio.ensure_future(self._begin(connection))
        return await asyncio.shield(task)

    async def _begin(self, connection: Any) -> _Session:
        process = await connection.create_process(self._command, encoding=None)
        with suppress(BrokenPipeError):  # it may be gone already; what it said is read below
            process.stdin.write(_program())
        if await process.stdout.readline() != b"ready\n":
            words = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
            if not words:  # killed, or its connection broke: an interpreter that cannot work says why
                raise Unreachable(f"{self.host.label}: its Python ended before it was ready")
            raise BackendError(
                f"{self.host.label}: its Python does not start: {words[-1]}",
                "name another interpreter (python), or what has to come before it (setup)",
            )
        return _Session(process, self.host.label)


def look(
    logs: Sequence[tuple[Asked, str]], missing: set[int]
) -> Callable[[Sequence[int]], list[Iterator[bytes] | None]]:
    """Return what `nodes.merged` reads logs of other machines with: place and path of each.

    All are asked at once. A machine that does not answer has nothing to say for now, and its number is in `missing`.
    """

    def begin(node: int, offset: int) -> Future[Answer]:
        there, path = logs[node]
        return there.begin("read", path=path, offset=offset, limit=CHUNK)

    def pieces(node: int, offset: int, piece: bytes) -> Iterator[bytes]:
        while piece:
            offset += len(piece)
            more = begin(node, offset) if len(piece) == CHUNK else None  # on its way while this one is taken apart
            yield piece
            try:
                piece = ssh.result(more).data if more else b""
            except Unreachable:
                return

    def ask(offsets: Sequence[int]) -> list[Iterator[bytes] | None]:
        found: list[Iterator[bytes] | None] = []
        silent = set()
        for node, future in enumerate([begin(node, offset) for node, offset in enumerate(offsets)]):
            try:
                piece = ssh.result(future).data
                found.append(pieces(node, offsets[node], piece) if piece else None)
            except Unreachable:
                silent.add(node)
                found.append(None)
        missing.intersection_update(silent)
        missing.update(silent)
        return found

    return ask


class Ended(Exception):
    """The agent is gone, its connection is not."""


class _Session:
    """One agent: questions go out at once, answers are handed to who asked first."""

    def __init__(self, process: SSHClientProcess[bytes], label: str) -> None:
        self._process, self._label = process, label
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self.over = False
        self.answered = False
        self._reader = asyncio.ensure_future(self._read())

    async def ask(self, data: bytes) -> Answer:
        if self.over:
            raise Ended("it was idle")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:  # the channel closes before the reader has heard of it
            self._process.stdin.write(data)
            self._waiting.append(future)
            if len(data) > ssh.PIECE:
                await self._process.stdin.drain()
        except BrokenPipeError:
            self.over = True
            future.cancel()
            raise Ended("it ended") from None
        return await future

    async def _read(self) -> None:
        problem: BaseException = Ended("it ended")
        try:
            while line := await self._process.stdout.readline():
                head = json.loads(line)
                data = await self._process.stdout.readexactly(head["size"]) if head["size"] else b""
                self.answered = True
                future = self._waiting.popleft()
                if future.cancelled():
                    continue
                if "error" in head:
                    future.set_exception(BackendError(f"{self._label}: {head['error']}"))
                else:
                    future.set_result(Answer(head["value"], data))
            words = (await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
            problem = Ended(words[-1] if words else "it ended")
        except (Exception, asyncio.CancelledError) as error:
            problem = error
        self.over = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(problem)


@cache
def _program() -> bytes:
    """Return what an agent reads first: the length of a program, and the program."""
    top = Path(__file__).parents[1]
    texts = {f"cloudtrain.{name}": (top / f"{name.replace('.', '/')}.py").read_text("utf-8") for name in SENT}
    text = _PROGRAM.format(modules=json.dumps({**dict.fromkeys(EMPTY, ""), **texts})).encode()
    return b"%d\n%b" % (len(text), text)
