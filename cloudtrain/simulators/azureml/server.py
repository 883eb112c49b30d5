"""The HTTP service of a simulated workspace: Resource Manager, Run History, log files, and Blob Storage beside them."""

from __future__ import annotations

import re
import secrets
import threading
from pathlib import Path
from typing import Any

from cloudtrain.simulators.azureml.jobs import FINAL, STORES, Behavior, Runner, SimulatedJob, is_duration, now
from cloudtrain.simulators.blob import ACCOUNT, BlobService
from cloudtrain.simulators.http import ApiError, Request, Response, Route, Server

SUBSCRIPTION, GROUP, WORKSPACE = "00000000-0000-0000-0000-000000000000", "local", "local"
CONTAINER = "jobs"
ID = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/Microsoft.MachineLearningServices/workspaces/{WORKSPACE}"
OPERATIONS = f"{ID.partition('/workspaces/')[0]}/locations/local/mfeOperationResults"
ARTIFACTS = STORES["workspaceartifactstore"]  # the container of the workspace's own store
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9\-_]{0,254}")
# fields of CommandJob in azure-rest-api-specs, machinelearningservices stable/2024-10-01
FIELDS = {"jobType", "displayName", "experimentName", "command", "environmentId", "environmentVariables", "inputs", "outputs",
          "resources", "limits", "tags", "properties", "isArchived", "computeId", "distribution", "identity", "queueSettings",
          "codeId", "componentId", "description", "services", "notificationSetting"}  # fmt: skip


class AzureApiError(ApiError):
    """An error as Resource Manager writes it."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message)
        self.code = code

    @property
    def response(self) -> Response:
        return Response({"error": {"code": self.code, "message": self.message}}, self.status)


class Simulator:
    """A workspace at `url`; `options` are those of a target, `environ` what a shell needs for its storage account."""

    def __init__(self, folder: Path, *, behavior: Behavior | None = None, port: int = 0) -> None:
        self.blobs, self.behavior = BlobService(), behavior or Behavior()
        self.blobs.containers.update({name: {} for name in (CONTAINER, *STORES.values())})
        self.runner = Runner(folder, self.blobs, self.behavior)
        self.jobs: dict[str, SimulatedJob] = {}
        self.environments: dict[str, dict[str, Any]] = {}
        self.computes = {"gpus"}
        self._lock = threading.RLock()
        self.server = Server([*self._routes(), *self.blobs.routes], secret=secrets.token_urlsafe(16), port=port)
        self.environ = {"AZURE_STORAGE_CONNECTION_STRING": self.blobs.connection(self.server.url)}
        self.runner.environ = self.environ

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def options(self) -> dict[str, str]:
        return {"subscription": SUBSCRIPTION, "resource_group": GROUP, "workspace": WORKSPACE,
                "store": f"az://{CONTAINER}@{ACCOUNT}", "endpoint": self.url}  # fmt: skip

    def close(self) -> None:
        """End all jobs and the server; blocking."""
        self.runner.closed.set()
        for job in self.jobs.values():
            if job.thread is not None:
                job.thread.join(60)
        self.server.close()

    def _routes(self) -> list[Route]:
        one = rf"{ID}/jobs/([^/]+)"
        return [
            ("GET", ID, self._workspace),
            ("GET", r"/discovery", lambda request: Response({"api": request.base})),
            ("GET", rf"{ID}/computes/([^/]+)", self._compute),
            ("GET", rf"{ID}/environments/cloudtrain/versions/([^/]+)", self._environment),
            ("PUT", rf"{ID}/environments/cloudtrain/versions/([^/]+)", self._new_environment),
            ("GET", rf"{ID}/jobs", self._list),
            ("GET", one, lambda _, name: Response(self._shown(self._find(name)))),
            ("PUT", one, self._create),
            ("POST", rf"{one}/cancel", self._cancel),
            ("GET", rf"{OPERATIONS}/([^/]+)", self._cancelled),
            ("POST", rf"/history/v1\.0{ID}/experiments/([^/]+)/runs/runIds", self._runs),
            ("GET", rf"/history/v1\.0{ID}/runs/([^/]+)/details", self._details),
            ("POST", rf"/history/v1\.0{ID}/rundata", self._run_data),
            ("GET", rf"{ID}/datastores", lambda _: Response({"value": [_datastore("workspaceartifactstore")]})),
            ("GET", rf"{ID}/datastores/(\w+)", lambda _, name: Response(_datastore(name))),
            ("POST", rf"{ID}/datastores/\w+/listSecrets", self._secrets),
            *(
                (method, r"/subscriptions/.+/workspaces/([^/]+)(?:/.*)?", self._absent)
                for method in ("GET", "PUT", "POST")
            ),
        ]

    def _absent(self, request: Request, name: str) -> Response:
        if name == WORKSPACE:
            raise AzureApiError(404, "UserError", f"{request.path.partition('?')[0]} was not found")
        message = f"The Resource 'Microsoft.MachineLearningServices/workspaces/{name}' was not found"
        raise AzureApiError(404, "ResourceNotFound", message)

    # -- the workspace -------------------------------------------------------------------------------------------------

    def _workspace(self, request: Request) -> Response:
        return Response({"id": ID, "name": WORKSPACE, "properties": {"discoveryUrl": f"{request.base}/discovery"}})

    def _compute(self, _: Request, name: str) -> Response:
        if name not in self.computes:
            raise AzureApiError(404, "UserError", f"Compute {name} does not exist")
        return Response({"id": f"{ID}/computes/{name}", "name": name, "properties": {"computeType": "AmlCompute"}})

    def _environment(self, _: Request, version: str) -> Response:
        with self._lock:
            if version not in self.environments:
                raise AzureApiError(404, "UserError", f"Environment cloudtrain with version {version} is not found")
            return Response({"name": version, **self.environments[version]})

    def _new_environment(self, request: Request, version: str) -> Response:
        body = request.json
        if not body.get("properties", {}).get("image"):
            raise AzureApiError(400, "UserError", "Environment needs an image")
        with self._lock:
            if self.environments.setdefault(version, body) != body:
                raise AzureApiError(409, "UserError", f"Environment version {version} is immutable")
        return Response({"name": version, **body}, 201)

    # -- jobs ----------------------------------------------------------------------------------------------------------

    def _create(self, request: Request, name: str) -> Response:
        own = request.json.get("properties")
        if not isinstance(own, dict) or not NAME.fullmatch(name):
            raise AzureApiError(400, "UserError", "The job's name or its properties are invalid")
        self._check(own)
        with self._lock:
            if name in self.jobs:
                raise AzureApiError(409, "UserError", f"A job with this name already exists: {name}")
            job = self.jobs[name] = SimulatedJob(name, own, now())
        self.runner.start(job)
        return Response(self._shown(job), 201)

    def _check(self, own: dict[str, Any]) -> None:
        if unknown := own.keys() - FIELDS:
            raise AzureApiError(
                400, "ValidationError", f"Could not find member {', '.join(sorted(unknown))} on CommandJob"
            )
        if own.get("jobType") != "Command" or not own.get("command") or not own.get("environmentId"):
            raise AzureApiError(400, "ValidationError", "command and environmentId are required")
        version = own["environmentId"].removeprefix(f"{ID}/environments/cloudtrain/versions/")
        if own["environmentId"].startswith("/") and version not in self.environments:
            raise AzureApiError(400, "UserError", f"Environment {own['environmentId']} does not exist")
        if (compute := own.get("computeId")) and compute.rpartition("/")[2] not in self.computes:
            raise AzureApiError(400, "UserError", f"Compute {compute} does not exist")
        if not compute and not own.get("resources", {}).get("instanceType"):
            raise AzureApiError(400, "UserError", "Serverless compute needs resources.instanceType")
        if not is_duration((own.get("limits") or {}).get("timeout") or "P1D"):
            raise AzureApiError(400, "ValidationError", "limits.timeout is not a duration")
        if any(not isinstance(value, str) for value in (own.get("environmentVariables") or {}).values()):
            raise AzureApiError(400, "ValidationError", "environmentVariables are texts")

    def _find(self, name: str) -> SimulatedJob:
        with self._lock:
            if name not in self.jobs:
                raise AzureApiError(404, "UserError", f"Job {name} was not found in this workspace")
            return self.jobs[name]

    def _shown(self, job: SimulatedJob) -> dict[str, Any]:
        studio = {
            **(job.properties.get("services") or {}),
            "Studio": {"endpoint": f"https://ml.azure.com/runs/{job.name}?wsid={ID}", "jobServiceType": "Studio"},
        }
        own = {**job.properties, "status": job.status, "services": studio}
        return {
            "id": f"{ID}/jobs/{job.name}",
            "name": job.name,
            "properties": own,
            "systemData": {"createdAt": job.created},
        }

    def _list(self, request: Request) -> Response:
        tag = request.query.get("tag", "")
        with self._lock:
            found = [
                job for job in reversed(self.jobs.values()) if not tag or tag in (job.properties.get("tags") or {})
            ]
        first = int(request.query.get("$skip") or 0)
        page, more = found[first : first + self.behavior.page], first + self.behavior.page < len(found)
        where = f"{request.base}{ID}/jobs?tag={tag}&$skip={first + self.behavior.page}"
        return Response({"value": [self._shown(job) for job in page], **({"nextLink": where} if more else {})})

    def _cancel(self, request: Request, name: str) -> Response:
        job = self._find(name)
        if job.status not in FINAL:
            job.cancelled.set()
            job.status = "CancelRequested" if job.thread else "Canceled"
        return self._cancelled(request, name)

    def _cancelled(self, request: Request, name: str) -> Response:
        """Answer whether a job has ended: 202 says where to ask again."""
        if self._find(name).status in FINAL:
            return Response(None, 200)
        return Response(None, 202, {"Location": f"{request.base}{OPERATIONS}/{name}", "Retry-After": "1"})

    # -- run history ---------------------------------------------------------------------------------------------------

    def _details(self, request: Request, name: str) -> Response:
        job = self._find(name)
        where = f"{request.base}/{ACCOUNT}/{ARTIFACTS}"
        files = {file: f"{where}/{path}?{self.blobs.signed()}" for file, path in self._publish(job).items()}
        return Response({**_run(job), "logFiles": files})

    def _runs(self, request: Request, experiment: str) -> Response:
        wanted = request.json.get("runIds") or []
        with self._lock:
            found = {name: self.jobs[name] for name in wanted if name in self.jobs}
        runs = {name: _run(job) for name, job in found.items() if job.properties["experimentName"] == experiment}
        errors = {name: {"error": {"code": "UserError"}} for name in wanted if name not in runs}
        return Response({"runs": runs, "errors": errors})

    def _run_data(self, request: Request) -> Response:
        job = self._find(str(request.json.get("runId")))
        self._publish(job)
        return Response({"runMetadata": {**_run(job), "outputs": {}}})

    def _publish(self, job: SimulatedJob) -> dict[str, str]:
        """Write the logs of a job to the workspace's store, as they are now; return their names there."""
        files = {file: f"ExperimentRun/dcid.{job.name}/{file}" for file in job.log_files()}
        for file, path in files.items():
            self.blobs.write(ARTIFACTS, path, bytes(job.logs[job.log_files()[file]]))
        return files

    def _secrets(self, _: Request) -> Response:
        return Response({"secretsType": "Sas", "sasToken": self.blobs.signed()})


def _datastore(name: str) -> dict[str, Any]:
    if name not in STORES:
        raise AzureApiError(404, "UserError", f"Could not find datastore with name: {name}")
    own = {"datastoreType": "AzureBlob", "accountName": ACCOUNT, "containerName": STORES[name],
           "isDefault": name == "workspaceartifactstore", "credentials": {"credentialsType": "Sas"}}  # fmt: skip
    return {"id": f"{ID}/datastores/{name}", "name": name, "properties": own}


def _run(job: SimulatedJob) -> dict[str, Any]:
    """Return a job as Run History shows it."""
    error = {"error": job.error} if job.error else None
    times = {"startTimeUtc": job.started, "endTimeUtc": job.ended}
    return {"runId": job.name, "status": job.status, "error": error, **times}
