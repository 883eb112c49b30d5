"""The jobs of a simulated workspace: each node is a process group of this machine, its log a file in memory."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM
from cloudtrain.simulators.blob import ACCOUNT, BlobService
from cloudtrain.simulators.replicas import Replica, base_environment, free_port, pick_addresses

FINAL = ("Completed", "Failed", "Canceled")
TICK_S = 0.02
AFTER_FAILURE_S = 60.0  # other nodes live on after one has failed: our launcher ends them itself earlier
_BINDING = re.compile(r"\$\{\{\s*(inputs|outputs)\.(\w+)\s*\}\}")
_DATASTORE = re.compile(r"azureml://datastores/(\w+)/paths/(.*)")
STORES = {"workspaceartifactstore": "azureml", "workspaceblobstore": "azureml-blobstore"}  # datastores and containers
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)S)?)?")


@dataclass
class Behavior:
    """What the workspace does with jobs.

    Attributes:
        execute: whether jobs run; else they stay queued.
        queue_s: how long a job is queued.
        stop_s: between SIGTERM and SIGKILL of a job that is cancelled.
        page: jobs on a page of a listing.
    """

    execute: bool = True
    queue_s: float = 0.0
    stop_s: float = 60.0
    page: int = 10


@dataclass
class SimulatedJob:
    """One job: what was sent, its status, and the logs of its nodes."""

    name: str
    properties: dict[str, Any]
    created: str
    status: str = "NotStarted"
    started: str | None = None
    ended: str | None = None
    error: dict[str, Any] | None = None
    logs: list[bytearray] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    evicted: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def nodes(self) -> int:
        return int((self.properties.get("resources") or {}).get("instanceCount") or 1)

    def log_files(self) -> dict[str, int]:
        """Return the names of the log files that there are, with their nodes."""
        several = bool(self.properties.get("distribution"))
        names = (
            f"user_logs/std_log_process_{node}.txt" if several else "user_logs/std_log.txt"
            for node in range(self.nodes)
        )
        return {name: node for node, name in enumerate(names) if node < len(self.logs)}


class Runner:
    """Runs the jobs of a workspace."""

    def __init__(self, folder: Path, blobs: BlobService, behavior: Behavior) -> None:
        self._folder, self._blobs, self.behavior = folder, blobs, behavior
        self.environ: dict[
            str, str
        ] = {}  # what the machines of the workspace have: the identity of the simulated account
        self.closed = threading.Event()

    def start(self, job: SimulatedJob) -> None:
        if not self.behavior.execute:
            job.status = "Queued"
            return
        job.thread = threading.Thread(target=self._live, args=(job,), daemon=True)
        job.thread.start()

    def _live(self, job: SimulatedJob) -> None:
        job.status = "Queued"
        until = SYSTEM.monotonic() + self.behavior.queue_s
        while SYSTEM.monotonic() < until:
            if job.cancelled.is_set() or self.closed.is_set():
                job.status = "Canceled"
                return
            SYSTEM.sleep(TICK_S)
        job.status = "Preparing"
        replicas: list[Replica] = []
        try:
            job.logs = [bytearray() for _ in range(job.nodes)]
            for node, environment in enumerate(self._environments(job)):
                folder = self._folder / job.name / f"node-{node}"
                folder.mkdir(parents=True)
                replicas.append(self._replica(job, node, folder, environment))
            job.status, job.started = "Running", now()
            job.status, job.error = self._watch(job, replicas)
        except Exception as error:
            job.status, job.error = "Failed", {"code": "UserError", "message": f"{type(error).__name__}: {error}"}
        finally:
            ended, job.status = job.status, "Finalizing"
            for replica in replicas:
                replica.kill()
            self._return(job)
            job.status, job.ended = ended, now()

    def _replica(self, job: SimulatedJob, node: int, folder: Path, environment: Mapping[str, str]) -> Replica:
        bound = {}
        for name, item in (job.properties.get("inputs") or {}).items():
            bound["inputs", name] = item["uri"] if item["mode"] == "Direct" else self._bring(item["uri"], folder / name)
        for name, item in (job.properties.get("outputs") or {}).items():  # a mount is one folder of all nodes
            bound["outputs", name] = self._bring(item["uri"], folder.parent / "mounted" / name, is_new=True)
        command = _BINDING.sub(lambda found: bound[found[1], found[2]], job.properties["command"])
        log = job.logs[node]

        def write(lines: list[str]) -> None:
            log.extend("".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))

        return Replica(str(node), ["bash", "-c", command], environment, folder / "work", write)

    def _bring(self, uri: str, into: Path, is_new: bool = False) -> str:
        """Copy a blob, or all below a folder, to a machine; return the path. A folder is made where it is an output's."""
        container, key = split(uri)
        objects = self._blobs.objects(container)
        if key in objects:
            objects, into = {key: objects[key]}, into / Path(key).name
        files = {name: data for name, data in objects.items() if name == key or name.startswith(f"{key.rstrip('/')}/")}
        if not files and not is_new:
            raise ValueError(f"Input path {uri} does not exist")
        into.parent.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            path = into / name.removeprefix(key.rstrip("/")).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        if is_new:
            into.mkdir(exist_ok=True)
        return str(into)

    def _return(self, job: SimulatedJob) -> None:
        """Make the files of mounted outputs blobs."""
        for name, item in (job.properties.get("outputs") or {}).items():
            container, key = split(item["uri"])
            folder = self._folder / job.name / "mounted" / name
            files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
            for below in self._blobs.objects(container):
                if below.startswith(f"{key}/") and below.removeprefix(f"{key}/") not in files:
                    del self._blobs.containers[container][below]
            for below, path in files.items():
                self._blobs.write(container, f"{key}/{below}", path.read_bytes())

    def _environments(self, job: SimulatedJob) -> list[dict[str, str]]:
        """Return the variables of each node; with a distribution those of its one process, LOCAL_RANK among them."""
        shared = {**base_environment(), **self.environ, **(job.properties.get("environmentVariables") or {})}
        shared["AZUREML_RUN_ID"] = job.name
        if not job.properties.get("distribution"):
            return [shared] * job.nodes
        hosts, port = pick_addresses(job.nodes), str(free_port())
        own = {"MASTER_ADDR": hosts[0], "MASTER_PORT": port, "WORLD_SIZE": str(job.nodes), "LOCAL_RANK": "0"}
        return [{**shared, **own, "RANK": str(node), "NODE_RANK": str(node)} for node in range(job.nodes)]

    def _watch(self, job: SimulatedJob, replicas: list[Replica]) -> tuple[str, dict[str, Any] | None]:
        """Wait for the end of all nodes; return the status and the error."""
        now = SYSTEM.monotonic()
        limit, stop_at, asked = now + _seconds(job.properties), float("inf"), ""
        while any(replica.code is None for replica in replicas):
            now = SYSTEM.monotonic()
            if self.closed.is_set() or now > stop_at:
                break
            wanted = "Canceled" if job.cancelled.is_set() or now > limit else "Evicted" if job.evicted.is_set() else ""
            if wanted and not asked:
                asked, stop_at = wanted, now + self.behavior.stop_s
                for replica in replicas:
                    replica.terminate()
            if not asked and any(replica.code for replica in replicas):
                stop_at = min(stop_at, now + AFTER_FAILURE_S)
            SYSTEM.sleep(TICK_S)
        if asked == "Evicted":
            return "Failed", {"code": "NodePreempted", "message": "The node was preempted: a spot machine was evicted."}
        if asked or self.closed.is_set():
            return "Canceled", None
        codes = [replica.code for replica in replicas]
        if any(codes):
            first = next(code for code in codes if code)
            return "Failed", {
                "code": "UserError",
                "message": f"Execution failed. User process exited with status code {first}.",
            }
        return "Completed", None


def split(uri: str) -> tuple[str, str]:
    """Return container and name of an address of the account, or of a path in a datastore. Raises ValueError."""
    if found := _DATASTORE.fullmatch(uri):
        if found[1] not in STORES:
            raise ValueError(f"Datastore {found[1]} was not found")
        return STORES[found[1]], found[2]
    container, _, key = uri.removeprefix(f"https://{ACCOUNT}.blob.core.windows.net/").partition("/")
    return container, key


def _seconds(properties: Mapping[str, Any]) -> float:
    found = _DURATION.fullmatch((properties.get("limits") or {}).get("timeout") or "P30D")
    assert found is not None, "it was checked when the job was created"
    return float(sum(int(text or 0) * unit for text, unit in zip(found.groups(), (86400, 3600, 60, 1), strict=True)))


def is_duration(text: str) -> bool:
    """Return whether a text is a duration that the service takes."""
    return bool(_DURATION.fullmatch(text)) and text[-1] not in "PT"


def now() -> str:
    return datetime.fromtimestamp(SYSTEM.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
