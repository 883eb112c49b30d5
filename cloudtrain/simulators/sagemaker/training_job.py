"""One training job of the SageMaker simulator: its state as DescribeTrainingJob tells it, and its execution as processes.

Every host is a folder with what SageMaker lays below /opt/ml, a process with the container's command, SAGEMAKER_BASE_DIR
set to that folder, and a loopback address of its own for a name. Logs, checkpoints and results go where the real ones do.
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

GROUP = "/aws/sagemaker/TrainingJobs"
FINAL = frozenset({"Completed", "Failed", "Stopped"})
SYNC_S = 0.5  # how often checkpoints are brought to their prefix
LINGER_S = 20.0  # for the other hosts when one has ended badly
Call = Callable[..., Any]  # (service, operation, **values): AWS as the simulator's own services answer


@dataclass
class Habits:
    """How the platform behaves; a test changes it before a job is created. Times in seconds."""

    pending_s: float = 0.0  # between acceptance and the start
    stop_s: float = 120.0  # between SIGTERM and SIGKILL
    logs_late_s: float = 0.0  # until a line is found in CloudWatch
    logs_twice: bool = False
    no_machines: int = 0  # of the next jobs: they fail for want of machines
    environment: dict[str, str] = field(default_factory=dict)  # of every container, beside the request's own


class TrainingJob:
    """A job from its acceptance to its end; `run` is its thread."""

    def __init__(self, request: Mapping[str, Any], arn: str, folder: Path, number: int, call: Call, habits: Habits):
        self.request, self.arn, self.habits = dict(request), arn, habits
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
        self._over = ""  # the limit that was exceeded
        self._restarts = 0
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._move("Starting", "Starting the training job")

    # -- what the API asks ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return DescribeTrainingJob's answer: the whole request but its tags, and the state."""
        with self._lock:
            kept = {name: value for name, value in self.request.items() if name != "Tags"}
            output = self.request["OutputDataConfig"]["S3OutputPath"]
            found = kept | {
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "CreationTime": self._created,
                "LastModifiedTime": self._modified,
                "SecondaryStatusTransitions": [dict(change) for change in self._transitions],
                "ModelArtifacts": {"S3ModelArtifacts": f"{output}/{self.name}/output/model.tar.gz"},
            }
            if self.failure:
                found["FailureReason"] = self.failure
            if self._started is not None:
                found["TrainingStartTime"] = self._started
                seconds = int((self._ended or time.time()) - self._started) + 1
                found |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": seconds}
            if self._ended is not None:
                found["TrainingEndTime"] = self._ended
            return found

    def stop(self) -> bool:
        """StopTrainingJob; False when the job has ended already."""
        with self._lock:
            if self.status in FINAL:
                return False
            if self.status != "Stopping":
                self.status = "Stopping"
                self._move("Stopping", "Stopping the training job")
        self._stop.set()
        return True

    def preempt(self) -> None:
        """Take the spot machines away: what SageMaker does without being asked."""
        self._preempt.set()

    # -- execution ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            deadline = time.monotonic() + self.habits.pending_s
            while time.monotonic() < deadline and not self._stop.is_set():
                time.sleep(0.02)
            if self.habits.no_machines > 0:
                self.habits.no_machines -= 1
                said = "CapacityError: Unable to provision requested ML compute capacity"
                self._end("Failed", "Failed", said)
                return
            while not self._stop.is_set() and self._attempt():
                pass
            if self._stop.is_set() or self._over:
                self._end("Stopped", self._over or "Stopped")
        except Exception as error:
            self._end("Failed", "Failed", f"InternalServerError: the simulator broke: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _attempt(self) -> bool:
        """Run all hosts once; True when they have to be run again, on other machines."""
        specification = self.request["AlgorithmSpecification"]
        command = [*specification.get("ContainerEntrypoint", ()), *specification.get("ContainerArguments", ())]
        if not specification.get("ContainerEntrypoint"):
            reason = "ClientError: the simulator runs ContainerEntrypoint only: it has no image whose own could run"
            self._end("Failed", "Failed", reason)
            return False
        count = int(self.request["ResourceConfig"]["InstanceCount"])
        # Hosts of loopback that no other job has, nor one of another simulator on this machine: their ports are the same.
        block = f"127.{64 + os.getpid() % 128}.{(os.getpid() // 128 + self._number) % 250 + 1}"
        names = [f"{block}.{n + 1}" for n in range(count)]
        self._move("Downloading", "Downloading input data")
        self._hosts = [_Host(self, n, names) for n in range(count)]
        for host in self._hosts:
            host.lay(self._call, count)
        self._move("Training", "Training image download completed. Training in progress.")
        with self._lock:
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
            self._move("Starting", "Starting the training job on other machines")
            return True
        if self._stop.is_set() or self._over:
            self._upload()
            return False
        self._move("Uploading", "Uploading generated training model")
        self._upload()
        failed = min((host for host in self._hosts if host.code), key=lambda host: host.ended_at, default=None)
        if failed is None:
            self._end("Completed", "Completed")
            return False
        said = failed.failure()
        self._end("Failed", "Failed", f"AlgorithmError: {said + ', ' if said else ''}exit code: {failed.code}"[-1024:])
        return False

    def _watch(self) -> bool:
        """Wait until every host has ended; True when the machines were taken away."""
        limit = time.monotonic() + int(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        asked, patience, synced, preempted = False, float("inf"), 0.0, False
        while any(host.running for host in self._hosts):
            now = time.monotonic()
            if now - synced >= SYNC_S:
                synced = now
                self._sync()
            if not asked:
                if now >= limit:
                    self._over = "MaxRuntimeExceeded"
                    self._move("MaxRuntimeExceeded", "The training job exceeded its time")
                elif self._preempt.is_set():
                    self._preempt.clear()
                    preempted = True
                    self._move("Interrupted", "The spot instance was interrupted")
                if preempted or self._over or self._stop.is_set():
                    asked, patience = True, now + self.habits.stop_s
                    for host in self._hosts:
                        host.signal(signal.SIGTERM)
                elif any(not host.running and host.code for host in self._hosts):
                    asked, patience = True, now + LINGER_S
            elif now >= patience:
                for host in self._hosts:
                    host.end()
            time.sleep(0.02)
        return preempted

    def _sync(self) -> None:
        """Bring changed checkpoints of all hosts to their prefix."""
        where = self.request.get("CheckpointConfig", {}).get("S3Uri")
        for host in self._hosts if where else ():
            for path, name in files(host.base / "checkpoints"):
                mark = (path.stat().st_mtime_ns, path.stat().st_size)
                if host.synced.get(name) != mark:
                    bucket, key = split(f"{where}/{name}")
                    self._call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())
                    host.synced[name] = mark
            for name in [name for name in host.synced if not (host.base / "checkpoints" / name).exists()]:
                bucket, key = split(f"{where}/{name}")
                self._call("s3", "delete_object", Bucket=bucket, Key=key)
                del host.synced[name]

    def _upload(self) -> None:
        output = f"{self.request['OutputDataConfig']['S3OutputPath']}/{self.name}/output"
        for archive, inner in (("model.tar.gz", "model"), ("output.tar.gz", "output/data")):
            path = self._folder / archive
            with tarfile.open(path, "w:gz") as tar:  # of all hosts in one, as SageMaker aggregates them
                for host in self._hosts:
                    for entry in sorted((host.base / inner).glob("*")):
                        tar.add(entry, arcname=entry.name)
            bucket, key = split(f"{output}/{archive}")
            self._call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())

    def _move(self, secondary: str, message: str) -> None:
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
            self._move(secondary, failure or secondary)
            self._transitions[-1]["EndTime"] = self._ended = time.time()
            self.status, self.failure = status, failure


class _Host:
    """One machine of a job."""

    def __init__(self, job: TrainingJob, number: int, names: list[str]) -> None:
        self.job, self.number, self.names = job, number, names
        self.base = job._folder / f"algo-{number + 1}"
        self.code: int | None = None
        self.ended_at = float("inf")
        self.synced: dict[str, tuple[int, int]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None

    def lay(self, call: Call, count: int) -> None:
        """Make the folders and bring channels and checkpoints."""
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
            if not bring(call, source["S3Uri"], into, share, count):
                raise FileNotFoundError(f"no objects at {source['S3Uri']}")
        if where := request.get("CheckpointConfig", {}).get("S3Uri"):
            bring(call, f"{where}/", self.base / "checkpoints")
            for path, name in files(self.base / "checkpoints"):
                self.synced[name] = (path.stat().st_mtime_ns, path.stat().st_size)

    def start(self, command: list[str], stream: str, call: Call) -> None:
        """Run the container's command as a process of this machine."""
        beside = str(Path(sys.executable).parent)
        env = {
            "PATH": f"{beside}{os.pathsep}{os.environ.get('PATH', '')}",
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "TRAINING_JOB_NAME": self.job.name,
            "SAGEMAKER_BASE_DIR": str(self.base),
            **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")},
            **self.job.habits.environment,
            **self.job.request.get("Environment", {}),
        }
        writer = _Stream(stream, call, self.job.habits)
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
        found = self._process.poll()
        if found is None:
            return True
        self.code, self.ended_at = found if found >= 0 else 128 - found, time.time()
        self.end()
        return False

    def signal(self, number: int) -> None:
        if self.running and self._process is not None:
            self._process.send_signal(number)

    def end(self) -> None:
        """Kill everything that the container has started: with its PID 1 gone nothing of it lives on."""
        for pid in _inside(str(self.base)):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def finish(self) -> None:
        self.end()
        if self._reader is not None:
            self._reader.join()

    def failure(self) -> str:
        """Return what the container left in /opt/ml/output/failure."""
        try:
            return (self.base / "output/failure").read_text(errors="replace")[:900]
        except OSError:
            return ""

    def _read(self, writer: _Stream) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            writer.write(line.rstrip(b"\n"))
        writer.close()


class _Stream:
    """A log stream in CloudWatch: lines in batches, as an agent sends them."""

    def __init__(self, name: str, call: Call, habits: Habits) -> None:
        self._name, self._call, self._habits = name, call, habits
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
        """Send what is left; the agent's delay may outlast the job."""
        self._end.set()
        if not self._habits.logs_late_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            self._send(time.time() - self._habits.logs_late_s)
        time.sleep(self._habits.logs_late_s)
        try:
            self._send(float("inf"))
        except Exception:
            if not self._habits.logs_late_s:
                raise  # otherwise the simulator may have been closed meanwhile

    def _send(self, until: float) -> None:
        with self._lock:
            due = [(at, line) for at, line in self._lines if at <= until]
            self._lines = self._lines[len(due) :]
        # CloudWatch takes no empty message.
        events = [{"timestamp": int(at * 1000), "message": line.decode("utf-8", "replace")} for at, line in due if line]
        for first in range(0, len(events), 1000):
            for _ in range(2 if self._habits.logs_twice else 1):
                batch = events[first : first + 1000]
                self._call("logs", "put_log_events", logGroupName=GROUP, logStreamName=self._name, logEvents=batch)


def files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and relative name of all files below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path, path.relative_to(folder).as_posix()


def split(uri: str) -> tuple[str, str]:
    """Return bucket and key of s3://bucket/key."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key


def bring(call: Call, uri: str, into: Path, share: int | None = None, count: int = 1) -> int:
    """Copy all objects that begin with a prefix below a folder and return their number, as SageMaker does.

    A name is relative to the last slash of the prefix. `share`: every `count`-th object only.
    """
    bucket, prefix = split(uri)
    base, found = prefix[: prefix.rfind("/") + 1], 0
    token: dict[str, str] = {}
    while True:
        page = call("s3", "list_objects_v2", Bucket=bucket, Prefix=prefix, **token)
        for item in page.get("Contents", []):
            found += 1
            if item["Key"].endswith("/") or (share is not None and found % count != share):
                continue
            path = into / item["Key"][len(base) :]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(call("s3", "get_object", Bucket=bucket, Key=item["Key"])["Body"].read())
        if not page.get("IsTruncated"):
            return found
        token = {"ContinuationToken": page["NextContinuationToken"]}


def _inside(base: str) -> list[int]:
    """Return the processes whose environment says that they belong to a host."""
    mark, found = f"SAGEMAKER_BASE_DIR={base}\0".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found
