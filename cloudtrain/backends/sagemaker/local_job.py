"""Run one training job in Docker containers on this machine: the detached process of an attempt of `sagemaker-local`.

    python -m cloudtrain.backends.sagemaker.local_job FOLDER

FOLDER holds request.json. This process writes the same files as a node's supervisor (nodes/directory.py): status.json,
`lock`, `cancel`. algo-<N>/log is the log of host N, algo-<N>/ml its /opt/ml. status.json also names the `image` of the
hosts. All containers are removed before the final status is written.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cloudtrain.backends.sagemaker import docker, local_s3, status
from cloudtrain.backends.sagemaker.limits import STOP_S
from cloudtrain.backends.sagemaker.local_request import run_folder
from cloudtrain.backends.sagemaker.local_s3 import LocalS3
from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError, CloudtrainError
from cloudtrain.events import EXIT_REFUSED, State, Status
from cloudtrain.job.units import now
from cloudtrain.nodes import files
from cloudtrain.nodes.process import boot_id, start_time
from cloudtrain.simulators.sagemaker.opt_ml import LINGER_S, failure_reason, read_failure, write_config
from cloudtrain.source.node_code import module

BASE = "/opt/ml"
TICK_S = 0.05
EXIT_OUTPUT = 74  # the launcher's code too: training succeeded, the upload of its results failed
_NUMBERED_LINE = re.compile(rb"(\d+) (-?\d+ \d{4}-\d\d-\d\dT[\d:.]+Z .*)", re.DOTALL)


def hosts(request: Mapping[str, Any]) -> list[str]:
    """Return the names of a request's hosts: algo-1, algo-2, ..."""
    return [f"algo-{number + 1}" for number in range(int(request["ResourceConfig"]["InstanceCount"]))]


def end_containers(folder: Path, request: Mapping[str, Any]) -> None:
    """Remove an attempt's containers, and make what they wrote this user's; blocking. Raises BackendError."""
    docker.remove_all(folder)
    for place in {run_folder(request), folder}:
        docker.take_over(place, str(request["AlgorithmSpecification"]["TrainingImage"]))


class LocalJob:
    """Starts the containers of an attempt, waits for their end, and removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.request = json.loads((folder / "request.json").read_text())
        self.attempt_id = str(self.request["TrainingJobName"])
        self._stop_requested = threading.Event()
        self._hosts: list[_Host] = []
        self._s3 = LocalS3(folder) if local_s3.uses_s3(self.request) else None
        self._status: dict[str, Any] = {
            "pid": os.getpid(),
            "start_ticks": start_time(os.getpid()),
            "boot_id": boot_id(),
            "grace_s": STOP_S,
            "started_at": now(),
            "ended_at": None,
            "exit_code": None,
            "reason": "",
        }

    def run(self) -> None:
        """Run the attempt and write its status; blocking until it has ended."""
        signal.signal(signal.SIGTERM, lambda *_: self._stop_requested.set())
        signal.signal(signal.SIGINT, lambda *_: self._stop_requested.set())
        self._write_status("STARTING")
        try:
            status = self._run_hosts()
        except BackendError as error:
            status = Status(State.FAILED, EXIT_REFUSED, error.message)
        except Exception as error:
            status = Status(State.LOST, None, f"the process that runs the containers failed: {error!r}")
        try:
            end_containers(self.folder, self.request)
        except BackendError as error:
            print(error, file=sys.stderr)  # noqa: T201 - launcher.out
        for host in self._hosts:
            host.close()
        if self._s3 is not None:
            status = self._upload_results(status)
        self._write_status(status.state.value, exit_code=status.exit_code, reason=status.reason, ended_at=now())

    @property
    def _cancelled(self) -> bool:
        return self._stop_requested.is_set() or (self.folder / "cancel").exists()

    def _run_hosts(self) -> Status:
        docker.remove_all(self.folder)  # containers of an earlier process that was killed
        self._starts = self._claim()
        names = hosts(self.request)
        if self._s3 is not None:
            self.request = self._s3.download_inputs(self.request, lambda: self._cancelled)
        if self._cancelled:
            return Status(State.CANCELLED)
        self._status["image"] = docker.image_digest(str(self.request["AlgorithmSpecification"]["TrainingImage"]))
        docker.create_network(self.folder, self.attempt_id, len(names))
        for name in names:
            self._hosts.append(_Host(self, name, names))
        self._write_status("RUNNING")
        stopped_by = self._wait()
        self._check_current()
        ended = [host for host in self._hosts if host.code]
        failed = min(ended, key=lambda host: host.ended_at, default=None)
        description: dict[str, Any] = {"TrainingJobStatus": "Completed"}
        if stopped_by:
            description = {"TrainingJobStatus": "Stopped", "SecondaryStatus": stopped_by}
        elif failed is not None:
            reason = failure_reason(failed.base, failed.code)
            description = {"TrainingJobStatus": "Failed", "FailureReason": reason}
        return status.parse_status(description)

    def _claim(self) -> Any:
        """Claim this start among those of the run, wherever they are; raises BackendError where a later one has begun."""
        starts = module("launcher.output.starts")
        try:
            return starts.Starts(str(run_folder(self.request)), int(self.attempt_id.rpartition("-a")[2]))
        except (starts.Refused, OSError) as error:
            raise BackendError(str(error)) from None

    def _check_current(self) -> None:
        """Raise BackendError where a later start of the run has begun: this one's containers are removed."""
        if replaced := self._starts.replaced():
            raise BackendError(replaced)

    def _upload_results(self, status: Status) -> Status:
        """Upload results to S3; a job whose upload fails has failed."""
        assert self._s3 is not None
        try:
            if self._hosts and not self._starts.replaced():
                self._s3.upload_results(self.request, run_folder(self.request))
        except Exception as error:
            message = (
                f"the output is not complete: {error.message if isinstance(error, CloudtrainError) else repr(error)}"
            )
            if status.state is State.SUCCEEDED:
                return Status(State.FAILED, EXIT_OUTPUT, message)
            return Status(status.state, status.exit_code, f"{status.reason}; {message}" if status.reason else message)
        finally:
            self._s3.remove_inputs()
        return status

    def _wait(self) -> str:
        """Wait until all hosts have ended; return SageMaker's status of a stopped job, "" if it ended by itself."""
        limit = SYSTEM.monotonic() + float(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        stopped_by, deadline = "", float("inf")
        while any(host.running for host in self._hosts):
            self._check_current()
            now = SYSTEM.monotonic()
            if not stopped_by and (self._cancelled or now >= limit):
                stopped_by = "Stopped" if self._cancelled else "MaxRuntimeExceeded"
                deadline = now + STOP_S
                self._write_status("STOPPING")
            elif not stopped_by and deadline == float("inf") and any(host.code for host in self._hosts):
                deadline = now + LINGER_S
            elif now >= deadline:
                deadline = now + LINGER_S
                for host in self._hosts:
                    docker.send_signal(host.container, "KILL")
            if stopped_by:
                for host in self._hosts:
                    host.request_stop()
            SYSTEM.sleep(TICK_S)
        return stopped_by

    def _write_status(self, state: str, **fields: Any) -> None:
        self._status |= {"state": state, "at": now(), **fields}
        files.write(self.folder / "status.json", json.dumps(self._status).encode())


class _Host:
    """A running or ended container of one host, and its log file."""

    def __init__(self, job: LocalJob, name: str, names: list[str]) -> None:
        self.folder = job.folder / name
        self.base = self.folder / "ml"
        self.ended_at = float("inf")
        self.code: int | None = None
        self._has_printed = self._stop_sent = False
        self.container = f"{docker.network_name(job.folder, job.attempt_id)}-{name}"
        request = job.request
        mounts = prepare_mounts(self.base, name, names, request)
        self._log = (self.folder / "log").open("ab", buffering=0)
        command = docker.container_command(job.folder, job.attempt_id, name, request, mounts)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._copy_log, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        if self.code is not None:
            return False
        exit_status = self._process.poll()
        if exit_status is None:
            return True
        self._reader.join()  # all output is in the log before the end is reported
        code, error = docker.read_exit_code(self.container)
        self.code, self.ended_at = (exit_status if code is None else code), SYSTEM.monotonic()
        if error and not read_failure(self.base):
            (self.base / "output/failure").write_text(error)
        return False

    def request_stop(self) -> None:
        """Send SIGTERM to the launcher; repeated until its first line has come, then once.

        Before its first line the launcher may not have installed its handler, and PID 1 never receives a signal
        without one. A second SIGTERM after that would cut its grace period short.
        """
        if self.running and not self._stop_sent:
            has_printed = self._has_printed
            self._stop_sent = docker.send_signal(self.container, "TERM") and has_printed

    def close(self) -> None:
        """Wait for the last line of a removed container and close its log."""
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _copy_log(self) -> None:
        """Copy the container's output into the log, with the launcher's numbers; other lines get numbers in between."""
        assert self._process.stdout is not None
        unnumbered = next_seq = 0
        for line in self._process.stdout:
            text = line.rstrip(b"\n")
            if numbered := _NUMBERED_LINE.fullmatch(text):
                seq, rest, self._has_printed = int(numbered[1]) + unnumbered, numbered[2], True
            else:
                seq, rest, unnumbered = next_seq, b"-1 %b %b" % (now().encode(), text.rstrip(b"\r")), unnumbered + 1
            next_seq = seq + 1
            try:
                self._log.write(b"%d %b\n" % (seq, rest))
            except OSError:
                continue  # a full disk must not stop the training


def prepare_mounts(ml: Path, host: str, names: list[str], request: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Write the files that SageMaker puts below /opt/ml, and return the mounts: source, target, writable."""
    write_config(ml, host, names, request, "eth0")
    run = run_folder(request)
    results = (("model", "model"), ("outputs", "output/data"), ("checkpoints", "checkpoints"))
    mounts = [(str(ml), BASE, True), *((str(run / name), f"{BASE}/{inner}", True) for name, inner in results)]
    for name, _ in results:
        (run / name).mkdir(parents=True, exist_ok=True)
    for channel in request["InputDataConfig"]:
        path = Path(channel["DataSource"]["FileDataSource"]["FileUri"].removeprefix("file://"))
        if not path.exists():
            raise BackendError(f"the input {channel['ChannelName']} does not exist on this machine: {path}")
        target = f"{BASE}/input/data/{channel['ChannelName']}"
        mounts.append((str(path), target if path.is_dir() else f"{target}/{path.name}", False))
    return mounts


if __name__ == "__main__":
    LocalJob(Path(sys.argv[1])).run()
