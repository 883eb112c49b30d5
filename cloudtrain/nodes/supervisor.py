"""Start and stop a node's supervisor, read its state, and kill leftover processes, all through the node's folder.

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

from cloudtrain.nodes.files import AnyPath, expand_path, read, read_texts
from cloudtrain.nodes.process import boot_id, detach, start_time

FIRST_STATUS_S = 30.0  # timeout for a started supervisor to write its first status
STATES = ("QUEUED", "STARTING", "RUNNING", "STOPPING")
FINAL = ("SUCCEEDED", "FAILED", "CANCELLED", "PREEMPTED", "TIMED_OUT", "LOST")
LAUNCHER_STOPPED = ("CANCELLED", "TIMED_OUT", "PREEMPTED")  # exit code 75 is the launcher's for these, not the script's
# Variables that an outer launcher may have set; a job must not see them.
LAUNCHER_VARIABLES = (
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
LAUNCHER_PREFIXES = ("CLOUDTRAIN_", "PET_", "TORCHELASTIC_", "SM_", "SLURM_")


def start(node: AnyPath, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; return False if it runs or ran already.

    `secrets` is passed on standard input, so that it appears neither in a command line nor in an environment. Raises
    OSError.
    """
    node = expand_path(node)
    with (node / "lock").open("a") as lock:
        if not _acquire_lock(lock):
            return False
        if (node / "status.json").exists() or (node / "cancel").exists():
            return False
        (node / "started").touch()
        stdin = json.dumps(secrets).encode()
        detach(argv, given=stdin, log=node / "launcher.out", env=env, cwd=node / "source", keep=[lock.fileno()])
    return True


def has_begun(node: AnyPath) -> bool:
    """Return whether a node's supervisor has begun its work; waits for one that is starting (blocking, seconds at most).

    If the process that started it was killed before it passed the secrets, the supervisor ends and may be started again.
    """
    node = expand_path(node)
    deadline = time.monotonic() + FIRST_STATUS_S
    while time.monotonic() < deadline:
        if read_status(node) is not None or (node / "cancel").exists():
            return True
        early_state = _state_before_status(node)
        if early_state is None or early_state["state"] != "STARTING":
            return read_status(node) is not None
        time.sleep(0.01)
    return True


def _acquire_lock(lock: IO[str]) -> bool:
    """Take the lock of a node, retrying: readers hold it for an instant only, a supervisor for its lifetime."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.02)
    return False


def read_status(node: AnyPath) -> dict[str, Any] | None:
    """Return the last status that a node's supervisor wrote (status.json), or None before the first one."""
    try:
        status = json.loads(read(expand_path(node) / "status.json"))
    except (OSError, ValueError, RecursionError):
        return None
    return status if isinstance(status, dict) and status.get("state") in STATES + FINAL else None


def is_supervised(status: Mapping[str, Any]) -> bool:
    """Return whether the supervisor that wrote a status still lives."""
    started = start_time(int(status.get("pid") or 0))
    if started is None:
        return False
    same_boot = status.get("boot_id") in (None, "", boot_id())
    return same_boot and status.get("start_ticks") in (None, started, int(started) if started.isdigit() else None)


def read_state(node: AnyPath) -> dict[str, Any] | None:
    """Return the state of a node (`raw`: its status.json), LOST if its supervisor died without a final status.

    None if it was never started.
    """
    node = expand_path(node)
    raw = read_status(node)
    if raw is None:
        return _state_before_status(node)
    if raw["state"] not in FINAL and not is_supervised(raw):
        raw = read_status(node) or raw  # it may have ended between the two looks
        if raw["state"] not in FINAL:
            message = f"the supervisor of {node.name} died"
            return _make_state("LOST", None, message, raw.get("started_at"), raw.get("at"), raw)
    code = None if raw["state"] in LAUNCHER_STOPPED else raw.get("exit_code")
    return _make_state(raw["state"], code, raw.get("reason") or "", raw.get("started_at"), raw.get("ended_at"), raw)


def _state_before_status(node: Path) -> dict[str, Any] | None:
    """Return the state of a node whose supervisor has not written a status yet."""
    if not (node / "started").exists():
        return _make_state("CANCELLED", None, "cancelled before it started") if (node / "cancel").exists() else None
    with (node / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _make_state("STARTING")
    if read_status(node) is not None:
        return read_state(node)
    printed = read_texts(node, ["launcher.out"]).get("launcher.out", "")
    lines = printed.strip().splitlines()
    return _make_state("LOST", None, "the supervisor did not start" + (f": {lines[-1]}" if lines else ""))


def _make_state(
    name: str,
    code: int | None = None,
    reason: str = "",
    started_at: str | None = None,
    ended_at: str | None = None,
    raw: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    node_state = {"state": name, "exit_code": code, "reason": reason, "started_at": started_at, "ended_at": ended_at}
    return {**node_state, "raw": raw}


def stop(node: AnyPath) -> None:
    """Ask a node's supervisor to cancel; if none lives, kill its leftover processes."""
    node = expand_path(node)
    (node / "cancel").touch()
    status = read_status(node)
    if status and status["state"] not in FINAL and is_supervised(status):
        try:
            os.kill(int(status["pid"]), signal.SIGTERM)
        except ProcessLookupError:
            pass
        return
    if (early_state := _state_before_status(node)) is not None and early_state["state"] == "STARTING":
        return  # it looks for `cancel` before it starts a rank
    kill_leftovers(node)


def kill_leftovers(node: AnyPath) -> int:
    """Kill every process of this node's control group or with its directory in the environment; return how many.

    A fallback for a supervisor that was killed: otherwise it does this itself, as the subreaper of its processes.
    """
    node, killed = expand_path(node), set[int]()
    for _ in range(100):  # a dying tree may fork once more, and its control group is busy until all are gone
        pids = [pid for pid in _pids(node) if pid != os.getpid()]
        if not pids and _remove_groups(node):
            break
        for pid in pids:
            killed.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        time.sleep(0.01)
    return len(killed)


def _remove_groups(node: Path) -> bool:
    """Remove a node's empty control groups; return whether none is left."""
    for group in reversed(_groups(node)):
        try:
            group.rmdir()
        except OSError:
            return False
    return True


def has_leftovers(node: AnyPath) -> bool:
    """Return whether processes of a node still run without their supervisor."""
    node = expand_path(node)
    return bool(_groups(node)) or any(_pids(node))


def _groups(node: Path) -> list[Path]:
    """Return a node's control group (launcher/cgroup.py) and those below it; empty where it has none."""
    try:
        group = Path((node / "cgroup").read_text())
    except OSError:
        return []
    return [Path(at) for at, _, _ in os.walk(group)]  # of one that is removed meanwhile: what is still there


def _pids(node: Path) -> Iterator[int]:
    for group in _groups(node):
        try:
            yield from (pid for pid in map(int, (group / "cgroup.procs").read_text().split()) if start_time(pid))
        except OSError:
            continue
    mark = f"CLOUDTRAIN_NODE_DIR={node}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        try:
            if mark in entry.read_bytes().split(b"\0") and start_time(pid):
                yield pid
        except OSError:
            continue


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of an outer launcher."""
    return {
        name: value
        for name, value in environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
