"""Hand a run to the watcher of its home, one process for all runs of this host; start that process where none lives.

The environment of this shell goes with the run, over a private socket or the new process's standard input: it is neither
stored nor visible in /proc. The watcher confirms once it has the run's lease. The socket takes one JSON message and gives
one back. It is in a folder that only its user can enter, and both sides check the other's user.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import secret_sources
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.history.leases import EnvironmentRecord
from cloudtrain.history.store import Store
from cloudtrain.nodes.process import detach
from cloudtrain.runs.planning import environment
from cloudtrain.runs.sending import watch_log

STARTING = "watch.starting"  # in the home: a watcher was started and is not elected yet
BIRTH_S = 30.0  # how long that may take; then it is taken for dead
DRIVER_S = 15.0  # the same of a sweep's process
PATIENCE_S = 2.0  # how long a submit waits for a watcher that another one has just started
CONFIRM_S = 5.0  # how long for its answer
LONGEST = 100  # bytes of a path in sockaddr_un, which has 104 or 108 (unix(7))
MOST_BYTES = 64 << 20  # of one message; an environment is at most 2 MiB (execve(2)), an answer has those of many runs
WAIT_S = 10.0  # for the next piece of a message
Message = dict[str, Any]


def start(store: Store, plan: Plan, *, instead: bool = False) -> None:
    """Hand a run to the watcher, which is started where there is none; blocks until it has confirmed, or was started.

    With `instead` of a watcher that has died this process is a reader: the run keeps what is known of its environment,
    and no other watcher is started while one that was started is not up yet.
    """
    message: Message = {
        "do": "watch",
        "run": plan.run_id,
        "environ": dict(os.environ),
        "sources": sorted(secret_sources(plan)),
        "own": not instead,
    }
    if _hand_over(store, message):
        return
    if _is_fresh(store.home / STARTING, store.clock):
        if instead:
            return
        end = store.clock.monotonic() + PATIENCE_S
        while _is_fresh(store.home / STARTING, store.clock) and store.clock.monotonic() < end:
            store.clock.sleep(0.02)
        if _hand_over(store, message):
            return
    # Should this one die at once, the next one finds the run, and asks with no credentials of another shell.
    if not instead:
        hidden = environment.hidden(os.environ, message["sources"])
        store.keep_environments({plan.run_id: EnvironmentRecord(environment.pointers(os.environ), hidden, hidden)})
    store.offer(plan.run_id)
    _start_process(store.home, message)


def look_now(store: Store, run_id: str) -> None:
    """Tell the watcher that something has happened to a run, such as a cancel; blocks for a moment."""
    if (holder := store.watcher()) and holder.is_valid(store.clock):
        call(holder.address, {"do": "look", "run": run_id}, CONFIRM_S)


def give_missing(store: Store, run_id: str) -> None:
    """Hand the watcher the variables of a run that it lacks and this shell has: values that are stored nowhere."""
    record = store.environments([run_id]).get(run_id)
    found = {name: os.environ[name] for name in record.lacking if name in os.environ} if record else {}
    if found and (holder := store.watcher()) and holder.is_valid(store.clock):
        call(holder.address, {"do": "fill", "run": run_id, "environ": found}, CONFIRM_S)


def is_newer(version: str, other: str) -> bool:
    """Return whether a cloudtrain replaces the watcher of another one."""
    return _version_key(version) > _version_key(other)


@cache
def own_version() -> str:
    """Return this cloudtrain's version and when its newest module was changed: an upgrade in place is newer too."""
    from cloudtrain.__about__ import __version__

    files = (f"{at}/{name}" for at, _, names in os.walk(Path(__file__).parents[2]) for name in names)
    newest = max(os.stat(file).st_mtime_ns for file in files if file.endswith(".py"))  # noqa: PTH116 - twice as fast
    return f"{__version__}+{newest}"


def starting(home: Path, sweep_id: str) -> Path:
    """Return the file that says that a sweep's process was started and has not taken its lease yet."""
    return home / "sweeps" / f"{sweep_id}.starting"


def drive(home: Path, sweep_id: str, shell: Mapping[str, str]) -> bool:
    """Start the process that drives a sweep, with the environment of a shell; returns at once.

    Returns False, and starts nothing, where one was started a moment ago that has not taken its lease yet.
    """
    marker = starting(home, sweep_id)
    if _is_fresh(marker, seconds=DRIVER_S):
        return False
    marker.parent.mkdir(exist_ok=True)
    marker.touch()
    command = ["nice", "-n", "5", sys.executable, "-m", "cloudtrain.sweeps.drive", str(home), sweep_id]
    base = environment.select(shell, environment.BASE)
    detach(command, given=json.dumps(dict(shell)).encode(), log=home / watch_log.NAME, env=base, cwd=Path("/"))
    return True


def _version_key(version: str) -> tuple[list[int], int]:
    number, _, changed = version.partition("+")
    return [int(part) for part in re.findall(r"\d+", number)], int(changed or 0)


def _hand_over(store: Store, message: Message) -> bool:
    """Send a run to the watcher; False where none confirms, or this cloudtrain is newer and replaces it."""
    holder = store.watcher()
    if holder is None or not holder.is_valid(store.clock) or is_newer(own_version(), holder.version):
        return False
    return call(holder.address, message, CONFIRM_S) is not None


def _is_fresh(marker: Path, clock: Clock = SYSTEM, seconds: float = BIRTH_S) -> bool:
    """Return whether a process that was started a moment ago may still take its lease."""
    with suppress(OSError):
        return abs(clock.now() - marker.stat().st_mtime) < seconds
    return False


def _start_process(home: Path, message: Message) -> None:
    with suppress(OSError):
        (home / STARTING).touch()
    command = [sys.executable, "-m", "cloudtrain.runs.watching.watch_all", str(home)]
    hidden = message["sources"]
    begins_with = {
        name: value for name, value in environment.select(os.environ, environment.BASE).items() if name not in hidden
    }
    detach(command, given=json.dumps([message]).encode(), log=home / watch_log.NAME, env=begins_with, cwd=Path("/"))


class Mailbox:
    """The watcher's side: `handle` is called with each message, in a thread of its own, and returns the answer."""

    def __init__(self, folder: Path, name: str, handle: Callable[[Message], Message]) -> None:
        self._handle = handle
        self._socket = socket.socket(socket.AF_UNIX)
        self.path = folder / name
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)
            with _short(self.path) as address:
                self._socket.bind(address)
        except OSError:  # a file system without sockets, or a path too long where there is no /proc
            import tempfile

            self.path = Path(tempfile.mkdtemp(prefix="cloudtrain-")) / name
            self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(256)
        threading.Thread(target=self._serve, name="mailbox", daemon=True).start()

    def close(self) -> None:
        """Accept nothing more; messages that are being handled are answered."""
        with suppress(OSError):
            self.path.unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            connection.settimeout(WAIT_S)
            if _is_mine(connection):
                answer = self._handle(_receive(connection))
                connection.sendall(json.dumps(answer).encode() + b"\n")


def call(path: str, message: Message, timeout_s: float = WAIT_S) -> Message | None:
    """Send a message to a watcher and return its answer; None without an answer. Blocking."""
    with socket.socket(socket.AF_UNIX) as connection, suppress(OSError, ValueError):
        connection.settimeout(timeout_s)
        with _short(Path(path)) as address:
            connection.connect(address)
        if _is_mine(connection):
            connection.sendall(json.dumps(message).encode() + b"\n")
            return _receive(connection)
    return None


def _receive(connection: socket.socket) -> Message:
    """Read one line of JSON; raises OSError, ValueError."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece or len(data) > MOST_BYTES:
            raise ValueError("the message has no end")
        data += piece
    message = json.loads(data)
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


def _is_mine(connection: socket.socket) -> bool:
    """Return whether the other side is a process of this user; elsewhere than on Linux the folder's mode must do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return bool(user == os.getuid())


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a name of the path that fits into an address."""
    if len(os.fsencode(path)) <= LONGEST or not Path("/proc/self/fd").is_dir():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
