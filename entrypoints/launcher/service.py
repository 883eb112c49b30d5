"""A service on its node: when it is ready, when it is restarted, and why the attempt ends with it."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable

from . import processes
from .loop import Loop
from .ranks import Ranks, manner
from .world.cluster import LOOPBACK

TYPE_CHECKING = False  # importing typing would cost every job some milliseconds
if TYPE_CHECKING:
    from .log import Log
    from .manifest import Role

LOOK_S = 0.1  # between two looks whether it is ready
ANSWER_S = 5.0  # that an answer to an HTTP request may take
CONNECT_S = 0.5
FIRST_PAUSE_S = 1.0  # before a restart; each is twice as long as the one before
LONGEST_PAUSE_S = 60.0
EXIT_SERVICE = 1  # of a run whose service ended with 0 before the main role
LEAST_GRACE_S = 5.0  # after the main role, where a stop has used up the grace
LINE = 300  # characters of the last line in a verdict


class Service:
    """What a node knows of the service that it runs. `ready` is called once, when it is ready."""

    def __init__(self, role: Role, loop: Loop, ready: Callable[[], object]) -> None:
        self._role, self._loop, self._clock, self._report = role, loop, loop.clock, ready
        self._check = _Check(role["ready"], loop) if role["ready"] else None
        self._ready = self._check is None
        self._began = self._look_at = 0.0
        self._restarts = 0
        self._restart_at: float | None = None
        self._stop_at: float | None = None
        self._last = ""
        self.host = LOOPBACK  # this node's address, as others see it
        self.over = False  # it is not restarted any more

    def began(self) -> None:
        """Its ranks have been started, for the first time or again."""
        self._look_at = now = self._clock.monotonic()
        self._began, self._restart_at = self._began or now, None

    def stop(self) -> None:
        """The main role has been asked to stop."""
        if self._stop_at is None:
            self._stop_at = self._clock.monotonic()

    def patience_after(self, grace_s: float) -> float:
        """Return how long it may take to end after the main role: what a stop has left of the grace, else all of it."""
        used_s = 0.0 if self._stop_at is None else self._clock.monotonic() - self._stop_at
        return max(LEAST_GRACE_S, grace_s - used_s)

    def printed(self, lines: list[bytes]) -> None:
        """Take note of lines of its log."""
        self._last = next((line for line in reversed(lines) if line.strip()), b"").decode()[:LINE] or self._last
        if self._check is not None and not self._ready and self._check.in_lines(lines):
            self._be_ready()

    def watch(self, start: Callable[[], object], refuse: Callable[[str], object]) -> None:
        """Start its ranks again where the pause is over; end the attempt where it does not become ready in time."""
        if self.is_due:
            start()
        elif late := self.look():
            refuse(late)

    def rank_ended(self, ranks: Ranks, log: Log, rank: int, status: int) -> str:
        """A rank of it has ended; return why the attempt ends with it, or end the others and return "": a restart follows."""
        if self.has_ended:
            return ""
        ranks.read(rank)
        verdict = self.ended(manner(status))
        if not verdict:
            log.say(f"rank {rank} of the service {manner(status)}: {self.describe_restart()}")
            ranks.reap(processes.end_descendants(ranks.groups))  # what it left may hold its port
            ranks.forget()
        return verdict

    def look(self) -> str:
        """Look whether it is ready, where it is time to; return why the attempt ends where it took too long, else ""."""
        now = self._clock.monotonic()
        if self._ready or not self._began or self.over or now < self._look_at:
            return ""
        self._look_at = now + LOOK_S
        if self._check is not None and self._check.look(self.host):
            self._be_ready()
        elif now - self._began >= self._role["ready_s"]:
            self.over = True
            limit = f"{self._role['ready_s']:g} s (ready_timeout)"
            at = "" if self._role["ready"].startswith("line:") else f" at {self.host}"
            return self._describe(f"did not become ready ({self._role['ready']}{at}) within {limit}")
        return ""

    def ended(self, manner: str) -> str:
        """A rank of it has ended; return why the attempt ends with it, or "" where it is restarted."""
        if self._restarts >= self._role["restart"]:
            self.over = True
            again = f" after {self._restarts} restart{'s' * (self._restarts > 1)}" if self._restarts else ""
            return self._describe(f"{manner}{again}")
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self._restarts)
        self._restarts += 1
        self._restart_at = self._clock.monotonic() + pause_s
        return ""

    @property
    def has_ended(self) -> bool:
        """Whether it is to be restarted, or never again: more ranks that end change nothing."""
        return self._restart_at is not None or self.over

    def describe_restart(self) -> str:
        """Return what the log says of a restart that is to come."""
        left_s = (self._restart_at or 0.0) - self._clock.monotonic()
        return f"it is restarted in {left_s:.0f} s ({self._restarts} of {self._role['restart']})"

    @property
    def is_due(self) -> bool:
        """Whether it is to be restarted now."""
        return self._restart_at is not None and self._clock.monotonic() >= self._restart_at

    @property
    def patience_s(self) -> float:
        """How long the loop may sleep."""
        if self._restart_at is not None:
            return max(0.0, self._restart_at - self._clock.monotonic())
        return LOOK_S if self._began and not self._ready else 1.0

    def _be_ready(self) -> None:
        self._ready = True
        self._report()

    def _describe(self, what: str) -> str:
        return f"role {self._role['name']} {what}" + (f'; its last line: "{self._last}"' if self._last else "")


class _Check:
    """How a service shows that it is ready: `tcp://:PORT`, `http://:PORT/PATH` or `line:TEXT`."""

    def __init__(self, text: str, loop: Loop) -> None:
        self._kind, _, rest = text.partition(":")
        self._loop = loop
        self._connection: socket.socket | None = None
        self._answered, self._asked_at = False, 0.0
        self._text = rest.encode() if self._kind == "line" else b""
        port, _, path = rest[3:].partition("/") if self._kind != "line" else ("0", "", "")
        self._port, self._path = int(port), f"/{path}"

    def in_lines(self, lines: list[bytes]) -> bool:
        """Return whether one of the lines says it."""
        return bool(self._text) and any(self._text in line for line in lines)

    def look(self, host: str) -> bool:
        """Return whether its port answers at this address or at loopback; an HTTP request is answered at a later look."""
        if self._text or self._answered:
            return self._answered
        now = self._loop.clock.monotonic()
        if self._connection is not None and now - self._asked_at < ANSWER_S:
            return False
        self._close()
        connection = self._connect(host)
        if connection is None:
            return False
        if self._kind == "tcp":
            connection.close()
            return True
        self._connection, self._asked_at = connection, now
        self._loop.watch(connection.fileno(), self._read)
        try:
            connection.sendall(f"GET {self._path} HTTP/1.0\r\nHost: localhost:{self._port}\r\n\r\n".encode())
        except OSError:
            self._close()
        return False

    def _connect(self, host: str) -> socket.socket | None:
        for address in dict.fromkeys((host, LOOPBACK)):
            try:
                made = socket.create_connection((address, self._port), CONNECT_S)
            except OSError:
                continue
            if made.getsockname() != made.getpeername():  # else it has met itself, where nothing listens
                return made
            made.close()
        return None

    def _read(self) -> None:
        try:
            answer = self._connection.recv(64) if self._connection else b""
        except OSError:
            answer = b""
        self._answered = re.match(rb"HTTP/\S+ 2\d\d", answer) is not None
        self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._loop.unwatch(self._connection.fileno())
            self._connection.close()
            self._connection = None


def check_free(port: int) -> None:
    """Raise OSError where another process of this machine listens on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            what = f"port {port} is not free on {socket.gethostname()}, and the role"
            raise OSError(error.errno, error.strerror, what) from None
