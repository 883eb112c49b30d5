"""The run directory on a node: prepare it, start its supervisor, read its state, tail its log, end what is left.

    <node>/source/        the bundle, extracted; `.cloudtrain/launch.py` in it is the supervisor
    <node>/status.json    the supervisor's word on itself, replaced atomically
    <node>/log            numbered lines: `<seq> <rank> <at> <text>`
    <node>/launcher.out   what the supervisor itself printed (empty unless it broke)
    <node>/started        made before the supervisor is started
    <node>/lock           held (flock) by the supervisor as long as it lives, so that it is never started twice
    <node>/cancel         a person asked to cancel

Shared by local, ssh and slurm.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

from cloudtrain.backend import LogLine
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.process import boot_id, detach, start_time
from cloudtrain.state import State, Status

CHUNK = 1 << 20  # bytes read of a log at a time
BIRTH_S = 30.0  # how long a started supervisor may take to its first word
TAIL_S = 0.03  # how often a followed log is looked at
_Raw = tuple[str, int, int, int, str, int]  # at, node, rank, seq, text, offset behind the line


def start(node: Path, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; False when it runs or ran already.

    `secrets` goes over standard input, so that it stands neither in a command line nor in an environment.
    """
    with (node / "lock").open("a") as lock:
        if not _locked(lock):
            return False
        if (node / "status.json").exists() or (node / "cancel").exists():
            return False
        (node / "started").touch()
        given = json.dumps(secrets).encode()
        try:
            detach(argv, given=given, log=node / "launcher.out", env=env, cwd=node / "source", keep=[lock.fileno()])
        except OSError as error:
            raise BackendError(f"the supervisor of {node} cannot be started: {error.strerror or error}") from None
    return True


def begun(node: Path) -> bool:
    """Return whether a node's supervisor took up its work; waits for one that is about to (blocking, seconds at most).

    One whose starter was killed before it had given the secrets ends without a word, and may be started again.
    """
    deadline = time.monotonic() + BIRTH_S
    while time.monotonic() < deadline:
        if read_status(node) is not None or (node / "cancel").exists():
            return True
        unborn = _unborn(node)
        if unborn is None or unborn.state is not State.STARTING:
            return read_status(node) is not None
        time.sleep(0.01)
    return True


def _locked(lock: IO[str]) -> bool:
    """Take the lock of a node; a reader holds it for an instant only, a supervisor for its life."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def read_status(node: Path) -> dict[str, Any] | None:
    """Return what a node's supervisor last said of itself, or None before its first word."""
    try:
        found = json.loads((node / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("state") in State.__members__ else None


def supervised(status: Mapping[str, Any]) -> bool:
    """Return whether the supervisor that wrote a status still lives."""
    started = start_time(int(status.get("pid") or 0))
    if started is None:
        return False
    same_boot = status.get("boot_id") in (None, "", boot_id())
    return same_boot and status.get("start_ticks") in (None, started, _as_int(started))


def node_status(node: Path) -> Status | None:
    """Return the true state of a node, LOST when its supervisor died without a last word; None when never started."""
    status = read_status(node)
    if status is None:
        return _unborn(node)
    state = State[status["state"]]
    if not state.final and not supervised(status):
        status = read_status(node) or status  # it may have ended between the two looks
        state = State[status["state"]]
        if not state.final:
            return Status(
                State.LOST, None, f"the supervisor of {node.name} died", status.get("started_at"), status.get("at")
            )
    # 75 is the launcher's word for "left on request", not the script's
    code = None if state in (State.CANCELLED, State.TIMED_OUT, State.PREEMPTED) else status.get("exit_code")
    return Status(state, code, status.get("reason") or "", status.get("started_at"), status.get("ended_at"))


def _unborn(node: Path) -> Status | None:
    """Return the state of a node whose supervisor has not spoken yet."""
    if not (node / "started").exists():
        return Status(State.CANCELLED, None, "cancelled before it started") if (node / "cancel").exists() else None
    with (node / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Status(State.STARTING)
    if read_status(node) is not None:
        return node_status(node)
    words = (
        (node / "launcher.out").read_text(errors="replace").strip().splitlines()
        if (node / "launcher.out").exists()
        else []
    )
    return Status(State.LOST, None, "the supervisor did not start" + (f": {words[-1]}" if words else ""))


def merge(statuses: Sequence[tuple[Mapping[str, Any] | None, Status | None]]) -> Status:
    """Return an attempt's state from its nodes' (status.json, true state): it is final when all of them are."""
    known = [(raw or {}, status) for raw, status in statuses if status is not None]
    if not known:
        return Status(State.QUEUED)
    started = min((status.started_at for _, status in known if status.started_at), default=None)
    live = [status for _, status in known if not status.state.final]
    if live or len(known) < len(statuses):
        stages = {status.state for _, status in known}
        ending = any(status.state.final and status.state is not State.SUCCEEDED for _, status in known)
        running = State.RUNNING if State.RUNNING in stages and not ending else State.STARTING
        return Status(State.STOPPING if ending or State.STOPPING in stages else running, started_at=started)
    ended = max((status.ended_at for _, status in known if status.ended_at), default=None)
    # The first failure by time is the cause; what the other nodes say is its consequence.
    _, worst = min(known, key=lambda pair: (_RANK[pair[1].state], pair[0].get("failed_at") or "~"))
    return Status(worst.state, worst.exit_code, worst.reason, started, ended)


_RANK = {
    State.CANCELLED: 0,
    State.FAILED: 1,
    State.TIMED_OUT: 2,
    State.PREEMPTED: 3,
    State.LOST: 4,
    State.SUCCEEDED: 9,
}


def stop(node: Path) -> None:
    """Ask a node's supervisor to end as cancelled; where none lives, end what it left behind."""
    (node / "cancel").touch()
    status = read_status(node)
    if status and not State[status["state"]].final and supervised(status):
        try:
            os.kill(int(status["pid"]), signal.SIGTERM)
        except ProcessLookupError:
            pass
        return
    if (unborn := _unborn(node)) is not None and unborn.state is State.STARTING:
        return  # it looks for `cancel` before it starts a rank
    reap(node)


def reap(node: Path) -> int:
    """Kill every process that bears this node's mark in its environment; return how many there were.

    The supervisor does this better (it is their subreaper); this is the last line, for when it was killed itself.
    """
    mark = f"CLOUDTRAIN_NODE_DIR={node}".encode()
    seen: set[int] = set()
    for _ in range(100):  # a dying tree may fork once more
        found = [pid for pid in _marked(mark) if pid != os.getpid()]
        if not found:
            break
        for pid in found:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.01)
    return len(seen)


def left(node: Path) -> bool:
    """Return whether processes of a node live on without their supervisor."""
    return any(_marked(f"CLOUDTRAIN_NODE_DIR={node}".encode()))


def _marked(mark: bytes) -> Iterator[int]:
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        try:
            if mark in entry.read_bytes().split(b"\0") and start_time(pid):
                yield pid
        except OSError:
            continue


def tail(
    logs: Sequence[Path], *, after: str | None = None, follow: bool = False, ended: Callable[[], bool] = lambda: True
) -> Iterator[LogLine]:
    """Yield the lines of several nodes' logs behind a cursor, by time, in order on each node.

    With `follow` it goes on until `ended()` says that nothing more will be written. The cursor is the byte offset on
    every node, joined by commas.
    """
    try:
        offsets = [int(part) for part in after.split(",")] if after else []
    except ValueError:
        raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them") from None
    offsets += [0] * (len(logs) - len(offsets))
    while True:
        last = not follow or ended()  # asked before reading: what was written until then is read below
        limits = [_size(log) for log in logs]
        seen = False
        streams = [
            _lines(log, node, offsets[node], limits[node])
            for node, log in enumerate(logs)
            if limits[node] > offsets[node]
        ]
        for at, node, rank, seq, text, offset in (
            streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))
        ):
            offsets[node] = offset
            seen = True
            yield LogLine(at, node, rank, seq, text, ",".join(map(str, offsets)))
        if last:
            return
        if not seen:
            time.sleep(TAIL_S)


def _lines(log: Path, node: int, offset: int, limit: int) -> Iterator[_Raw]:
    """Yield whole lines between two offsets; a line that is still being written waits for the next look."""
    rest = b""
    with log.open("rb") as file:
        file.seek(offset)
        left = limit - offset
        while left > 0 and (chunk := file.read(min(CHUNK, left))):
            left -= len(chunk)
            *lines, rest = (rest + chunk).split(b"\n") if rest else chunk.split(b"\n")
            for line in lines:
                offset += len(line) + 1
                parts = line.decode("utf-8", "backslashreplace").split(" ", 3)
                try:
                    yield parts[2], node, int(parts[1]), int(parts[0]), parts[3], offset
                except (IndexError, ValueError):
                    continue  # not one of ours: a supervisor that was killed in the middle of a line, then a full disk


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _as_int(text: str) -> int | None:
    return int(text) if text.isdigit() else None
