"""Executes one simulated SageMaker training job as local processes, with the state that DescribeTrainingJob returns.

Each host has a folder with the layout of /opt/ml, a process with the container's command and SAGEMAKER_BASE_DIR set to
that folder, and its own loopback address as host name. Logs, checkpoints and results go to CloudWatch and S3.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.simulators.replicas import list_processes

GROUP = "/aws/sagemaker/TrainingJobs"
FINAL = frozenset({"Completed", "Failed", "Stopped"})
SYNC_S = 0.5  # interval of the upload of checkpoints
LINGER_S = 20.0  # how long the other hosts may run after one has failed
Call = Callable[..., Any]  # (service, operation, **values): Simulator.call


@dataclass
class Behavior:
    """How the simulated platform behaves; tests change it before they create a job. Times in seconds."""

    pending_s: float = 0.0  # between creation and start
    stop_s: float = 120.0  # between SIGTERM and SIGKILL
    logs_late_s: float = 0.0  # delay of lines in CloudWatch
    logs_twice: bool = False
    capacity_errors: int = 0  # so many of the next jobs fail with insufficient capacity
    environment: dict[str, str] = field(default_factory=dict)  # of every container, besides the request's


class TrainingJob:
    """A training job from creation to its end, executed by `thread`."""

    def __init__(self, request: Mapping[str, Any], arn: str, folder: Path, number: int, call: Call, behavior: Behavior):
        self.request, self.arn, self.behavior = dict(request), arn, behavior
        self.name = str(request["TrainingJobName"])
        self._folder, self._number, self._call = folder, number, call
        self._lock = threading.RLock()
        self._created = self._modified = time.time()
        self._started: float | None = None
        self._ended: float | None = None
        self.status, self.secondary, self.failure = "InProgress", "Starting", ""
        self._transitions: list[dict[str, Any]] = []
        self._hosts: list[_Host] = []
        self._stop, self._preempt = threading.Event(), threading.Event()
        self._exceeded_limit = ""  # secondary status of the exceeded limit
        self._restarts = 0
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._transition("Starting", "Starting the training job")

    # -- API ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return DescribeTrainingJob's output: the request without tags, and the state."""
        with self._lock:
            request = {name: value for name, value in self.request.items() if name != "Tags"}
            output = self.request["OutputDataConfig"]["S3OutputPath"]
            description = request | {
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "CreationTime": self._created,
                "LastModifiedTime": self._modified,
                "SecondaryStatusTransitions": [dict(change) for change in self._transitions],
                "ModelArtifacts": {"S3ModelArtifacts": f"{output}/{self.name}/output/model.tar.gz"},
            }
            if self.failure:
                description["FailureReason"] = self.failure
            if self._started is not None:
                description["TrainingStartTime"] = self._started
                seconds = int((self._ended or time.time()) - self._started) + 1
                description |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": seconds}
            if self._ended is not None:
                description["TrainingEndTime"] = self._ended
            return description

    def stop(self) -> bool:
        """Stop the job; False when it has ended already."""
        with self._lock:
            if self.status in FINAL:
                return False
            if self.status != "Stopping":
                self.status = "Stopping"
                self._transition("Stopping", "Stopping the training job")
        self._stop.set()
        return True

    def preempt(self) -> None:
        """Preempt the job's spot instances."""
        self._preempt.set()

    # -- execution ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + self.behavior.pending_s
            while time.monotonic() < deadline and not self._stop.is_set():
                time.sleep(0.02)
            if self.behavior.capacity_errors > 0:
                self.behavior.capacity_errors -= 1
                message = "CapacityError: Unable to provision requested ML compute capacity"
                self._end("Failed", "Failed", message)
                return
            while not self._stop.is_set() and self._attempt():
                pass
            if self._stop.is_set() or self._exceeded_limit:
                self._end("Stopped", self._exceeded_limit or "Stopped")
        except Exception as error:
            self._end("Failed", "Failed", f"InternalServerError: the simulator broke: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _attempt(self) -> bool:
        """Run all hosts once; True when they must be restarted on other instances."""
        specification = self.request["AlgorithmSpecification"]
        command = [*specification.get("ContainerEntrypoint", ()), *specification.get("ContainerArguments", ())]
        if not specification.get("ContainerEntrypoint"):
            reason = "ClientError: the simulator runs ContainerEntrypoint only: it has no image whose own could run"
            self._end("Failed", "Failed", reason)
            return False
        count = int(self.request["ResourceConfig"]["InstanceCount"])
        # Loopback addresses that no other job or simulator on this machine uses: all hosts use the same ports.
        subnet = f"127.{64 + os.getpid() % 128}.{(os.getpid() // 128 + self._number) % 250 + 1}"
        names = [f"{subnet}.{n + 1}" for n in range(count)]
        self._transition("Downloading", "Downloading input data")
        self._hosts = [_Host(self, n, names) for n in range(count)]
        for host in self._hosts:
            host.prepare(self._call, count)
        with self._lock:
            self._transition("Training", "Training image download completed. Training in progress.")
            self._started = self._started or time.time()
        stamp = int(self._created) + self._restarts
        for host in self._hosts:
            host.start(command, f"{self.name}/algo-{host.number + 1}-{stamp}", self._call)
        preempted = self._watch()
        for host in self._hosts:
            host.finish()
        self._sync()
        if preempted and not self._stop.is_set():
            self._restarts += 1
            shutil.rmtree(self._folder, ignore_errors=True)
            self._transition("Starting", "Starting the training job on other machines")
            return True
        if self._stop.is_set() or self._exceeded_limit:
            self._upload()
            return False
        self._transition("Uploading", "Uploading generated training model")
        self._upload()
        failed = min((host for host in self._hosts if host.code), key=lambda host: host.ended_at, default=None)
        if failed is None:
            self._end("Completed", "Completed")
            return False
        failure = failed.failure()
        self._end(
            "Failed", "Failed", f"AlgorithmError: {failure + ', ' if failure else ''}exit code: {failed.code}"[-1024:]
        )
        return False

    def _watch(self) -> bool:
        """Wait until every host has ended; True when the job was preempted."""
        limit = time.monotonic() + int(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        terminating, kill_at, synced_at, preempted = False, float("inf"), 0.0, False
        while any(host.running for host in self._hosts):
            now = time.monotonic()
            if now - synced_at >= SYNC_S:
                synced_at = now
                self._sync()
            if not terminating:
                if now >= limit:
                    self._exceeded_limit = "MaxRuntimeExceeded"
                    self._transition("MaxRuntimeExceeded", "The training job exceeded its time")
                elif self._preempt.is_set():
                    self._preempt.clear()
                    preempted = True
                    self._transition("Interrupted", "The spot instance was interrupted")
                if preempted or self._exceeded_limit or self._stop.is_set():
                    terminating, kill_at = True, now + self.behavior.stop_s
                    for host in self._hosts:
                        host.signal(signal.SIGTERM)
                elif any(not host.running and host.code for host in self._hosts):
                    terminating, kill_at = True, now + LINGER_S
            elif now >= kill_at:
                for host in self._hosts:
                    host.end()
            time.sleep(0.02)
        return preempted

    def _sync(self) -> None:
        """Upload changed checkpoints of all hosts, and delete those that are gone."""
        prefix = self.request.get("CheckpointConfig", {}).get("S3Uri")
        for host in self._hosts if prefix else ():
            for path, name in iter_files(host.base / "checkpoints"):
                version = (path.stat().st_mtime_ns, path.stat().st_size)
                if host.synced.get(name) != version:
                    bucket, key = split_uri(f"{prefix}/{name}")
                    self._call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())
                    host.synced[name] = version
            for name in [name for name in host.synced if not (host.base / "checkpoints" / name).exists()]:
                bucket, key = split_uri(f"{prefix}/{name}")
                self._call("s3", "delete_object", Bucket=bucket, Key=key)
                del host.synced[name]

    def _upload(self) -> None:
        output = f"{self.request['OutputDataConfig']['S3OutputPath']}/{self.name}/output"
        for archive, inner in (("model.tar.gz", "model"), ("output.tar.gz", "output/data")):
            path = self._folder / archive
            with tarfile.open(path, "w:gz") as tar:  # one archive for all hosts, as in SageMaker
                for host in self._hosts:
                    for entry in sorted((host.base / inner).glob("*")):
                        tar.add(entry, arcname=entry.name)
            bucket, key = split_uri(f"{output}/{archive}")
            self._call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())

    def _transition(self, secondary: str, message: str) -> None:
        with self._lock:
            now = time.time()
            if self._transitions:
                self._transitions[-1].setdefault("EndTime", now)
            self._transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
            self.secondary, self._modified = secondary, now

    def _end(self, status: str, secondary: str, failure: str = "") -> None:
        with self._lock:
            if self.status in FINAL:
                return
            self._transition(secondary, failure or secondary)
            self._transitions[-1]["EndTime"] = self._ended = time.time()
            self.status, self.failure = status, failure


class _Host:
    """One instance of a training job."""

    def __init__(self, job: TrainingJob, number: int, names: list[str]) -> None:
        self.job, self.number, self.names = job, number, names
        self.base = job._folder / f"algo-{number + 1}"
        self.code: int | None = None
        self.ended_at = float("inf")
        self.synced: dict[str, tuple[int, int]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def prepare(self, call: Call, count: int) -> None:
        """Create the folders and download channels and checkpoints."""
        request = self.job.request
        for inner in ("input/config", "input/data", "model", "output/data", "checkpoints"):
            (self.base / inner).mkdir(parents=True, exist_ok=True)
        config = {
            "hyperparameters": request.get("HyperParameters", {}),
            "resourceconfig": {
                "current_host": self.names[self.number],
                "hosts": self.names,
                "network_interface_name": "lo",
                "current_instance_type": request["ResourceConfig"]["InstanceType"],
            },
            "inputdataconfig": {
                channel["ChannelName"]: {"TrainingInputMode": channel.get("InputMode", "File")}
                for channel in request.get("InputDataConfig", [])
            },
        }
        for name, value in config.items():
            (self.base / "input/config" / f"{name}.json").write_text(json.dumps(value))
        for channel in request.get("InputDataConfig", []):
            source = channel["DataSource"]["S3DataSource"]
            into = self.base / "input/data" / channel["ChannelName"]
            into.mkdir()
            share = self.number if source.get("S3DataDistributionType") == "ShardedByS3Key" else None
            if not download_prefix(call, source["S3Uri"], into, share, count):
                raise FileNotFoundError(f"no objects at {source['S3Uri']}")
        if prefix := request.get("CheckpointConfig", {}).get("S3Uri"):
            download_prefix(call, f"{prefix}/", self.base / "checkpoints")
            for path, name in iter_files(self.base / "checkpoints"):
                self.synced[name] = (path.stat().st_mtime_ns, path.stat().st_size)

    def start(self, command: list[str], stream: str, call: Call) -> None:
        """Run the container's command as a local process."""
        interpreter_folder = str(Path(sys.executable).parent)
        env = {
            "PATH": f"{interpreter_folder}{os.pathsep}{os.environ.get('PATH', '')}",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "TRAINING_JOB_NAME": self.job.name,
            "SAGEMAKER_BASE_DIR": str(self.base),
            **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")},
            **self.job.behavior.environment,
            **self.job.request.get("Environment", {}),
        }
        writer = _LogStream(stream, call, self.job.behavior)
        try:
            self._process = subprocess.Popen(
                command,
                cwd=self.base,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            writer.write(f"exec: {command[0]}: {error.strerror}".encode())
            writer.close()
            self.code, self.ended_at = 127, time.time()
            return
        self._reader = threading.Thread(target=self._read, args=(writer,), daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        if self._process is None or self.code is not None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self.code, self.ended_at = code if code >= 0 else 128 - code, time.time()
        self.end()
        return False

    def signal(self, number: int) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill all processes of the container, as when its PID 1 has ended."""
        for pid in find_processes(str(self.base)):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def finish(self) -> None:
        self.end()
        if self._reader is not None:
            self._reader.join()

    def failure(self) -> str:
        """Return the content of /opt/ml/output/failure."""
        try:
            return (self.base / "output/failure").read_text(errors="replace")[:900]
        except OSError:
            return ""

    def _read(self, writer: _LogStream) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            writer.write(line.rstrip(b"\n"))
        writer.close()


class _LogStream:
    """Sends the lines of a host to a CloudWatch log stream, in batches."""

    def __init__(self, name: str, call: Call, behavior: Behavior) -> None:
        self._name, self._call, self._behavior = name, call, behavior
        self._lines: list[tuple[float, bytes]] = []
        self._lock, self._end = threading.Lock(), threading.Event()
        for operation, values in (("create_log_group", {}), ("create_log_stream", {"logStreamName": name})):
            try:
                call("logs", operation, logGroupName=GROUP, **values)
            except Exception as error:
                if "ResourceAlreadyExists" not in type(error).__name__:
                    raise
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        with self._lock:
            self._lines.append((time.time(), line))

    def close(self) -> None:
        """Send the remaining lines; delayed ones may be sent after the job has ended."""
        self._end.set()
        if not self._behavior.logs_late_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self._send(time.time() - self._behavior.logs_late_s)
        time.sleep(self._behavior.logs_late_s)
        try:
            self._send(float("inf"))
        except Exception:
            if not self._behavior.logs_late_s:
                raise  # with a delay, the simulator may have been closed meanwhile

    def _send(self, until: float) -> None:
        with self._lock:
            due = [(at, line) for at, line in self._lines if at <= until]
            self._lines = self._lines[len(due) :]
        # CloudWatch rejects empty messages.
        events = [{"timestamp": int(at * 1000), "message": line.decode("utf-8", "replace")} for at, line in due if line]
        for first in range(0, len(events), 1000):
            for _ in range(2 if self._behavior.logs_twice else 1):
                batch = events[first : first + 1000]
                self._call("logs", "put_log_events", logGroupName=GROUP, logStreamName=self._name, logEvents=batch)


def iter_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and relative name of all files below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.relative_to(folder).as_posix()


def split_uri(uri: str) -> tuple[str, str]:
    """Split s3://bucket/key into bucket and key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def download_prefix(call: Call, uri: str, into: Path, share: int | None = None, count: int = 1) -> int:
    """Download all objects with a prefix into a folder, as SageMaker does, and return their number.

    File names are relative to the last slash of the prefix. With `share`, only every `count`-th object.
    """
    bucket, prefix = split_uri(uri)
    base, listed = prefix[: prefix.rfind("/") + 1], 0
    token: dict[str, str] = {}
    while True:
        page = call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        for item in page.get("Contents", []):
            listed += 1
            if item["Key"].endswith("/") or (share is not None and listed % count != share):
                continue
            path = into / item["Key"][len(base) :]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(call("s3", "get_object", Bucket=bucket, Key=item["Key"])["Body"].read())
        if not page.get("IsTruncated"):
            return listed
        token = {"ContinuationToken": page["NextContinuationToken"]}


def find_processes(base: str) -> list[int]:
    """Return the pids of all processes of a host, by SAGEMAKER_BASE_DIR in their environment."""
    return [pid for pid, folder in list_processes("SAGEMAKER_BASE_DIR") if folder == base and pid != os.getpid()]
