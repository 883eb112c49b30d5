"""What is done in the folder of a node, on the node itself: by this very process for local, over SSH for other machines.

A node has a Python of 3.9 or newer and no cloudtrain. So this file imports the standard library and what is sent with
it (rpc.SENT) alone, speaks plain data, and is sent as text. `serve` answers requests there: a line of JSON, then `size` bytes.

    <root>/src/<sha256>.tar.gz   bundles, by their digest
    <root>/runs/<run>/           checkpoints, outputs, model: the run's, where it has no shared output
    <root>/runs/<run>/a<N>/      an attempt: node-<rank>/ as directory.py describes it, and the nodes' common token
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudtrain.nodes.files import Place, path_of, read, texts, token, walk, write
from cloudtrain.nodes.supervisor import BIRTH_S, FINAL, begun, clean, left, read_status, reap, start, state, stop

JOIN_S = 60.0  # how long node 0 may take to listen before the others are started
ANSWER_S = 50.0  # how long a command that is run here may take; below what a client waits for an answer
IDLE_S = 120  # an agent that nobody asks for so long ends: its client may be gone without a word


def prepare(root: Place, run: str, attempt: int, sha256: str) -> dict[str, Any]:
    """Look at what is here before an attempt, and end what earlier ones of the run left running (blocking: their grace).

    `bundle`: the source is here; `request`: what an interrupted submit chose; `first`: this was the run's node 0.
    """
    run_dir = path_of(root) / "runs" / run
    for earlier in range(1, attempt):
        for node in sorted((run_dir / f"a{earlier}").glob("node-*")):
            end(node)
    return {
        "bundle": (path_of(root) / "src" / f"{sha256}.tar.gz").exists(),
        "request": request(run_dir / f"a{attempt}"),
        "first": (run_dir / "first").exists(),
    }


def request(folder: Place) -> dict[str, Any] | None:
    """Return what was written about an attempt before its first node was started, or None."""
    try:
        found = json.loads((path_of(folder) / "request.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def report(folder: Place, rank: int, lease: bool = False) -> dict[str, Any]:
    """Return an attempt's `request` and its node's `state`; `lease` lets the supervisor know that its client lives."""
    node = path_of(folder) / f"node-{rank}"
    if lease and node.is_dir():
        (node / "lease").touch()
    return {"request": request(folder), "state": state(node)}


def cancel(folder: Place, rank: int) -> None:
    """Stop a node of an attempt, whether it was started or not; one that has ended is only cleared of what is left."""
    node = path_of(folder) / f"node-{rank}"
    if request(folder) is None:
        return
    found = state(node)
    if found is not None and found["state"] in FINAL:
        reap(node)
        return
    node.mkdir(exist_ok=True)
    stop(node)


def end(node: Place) -> None:
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


def put(root: Place, sha256: str, offset: int, last: bool, given: bytes = b"") -> None:
    """Take a piece of a bundle, and keep it under its digest with the last one; raises OSError when the disk is full."""
    folder = path_of(root) / "src"
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


def extract(root: Place, sha256: str, into: Place) -> None:
    """Unpack a kept bundle into a folder that then holds all of it or does not exist; one that exists is left alone.

    Raises ValueError, and keeps it no longer, when it is not of its digest; OSError when the disk is full.
    """
    import hashlib

    from cloudtrain.errors import StoreError
    from cloudtrain.source import archive  # sent along, but taken up by those who need it only

    into, kept = path_of(into), path_of(root) / "src" / f"{sha256}.tar.gz"
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


def launch(node: Place, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]) -> dict[str, Any]:
    """Start a supervisor over this process's own environment, and wait for the address where it listens (blocking).

    Returns `control`, host:port of a node 0 of several, and the node's `state`.
    """
    node = path_of(node)
    base = clean(os.environ)
    own = {name: str(path_of(value)) if value.startswith("~/") else value for name, value in env.items()}
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


def facts(root: Place) -> dict[str, Any]:
    """Return what doctor wants to know about a machine."""
    from importlib import metadata, util

    def version(name: str) -> str | None:
        try:
            return metadata.version(name) if util.find_spec(name) else None
        except (metadata.PackageNotFoundError, ValueError):
            return None

    folder = path_of(root)
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
