"""The agent: operations on a node's folder, run on the node itself. rpc.py calls them in this process or over SSH.

A node has Python 3.9 or newer and no cloudtrain. So this file is sent as text; it imports only the standard library and
the modules sent with it (rpc.SENT_MODULES). `serve` answers requests: a line of JSON, then `size` bytes.

    <root>/src/                  bundles, by their digest (bundles.py)
    <root>/runs/<run>/           checkpoints, outputs, model of a run without a shared output
    <root>/runs/<run>/a<N>/      an attempt: node-<rank>/ (see directory.py), and the token that its nodes share
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cloudtrain.nodes import bundles
from cloudtrain.nodes.files import (
    MOST_REQUEST,
    AnyPath,
    digests,
    expand_path,
    make_folders,
    read,
    read_texts,
    token,
    walk,
    write,
)
from cloudtrain.nodes.removal import measure, remove_run, stop_and_wait
from cloudtrain.nodes.supervisor import (
    FINAL,
    clean_environment,
    has_begun,
    has_leftovers,
    kill_leftovers,
    read_state,
    read_status,
    start,
    stop,
)

JOIN_S = 60.0  # timeout for node 0 to listen, before the other nodes are started
COMMAND_S = 50.0  # timeout of a command that runs here; shorter than a client's wait for an answer
CONNECT_S = 5.0  # timeout of a connection between machines
IDLE_S = 120  # an agent without requests ends after this time: its client may be gone
_LISTENING: dict[int, Any] = {}  # port -> socket


def prepare_attempt(root: AnyPath, run: str, attempt: int, sha256: str) -> dict[str, Any]:
    """Stop the nodes of earlier attempts of the run (blocks for their grace time) and return what this machine has.

    `bundle`: the source was uploaded; `request`: the request of an interrupted submit; `first`: the last attempt
    that had its node 0 here, 0 for none.
    """
    run_dir = expand_path(root) / "runs" / run
    for earlier in range(1, attempt):
        for node in sorted((run_dir / f"a{earlier}").glob("node-*")):
            stop_and_wait(node)
    return {
        "bundle": (expand_path(root) / "src" / f"{sha256}.tar.gz").exists(),
        "request": read_request(run_dir / f"a{attempt}"),
        "first": _read_first(run_dir / "first", attempt),
    }


def _read_first(path: AnyPath, attempt: int) -> int:
    try:
        # An older cloudtrain wrote no number, and never changed the machine.
        return int(expand_path(path).read_text() or attempt - 1)
    except FileNotFoundError:
        return 0


def read_request(folder: AnyPath) -> dict[str, Any] | None:
    """Return the request of an attempt (request.json), or None."""
    try:
        stored = json.loads(read(expand_path(folder) / "request.json", limit=MOST_REQUEST))
    except (OSError, ValueError, RecursionError):
        return None
    return stored if isinstance(stored, dict) else None


def report_node(folder: AnyPath, rank: int, lease: bool = False) -> dict[str, Any]:
    """Return an attempt's `request` and a node's `state`; `lease` renews the client's lease with the supervisor."""
    node = expand_path(folder) / f"node-{rank}"
    if lease and node.is_dir():
        (node / "lease").touch()
    return {"request": read_request(folder), "state": read_state(node)}


def cancel_node(folder: AnyPath, rank: int) -> None:
    """Stop a node of an attempt, started or not; if it has ended, kill its leftover processes."""
    node = expand_path(folder) / f"node-{rank}"
    if read_request(folder) is None:
        return
    node_state = read_state(node)
    if node_state is not None and node_state["state"] in FINAL:
        kill_leftovers(node)
        return
    node.mkdir(exist_ok=True)
    stop(node)


def launch_node(
    node: AnyPath, argv: Sequence[str], env: Mapping[str, str], secrets: Mapping[str, Any]
) -> dict[str, Any]:
    """Start a node's supervisor with this process's environment and `env`; for node 0 of several, wait until it listens.

    Returns `control`, host:port of node 0 of several, and the node's `state`.
    """
    node = expand_path(node)
    base_env = clean_environment(os.environ)
    node_env = {name: str(expand_path(value)) if value.startswith("~/") else value for name, value in env.items()}
    listens = "CLOUDTRAIN_CONTROL" not in node_env and node_env.get("CLOUDTRAIN_NUM_NODES", "1") != "1"
    start(node, argv, {**base_env, **node_env}, secrets)
    deadline = time.monotonic() + JOIN_S
    while listens and time.monotonic() < deadline:
        status, node_state = read_status(node), read_state(node)
        if status and (control := status.get("control")):
            return {"control": f"{control['host']}:{control['port']}", "state": node_state}
        if node_state is None or node_state["state"] in FINAL:
            break
        time.sleep(0.005)
    return {"control": None, "state": read_state(node)}


def run_command(argv: Sequence[str], hide: Sequence[str] = (), limit_s: float = COMMAND_S) -> dict[str, Any]:
    """Run a command to its end, without environment variables that begin with `hide`; blocking.

    Returns `code` (None: the command does not exist, or timed out), `out` and `err`.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(tuple(hide))}
    try:
        completed = subprocess.run(
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
    out, err = (text.decode("utf-8", "replace") for text in (completed.stdout, completed.stderr))
    return {"code": completed.returncode, "out": out, "err": err}


def run_each(name: str, arguments: Sequence[Mapping[str, Any]]) -> bytes:
    """Run one operation for each of several arguments; returns the JSON list of a `value` or an `error` of each. Blocking."""
    answers: list[dict[str, Any]] = []
    for each in arguments:
        try:
            answers.append({"value": OPERATIONS[name](**each)})
        except (OSError, ValueError) as error:
            answers.append({"error": f"{name} failed: {error}"})
    return json.dumps(answers).encode()


def machine_facts(root: AnyPath) -> dict[str, Any]:
    """Return what `cloudtrain doctor` checks on a machine: Python, torch, disk, GPUs."""
    from importlib import metadata, util

    def version(name: str) -> str | None:
        try:
            return metadata.version(name) if util.find_spec(name) else None
        except (metadata.PackageNotFoundError, ValueError):
            return None

    folder = expand_path(root)
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
    }


# -- ports ------------------------------------------------------------------------------------------------------------------


def listen_on(host: str) -> int:
    """Listen on a free port of an address until this agent ends or closes it, and return the port; raises OSError."""
    import socket  # here: most agents need no network

    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.bind(address)
    server.listen(128)
    port = int(server.getsockname()[1])
    _LISTENING[port] = server
    return port


def close_port(port: int) -> None:
    """Stop to listen on a port of `listen_on`."""
    _LISTENING.pop(port).close()


def check_connection(host: str, port: int, wait_s: float = CONNECT_S) -> str | None:
    """Return why a connection to an address fails, or None if it succeeds."""
    import socket

    try:
        socket.create_connection((host, port), timeout=wait_s).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


# -- server -----------------------------------------------------------------------------------------------------------------

# Names on the wire -> functions
OPERATIONS: dict[str, Callable[..., Any]] = {
    "start": start,
    "begun": has_begun,
    "state": read_state,
    "stop": stop,
    "reap": kill_leftovers,
    "left": has_leftovers,
    "prepare": prepare_attempt,
    "request": read_request,
    "report": report_node,
    "cancel": cancel_node,
    "end": stop_and_wait,
    "size": measure,
    "remove": remove_run,
    "arrived": bundles.arrived,
    "put": bundles.store_piece,
    "extract": bundles.extract_bundle,
    "launch": launch_node,
    "token": token,
    "read": read,
    "write": write,
    "walk": walk,
    "digests": digests,
    "folders": make_folders,
    "texts": read_texts,
    "command": run_command,
    "each": run_each,
    "facts": machine_facts,
    "clock": time.time,
    "listen": listen_on,
    "close": close_port,
    "reach": check_connection,
}


def serve() -> None:
    """Answer the requests on standard input until it closes, or until there was none for IDLE_S seconds."""
    os.umask(0o077)
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
        answer: dict[str, Any] = {}
        try:
            value = OPERATIONS[request["operation"]](**arguments)
            data, answer["value"] = (value, None) if isinstance(value, bytes) else (b"", value)
        except OSError as error:
            prefix = f"{error.filename}: " if error.filename else ""
            answer["error"] = prefix + (error.strerror or str(error))
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.write(json.dumps({**answer, "size": len(data)}).encode() + b"\n" + data)
        answers.flush()
