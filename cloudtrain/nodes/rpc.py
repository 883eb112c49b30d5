"""Call the agent's operations (agent.py) over SSH, on another machine.

Its Python runs agent.py, which is sent as text; nothing is installed there. One agent serves a connection
while there are requests. Several threads may send requests at once; answers come in the order of the requests.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BackendError, Unreachable
from cloudtrain.nodes import event_loop, ssh
from cloudtrain.nodes.agents import ANSWER_S, Agent, Answer
from cloudtrain.nodes.ssh import Host, Remote
from cloudtrain.nodes.ssh_command import python_line

if TYPE_CHECKING:
    from concurrent.futures import Future

    from asyncssh import SSHClientProcess

CHUNK_BYTES = 1 << 20  # bytes of a log in one answer
# The program that arrives first; it imports the modules that were sent with it.
_BOOTSTRAP = "import sys; exec(sys.stdin.buffer.read(int(sys.stdin.buffer.readline())))"
READY = b"cloudtrain: the agent is ready\n"
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
sys.stdout.buffer.write({ready!r})
sys.stdout.buffer.flush()
agent.serve()
"""
SENT_MODULES = (
    "nodes.agent",
    "nodes.bundles",
    "nodes.removal",
    "nodes.supervisor",
    "nodes.files",
    "nodes.process",
    "source.archive",
    "source.untrusted",
    "errors",
)  # modules of cloudtrain that an agent may import
EMPTY_PACKAGES = ("cloudtrain", "cloudtrain.nodes", "cloudtrain.source")  # their packages


class RemoteAgent:
    """Runs the agent's operations on another machine.

    Args:
        setup: shell lines to run first (module load, conda activate).
        process: which of this connection's processes answers. One answers its requests one after the other: what may
            take long, such as a command, gets another.
    """

    def __init__(self, host: Host, python: str = "python3", setup: Sequence[str] = (), process: str = "") -> None:
        self.host, self._process = host, process
        self._command = python_line(python, ["-c", _BOOTSTRAP], setup)

    @property
    def label(self) -> str:
        return self.host.label

    @property
    def remote(self) -> Remote:
        return ssh.connect_lazily(self.host)

    @property
    def unreachable_s(self) -> float:
        return self.remote.unreachable_s

    def ask(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Answer:
        return event_loop.wait_result(self.begin(operation, given, timeout_s=timeout_s, **arguments))

    def begin(
        self, operation: str, given: bytes | None = None, *, timeout_s: float = ANSWER_S, **arguments: Any
    ) -> Future[Answer]:
        request = {"operation": operation, "arguments": arguments, "size": len(given) if given is not None else 0}
        data = json.dumps(request).encode() + b"\n" + (given or b"")
        return event_loop.begin(self.remote.translate_errors(self._ask(data), timeout_s))

    async def _ask(self, data: bytes) -> Answer:
        for again in (True, False):
            session = await self._session()
            try:
                return await session.ask(data)
            except AgentEnded as error:
                # An idle agent has ended. Every operation is safe to repeat.
                if not again or not session.answered:
                    raise Unreachable(f"{self.host.label}: its Python ended: {error}") from None
        raise AssertionError

    async def _session(self) -> _Session:
        connection = await self.remote.connection()
        sessions: dict[tuple[str, str], asyncio.Task[_Session]] = connection.__dict__.setdefault(
            "cloudtrain_sessions", {}
        )
        key = (self._command, self._process)
        task = sessions.get(key)
        if task is None or (task.done() and not _is_live(task)):
            task = sessions[key] = asyncio.ensure_future(self._begin(connection))
        return await asyncio.shield(task)

    async def _begin(self, connection: Any) -> _Session:
        process = await connection.create_process(self._command, encoding=None)
        with suppress(BrokenPipeError):  # it may have ended already; its error output is read below
            process.stdin.write(_program())
        printed: deque[bytes] = deque(maxlen=5)
        while (line := await process.stdout.readline()) and not line.endswith(READY):
            printed.append(line)  # of a .bashrc, or of a shell that takes no commands
        if line:
            return _Session(process, self.host.label)
        errors = await process.stderr.read()
        await process.wait_closed()
        self.remote.drop(connection)  # its login shell is that of the moment when it was opened
        if not any(_is_live(task) for task in connection.cloudtrain_sessions.values()):
            connection.close()
        if errors.strip():
            raise BackendError(
                f"{self.host.label}: its Python does not start: {telling_line(errors)}",
                "set another interpreter (python), or the shell lines that it needs first (setup)",
            )
        if process.exit_status in (None, -1):  # killed, or the connection broke
            raise Unreachable(f"{self.host.label}: its Python ended before it was ready")
        raise BackendError(
            f"{self.host.label}: the login shell ended with exit code {process.exit_status} before Python started: "
            f"{telling_line(b''.join(printed)) or 'it printed nothing'}",
            "let the account have a shell that runs commands; see: ssh HOST true",
        )


def begin_each(agent: Agent, name: str, arguments: Sequence[Mapping[str, Any]]) -> Future[Answer]:
    """Send one request that runs an operation for each of several arguments; `read_each` reads its answer."""
    return agent.begin("each", name=name, arguments=[dict(each) for each in arguments])


def read_each(agent: Agent, future: Future[Answer]) -> list[Any]:
    """Return the value of each, or the BackendError of one that failed; raises BackendError where the machine did not answer."""
    answers = json.loads(event_loop.wait_result(future).data)
    return [BackendError(f"{agent.label}: {it['error']}") if "error" in it else it["value"] for it in answers]


def remote_log_reader(
    logs: Sequence[tuple[Agent, str]], missing: set[int]
) -> Callable[[Sequence[int]], list[Iterator[bytes] | None]]:
    """Return the `ReadPieces` function for `logs.merge` that reads the logs of other machines, all at once.

    `logs` has agent and path of each. The index of a machine that does not answer is added to `missing`.
    """

    def begin(node: int, offset: int) -> Future[Answer]:
        agent, path = logs[node]
        return agent.begin("read", path=path, offset=offset, limit=CHUNK_BYTES)

    def pieces(node: int, offset: int, piece: bytes) -> Iterator[bytes]:
        while piece:
            offset += len(piece)
            more = begin(node, offset) if len(piece) == CHUNK_BYTES else None  # requested while this one is parsed
            yield piece
            try:
                piece = event_loop.wait_result(more).data if more else b""
            except Unreachable:
                return

    def ask(offsets: Sequence[int]) -> list[Iterator[bytes] | None]:
        streams: list[Iterator[bytes] | None] = []
        unreachable = set()
        for node, future in enumerate([begin(node, offset) for node, offset in enumerate(offsets)]):
            try:
                piece = event_loop.wait_result(future).data
                streams.append(pieces(node, offsets[node], piece) if piece else None)
            except Unreachable:
                unreachable.add(node)
                streams.append(None)
        missing.intersection_update(unreachable)
        missing.update(unreachable)
        return streams

    return ask


def _is_live(task: asyncio.Task[_Session]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None and not task.result().over


def telling_line(output: bytes) -> str:
    """Return the line of an error output that says what is wrong, by default the last one; "" without any.

    fish and csh show the place of an error in the lines after it.
    """
    lines = [line.strip()[:300] for line in output.decode(errors="replace").splitlines() if _WORDS.search(line)]
    return next((line for line in reversed(lines) if _FAILURES.search(line)), lines[-1] if lines else "")


_WORDS = re.compile(r"[^\W\d_]{2}")
_FAILURES = re.compile(
    r"error|not found|unknown|no such|not available|denied|cannot|can't|no space|expired|not exist", re.I
)


class AgentEnded(Exception):
    """The agent has ended, but its connection is open."""


class _Session:
    """One running agent: sends requests at once and matches the answers in order."""

    def __init__(self, process: SSHClientProcess[bytes], label: str) -> None:
        self._process, self._label = process, label
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self.over = False
        self.answered = False
        self._reader = asyncio.ensure_future(self._read())

    async def ask(self, data: bytes) -> Answer:
        if self.over:
            raise AgentEnded("it was idle")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        try:  # the channel may close before the reader notices
            self._process.stdin.write(data)
            self._waiting.append(future)
            if len(data) > ssh.CHUNK_BYTES:
                await self._process.stdin.drain()
        except BrokenPipeError:
            self.over = True
            future.cancel()
            raise AgentEnded("it ended") from None
        return await future

    async def _read(self) -> None:
        problem: BaseException = AgentEnded("it ended")
        try:
            while line := await self._process.stdout.readline():
                header = json.loads(line)
                data = await self._process.stdout.readexactly(header["size"]) if header["size"] else b""
                self.answered = True
                future = self._waiting.popleft()
                if future.cancelled():
                    continue
                if "error" in header:
                    future.set_exception(BackendError(f"{self._label}: {header['error']}"))
                else:
                    future.set_result(Answer(header["value"], data))
            problem = AgentEnded(telling_line(await self._process.stderr.read()) or "it ended")
        except (Exception, asyncio.CancelledError) as error:
            problem = error
        self.over = True
        for future in self._waiting:
            if not future.done():
                future.set_exception(problem)


@cache
def _program() -> bytes:
    """Return what an agent reads first: the length of the program, and the program."""
    top = Path(__file__).parents[1]
    texts = {f"cloudtrain.{name}": (top / f"{name.replace('.', '/')}.py").read_text("utf-8") for name in SENT_MODULES}
    text = _PROGRAM.format(ready=READY, modules=json.dumps({**dict.fromkeys(EMPTY_PACKAGES, ""), **texts})).encode()
    return b"%d\n%b" % (len(text), text)
