"""The replicas of a custom job as processes of this machine: a private folder each, and the environment that Vertex gives.

What stands for the container's end is done here too: when its first process ends, all that it has started ends.
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
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.simulators.http import Refusal

CLUSTER_PORT = 2222
PROJECT_NUMBER = "123456789012"
MARK = "CLOUDTRAIN_SIMULATED"  # in the environment of all that a replica starts: its folder
CHUNK = 1 << 16
# what of this process's environment a container may see
PASSED = ("LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
          "OMP_NUM_THREADS")  # fmt: skip
_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None


class Replica:
    """One replica: started by its constructor, ended by itself, `ask` or `end`."""

    def __init__(
        self, task: str, command: list[str], env: Mapping[str, str], folder: Path, heard: Callable[[list[str]], None]
    ) -> None:
        self.task, self._folder, self._heard = task, folder, heard
        (folder / "tmp").mkdir(parents=True)
        env = {**env, MARK: str(folder), "HOME": str(folder), "TMPDIR": str(folder / "tmp")}
        program = shutil.which(command[0], path=env["PATH"])
        if program is None:
            raise Refusal(400, f"the command {command[0]!r} does not exist in this image")
        self._process = subprocess.Popen(
            [program, *command[1:]],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_us,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def code(self) -> int | None:
        """The exit code of its first process, None while it runs; a signal is 128+n."""
        found = self._process.poll()
        return 128 - found if found is not None and found < 0 else found

    def ask(self) -> None:
        """Send SIGTERM to its first process, as Kubernetes does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill what is left of it, wait until all that it printed is in the log, and remove its disk; blocking."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        while left := [pid for pid, folder in marked() if folder == str(self._folder)]:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._reader.join(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> None:
        assert self._process.stdout is not None
        rest = b""
        with self._process.stdout as pipe:
            while data := os.read(pipe.fileno(), CHUNK):
                *lines, rest = (rest + data).split(b"\n")
                if lines:
                    self._heard([line.decode("utf-8", "replace") for line in lines])
        if rest:
            self._heard([rest.decode("utf-8", "replace")])


def marked() -> Iterator[tuple[int, str]]:
    """Yield the processes of all replicas, and the folder of theirs."""
    word = f"\0{MARK}=".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = b"\0" + (entry / "environ").read_bytes()
            if word in environ and (entry / "stat").read_bytes().rpartition(b") ")[2][:1] not in (b"Z", b"X"):
                yield int(entry.name), environ.partition(word)[2].partition(b"\0")[0].decode()
        except OSError:
            continue


def tasks(spec: Mapping[str, Any]) -> list[tuple[str, int, Mapping[str, Any]]]:
    """Return (pool, index, pool's spec) of every replica of a job's spec."""
    return [
        (f"workerpool{number}", index, pool)
        for number, pool in enumerate(spec["workerPoolSpecs"])
        for index in range(int(pool.get("replicaCount", 0)))
    ]


def environments(job: Mapping[str, Any], storage_url: str) -> list[tuple[str, list[str], dict[str, str]]]:
    """Return (task, command, environment) of every replica of a job, with addresses of their own for this start."""
    spec = job["jobSpec"]
    replicas = tasks(spec)
    hosts = addresses(len(replicas))
    cluster: dict[str, list[str]] = {}
    for (pool, _, _), host in zip(replicas, hosts, strict=True):
        cluster.setdefault(pool, []).append(f"{host}:{CLUSTER_PORT}")
    shared = shared_environment() | {
        "CLOUD_ML_PROJECT_ID": PROJECT_NUMBER,
        "CLOUD_ML_JOB_ID": str(job["name"]).rpartition("/")[2],
        "STORAGE_EMULATOR_HOST": storage_url,
        "WORLD_SIZE": str(len(replicas)),  # here, and in RANK, of nodes: a trap that is part of the platform
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": str(_free_port()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(replicas))))
    if base := spec.get("baseOutputDirectory", {}).get("outputUriPrefix"):
        base = base.rstrip("/")
        shared |= {"AIP_MODEL_DIR": f"{base}/model/", "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
                   "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/"}  # fmt: skip
    found = []
    for rank, (pool, index, its) in enumerate(replicas):
        container = its["containerSpec"]
        task = {"type": pool, "index": index, "trial": ""}
        cluster_spec = {"cluster": cluster, "environment": "cloud", "task": task, "job": json.dumps(spec)}
        env = shared | {"CLUSTER_SPEC": json.dumps(cluster_spec), "RANK": str(rank)}
        if len(replicas) > 1:
            names = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps"}
            tf_cluster = {names[name]: places for name, places in cluster.items() if name in names}
            tf_task = {**task, "type": names.get(pool, pool), "cloud": "local"}
            env["TF_CONFIG"] = json.dumps({"cluster": tf_cluster, "task": tf_task, "environment": "cloud"})
        env |= {item["name"]: item.get("value", "") for item in container.get("env", ())}
        command = [*container.get("command", ()), *container.get("args", ())]
        found.append((f"{pool}-{index}", command, env))
    return found


def shared_environment() -> dict[str, str]:
    """Return what every container here sees: a path to this interpreter, and what of our environment it may have."""
    found = {name: os.environ[name] for name in PASSED if name in os.environ}
    found["PATH"] = str(Path(sys.executable).parent) + os.pathsep + os.environ.get("PATH", os.defpath)
    found["PYTHONUNBUFFERED"] = "1"
    if sys.platform.startswith("linux"):
        found["GLOO_SOCKET_IFNAME"] = "lo"  # all machines are this one
    return found


def addresses(count: int) -> list[str]:
    """Return loopback addresses that no other job uses: every replica is a host with all ports of its own."""
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


def _free_port() -> int:
    """Return a port below the ephemeral range that is free on all addresses: rank 0 listens on all of them."""
    while True:
        port = random.randint(20000, 29000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port


def _die_with_us() -> None:
    """Between fork and exec: the replica is killed when the thread that started it, and so the simulator, has gone."""
    if _libc is not None:
        _libc.prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
