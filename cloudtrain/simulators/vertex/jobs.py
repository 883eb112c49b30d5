"""Vertex AI's job service: create, get, list, cancel and delete custom jobs, as REST; their life is lifecycle.py's."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.simulators.http import Answer, Refusal, Request, Route
from cloudtrain.simulators.replicas import PROJECT_NUMBER
from cloudtrain.simulators.vertex.lifecycle import Life, Pace
from cloudtrain.simulators.vertex.logs import Entries, selector, stamp

FINAL = frozenset({"JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED",
                   "JOB_STATE_PARTIALLY_SUCCEEDED"})  # fmt: skip
STRATEGIES = ("STRATEGY_UNSPECIFIED", "ON_DEMAND", "LOW_COST", "STANDARD", "SPOT", "", "FLEX_START")
# What the service knows; anything else is an error there too.
FIELDS = {
    "": "displayName jobSpec labels encryptionSpec",
    "jobSpec": "persistentResourceId workerPoolSpecs scheduling serviceAccount network reservedIpRanges"
    " pscInterfaceConfig baseOutputDirectory protectedArtifactLocationId tensorboard enableWebAccess"
    " enableDashboardAccess experiment experimentRun models",
    "workerPoolSpecs": "containerSpec pythonPackageSpec machineSpec replicaCount nfsMounts lustreMounts diskSpec",
    "containerSpec": "imageUri command args env",
    "machineSpec": "machineType acceleratorType acceleratorCount gpuPartitionSize tpuTopology multihostGpuNodeCount"
    " reservationAffinity minGpuDriverVersion",
    "diskSpec": "bootDiskType bootDiskSizeGb",
    "scheduling": "timeout restartJobOnWorkerRestart strategy disableRetries maxWaitDuration",
}
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
Job = dict[str, Any]


class CustomJobs:
    """The jobs of one project, each a file, executed by a thread of its own."""

    def __init__(self, folder: Path, project: str, entries: Entries, pace: Pace) -> None:
        self._folder, self._project, self._entries, self._pace = folder, project, entries, pace
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self._lives: dict[str, Life] = {}
        self._storage_url = ""
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            job = json.loads(path.read_text())
            self._jobs[path.stem] = job
            if job["state"] not in FINAL:  # its replicas have died with the simulator that had started them
                error = {"code": 13, "message": "Internal error occurred: the simulator was stopped while the job ran."}
                self.change(path.stem, state="JOB_STATE_FAILED", error=error, endTime=stamp(time.time()))

    def serve(self, url: str) -> None:
        """Learn the address at which replicas find the object store."""
        self._storage_url = url

    @property
    def routes(self) -> list[Route]:
        place = r"/v1/projects/([^/]+)/locations/([^/]+)/customJobs"
        return [
            ("POST", place, self._create),
            ("GET", place, self._list),
            ("GET", place + r"/([^/:]+)", self._get),
            ("POST", place + r"/([^/:]+):cancel", self._cancel),
            ("DELETE", place + r"/([^/:]+)", self._delete),
            ("POST", r"/simulator/preempt/(\d+)", self._preempt),
        ]

    @property
    def running(self) -> int:
        with self._lock:
            return sum(job["state"] not in FINAL for job in self._jobs.values())

    def change(self, number: str, **fields: Any) -> None:
        """Change fields of a job and write it down."""
        with self._lock:
            job = self._jobs[number]
            job.update(fields, updateTime=stamp(time.time()))
            path = self._folder / f"{number}.json"
            half = path.with_suffix(".half")
            half.write_text(json.dumps(job))
            half.replace(path)

    def preempt(self, number: str, task: str = "", *, notice: bool = True) -> None:
        """Take the machine of a replica away (of all, without a task): SIGTERM, time to save, SIGKILL."""
        self._lives[number].preempt(task, notice)

    def close(self) -> None:
        """End all that runs; blocking."""
        for life in list(self._lives.values()):
            life.cancel()
        for life in list(self._lives.values()):
            life.join()

    # -- the service ---------------------------------------------------------------------------------------------------

    def _create(self, request: Request, project: str, region: str) -> Answer:
        self._place(project)
        job = normal(request.json)
        number = str(random.randint(10**17, 10**18 - 1) * 10 + 1)
        now = stamp(time.time())
        job |= {
            "name": f"projects/{PROJECT_NUMBER}/locations/{region}/customJobs/{number}",
            "state": "JOB_STATE_QUEUED" if self._pace.queue_s else "JOB_STATE_PENDING",
            "createTime": now,
            "updateTime": now,
        }
        answer = dict(job)
        with self._lock:
            self._jobs[number] = job
            self.change(number)
            if self._pace.execute:
                self._lives[number] = Life(job, self._folder / number, self._entries, self._pace, self._storage_url,
                                           lambda **fields: self.change(number, **fields))  # fmt: skip
        return Answer(answer)

    def _get(self, _: Request, project: str, __: str, number: str) -> Answer:
        self._place(project)
        with self._lock:
            if number not in self._jobs:
                raise Refusal(404, f"The CustomJob does not exist: {number}")
            return Answer(dict(self._jobs[number]))

    def _list(self, request: Request, project: str, region: str) -> Answer:
        self._place(project)
        fits = selector(request.query.get("filter", ""))
        with self._lock:
            found = [
                dict(job)
                for job in self._jobs.values()
                if f"/locations/{region}/" in job["name"] and fits({**job, "display_name": job["displayName"]})
            ]
        found.sort(key=lambda job: str(job["createTime"]), reverse=True)
        first, size = int(request.query.get("pageToken") or 0), int(request.query.get("pageSize") or 100)
        page = found[first : first + size]
        more = {"nextPageToken": str(first + size)} if first + size < len(found) else {}
        return Answer({**({"customJobs": page} if page else {}), **more})

    def _cancel(self, request: Request, project: str, region: str, number: str) -> Answer:
        job = self._get(request, project, region, number).body
        if job["state"] in FINAL:
            raise Refusal(400, f"The job is in state {job['state']} and cannot be cancelled.")
        if number in self._lives:
            self.change(number, state="JOB_STATE_CANCELLING")
            self._lives[number].cancel()
        else:
            self.change(number, state="JOB_STATE_CANCELLED", endTime=stamp(time.time()))
        return Answer({})

    def _delete(self, request: Request, project: str, region: str, number: str) -> Answer:
        job = self._get(request, project, region, number).body
        if job["state"] not in FINAL:
            raise Refusal(400, f"The job is in state {job['state']} and cannot be deleted.")
        with self._lock:
            del self._jobs[number]
            (self._folder / f"{number}.json").unlink(missing_ok=True)
        name = job["name"].replace("/customJobs/", "/operations/")
        kind = "type.googleapis.com/google.protobuf.Empty"
        return Answer({"name": name, "done": True, "response": {"@type": kind}})

    def _preempt(self, request: Request, number: str) -> Answer:
        if number not in self._lives:
            raise Refusal(404, f"no job {number} runs here")
        self.preempt(number, request.query.get("task", ""), notice=request.query.get("notice") != "no")
        return Answer({})

    def _place(self, project: str) -> None:
        if project not in (self._project, PROJECT_NUMBER):
            raise Refusal(403, f"Permission 'aiplatform.customJobs.create' denied on resource '//aiplatform.googleapis.com"
                               f"/projects/{project}' (or it may not exist).")  # fmt: skip


def normal(job: Mapping[str, Any]) -> Job:
    """Return a job as the service keeps it: names instead of numbers of enums; raises Refusal for what it would refuse."""
    found: Job = json.loads(json.dumps(job))
    _only("", found)
    if not 1 <= len(found.get("displayName", "")) <= 128:
        raise Refusal(400, "display_name must have 1 to 128 characters.")
    labels = found.get("labels", {})
    wrong = [name for name, value in labels.items() if not (_LABEL.fullmatch(name) and _VALUE.fullmatch(value))]
    if wrong or len(labels) > 64:
        raise Refusal(400, f"Invalid labels: {', '.join(wrong) or len(labels)}")
    spec = found.get("jobSpec") or {}
    _only("jobSpec", spec)
    pools = spec.get("workerPoolSpecs") or []
    if not 1 <= len(pools) <= 4:
        raise Refusal(400, "worker_pool_specs must have 1 to 4 entries.")
    for number, pool in enumerate(pools):
        if pool:
            _check_pool(number, pool)
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        raise Refusal(400, "service_account must be specified when tensorboard is specified.")
    scheduling = spec.get("scheduling") or {}
    _only("scheduling", scheduling)
    if isinstance(scheduling.get("strategy"), int):
        scheduling["strategy"] = STRATEGIES[scheduling["strategy"]]
    if scheduling.get("strategy", "STANDARD") not in STRATEGIES:
        raise Refusal(400, f"Invalid value at 'scheduling.strategy': {scheduling['strategy']}")
    return found


def _check_pool(number: int, pool: Mapping[str, Any]) -> None:
    _only("workerPoolSpecs", pool)
    if number == 0 and int(pool.get("replicaCount", 0)) != 1:
        raise Refusal(400, "replica_count of the first worker pool must be 1.")
    if not (pool.get("machineSpec") or {}).get("machineType"):
        raise Refusal(400, f"machine_type of worker pool {number} is required.")
    _only("machineSpec", pool["machineSpec"])
    container = pool.get("containerSpec")
    if not container or not container.get("imageUri"):
        raise Refusal(400, "this simulator runs container_spec, with an image_uri, only.")
    _only("containerSpec", container)
    if len(container.get("env") or []) > 100:
        raise Refusal(400, "a container may have 100 environment variables.")
    if size := int((pool.get("diskSpec") or {}).get("bootDiskSizeGb", 0)):
        _only("diskSpec", pool["diskSpec"])
        if not 100 <= size <= 64000:
            raise Refusal(400, f"boot_disk_size_gb must be 100 to 64000, not {size}.")


def _only(place: str, found: Mapping[str, Any]) -> None:
    for name in found.keys() - set(FIELDS[place].split()):
        at = place or "custom_job"
        raise Refusal(400, f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field.")
