"""What is done in the folder of a node, on the node itself: by this very process for local, over SSH for other machines.

A node has a Python of 3.9 or newer and no cloudtrain. So this file imports the standard library and what is sent with
it (rpc.SENT) alone, speaks plain data, and is sent as text. `serve` answers requests there: a line of JSON, then `size` bytes.

    <root>/src/<sha256>.tar.gz   bundles, by their digest
    <root>/runs/<run>/           checkpoints, outputs, model: the run's, where it has no shared output
    <root>/runs/<run>/a<N>/      an attempt: node-<rank>/ as nodes.py describes it, and the nodes' common token
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Union

from cloudtrain.process import boot_id, detach, start_time

BIRTH_S = 30.0  # how long a started supervisor may take to its first word
JOIN_S = 60.0  # how long node 0 may take to listen before the others are started
ANSWER_S = 50.0  # how long a command that is run here may take; below what a client waits for an answer
IDLE_S = 120  # an agent that nobody asks for so long ends: its client may be gone without a word
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
_Place = Union[str, Path]


# -- the supervisor's life ------------------------------------------------------------------------------------------------


def start(node: _Place, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> bool:
    """Start a node's supervisor, detached from this process and its terminal; False when it runs or ran already.

    `secrets` goes over standard input, so that it stands neither in a command line nor in an environment. Raises
    OSError.
    """
    node = _path(node)
    with (node / "lock").open("a") as lock:
        if not _locked(lock):
            return False
        if (node / "status.json").exists() or (node / "cancel").exists():
            return False
        (node / "started").touch()
        given = json.dumps(secrets).encode()
        detach(argv, given=given, log=node / "launcher.out", env=env, cwd=node / "source", keep=[lock.fileno()])
    return True


def begun(node: _Place) -> bool:
    """Return whether a node's supervisor took up its work; waits for one that is about to (blocking, seconds at most).

    One whose starter was killed before it had given the secrets ends without a word, and may be started again.
    """
    node = _path(node)
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


def read_status(node: _Place) -> dict[str, Any] | None:
    """Return what a node's supervisor last said of itself, or None before its first word."""
    try:
        found = json.loads((_path(node) / "status.json").read_text())
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


def state(node: _Place) -> dict[str, Any] | None:
    """Return the true state of a node (`raw`: its status.json), LOST when its supervisor died without a last word.

    None when it was never started.
    """
    node = _path(node)
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


def stop(node: _Place) -> None:
    """Ask a node's supervisor to end as cancelled; where none lives, end what it left behind."""
    node = _path(node)
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


def reap(node: _Place) -> int:
    """Kill every process that bears this node's mark in its environment; return how many there were.

    The supervisor does this better (it is their subreaper); this is the last line, for when it was killed itself.
    """
    seen: set[int] = set()
    for _ in range(100):  # a dying tree may fork once more
        found = [pid for pid in _marked(_path(node)) if pid != os.getpid()]
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


def left(node: _Place) -> bool:
    """Return whether processes of a node live on without their supervisor."""
    return any(_marked(_path(node)))


def _marked(node: Path) -> Iterator[int]:
    mark = f"CLOUDTRAIN_NODE_DIR={node}".encode()
    for entry in Path("/proc").glob("[0-9]*/environ"):
        pid = int(entry.parent.name)
        try:
            if mark in entry.read_bytes().split(b"\0") and start_time(pid):
                yield pid
        except OSError:
            continue


# -- what is needed on another machine only ---------------------------------------------------------------------------------


def prepare(root: _Place, run: str, attempt: int, sha256: str) -> dict[str, Any]:
    """Look at what is here before an attempt, and end what earlier ones of the run left running (blocking: their grace).

    `bundle`: the source is here; `request`: what an interrupted submit chose; `first`: this was the run's node 0.
    """
    run_dir = _path(root) / "runs" / run
    for earlier in range(1, attempt):
        for node in sorted((run_dir / f"a{earlier}").glob("node-*")):
            end(node)
    return {
        "bundle": (_path(root) / "src" / f"{sha256}.tar.gz").exists(),
        "request": request(run_dir / f"a{attempt}"),
        "first": (run_dir / "first").exists(),
    }


def request(folder: _Place) -> dict[str, Any] | None:
    """Return what was written about an attempt before its first node was started, or None."""
    try:
        found = json.loads((_path(folder) / "request.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def report(folder: _Place, rank: int, lease: bool = False) -> dict[str, Any]:
    """Return an attempt's `request` and its node's `state`; `lease` lets the supervisor know that its client lives."""
    node = _path(folder) / f"node-{rank}"
    if lease and node.is_dir():
        (node / "lease").touch()
    return {"request": request(folder), "state": state(node)}


def cancel(folder: _Place, rank: int) -> None:
    """Stop a node of an attempt, whether it was started or not; one that has ended is only cleared of what is left."""
    node = _path(folder) / f"node-{rank}"
    if request(folder) is None:
        return
    found = state(node)
    if found is not None and found["state"] in FINAL:
        reap(node)
        return
    node.mkdir(exist_ok=True)
    stop(node)


def end(node: _Place) -> None:
    """Stop a node that may still run and wait until it has ended; kill what did not listen. Blocking."""
    found = state(node)
    if found is None:
        return
    if found["state"] not in FINAL:
        stop(node)
        grace = float((found["raw"] or {}).get("grace_s") or 30.0)
        deadline = time.monotonic() + grace + BIRTH_S
        while (now := state(node)) is not None and now["state"] not in FINAL and time.monotonic() < deadline:
            time.sleep(0.05)
    reap(node)


def put(root: _Place, sha256: str, offset: int, last: bool, given: bytes = b"") -> None:
    """Take a piece of a bundle, and keep it under its digest with the last one; raises OSError when the disk is full."""
    folder = _path(root) / "src"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    half = folder / f".{sha256}.{os.getpid()}"
    try:
        with open(half, "wb" if offset == 0 else "r+b") as file:
            file.seek(offset)
            file.write(given)
        if last:
            half.replace(folder / f"{sha256}.tar.gz")
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def extract(root: _Place, sha256: str, into: _Place) -> None:
    """Unpack a kept bundle into a folder that then holds all of it or does not exist; one that exists is left alone.

    Raises ValueError, and keeps it no longer, when it is not of its digest; OSError when the disk is full.
    """
    import hashlib

    from cloudtrain import archive  # sent along, but taken up by those who need it only
    from cloudtrain.errors import StoreError

    into, kept = _path(into), _path(root) / "src" / f"{sha256}.tar.gz"
    if into.exists():
        return
    half = into.with_name(f".{into.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    try:
        whole = hashlib.sha256()
        try:
            with open(kept, "rb", buffering=0) as stream:
                archive.extract(stream, half, whole.update)
            sound = whole.hexdigest() == sha256
        except StoreError:
            sound = False
        if not sound:
            kept.unlink()
            raise ValueError("what arrived is not the bundle that was sent")
        try:
            half.rename(into)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
    finally:
        shutil.rmtree(half, ignore_errors=True)


def launch(node: _Place, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Start a supervisor over this process's own environment, and wait for the address where it listens (blocking).

    Returns `control`, host:port of a node 0 of several, and the node's `state`.
    """
    node = _path(node)
    base = clean(os.environ)
    own = {name: str(_path(value)) if value.startswith("~/") else value for name, value in env.items()}
    listens = "CLOUDTRAIN_CONTROL" not in own and own.get("CLOUDTRAIN_NUM_NODES", "1") != "1"
    start(node, argv, {**base, **own}, secrets)
    deadline = time.monotonic() + JOIN_S
    while listens and time.monotonic() < deadline:
        said, found = read_status(node), state(node)
        if said and (control := said.get("control")):
            return {"control": f"{control['host']}:{control['port']}", "state": found}
        if found is None or found["state"] in FINAL:
            break
        time.sleep(0.005)
    return {"control": None, "state": state(node)}


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what an outer launcher left in it."""
    return {
        name: value for name, value in environ.items() if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }


def token(folder: _Place) -> str:
    """Return the word by which the nodes of an attempt know each other; made once, readable by this user only."""
    path = _path(folder) / "token"
    if not path.exists():
        half = path.with_name(f"token.{_unique()}")
        half.touch(mode=0o600)
        half.write_text(os.urandom(16).hex())
        try:
            os.link(half, path)
        except FileExistsError:
            pass
        half.unlink()
    return path.read_text()


# -- files ------------------------------------------------------------------------------------------------------------------


def read(path: _Place, offset: int = 0, limit: int = 1 << 20) -> bytes:
    """Return at most `limit` bytes of a file behind an offset; nothing where there is no file."""
    try:
        with open(_path(path), "rb") as file:
            file.seek(offset)
            return file.read(limit)
    except FileNotFoundError:
        return b""


def write(path: _Place, given: bytes = b"", mode: int = 0o600) -> None:
    """Replace a file, all or nothing."""
    path = _path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{_unique()}")
    try:
        with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(given)
        half.replace(path)
    except BaseException:
        half.unlink(missing_ok=True)
        raise


def walk(path: _Place) -> list[list[Any]]:
    """Return the files and links below a folder: path, size, mtime_ns, mode, target of a link ("" for a file)."""
    found: list[list[Any]] = []
    top = str(_path(path))
    for at, folders, names in os.walk(top):
        for name in sorted([*names, *(folder for folder in folders if os.path.islink(os.path.join(at, folder)))]):
            whole = os.path.join(at, name)
            seen = os.lstat(whole)
            target = os.readlink(whole) if os.path.islink(whole) else ""
            if target or os.path.isfile(whole):
                inner = os.path.relpath(whole, top)
                found.append([inner, seen.st_size, seen.st_mtime_ns, seen.st_mode & 0o777, target])
    return found


def texts(folder: _Place, patterns: Sequence[str], limit: int = 1 << 20) -> dict[str, str]:
    """Return the files of a folder that patterns such as node-*/status.json match: path below it -> (end of its) text."""
    top, found = _path(folder), {}
    if top.is_dir():
        for place in [top, *(place for place in top.iterdir() if place.is_dir())]:
            os.listdir(place)  # on NFS this asks the server again; a name alone may be answered from what was
    for path in sorted({path for pattern in patterns for path in top.glob(pattern)}):
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
                found[str(path.relative_to(top))] = file.read(limit).decode("utf-8", "replace")
        except OSError:
            continue  # gone since it was listed
    return found


def command(argv: Sequence[str], hide: Sequence[str] = (), limit_s: float = ANSWER_S) -> dict[str, Any]:
    """Run a command of this machine to its end, without the variables that begin with `hide`; blocking.

    Returns `code` (None: it does not exist, or took too long), `out` and `err`.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(tuple(hide))}
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**environ, "LC_ALL": "C"},
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "out": "", "err": f"{argv[0]} took more than {limit_s:g} s"}
    except OSError as error:
        return {"code": None, "out": "", "err": f"{argv[0]}: {error.strerror or error}"}
    out, err = (text.decode("utf-8", "replace") for text in (done.stdout, done.stderr))
    return {"code": done.returncode, "out": out, "err": err}


def facts(root: _Place) -> dict[str, Any]:
    """Return what doctor wants to know about a machine."""
    from importlib import metadata, util

    def version(name: str) -> str | None:
        try:
            return metadata.version(name) if util.find_spec(name) else None
        except (metadata.PackageNotFoundError, ValueError):
            return None

    folder = _path(root)
    parent = next(path for path in (folder, *folder.parents) if path.exists())
    gpus = sorted(os.listdir("/proc/driver/nvidia/gpus")) if os.path.isdir("/proc/driver/nvidia/gpus") else []
    return {
        "python": list(sys.version_info[:3]),
        "executable": sys.executable,
        "torch": version("torch"),
        "accelerate": version("accelerate"),
        "free_bytes": shutil.disk_usage(parent).free,
        "writable": os.access(parent, os.W_OK),
        "folder": str(folder),
        "gpus": len(gpus),
        "cpus": os.cpu_count(),
        "hostname": os.uname().nodename,
        "clock": time.time(),
    }


_LISTENING: list[Any] = []  # sockets


def listen(host: str) -> int:
    """Listen on any port of an address of this machine as long as this agent lives; raises OSError."""
    import socket  # here: local's plan imports this file for nothing of the network

    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.bind(address)
    server.listen(128)
    _LISTENING.append(server)
    return int(server.getsockname()[1])


def reach(host: str, port: int, wait_s: float = 5.0) -> str | None:
    """Return why an address cannot be connected to from here, or None when it can."""
    import socket

    try:
        socket.create_connection((host, port), timeout=wait_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _unique() -> str:
    """Return the end of a temporary name that no other process or thread makes."""
    return f"{os.getpid()}-{os.urandom(4).hex()}"


def _path(place: _Place) -> Path:
    return place if isinstance(place, Path) else Path(os.path.expanduser(place))


# -- answering --------------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (start, begun, state, stop, reap, left, prepare, request, report, cancel, end, put, extract, launch,
                     token, read, write, walk, texts, command, facts, listen, reach)
}  # fmt: skip


def serve() -> None:
    """Answer the requests on standard input until it ends, or until nobody has asked for IDLE_S seconds."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    while True:
        signal.alarm(IDLE_S)
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        arguments = request["arguments"]
        if request["size"]:
            arguments["given"] = requests.read(request["size"])
        signal.alarm(0)
        data = b""
        said: dict[str, Any] = {}
        try:
            value = OPERATIONS[request["operation"]](**arguments)
            data, said["value"] = (value, None) if isinstance(value, bytes) else (b"", value)
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            said["error"] = place + (error.strerror or str(error))
        except Exception as error:
            said["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps({**said, "size": len(data)}).encode() + b"\n" + data)
        answers.flush()
