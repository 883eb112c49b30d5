"""Simulates SageMaker on loopback, for tests and users' CI: moto's server, and training jobs that really run.

    python -m cloudtrain.simulators.sagemaker --bucket my-bucket

moto serves S3, CloudWatch Logs, STS, IAM and ECR. Training jobs are in training_job.py: names are unique, whole requests
are kept, jobs pass through SageMaker's states, can be stopped and preempted, and write logs and results to CloudWatch and
S3. Images are not simulated: the container's command runs with this machine's Python. `make_queue` makes a queue of AWS
Batch, whose service jobs become training jobs (batch.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudtrain.errors import MissingExtra
from cloudtrain.simulators.sagemaker.batch import PATHS, Batch
from cloudtrain.simulators.sagemaker.host import Behavior
from cloudtrain.simulators.sagemaker.job_list import AwsError, list_training_jobs
from cloudtrain.simulators.sagemaker.training_job import FINAL, TrainingJob

ACCOUNT, REGION = "123456789012", "us-east-1"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/training"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": REGION}
_SERVICES = {"SageMaker": "sagemaker", "Logs_20140328": "logs", "AmazonEC2ContainerRegistry_V20150921": "ecr"}
_StartResponse = Callable[..., Any]


@dataclass
class Fault:
    """An injected fault: the next calls of an action get an error, instead of or after being carried out."""

    action: str  # CreateTrainingJob, PutObject, GetLogEvents, GetCallerIdentity ...
    status: int = 500  # 0: the connection is closed without a response
    code: str = "InternalFailure"
    times: int = 1
    committed: bool = False  # the request is carried out and its response is lost
    message: str = "injected"


class Simulator:
    """A SageMaker server on loopback until `close`; `folder` holds the hosts of running jobs."""

    def __init__(self, folder: Path | None = None, port: int = 0) -> None:
        try:
            from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
            from werkzeug.serving import WSGIRequestHandler, make_server
        except ModuleNotFoundError:
            raise MissingExtra("the simulator of SageMaker", "simulators") from None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="cloudtrain-sagemaker-"))
        self.jobs: dict[str, TrainingJob] = {}
        self.behavior = Behavior()
        self.batch = Batch(REGION, ACCOUNT, self._create_named)
        self.faults: list[Fault] = []
        self.calls: list[str] = []  # service:Action, in the order of arrival
        self.uploaded_bytes = 0
        self.page = 0  # events in one page of GetLogEvents; 0: the service's maximum
        self._lock = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)

        class Quiet(WSGIRequestHandler):
            def log(self, *_: Any, **__: Any) -> None: ...

        self._server = make_server("127.0.0.1", port, self._serve, threaded=True, request_handler=Quiet)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environ = KEYS | {"AWS_ENDPOINT_URL": self.url}
        self.behavior.environment |= self.environ
        self._clients: dict[str, Any] = {}

    def make_bucket(self, name: str) -> None:
        """Create a bucket, if it does not exist."""
        try:
            self.call("s3", "create_bucket", Bucket=name)
        except Exception as error:
            if "AlreadyOwned" not in type(error).__name__:
                raise

    def make_queue(self, name: str, capacity: int = 100) -> None:
        """Create a queue of AWS Batch that runs so many training jobs at the same time."""
        self.batch.make_queue(name, capacity)

    def call(self, service: str, operation: str, **values: Any) -> Any:
        """Call the simulated services internally; such calls are not recorded and hit no faults."""
        with self._lock:
            if service not in self._clients:
                import boto3
                from botocore.config import Config

                self._clients[service] = boto3.client(
                    service,
                    endpoint_url=self.url,
                    region_name=REGION,
                    aws_access_key_id="test",
                    aws_secret_access_key="test",  # noqa: S106 - moto's
                    config=Config(user_agent_extra="simulator-itself", s3={"addressing_style": "path"}),
                )
        return getattr(self._clients[service], operation)(**values)

    def preempt(self, name: str) -> None:
        """Preempt a job's spot instances."""
        self.jobs[name].preempt()

    def close(self) -> None:
        """End all jobs and the server; blocking."""
        for job in self.jobs.values():
            job.behavior.stop_s = 5.0
            job.stop()
        for job in self.jobs.values():
            job.thread.join(30)
        self._server.shutdown()
        self._server.server_close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- requests -------------------------------------------------------------------------------------------------------

    def _serve(self, environ: dict[str, Any], start: _StartResponse) -> Iterable[bytes]:
        internal = "simulator-itself" in environ.get("HTTP_USER_AGENT", "")
        size = int(environ.get("CONTENT_LENGTH") or 0)
        target = environ.get("HTTP_X_AMZ_TARGET", "")
        service, action, body = _parse_request(environ, target, size)
        fault = None
        if not internal:
            with self._lock:
                self.calls.append(f"{service}:{action}")
                if action in ("PutObject", "UploadPart"):
                    self.uploaded_bytes += size
                fault = next(
                    (candidate for candidate in self.faults if candidate.action == action and candidate.times), None
                )
                if fault:
                    fault.times -= 1
        if fault and not fault.committed:
            return _send_fault(environ, start, target, fault)
        if service == "logs" and action == "GetLogEvents" and self.page and body is not None:
            body["limit"] = self.page
            _restore_body(environ, json.dumps(body).encode())
        if service == "batch" and action in PATHS.values():
            try:
                output = self.batch.answer(action, body or {})
            except AwsError as error:
                return _send_error(start, "batch", 400, error.code, str(error))
            if not fault:
                return _send(start, 200, json.dumps(output).encode(), "application/json")
        elif service == "sagemaker" and (handler := getattr(self, f"_{action}", None)):
            try:
                output = handler(body or {})
            except AwsError as error:
                return _send_error(start, target, 400, error.code, str(error))
            if not fault:
                return _send(start, 200, json.dumps(output).encode(), "application/x-amz-json-1.1")
        elif not fault:
            return self._moto(environ, start)  # type: ignore[no-any-return]
        else:
            list(self._moto(environ, lambda *_: None))
        return _send_fault(environ, start, target, fault)

    def _create_named(self, request: Mapping[str, Any]) -> TrainingJob:
        self._CreateTrainingJob(request)
        return self.jobs[str(request["TrainingJobName"])]

    def _CreateTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = str(request["TrainingJobName"])
        if not re.fullmatch(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}", name):
            raise AwsError("ValidationException", f"1 validation error detected: Value '{name}' at 'trainingJobName'")
        stopping = request["StoppingCondition"]
        if request.get("EnableManagedSpotTraining") and "MaxWaitTimeInSeconds" not in stopping:
            raise AwsError("ValidationException", "MaxWaitTimeInSeconds is required with managed spot training")
        if stopping.get("MaxWaitTimeInSeconds", 1 << 40) < stopping["MaxRuntimeInSeconds"]:
            raise AwsError("ValidationException", "MaxWaitTimeInSeconds must be at least MaxRuntimeInSeconds")
        with self._lock:
            if name in self.jobs:
                raise AwsError("ResourceInUse", "Training job names must be unique within an AWS account and region")
            arn = f"arn:aws:sagemaker:{REGION}:{ACCOUNT}:training-job/{name}"
            job = TrainingJob(request, arn, self.folder / name, len(self.jobs), self.call, self.behavior)
            self.jobs[name] = job
        job.thread.start()
        return {"TrainingJobArn": arn}

    def _DescribeTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return self._job(request).describe()

    def _StopTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request)
        if not job.stop():
            message = f"The request was rejected because the training job is in status {job.status}."
            raise AwsError("ValidationException", message)
        return {}

    def _DeleteTrainingJob(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = self._job(request)
        if job.status not in FINAL:
            raise AwsError("ResourceInUse", f"The training job is in status {job.status} and cannot be deleted.")
        del self.jobs[request["TrainingJobName"]]
        return {}

    def _ListTrainingJobs(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return list_training_jobs([job.summary() for job in list(self.jobs.values())], request)

    def _ListTags(self, request: Mapping[str, Any]) -> dict[str, Any]:
        tags = (job.request.get("Tags", []) for job in self.jobs.values() if job.arn == request["ResourceArn"])
        return {"Tags": next(tags, [])}

    def _job(self, request: Mapping[str, Any]) -> TrainingJob:
        job = self.jobs.get(str(request["TrainingJobName"]))
        if job is None:
            raise AwsError("ValidationException", "Requested resource not found.")
        return job


def _parse_request(environ: dict[str, Any], target: str, size: int) -> tuple[str, str, dict[str, Any] | None]:
    """Return service, action and, for JSON protocols, the body of a request."""
    if target:
        service = _SERVICES.get(target.partition(".")[0], target)
        raw = environ["wsgi.input"].read(size)
        _restore_body(environ, raw)
        return service, target.rpartition(".")[2], json.loads(raw or b"{}")
    if environ.get("CONTENT_TYPE", "").startswith("application/x-www-form-urlencoded"):
        raw = environ["wsgi.input"].read(size)
        _restore_body(environ, raw)
        match = re.search(rb"Action=(\w+)", raw)
        action = match[1].decode() if match else ""
        scope = re.search(r"/(\w+)/aws4_request", environ.get("HTTP_AUTHORIZATION", ""))  # of the signature
        return (scope[1] if scope else "sts"), action, None
    if (path := environ.get("PATH_INFO", "/")) in PATHS and environ["REQUEST_METHOD"] == "POST":
        raw = environ["wsgi.input"].read(size)
        _restore_body(environ, raw)
        return "batch", PATHS[path], json.loads(raw or b"{}")
    method, query = environ["REQUEST_METHOD"], environ.get("QUERY_STRING", "")
    inside = environ.get("PATH_INFO", "/").strip("/").count("/") > 0
    if not inside:
        return (
            "s3",
            {"GET": "ListObjectsV2" if query else "ListBuckets", "HEAD": "HeadBucket"}.get(method, method),
            None,
        )
    return "s3", f"{method.capitalize()}Object", None


def _restore_body(environ: dict[str, Any], raw: bytes) -> None:
    import io

    environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(raw), str(len(raw))


def _send_fault(environ: Mapping[str, Any], start: _StartResponse, target: str, fault: Fault) -> list[bytes]:
    if fault.status:
        kind = "batch" if environ.get("PATH_INFO") in PATHS else target
        return _send_error(start, kind, fault.status, fault.code, fault.message)
    environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return _send(start, 500, b"", "text/plain")


def _send_error(start: _StartResponse, target: str, status: int, code: str, message: str) -> list[bytes]:
    if target:
        raw = json.dumps({"__type": code, "message": message}).encode()
        return _send(start, status, raw, "application/x-amz-json-1.1")
    error = f"<Code>{code}</Code><Message>{message}</Message>"
    return _send(start, status, f"<Error>{error}</Error>".encode(), "application/xml")


def _send(start: _StartResponse, status: int, raw: bytes, kind: str) -> list[bytes]:
    start(f"{status} simulated", [("Content-Type", kind), ("Content-Length", str(len(raw)))])
    return [raw]


def main() -> int:
    """Serve until interrupted; print the environment variables for clients."""
    parser = argparse.ArgumentParser(prog="python -m cloudtrain.simulators.sagemaker", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="port on loopback; default: any free one")
    parser.add_argument("--bucket", action="append", default=[], help="bucket to make; may be repeated")
    parser.add_argument("--queue", action="append", default=[], help="queue of AWS Batch to make; may be repeated")
    options = parser.parse_args()
    os.environ.update(KEYS)
    simulator = Simulator(port=options.port)
    for bucket in options.bucket:
        simulator.make_bucket(bucket)
    for queue in options.queue:
        simulator.make_queue(queue)
    for name, value in simulator.environ.items():
        print(f"export {name}={value}", flush=True)  # noqa: T201
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    stopped.wait()
    simulator.close()
    return 0
