"""A node's supervisor, from the node's folder: started, asked how it is, stopped, and what it left behind ended.

Sent to nodes as text, like agent.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from cloudtrain.nodes.files import Place, path_of
from cloudtrain.nodes.process import boot_id, detach, start_time

BIRTH_S = 30.0  # how long a started supervisor may take to its first word
STATES = ("QUEUED", "STARTING", "RUNNING", "STOPPING")
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "PREEMPTED", "TIMED_OUT", "LOST")
LEFT = ("CANCELLED", "TIMED_OUT", "PREEMPTED")  # 75 is the launcher's word for these, not the script's
# What an outer launcher may have left in an environment; a job must not take it for its own.
FOREIGN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CLUSTER_SPEC",
    "TF_CONFIG",
    "JOB_COMPLETION_INDEX",
)
FOREIGN_PREFIXES = ("CLOUDTRAIN_", "PET_", "TORCHELASTIC_", "SM_", "SLURM_")


def start(node: Place, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; False when it runs or ran already.

    `secrets` goes over standard input, so that it stands neither in a command line nor in an environment. Raises
    OSError.
    """
    node = path_of(node)
    with (node / "lock").open("a") as lock:
        if not _locked(lock):
            return False
        if (node / "status.json").exists() or (node / "cancel").exists():
            return False
        (node / "started").touch()
        given = json.dumps(secrets).encode()
        detach(argv, given=given, log=node / "launcher.out", env=env, cwd=node / "source", keep=[lock.fileno()])
    return True


def begun(node: Place) -> bool:
    """Return whether a node's supervisor took up its work; waits for one that is about to (blocking, seconds at most).

    One whose starter was killed before it had given the secrets ends without a word, and may be started again.
    """
    node = path_of(node)
    deadline = time.monotonic() + BIRTH_S
    while time.monotonic() < deadline:
        if read_status(node) is not None or (node / "cancel").exists():
            return True
        unborn = _unborn(node)
        if unborn is None or unborn["state"] != "STARTING":
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


def read_status(node: Place) -> dict[str, Any] | None:
    """Return what a node's supervisor last said of itself, or None before its first word."""
    try:
        found = json.loads((path_of(node) / "status.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("state") in STATES + FINAL else None


def supervised(status: Mapping[str, Any]) -> bool:
    """Return whether the supervisor that wrote a status still lives."""
    started = start_time(int(status.get("pid") or 0))
    if started is None:
        return False
    same_boot = status.get("boot_id") in (None, "", boot_id())
    return same_boot and status.get("start_ticks") in (None, started, int(started) if started.isdigit() else None)


def state(node: Place) -> dict[str, Any] | None:
    """Return the true state of a node (`raw`: its status.json), LOST when its supervisor died without a last word.

    None when it was never started.
    """
    node = path_of(node)
    raw = read_status(node)
    if raw is None:
        return _unborn(node)
    if raw["state"] not in FINAL and not supervised(raw):
        raw = read_status(node) or raw  # it may have ended between the two looks
        if raw["state"] not in FINAL:
            died = f"the supervisor of {node.name} died"
            return _found("LOST", None, died, raw.get("started_at"), raw.get("at"), raw)
    code = None if raw["state"] in LEFT else raw.get("exit_code")
    return _found(raw["state"], code, raw.get("reason") or "", raw.get("started_at"), raw.get("ended_at"), raw)


def _unborn(node: Path) -> dict[str, Any] | None:
    """Return the state of a node whose supervisor has not spoken yet."""
    if not (node / "started").exists():
        return _found("CANCELLED", None, "cancelled before it started") if (node / "cancel").exists() else None
    with (node / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _found("STARTING")
    if read_status(node) is not None:
        return state(node)
    out = node / "launcher.out"
    words = out.read_text(errors="replace").strip().splitlines() if out.exists() else []
    return _found("LOST", None, "the supervisor did not start" + (f": {words[-1]}" if words else ""))


def _found(
    name: str,
    code: int | None = None,
    reason: str = "",
    started_at: str | None = None,
    ended_at: str | None = None,
    raw: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    said = {"state": name, "exit_code": code, "reason": reason, "started_at": started_at, "ended_at": ended_at}
    return {**said, "raw": raw}


def stop(node: Place) -> None:
    """Ask a node's supervisor to end as cancelled; where none lives, end what it left behind."""
    node = path_of(node)
    (node / "cancel").touch()
    status = read_status(node)
    if status and status["state"] not in FINAL and supervised(status):
        try:
            os.kill(int(status["pid"]), signal.SIGTERM)
        except ProcessLookupError:
            pass
        return
    if (unborn := _unborn(node)) is not None and unborn["state"] == "STARTING":
        return  # it looks for `cancel` before it starts a rank
    reap(node)


def reap(node: Place) -> int:
    """Kill every process that bears this node's mark in its environment; return how many there were.

    The supervisor does this better (it is their subreaper); this is the last line, for when it was killed itself.
    """
    seen: set[int] = set()
    for _ in range(100):  # a dying tree may fork once more
        found = [pid for pid in _marked(path_of(node)) if pid != os.getpid()]
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


def left(node: Place) -> bool:
    """Return whether processes of a node live on without their supervisor."""
    return any(_marked(path_of(node)))


def _marked(node: Path) -> Iterator[int]:
    mark = f"CLOUDTRAIN_NODE_DIR={node}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        try:
            if mark in entry.read_bytes().split(b"\0") and start_time(pid):
                yield pid
        except OSError:
            continue


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what an outer launcher left in it."""
    return {
        name: value for name, value in environ.items() if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
