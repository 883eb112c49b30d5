"""One host of a simulated SageMaker training job: its folder like /opt/ml, its process, its log and its data from S3."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.simulators.replicas import list_processes
from cloudtrain.simulators.sagemaker import opt_ml

GROUP = "/aws/sagemaker/TrainingJobs"
LOG_TRIES = 3  # of the last lines of a host
Call = Callable[..., Any]  # (service, operation, **values): Simulator.call


@dataclass
class Behavior:
    """How the simulated platform behaves; tests change it before they create a job. Times in seconds."""

    pending_s: float = 0.0  # between creation and start
    stop_s: float = 120.0  # between SIGTERM and SIGKILL
    upload_s: float = 0.0  # of results, after the last host has ended
    logs_late_s: float = 0.0  # delay of lines in CloudWatch
    logs_twice: bool = False
    capacity_errors: int = 0  # so many of the next jobs fail with insufficient capacity
    environment: dict[str, str] = field(default_factory=dict)  # of every container, besides the request's


class Host:
    """One instance of a training job."""

    def __init__(
        self,
        folder: Path,
        job_name: str,
        request: Mapping[str, Any],
        behavior: Behavior,
        number: int,
        names: list[str],
        clock: Clock = SYSTEM,
    ) -> None:
        self._clock = clock
        self.job_name, self.request, self.behavior = job_name, request, behavior
        self.number, self.names = number, names
        self.base = folder / f"algo-{number + 1}"
        self.code: int | None = None
        self.ended_at = float("inf")
        self.synced: dict[str, tuple[int, int]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._log: LogStream | None = None

    def prepare(self, call: Call, count: int) -> None:
        """Create the folders and download channels and checkpoints."""
        request = self.request
        opt_ml.write_config(self.base, self.names[self.number], self.names, request, "lo")
        for channel in request.get("InputDataConfig", []):
            into = self.base / "input/data" / channel["ChannelName"]
            into.mkdir()
            source = channel["DataSource"].get("S3DataSource")
            if source is None:  # a file system, which is not simulated
                continue
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
            "TRAINING_JOB_NAME": self.job_name,
            "SAGEMAKER_BASE_DIR": str(self.base),
            **{name: os.environ[name] for name in os.environ if name.startswith("AWS_")},
            **self.behavior.environment,
            **self.request.get("Environment", {}),
        }
        writer = self._log = LogStream(stream, call, self.behavior, self._clock)
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
            self.code, self.ended_at = 127, self._clock.now()
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
        self.code, self.ended_at = code if code >= 0 else 128 - code, self._clock.now()
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
        if self._log is not None and self._log.failure is not None:
            raise self._log.failure  # a job whose log is not whole has not completed

    def _read(self, writer: LogStream) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            writer.write(line.rstrip(b"\n"))
        writer.close()


class LogStream:
    """Sends the lines of a host to a CloudWatch log stream, in batches."""

    def __init__(self, name: str, call: Call, behavior: Behavior, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self._name, self._call, self._behavior = name, call, behavior
        self.failure: Exception | None = None  # why lines are missing, once `close` has returned
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
        with self._lock:  # CloudWatch rejects events that are not in the order of their times: a clock may be set back
            self._lines.append((max(self._clock.now(), self._lines[-1][0] if self._lines else 0.0), line))

    def close(self) -> None:
        """Send the remaining lines; delayed ones may be sent after the job has ended."""
        self._end.set()
        if not self._behavior.logs_late_s:
            self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            with suppress(Exception):  # what could not be sent is sent with the next lines
                self._send(self._clock.now() - self._behavior.logs_late_s)
        self._clock.sleep(self._behavior.logs_late_s)
        for left in reversed(range(LOG_TRIES)):
            try:
                self._send(float("inf"))
                return
            except Exception as error:
                # With a delay, the simulator may have been closed meanwhile.
                if not left and not self._behavior.logs_late_s:
                    self.failure = error

    def _send(self, until: float) -> None:
        """Send the lines up to a time; those that CloudWatch has not taken stay."""
        while True:
            with self._lock:
                due = [(at, line) for at, line in self._lines[:1000] if at <= until]
            if not due:
                return
            # CloudWatch rejects empty messages.
            events = [
                {"timestamp": int(at * 1000), "message": line.decode("utf-8", "replace")} for at, line in due if line
            ]
            for _ in range(2 if self._behavior.logs_twice else 1):
                if events:
                    self._call("logs", "put_log_events", logGroupName=GROUP, logStreamName=self._name, logEvents=events)
            with self._lock:
                del self._lines[: len(due)]


def iter_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and relative name of all files below a folder, which may change meanwhile."""
    paths = [Path(base, name) for base, _, names in os.walk(folder) for name in names]
    for path in sorted(paths):
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
