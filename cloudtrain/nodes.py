"""The run directory on a node: prepare it, start its supervisor, read its state, tail its log, end what is left.

    <node>/source/        the bundle, extracted; `.cloudtrain/launch.py` in it is the supervisor
    <node>/status.json    the supervisor's word on itself, replaced atomically
    <node>/log            numbered lines: `<seq> <rank> <at> <text>`
    <node>/launcher.out   what the supervisor itself printed (empty unless it broke)
    <node>/started        made before the supervisor is started
    <node>/lock           held (flock) by the supervisor as long as it lives, so that it is never started twice
    <node>/cancel         a person asked to cancel

Shared by local, ssh and slurm. What is done in the folder itself is supervision.py's, here or on another machine (agent.py);
what is made of it is here: states of several nodes in one, logs of several nodes in one.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from cloudtrain import supervision
from cloudtrain.backend import LogLine
from cloudtrain.errors import BackendError, BadRequest
from cloudtrain.state import State, Status
from cloudtrain.supervision import begun, left, read_status, reap, stop, supervised

__all__ = ["begun", "given_secrets", "left", "merge", "merged", "node_status", "read_status", "reap", "start",
           "status_of", "stop", "supervised", "tail"]  # fmt: skip
CHUNK = 1 << 20  # bytes read of a log at a time
TAIL_S = 0.03  # how often a followed log is looked at
ASK_S = 0.15  # how often at least it is asked whether more can come
_Raw = tuple[str, int, int, int, str, int]  # at, node, rank, seq, text, offset behind the line
# What is behind an offset on every node, in pieces; None where nothing is, or nobody knows.
Look = Callable[[Sequence[int]], Sequence[Iterable[bytes] | None]]


def start(node: Path, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; False when it runs or ran already.

    `secrets` goes over standard input. Raises BackendError.
    """
    try:
        return supervision.start(node, argv, env, secrets)
    except OSError as error:
        raise BackendError(f"the supervisor of {node} cannot be started: {error.strerror or error}") from None


def given_secrets(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of `env:` sources that this process has, by source; they go over standard input only."""
    sources = {source for found in manifest["secrets"].values() for source in found if source.startswith("env:")}
    return {source: os.environ[source[4:]] for source in sorted(sources) if source[4:] in os.environ}


def node_status(node: Path) -> Status | None:
    """Return the true state of a node, LOST when its supervisor died without a last word; None when never started."""
    return status_of(supervision.state(node))


def status_of(found: Mapping[str, Any] | None) -> Status | None:
    """Return what `supervision.state` said as a Status."""
    if found is None:
        return None
    return Status(State[found["state"]], found["exit_code"], found["reason"], found["started_at"], found["ended_at"])


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


def tail(
    logs: Sequence[Path], *, after: str | None = None, follow: bool = False, ended: Callable[[], bool] = lambda: True
) -> Iterator[LogLine]:
    """Yield the lines of several nodes' logs on this machine, as `merged` does."""

    def look(offsets: Sequence[int]) -> list[Iterable[bytes] | None]:
        sizes = [_size(log) for log in logs]
        return [
            _pieces(log, offset, size) if size > offset else None
            for log, offset, size in zip(logs, offsets, sizes, strict=True)
        ]

    return merged(look, len(logs), after=after, follow=follow, ended=ended)


def merged(
    look: Look,
    nodes: int,
    *,
    after: str | None = None,
    follow: bool = False,
    ended: Callable[[], bool] = lambda: True,
    pause_s: float | None = None,
) -> Iterator[LogLine]:
    """Yield the lines of several nodes' logs behind a cursor, by time, in order on each node.

    With `follow` it goes on until `ended()` says that nothing more will be written. The cursor is the byte offset on
    every node, joined by commas.
    """
    try:
        offsets = [int(part) for part in after.split(",")] if after else []
    except ValueError:
        raise BadRequest(f"{after!r} is no cursor of a log", "cloudtrain logs --json shows them") from None
    offsets += [0] * (nodes - len(offsets))
    words = [str(offset) for offset in offsets]  # kept, since most of a cursor stays as it was
    quiet = 0  # looks in which nothing was new: they come less often, down to a fifth, and cost a fifth
    began, ask_at = time.monotonic(), 0.0
    while True:
        last = not follow
        if follow and (moment := time.monotonic()) >= ask_at:
            last = ended()  # asked before reading: what was written until then is read below
            ask_at = moment + min((moment - began) / 50, ASK_S)  # asking costs more than looking
        seen = False
        streams = [
            _lines(pieces, node, offsets[node]) for node, pieces in enumerate(look(offsets)) if pieces is not None
        ]
        for at, node, rank, seq, text, offset in (
            streams[0] if len(streams) == 1 else heapq.merge(*streams, key=itemgetter(0))
        ):
            offsets[node] = offset
            words[node] = str(offset)
            seen = True
            yield LogLine(at, node, rank, seq, text, ",".join(words))
        if last:
            return
        quiet = 0 if seen else quiet + 1
        if not seen:
            time.sleep(TAIL_S * min(1 + quiet // 10, 5) if pause_s is None else pause_s)


def _pieces(log: Path, offset: int, size: int) -> Iterator[bytes]:
    """Yield a file's bytes between an offset and what was its size."""
    with log.open("rb") as file:
        file.seek(offset)
        while offset < size and (piece := file.read(min(CHUNK, size - offset))):
            offset += len(piece)
            yield piece


def _lines(pieces: Iterable[bytes], node: int, offset: int) -> Iterator[_Raw]:
    """Yield whole lines behind an offset; a line that is still being written waits for the next look."""
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n") if rest else piece.split(b"\n")
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
