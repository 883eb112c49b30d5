"""Executes one simulated SageMaker training job as local processes, with the state that DescribeTrainingJob returns.

Each host has a folder with the layout of /opt/ml, a process with the container's command and SAGEMAKER_BASE_DIR set to
that folder, and its own loopback address as host name. Logs, checkpoints and results go to CloudWatch and S3.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import tarfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators.sagemaker.host import Behavior, Call, Host, iter_files, split_uri
from cloudtrain.simulators.sagemaker.opt_ml import LINGER_S, failure_reason
from cloudtrain.simulators.steps import Steps, follow

FINAL = frozenset({"Completed", "Failed", "Stopped"})
SYNC_S = 0.5  # interval of the upload of checkpoints


class TrainingJob:
    """A training job from creation to its end, executed by `thread`, or by who goes through `steps`."""

    def __init__(
        self,
        request: Mapping[str, Any],
        arn: str,
        folder: Path,
        number: int,
        call: Call,
        behavior: Behavior,
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self.request, self.arn, self.behavior = dict(request), arn, behavior
        self.name = str(request["TrainingJobName"])
        self._folder, self._number, self._call = folder, number, call
        self._lock = threading.RLock()
        self._created = self._modified = self._clock.now()
        self._started: float | None = None
        self._ended: float | None = None
        self.status, self.secondary, self.failure = "InProgress", "Starting", ""
        self._transitions: list[dict[str, Any]] = []
        self._hosts: list[Host] = []
        self._stop, self._preempt = threading.Event(), threading.Event()
        self._exceeded_limit = ""  # secondary status of the exceeded limit
        self._restarts = 0
        self._waits_until = self._clock.monotonic() + int(
            request["StoppingCondition"].get("MaxWaitTimeInSeconds", 1 << 40)
        )
        self.thread = threading.Thread(target=lambda: follow(self.steps(), clock), name=self.name, daemon=True)
        self._transition("Starting", "Starting the training job")

    # -- API ----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return DescribeTrainingJob's output: the request without tags, and the state."""
        with self._lock:
            request = {name: value for name, value in self.request.items() if name != "Tags"}
            output = self.request["OutputDataConfig"]["S3OutputPath"]
            description = {
                **request,
                **self.summary(),
                "SecondaryStatusTransitions": [dict(change) for change in self._transitions],
                "ModelArtifacts": {"S3ModelArtifacts": f"{output}/{self.name}/output/model.tar.gz"},
            }
            if self.failure:
                description["FailureReason"] = self.failure
            if self._started is not None:
                description["TrainingStartTime"] = self._started
                seconds = math.ceil((self._ended or self._clock.now()) - self._started)
                description |= {"TrainingTimeInSeconds": seconds, "BillableTimeInSeconds": seconds}
            return description

    def summary(self) -> dict[str, Any]:
        """Return what ListTrainingJobs shows of the job."""
        with self._lock:
            ended = {"TrainingEndTime": self._ended} if self._ended is not None else {}
            return {
                "TrainingJobName": self.name,
                "TrainingJobArn": self.arn,
                "TrainingJobStatus": self.status,
                "SecondaryStatus": self.secondary,
                "CreationTime": self._created,
                "LastModifiedTime": self._modified,
                **ended,
            }

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

    def steps(self) -> Steps:
        """Execute the job."""
        try:
            yield from self._pause(self.behavior.pending_s)
            if self.behavior.capacity_errors > 0:
                self.behavior.capacity_errors -= 1
                message = "CapacityError: Unable to provision requested ML compute capacity"
                self._end("Failed", "Failed", message)
                return
            while not self._stop.is_set() and (yield from self._attempt()):
                pass
            if self._stop.is_set() or self._exceeded_limit:
                self._end("Stopped", self._exceeded_limit or "Stopped")
        except Exception as error:
            self._end("Failed", "Failed", f"InternalServerError: the simulator broke: {type(error).__name__}: {error}")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pause(self, seconds: float) -> Steps:
        until = self._clock.monotonic() + seconds
        while not self._stop.is_set() and self._clock.monotonic() < until:
            yield until

    def _attempt(self) -> Generator[float, None, bool]:
        """Run all hosts once; True when they must be restarted on other instances."""
        specification = self.request["AlgorithmSpecification"]
        command = [*specification.get("ContainerEntrypoint", ()), *specification.get("ContainerArguments", ())]
        if not specification.get("ContainerEntrypoint"):
            reason = "ClientError: the simulator runs ContainerEntrypoint only: it has no image whose own could run"
            self._end("Failed", "Failed", reason)
            return False
        resources = self.request["ResourceConfig"]
        count = int(sum(g["InstanceCount"] for g in resources.get("InstanceGroups", ())) or resources["InstanceCount"])
        # Loopback addresses that no other job or simulator on this machine uses: all hosts use the same ports.
        subnet = f"127.{64 + os.getpid() % 128}.{(os.getpid() // 128 + self._number) % 250 + 1}"
        names = [f"{subnet}.{n + 1}" for n in range(count)]
        self._transition("Downloading", "Downloading input data")
        self._hosts = [
            Host(self._folder, self.name, self.request, self.behavior, n, names, self._clock) for n in range(count)
        ]
        for host in self._hosts:
            host.prepare(self._call, count)
        with self._lock:
            self._transition("Training", "Training image download completed. Training in progress.")
            self._started = self._started or self._clock.now()
        stamp = int(self._created) + self._restarts
        for host in self._hosts:
            host.start(command, f"{self.name}/algo-{host.number + 1}-{stamp}", self._call)
        preempted = yield from self._watch()
        for host in self._hosts:
            host.finish()
        self._sync()
        if preempted and not self._stop.is_set():
            self._restarts += 1
            shutil.rmtree(self._folder, ignore_errors=True)
            self._transition("Starting", "Starting the training job on other machines")
            return True
        stopped = self._stop.is_set() or self._exceeded_limit
        if not stopped:
            self._transition("Uploading", "Uploading generated training model")
        uploaded_at = self._clock.monotonic() + self.behavior.upload_s
        while self._clock.monotonic() < uploaded_at:
            yield uploaded_at
        self._upload()
        if stopped:
            return False
        failed = min((host for host in self._hosts if host.code), key=lambda host: host.ended_at, default=None)
        if failed is None:
            self._end("Completed", "Completed")
            return False
        self._end("Failed", "Failed", failure_reason(failed.base, failed.code))
        return False

    def _watch(self) -> Generator[float, None, bool]:
        """Wait until every host has ended; True when the job was preempted."""
        limit = self._clock.monotonic() + int(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        terminating, kill_at, synced_at, preempted = False, float("inf"), float("-inf"), False
        while any(host.running for host in self._hosts):
            now = self._clock.monotonic()
            if now - synced_at >= SYNC_S:
                synced_at = now
                self._sync()
            if not terminating:
                if now >= limit or now >= self._waits_until:
                    self._exceeded_limit = "MaxRuntimeExceeded" if now >= limit else "MaxWaitTimeExceeded"
                    self._transition(self._exceeded_limit, "The training job exceeded its time")
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
            yield kill_at if terminating else min(limit, self._waits_until)
        return preempted

    def _sync(self) -> None:
        """Upload changed checkpoints of all hosts, and delete those that are gone."""
        prefix = self.request.get("CheckpointConfig", {}).get("S3Uri")
        for host in self._hosts if prefix else ():
            for path, name in iter_files(host.base / "checkpoints"):
                try:
                    version = (path.stat().st_mtime_ns, path.stat().st_size)
                    if host.synced.get(name) == version:
                        continue
                    content = path.read_bytes()
                except FileNotFoundError:  # the job has deleted it since it was listed
                    continue
                bucket, key = split_uri(f"{prefix}/{name}")
                self._call("s3", "put_object", Bucket=bucket, Key=key, Body=content)
                host.synced[name] = version
            for name in [name for name in host.synced if not (host.base / "checkpoints" / name).exists()]:
                bucket, key = split_uri(f"{prefix}/{name}")
                self._call("s3", "delete_object", Bucket=bucket, Key=key)
                del host.synced[name]

    def _upload(self) -> None:
        output = f"{self.request['OutputDataConfig']['S3OutputPath']}/{self.name}/output"
        for archive, inner in (("model.tar.gz", "model"), ("output.tar.gz", "output/data")):
            if self.request["OutputDataConfig"].get("CompressionType") == "NONE" and inner == "model":
                for host in self._hosts:
                    for file, name in iter_files(host.base / inner):
                        bucket, key = split_uri(f"{output}/model/{name}")
                        self._call("s3", "put_object", Bucket=bucket, Key=key, Body=file.read_bytes())
                continue
            path = self._folder / archive
            with tarfile.open(path, "w:gz") as tar:  # one archive for all hosts, as in SageMaker
                for host in self._hosts:
                    for entry in sorted((host.base / inner).glob("*")):
                        tar.add(entry, arcname=entry.name)
            bucket, key = split_uri(f"{output}/{archive}")
            self._call("s3", "put_object", Bucket=bucket, Key=key, Body=path.read_bytes())

    def _transition(self, secondary: str, message: str) -> None:
        with self._lock:
            now = self._clock.now()
            if self._transitions:
                self._transitions[-1].setdefault("EndTime", now)
            self._transitions.append({"Status": secondary, "StartTime": now, "StatusMessage": message})
            self.secondary, self._modified = secondary, now

    def _end(self, status: str, secondary: str, failure: str = "") -> None:
        with self._lock:
            if self.status in FINAL:
                return
            self._transition(secondary, failure or secondary)
            self._transitions[-1]["EndTime"] = self._ended = self._clock.now()
            self.failure = failure
            self.status = status  # last: a queue looks at it without the lock
