"""Start the ranks of this node, read their output, collect their exit codes in the order of their ends."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from . import processes
from .grace import LOOK_S, Grace, find_deaf
from .log import CHUNK, Log, Splitter
from .loop import Loop

TAIL = 8192  # bytes that each rank printed last
MOST_READS = 8  # of what a pipe held when its rank ended; a child of the rank may write for ever


class _Rank:
    def __init__(self, rank: int, pid: int, pipe: int, splitter: Splitter, is_shell: bool) -> None:
        self.rank, self.pid, self.pipe, self.splitter, self.is_shell = rank, pid, pipe, splitter, is_shell
        self.code: int | None = None
        self.tail = b""


class ExitOrder:
    """Records the order in which watched processes ended.

    `waitpid` returns children in the order in which they were started. A pidfd becomes ready when its process exits, and
    Linux's epoll lists descriptors in the order in which they became ready. Elsewhere the order is not known.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") and hasattr(os, "pidfd_open") else None
        self._pids: dict[int, int] = {}
        self._order: list[int] = []

    def watch(self, pid: int) -> None:
        """Watch a child that has not been waited for."""
        if self._epoll is None:
            return
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return  # an old kernel, or a sandbox without this call
        self._epoll.register(descriptor, select.EPOLLIN)
        self._pids[descriptor] = pid

    def sorted(self, ended: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return (pid, wait status) pairs with the first that ended first; unknown ones stay behind, as they are."""
        if self._epoll is not None and self._pids:
            for descriptor, _ in self._epoll.poll(0):
                self._epoll.unregister(descriptor)
                os.close(descriptor)
                self._order.append(self._pids.pop(descriptor))
        position = {pid: number for number, pid in enumerate(self._order)}
        return sorted(ended, key=lambda end: position.get(end[0], len(position)))


class Ranks:
    """All ranks of this node. `ended(rank, wait status, at)` is called once for each; output goes to the log."""

    def __init__(self, loop: Loop, log: Log, ended: Callable[[int, int, float], None]) -> None:
        self._loop, self._log, self._ended = loop, log, ended
        self.printed: Callable[[int, list[bytes]], None] | None = None  # is called with a rank and lines of it
        self._ranks: list[_Rank] = []
        self._by_pid: dict[int, _Rank] = {}
        self._deaths = ExitOrder()
        self._graces: list[Grace] = []  # of each rank, from a request to stop until it is killed
        self._look_at = 0.0
        self._deaf: dict[int, bytes] | None = None

    def start(self, rank: int, argv: list[str], env: dict[str, str], cwd: str) -> None:
        """Start one rank; raises OSError when its command cannot be executed."""
        read, write = os.pipe()
        try:
            pid = processes.spawn(argv, env, cwd, write)
        except OSError:
            os.close(read)
            raise
        finally:
            os.close(write)
        os.set_blocking(read, False)
        _widen(read)
        started = _Rank(rank, pid, read, Splitter(self._log), argv[0] in ("bash", "sh"))
        self._ranks.append(started)
        self._by_pid[pid] = started
        self._deaths.watch(pid)
        self._loop.watch(read, lambda: self._read(started), output=True)

    @property
    def running(self) -> list[int]:
        """The pids of ranks that have not ended."""
        return [rank.pid for rank in self._ranks if rank.code is None]

    @property
    def active(self) -> bool:
        """Whether a rank runs, or something that has been asked to stop still saves."""
        return bool(self.running) or any(grace.saving for grace in self._graces)

    @property
    def groups(self) -> tuple[int, ...]:
        """The process groups that were started: each rank leads one."""
        return tuple(rank.pid for rank in self._ranks)

    def reap(self, ended: list[tuple[int, int]]) -> None:
        """Take note of children that have ended, the first first; those that are no rank of ours were orphans."""
        at = self._loop.clock.now()
        for pid, status in self._deaths.sorted(ended):
            rank = self._by_pid.get(pid)
            if rank is not None and rank.code is None:
                rank.code = processes.exit_code(status)
                self._ended(rank.rank, status, at)

    def signal(self, number: int) -> None:
        """Send a signal to every rank, and not to its children. A shell passes nothing on, so its whole group gets it."""
        for rank in self._ranks:
            if rank.code is None:
                if rank.is_shell:
                    processes.kill_group(rank.pid, number)
                else:
                    processes.kill(rank.pid, number)

    def find_deaf(self) -> None:
        """Remember who ignores SIGTERM, for a stop by a scheduler that signals every process; to be called at times."""
        self._deaf = find_deaf()

    def terminate(self) -> None:
        """Ask every rank to save and stop; `look` goes on with it."""
        if not processes.HAS_PROC:
            self.signal(signal.SIGTERM)
        elif not self._graces:
            self._graces = [Grace(rank.pid, self._deaf) for rank in self._ranks]
            self.look()

    def look(self) -> None:
        """Send SIGTERM to those of a rank's processes whose turn it is now; to be called every LOOK_S."""
        now = self._loop.clock.monotonic()
        if self._graces and now >= self._look_at:
            self._look_at = now + LOOK_S
            stats = processes.descendants(os.getpid())
            for grace in self._graces:
                grace.look(stats, now)

    def kill(self) -> None:
        """Kill every rank with its process group."""
        self._graces = []  # `end_descendants` ends what is left
        for rank in self._ranks:
            if rank.code is None:
                processes.kill_group(rank.pid, signal.SIGKILL)

    def read(self, rank: int) -> str:
        """Read what a rank has printed until now, and return the end of it."""
        newest = next((each for each in reversed(self._ranks) if each.rank == rank), None)
        if newest is None:
            return ""
        self._read_some(newest)
        return newest.tail.decode(errors="replace")

    def forget(self) -> None:
        """Leave out ranks that have ended with all that they started: a process of others may get their pid."""
        self._graces = []
        for rank in [each for each in self._ranks if each.code is not None]:
            self._read_some(rank)
            self._close(rank)
            self._ranks.remove(rank)
            self._by_pid.pop(rank.pid, None)

    def drain(self) -> None:
        """Read what is left in the pipes, the last lines without an end too, and close them."""
        for rank in self._ranks:
            while rank.pipe >= 0 and self._read(rank):
                pass
            self._close(rank)

    def _read_some(self, rank: _Rank) -> None:
        for _ in range(MOST_READS):
            if rank.pipe < 0 or not self._read(rank):
                return

    def _read(self, rank: _Rank) -> bool:
        """Read once; False when nothing is there for now or for ever."""
        try:
            data = os.read(rank.pipe, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(rank)
            return False
        rank.tail = (rank.tail + data)[-TAIL:]
        lines = rank.splitter.feed(data)
        self._log.lines(rank.rank, lines)
        if self.printed is not None:
            self.printed(rank.rank, lines)
        return True

    def _close(self, rank: _Rank) -> None:
        if rank.pipe >= 0:
            self._loop.unwatch(rank.pipe)
            os.close(rank.pipe)
            rank.pipe = -1
            lines = rank.splitter.end()
            self._log.lines(rank.rank, lines)
            if self.printed is not None:
                self.printed(rank.rank, lines)


def _widen(pipe: int) -> None:
    """Let a pipe hold a mebibyte, so that a rank that prints much seldom waits for us (Linux)."""
    try:
        import fcntl

        fcntl.fcntl(pipe, 1031, CHUNK)  # F_SETPIPE_SZ, which has a name from Python 3.10 on
    except OSError:
        pass  # the user's limit of pipe pages, or another system: it stays as it is


def manner(status: int) -> str:
    """Return how a process ended by its wait status, in words.

    An exit code above 128 is how a shell, or a script that passes on the code of its own child, reports a signal.
    """
    code = processes.exit_code(status)
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        name = ""
    if os.WIFSIGNALED(status):
        return f"was killed by signal {code - 128}" + (f" ({name})" if name else "")
    return f"exited with code {code}" + (f", the code of a program that was killed by {name}" if name else "")
