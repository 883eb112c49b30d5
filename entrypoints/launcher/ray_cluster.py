"""The program of each node of a job or role with `ray: true`: ray_cluster.py SCRIPT ARGS..., or -- COMMAND...

Node 0 starts Ray's head, waits until all nodes have joined, and runs the command with RAY_ADDRESS; its exit code is the
role's. The other nodes join, and end when node 0 does. `ray symmetric-run` would find the head by the addresses of the
interfaces and end with a `ray stop` for the whole host, so it serves no host with two nodes (ray 2.60, read 2026-11-29).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from time import monotonic, sleep  # noqa: TID251 - the program runs by itself, without the launcher

JOIN_S = 600.0  # until all nodes have joined
END_S = 10.0  # for Ray to end
REJOINS = 2  # of a node that has not joined: Ray gives its start half a minute, which a busy machine may exceed
WORKER_PORTS = range(10002, 20000)  # Ray's own processes listen there
DASHBOARD_PORT = 8265
PRIVATE = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats")
COUNT = """
import sys, time, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(0.2)
"""


class Node:
    """This node's part of the Ray cluster."""

    def __init__(self) -> None:
        self._nodes = int(os.environ["CLOUDTRAIN_NUM_NODES"])
        self._is_head = int(os.environ.get("NODE_RANK") or 0) == 0
        self._meeting = (
            socket.gethostbyname(os.environ.get("MASTER_ADDR") or "127.0.0.1"),
            int(os.environ.get("MASTER_PORT") or 0),
        )
        self._env = {name: value for name, value in os.environ.items() if name not in PRIVATE}
        self._env.setdefault("RAY_COLOR_PREFIX", "0")  # the log is a file
        # Ray 2.52 or newer; docs.ray.io/en/latest/ray-security/token-auth.html, read 2026-11-29
        self._env.setdefault("RAY_AUTH_MODE", "token")
        self._env["PATH"] = os.path.dirname(sys.executable) + os.pathsep + self._env.get("PATH", os.defpath)
        self._end_at = monotonic() + JOIN_S
        self._folder = ""  # of the cluster, on each host: Ray takes the head's
        self._followers: list[socket.socket] = []  # closed when this process ends, however it does
        self._ray: subprocess.Popen[bytes] | None = None
        self._command: subprocess.Popen[bytes] | None = None

    def run(self, command: list[str]) -> int:
        """Return this node's exit code; blocking."""
        signal.signal(signal.SIGTERM, self._stop)
        try:
            return self._lead(command) if self._is_head else self._follow()
        finally:
            self._end_ray()

    def _lead(self, command: list[str]) -> int:
        """Be the head, and run the command when all nodes have joined."""
        port, dashboard = free_port(), free_port(DASHBOARD_PORT)
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, as the paths of sockets must be
        token = "" if {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & self._env.keys() else secrets.token_hex(32)
        if token:  # the launcher gives one only where the attempt has one
            self._env["RAY_AUTH_TOKEN"] = token
        host = self._meeting[0]
        # Before Ray, whose processes might take the port.
        with socket.create_server(self._meeting) as server:
            server.setblocking(False)
            self._start_ray(host, "--head", f"--port={port}", f"--dashboard-port={dashboard}")
            while not is_open(host, port):
                self._attend("Ray's head")
            address = self._env["RAY_ADDRESS"] = f"{host}:{port}"
            head = self._count(address, 1)  # a node that joins before waits only half a minute for it
            while head.poll() is None:
                self._attend("Ray's head")
            counting = self._count(address, self._nodes)
            while counting.poll() is None:
                self._attend(f"one of the {self._nodes} nodes of the Ray cluster")
                self._welcome(server, f"{port} {self._folder} {token}\n")
        if counting.returncode:
            return exit_code(counting.returncode)
        for follower in self._followers:
            try:
                follower.sendall(b"+")
            except OSError:
                pass  # it has ended; Ray says so
        print(
            f"Ray: {self._nodes} nodes have joined; with ray[default], its dashboard is at port {dashboard}", flush=True
        )
        running = self._command = subprocess.Popen(command, env=self._env)
        while running.poll() is None:
            self._attend()
        return exit_code(running.returncode)

    def _count(self, address: str, nodes: int) -> subprocess.Popen[bytes]:
        """Start what ends when so many nodes are alive."""
        self._command = subprocess.Popen([sys.executable, "-c", COUNT, address, str(nodes)], env=self._env)
        return self._command

    def _welcome(self, server: socket.socket, line: str) -> None:
        """Tell nodes that ask how to join."""
        try:
            follower, _ = server.accept()
            follower.sendall(line.encode())
            self._followers.append(follower)
        except OSError:
            pass  # no node asks now

    def _follow(self) -> int:
        """Join the head, and end when it does."""
        while True:
            try:
                head = socket.create_connection(self._meeting, 5)
                head.settimeout(JOIN_S)
                answer = head.makefile().readline().split()
                break
            except OSError as error:
                if monotonic() > self._end_at:
                    sys.exit(f"Ray's head at {self._meeting[0]} does not answer: {error}")
                sleep(0.2)
        if not answer:
            return 0
        # The command may still save; were the signal ignored, the launcher would send it to Ray instead.
        signal.signal(signal.SIGTERM, lambda *_: None)
        port, self._folder, *token = answer
        if token:
            self._env["RAY_AUTH_TOKEN"] = token[0]
        host = head.getsockname()[0]
        shared = ["--include-log-monitor=false"] if host == self._meeting[0] else []  # the head's reads the same folder
        self._start_ray(host, f"--address={self._meeting[0]}:{port}", *shared)
        head.settimeout(0.2)
        rejoins = REJOINS
        while True:
            why = self._ray_ended()
            try:
                if not head.recv(1):
                    return 0
                rejoins = 0  # all nodes have joined
            except TimeoutError:
                pass
            except OSError:
                return 0  # the head has been killed
            if why and not rejoins:
                sys.exit(why)
            if why:
                rejoins -= 1
                print(f"{why} before all nodes have joined: it is started again", flush=True)
                self._kill_ray()
                self._start_ray(host, f"--address={self._meeting[0]}:{port}", *shared)

    def _start_ray(self, host: str, *words: str) -> None:
        from health.measure import processors

        # Ports of workers that the system gives: nodes of one host would take each other's of the usual range.
        ports = [f"--{name}-port=0" for name in ("min-worker", "max-worker")]
        names = (
            "node-manager",
            "object-manager",
            "dashboard-agent-listen",
            "dashboard-agent-grpc",
            "runtime-env-agent",
        )
        ports += [f"--{name}-port={free_port()}" for name in (*names, "metrics-export")]
        about = [f"--node-ip-address={host}", f"--temp-dir={self._folder}", f"--num-cpus={max(1, int(processors()))}"]
        command = [*START, *about, *gpu_words(self._env), *ports, *words]
        self._ray = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL, start_new_session=True)

    def _attend(self, awaited: str = "") -> None:
        """Wait a little; exit where Ray has ended here, or what is awaited does not come."""
        sleep(0.1)
        if why := self._ray_ended():
            sys.exit(why)
        if awaited and monotonic() > self._end_at:
            sys.exit(f"{awaited} has not come up within {JOIN_S:g} s")

    def _ray_ended(self) -> str:
        """Return that Ray has ended on this node, "" while it runs."""
        if self._ray is None or self._ray.poll() is None:
            return ""
        return f"Ray has ended on this node with exit code {exit_code(self._ray.returncode)}"

    def _stop(self, *_: object) -> None:
        """Pass a request to stop on to the command, which may save."""
        if self._command is None or self._command.poll() is not None:
            sys.exit(128 + signal.SIGTERM)
        self._command.send_signal(signal.SIGTERM)

    def _kill_ray(self) -> None:
        """Kill all processes of Ray on this node."""
        try:
            if self._ray is not None:
                os.killpg(self._ray.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _end_ray(self) -> None:
        if self._command and self._command.poll() is None:
            self._command.kill()
        if self._ray and self._ray.poll() is None:
            self._ray.send_signal(signal.SIGTERM)
            try:
                self._ray.wait(END_S)
            except subprocess.TimeoutExpired:
                self._kill_ray()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def gpu_words(environ: Mapping[str, str]) -> list[str]:
    """Return the option for the GPUs that the launcher has chosen for this node; [] where Ray counts those that are there."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return []
    return [f"--num-gpus={sum(number.strip() not in ('', '-1') for number in chosen.split(','))}"]


def is_open(host: str, port: int) -> bool:
    """Return whether a port answers."""
    try:
        socket.create_connection((host, port), 1).close()
        return True
    except OSError:
        return False


def free_port(wanted: int = 0) -> int:
    """Return the wanted port where it is free, else another one, outside of those of Ray's workers."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("", wanted))
            except OSError:
                wanted = 0
                continue
            port = int(probe.getsockname()[1])
        if port not in WORKER_PORTS:
            return port


def exit_code(status: int) -> int:
    """Return the exit code of a process, 128 + N where signal N has ended it."""
    return status if status >= 0 else 128 - status


def to_command(words: list[str]) -> list[str]:
    """Return the words of a command; a script has this interpreter, as without Ray."""
    if words[0] == "--":
        return words[1:]
    return [*(["bash"] if words[0].endswith(".sh") else [sys.executable]), *words]


if __name__ == "__main__":
    sys.exit(Node().run(to_command(sys.argv[1:])))
