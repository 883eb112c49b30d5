"""Runs containers as local processes, each with a private folder, and builds the environment of Vertex AI replicas.

As in a container, all processes end when the first one has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.http import ApiError

CLUSTER_PORT = 2222
PROJECT_NUMBER = "123456789012"
FOLDER_VARIABLE = "CLOUDTRAIN_SIMULATED"  # environment variable of all processes of a replica: its folder
CHUNK = 1 << 16
# variables that a container inherits from this process
INHERITED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
          "OMP_NUM_THREADS", "CLOUDTRAIN_SYNC_EVERY_S")  # fmt: skip
_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class Replica:
    """A container as a process group: the constructor starts it; it ends by itself, by `terminate` or by `kill`."""

    def __init__(
        self,
        task: str,
        command: list[str],
        env: Mapping[str, str],
        folder: Path,
        write_lines: Callable[[list[str]], None],
    ) -> None:
        self.task, self._folder, self._write_lines = task, folder, write_lines
        (folder / "tmp").mkdir(parents=True)
        env = {**env, FOLDER_VARIABLE: str(folder), "HOME": str(folder), "TMPDIR": str(folder / "tmp")}
        self.folder, self.env = folder, env
        program = shutil.which(command[0], path=env["PATH"])
        if program is None:
            raise ApiError(400, f"the command {command[0]!r} does not exist in this image")
        self._process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """Exit code of the first process, 128+n for a signal; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to the first process only, as Kubernetes does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all its processes, wait for the end of its log, and remove its folder; blocking."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        while pids := [pid for pid, folder in list_processes() if folder == str(self._folder)]:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            SYSTEM.sleep(0.01)
        self._reader.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    self._write_lines([line.decode("utf-8", "replace") for line in lines])
        if rest:
            self._write_lines([rest.decode("utf-8", "replace")])


def list_processes(variable: str = FOLDER_VARIABLE) -> Iterator[tuple[int, str]]:
    """Yield (pid, value) of all processes with an environment variable; by default all replicas with their folders."""
    marker = f"\0{variable}=".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (entry / "environ").read_bytes()
            if marker in environ and (entry / "stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X"):
                yield int(entry.name), environ.partition(marker)[2].partition(b"\0")[0].decode()
        except OSError:
            continue


def list_tasks(spec: Mapping[str, Any]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Return (pool, index, pool's spec) for each replica of a job's spec."""
    return [
        (f"workerpool{number}", index, pool)
        for number, pool in enumerate(spec["workerPoolSpecs"])
        for index in range(int(pool.get("replicaCount", 0)))
    ]


def list_containers(job: Mapping[str, Any], storage_url: str) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return (task, command, environment) for each replica of a job, with new loopback addresses."""
    spec = job["jobSpec"]
    replicas = list_tasks(spec)
    hosts = pick_addresses(len(replicas))
    cluster: dict[str, list[str]] = {}
    for (pool, _, _), host in zip(replicas, hosts, strict=True):
        cluster.setdefault(pool, []).append(f"{host}:{CLUSTER_PORT}")
    shared = base_environment() | {
        "CLOUD_ML_PROJECT_ID": PROJECT_NUMBER,
        "CLOUD_ML_JOB_ID": str(job["name"]).rpartition("/")[2],
        "STORAGE_EMULATOR_HOST": storage_url,
        "WORLD_SIZE": str(len(replicas)),  # Vertex counts nodes in WORLD_SIZE and RANK, not processes
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(free_port()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(replicas))))
    if base := spec.get("baseOutputDirectory", {}).get("outputUriPrefix"):
        base = base.rstrip("/")
        shared |= {"AIP_MODEL_DIR": f"{base}/model/", "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
                   "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/"}  # fmt: skip
    containers = []
    for rank, (pool, index, pool_spec) in enumerate(replicas):
        container = pool_spec["containerSpec"]
        task = {"type": pool, "index": index, "trial": ""}
        cluster_spec = {"cluster": cluster, "environment": "cloud", "task": task, "job": json.dumps(spec)}
        env = shared | {"CLUSTER_SPEC": json.dumps(cluster_spec), "RANK": str(rank)}
        if len(replicas) > 1:
            names = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
            tf_cluster = {
                names[name]: addresses_of_pool for name, addresses_of_pool in cluster.items() if name in names
            }
            tf_task = {**task, "type": names.get(pool, pool), "cloud": "local"}
            env["TF_CONFIG"] = json.dumps({"cluster": tf_cluster, "task": tf_task, "environment": "cloud"})
        env |= {item["name"]: item.get("value", "") for item in container.get("env", ())}
        command = [*container.get("command", ()), *container.get("args", ())]
        containers.append((f"{pool}-{index}", command, env))
    return containers


def base_environment() -> dict[str, str]:
    """Return the environment of every container: PATH with this interpreter, and inherited variables."""
    env = {name: os.environ[name] for name in INHERITED if name in os.environ}
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath)
    env["PYTHONUNBUFFERED"] = "1"
    if sys.platform.startswith("linux"):
        env["GLOO_SOCKET_IFNAME"] = "lo"  # all nodes are this machine
    return env


def pick_addresses(count: int) -> list[str]:
    """Pick loopback addresses that no other job uses, so that each replica has all ports of its own."""
    if not sys.platform.startswith("linux"):
        return ["127.0.0.1"] * count
    while True:
        net = f"127.{random.randint(16, 250)}.{random.randint(0, 255)}"
        with socket.socket() as probe:
            try:
                probe.bind((f"{net}.1", CLUSTER_PORT))
            except OSError:
                continue
        return [f"{net}.{number}" for number in range(1, count + 1)]


def free_port() -> int:
    """Return a port below the ephemeral range that is free on all addresses, because rank 0 listens on all."""
    while True:
        port = random.randint(20000, 29000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def _die_with_parent() -> None:
    """Have the kernel kill the replica when the simulator's thread ends; runs between fork and exec."""
    if _libc is not None:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
