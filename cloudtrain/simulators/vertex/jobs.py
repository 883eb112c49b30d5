"""Simulates Vertex AI's REST API for custom jobs: create, get, list, cancel, delete. lifecycle.py executes them."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.job.units import format_time
from cloudtrain.simulators.http import ApiError, Request, Response, Route, paginate
from cloudtrain.simulators.replicas import PROJECT_NUMBER
from cloudtrain.simulators.vertex.lifecycle import Behavior, JobLifecycle
from cloudtrain.simulators.vertex.logs import LogEntries, parse_filter
from cloudtrain.simulators.vertex.validation import check_accelerators, check_job_filter, check_place

FINAL = frozenset({"JOB_STATE_SUCCEEDED", "JOB_STATE_FAILED", "JOB_STATE_CANCELLED", "JOB_STATE_EXPIRED",
                   "JOB_STATE_PARTIALLY_SUCCEEDED"})  # fmt: skip
STRATEGIES = ("STRATEGY_UNSPECIFIED", "ON_DEMAND", "LOW_COST", "STANDARD", "SPOT", "", "FLEX_START")
# Fields that the service accepts; it rejects all others too.
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
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
Job = dict[str, Any]


class CustomJobs:
    """The custom jobs of one project, each stored in a file and executed by its own thread."""

    def __init__(self, folder: Path, project: str, entries: LogEntries, behavior: Behavior) -> None:
        self._folder, self._project, self._entries, self._behavior = folder, project, entries, behavior
        self._lock = threading.RLock()
        self._jobs: dict[str, Job] = {}
        self._lifecycles: dict[str, JobLifecycle] = {}
        self._storage_url = ""
        self._has_bucket: Callable[[str], bool] = bool
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            job = json.loads(path.read_text())
            self._jobs[path.stem] = job
            if job["state"] not in FINAL:  # its replicas ended with the simulator that started them
                error = {"code": 13, "message": "Internal error occurred: the simulator was stopped while the job ran."}
                self.change(
                    path.stem, state="JOB_STATE_FAILED", error=error, endTime=format_time(self._entries.clock.now())
                )

    def set_storage(self, url: str, has_bucket: Callable[[str], bool]) -> None:
        """Set the URL of Cloud Storage for the replicas, and which buckets there are."""
        self._storage_url, self._has_bucket = url, has_bucket

    @property
    def routes(self) -> list[Route]:
        jobs_path = r"/v1/projects/([^/]+)/locations/([^/]+)/customJobs"
        return [
            ("POST", jobs_path, self._create),
            ("GET", jobs_path, self._list),
            ("GET", jobs_path + r"/([^/:]+)", self._get),
            ("POST", jobs_path + r"/([^/:]+):cancel", self._cancel),
            ("DELETE", jobs_path + r"/([^/:]+)", self._delete),
            ("POST", r"/simulator/preempt/(\d+)", self._preempt),
        ]

    @property
    def running(self) -> int:
        with self._lock:
            return sum(job["state"] not in FINAL for job in self._jobs.values())

    def change(self, number: str, **fields: Any) -> None:
        """Update fields of a job and save it."""
        with self._lock:
            job = self._jobs[number]
            job.update(fields, updateTime=format_time(self._entries.clock.now()))
            path = self._folder / f"{number}.json"
            temporary = path.with_suffix(".half")
            temporary.write_text(json.dumps(job))
            temporary.replace(path)

    def preempt(self, number: str, task: str = "", *, notice: bool = True) -> None:
        """Preempt a replica, or all replicas where `task` is empty: SIGTERM, grace period, SIGKILL."""
        self._lifecycles[number].preempt(task, notice)

    def close(self) -> None:
        """Cancel all running jobs; blocking."""
        for lifecycle in list(self._lifecycles.values()):
            lifecycle.cancel()
        for lifecycle in list(self._lifecycles.values()):
            lifecycle.join()

    # -- the service ---------------------------------------------------------------------------------------------------

    def _create(self, request: Request, project: str, region: str) -> Response:
        self._check_project(project)
        check_place(region)
        job = normalize_job(request.json)
        base = str((job["jobSpec"].get("baseOutputDirectory") or {}).get("outputUriPrefix", ""))
        bucket = base.removeprefix("gs://").partition("/")[0]
        if base and not self._has_bucket(bucket):
            raise ApiError(400, f"The specified bucket does not exist: {bucket}")
        number = str(random.randint(10**17, 10**18 - 1) * 10 + 1)
        now = format_time(self._entries.clock.now())
        job |= {
            "name": f"projects/{PROJECT_NUMBER}/locations/{region}/customJobs/{number}",
            "state": "JOB_STATE_QUEUED" if self._behavior.queue_s else "JOB_STATE_PENDING",
            "createTime": now,
            "updateTime": now,
        }
        answer = dict(job)
        with self._lock:
            self._jobs[number] = job
            self.change(number)
            if self._behavior.execute:
                lifecycle = self._lifecycles[number] = JobLifecycle(
                    job,
                    self._folder / number,
                    self._entries,
                    self._behavior,
                    self._storage_url,
                    lambda **fields: self.change(number, **fields),
                )
                lifecycle.start()
        return Response(answer)

    def _get(self, _: Request, project: str, __: str, number: str) -> Response:
        self._check_project(project)
        with self._lock:
            if number not in self._jobs:
                raise ApiError(404, f"The CustomJob does not exist: {number}")
            return Response(dict(self._jobs[number]))

    def _list(self, request: Request, project: str, region: str) -> Response:
        self._check_project(project)
        check_place(region)
        check_job_filter(request.query.get("filter", ""))
        matches = parse_filter(request.query.get("filter", ""))
        with self._lock:
            jobs = [
                dict(job)
                for job in self._jobs.values()
                if f"/locations/{region}/" in job["name"]
                and matches({**job, "display_name": job["displayName"], "create_time": job["createTime"]})
            ]
        jobs.sort(key=lambda job: str(job["createTime"]), reverse=True)
        if mask := request.query.get("readMask"):
            jobs = [{name: value for name, value in job.items() if name in mask.split(",")} for job in jobs]
        return paginate(
            "customJobs", jobs, request.query.get("pageToken", ""), int(request.query.get("pageSize") or 100)
        )

    def _cancel(self, request: Request, project: str, region: str, number: str) -> Response:
        job = self._get(request, project, region, number).body
        if job["state"] in FINAL:
            raise ApiError(400, f"The job is in state {job['state']} and cannot be cancelled.")
        if number in self._lifecycles:
            self.change(number, state="JOB_STATE_CANCELLING")
            self._lifecycles[number].cancel()
        else:
            self.change(number, state="JOB_STATE_CANCELLED", endTime=format_time(self._entries.clock.now()))
        return Response({})

    def _delete(self, request: Request, project: str, region: str, number: str) -> Response:
        job = self._get(request, project, region, number).body
        if job["state"] not in FINAL:
            raise ApiError(400, f"The job is in state {job['state']} and cannot be deleted.")
        with self._lock:
            del self._jobs[number]
            (self._folder / f"{number}.json").unlink(missing_ok=True)
        name = job["name"].replace("/customJobs/", "/operations/")
        kind = "type.googleapis.com/google.protobuf.Empty"
        return Response({"name": name, "done": True, "response": {"@type": kind}})

    def _preempt(self, request: Request, number: str) -> Response:
        if number not in self._lifecycles:
            raise ApiError(404, f"no job {number} runs here")
        self.preempt(number, request.query.get("task", ""), notice=request.query.get("notice") != "no")
        return Response({})

    def _check_project(self, project: str) -> None:
        if project not in (self._project, PROJECT_NUMBER):
            raise ApiError(403, f"Permission 'aiplatform.customJobs.create' denied on resource '//aiplatform.googleapis.com"
                               f"/projects/{project}' (or it may not exist).")  # fmt: skip


def normalize_job(job: Mapping[str, Any]) -> Job:
    """Validate a job and return it as the service stores it, with names for enum numbers; raises ApiError."""
    normalized: Job = json.loads(json.dumps(job))
    _check_fields("", normalized)
    if not 1 <= len(normalized.get("displayName", "")) <= 128:
        raise ApiError(400, "display_name must have 1 to 128 characters.")
    labels = normalized.get("labels", {})
    wrong = [name for name, value in labels.items() if not (_LABEL.fullmatch(name) and _LABEL_VALUE.fullmatch(value))]
    if wrong or len(labels) > 64:
        raise ApiError(400, f"Invalid labels: {', '.join(wrong) or len(labels)}")
    spec = normalized.get("jobSpec") or {}
    _check_fields("jobSpec", spec)
    pools = spec.get("workerPoolSpecs") or []
    if not 1 <= len(pools) <= 4:
        raise ApiError(400, "worker_pool_specs must have 1 to 4 entries.")
    for number, pool in enumerate(pools):
        if pool:
            _check_pool(number, pool)
    if spec.get("tensorboard") and not spec.get("serviceAccount"):
        raise ApiError(400, "service_account must be specified when tensorboard is specified.")
    scheduling = spec.get("scheduling") or {}
    _check_fields("scheduling", scheduling)
    if isinstance(scheduling.get("strategy"), int):
        scheduling["strategy"] = STRATEGIES[scheduling["strategy"]]
    if scheduling.get("strategy", "STANDARD") not in STRATEGIES:
        raise ApiError(400, f"Invalid value at 'scheduling.strategy': {scheduling['strategy']}")
    return normalized


def _check_pool(number: int, pool: Mapping[str, Any]) -> None:
    _check_fields("workerPoolSpecs", pool)
    if number == 0 and int(pool.get("replicaCount", 0)) != 1:
        raise ApiError(400, "replica_count of the first worker pool must be 1.")
    if not (pool.get("machineSpec") or {}).get("machineType"):
        raise ApiError(400, f"machine_type of worker pool {number} is required.")
    _check_fields("machineSpec", pool["machineSpec"])
    check_accelerators(pool["machineSpec"])
    container = pool.get("containerSpec")
    if not container or not container.get("imageUri"):
        raise ApiError(400, "this simulator runs container_spec, with an image_uri, only.")
    _check_fields("containerSpec", container)
    if len(container.get("env") or []) > 100:
        raise ApiError(400, "a container may have 100 environment variables.")
    if size := int((pool.get("diskSpec") or {}).get("bootDiskSizeGb", 0)):
        _check_fields("diskSpec", pool["diskSpec"])
        if not 100 <= size <= 64000:
            raise ApiError(400, f"boot_disk_size_gb must be 100 to 64000, not {size}.")


def _check_fields(message_name: str, message: Mapping[str, Any]) -> None:
    for name in message.keys() - set(FIELDS[message_name].split()):
        at = message_name or "custom_job"
        raise ApiError(400, f"Invalid JSON payload received. Unknown name \"{name}\" at '{at}': Cannot find field.")
