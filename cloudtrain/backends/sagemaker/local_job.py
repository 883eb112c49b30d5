"""One training job in containers of this machine, as SageMaker's local mode runs it; a detached process for each attempt.

    python -m cloudtrain.backends.sagemaker.local_job FOLDER

FOLDER holds request.json, and this process keeps there what a supervisor keeps (nodes/directory.py): status.json,
`lock`, `cancel`;
algo-<N>/log is what host N has printed, algo-<N>/ml its /opt/ml. status.json also says which `image` the hosts run. Before
the last word every container is gone.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cloudtrain.backends.sagemaker import docker, local_store, status
from cloudtrain.backends.sagemaker.local_request import run_folder
from cloudtrain.backends.sagemaker.local_store import LocalStore
from cloudtrain.backends.sagemaker.request import STOP_S
from cloudtrain.errors import BackendError, CloudtrainError
from cloudtrain.events import EXIT_REFUSED, State, Status
from cloudtrain.nodes import files
from cloudtrain.nodes.process import boot_id, start_time

BASE = "/opt/ml"
LINGER_S = 20.0  # for the other hosts when one has ended badly
TICK_S = 0.05
EXIT_OUTPUT = 74  # the launcher's word too: it ended well, its results are not where they should be
_OURS = re.compile(rb"(\d+) (-?\d+ \d{4}-\d\d-\d\dT[\d:.]+Z .*)", re.DOTALL)


def hosts(request: Mapping[str, Any]) -> list[str]:
    """Return the names of a request's hosts: algo-1, algo-2, ..."""
    return [f"algo-{number + 1}" for number in range(int(request["ResourceConfig"]["InstanceCount"]))]


class Keeper:
    """Starts an attempt's hosts, waits for their end, and removes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.request = json.loads((folder / "request.json").read_text())
        self.attempt_id = str(self.request["TrainingJobName"])
        self._asked = threading.Event()
        self._hosts: list[_Host] = []
        self._store = LocalStore(folder) if local_store.asked(self.request) else None
        self._said: dict[str, Any] = {
            "pid": os.getpid(),
            "start_ticks": start_time(os.getpid()),
            "boot_id": boot_id(),
            "grace_s": STOP_S,
            "started_at": _now(),
            "ended_at": None,
            "exit_code": None,
            "reason": "",
        }

    def run(self) -> None:
        """Do all of it; blocking until the attempt has ended."""
        signal.signal(signal.SIGTERM, lambda *_: self._asked.set())
        signal.signal(signal.SIGINT, lambda *_: self._asked.set())
        self._say("STARTING")
        try:
            status = self._attempt()
        except BackendError as error:
            status = Status(State.FAILED, EXIT_REFUSED, error.message)
        except Exception as error:
            status = Status(State.LOST, None, f"the process that keeps the containers broke: {error!r}")
        try:
            docker.remove(self.folder)
        except BackendError as error:
            print(error, file=sys.stderr)  # noqa: T201 - launcher.out
        for host in self._hosts:
            host.close()
        if self._store is not None:
            status = self._take(status)
        self._say(status.state.value, exit_code=status.exit_code, reason=status.reason, ended_at=_now())

    @property
    def _cancelled(self) -> bool:
        return self._asked.is_set() or (self.folder / "cancel").exists()

    def _attempt(self) -> Status:
        docker.remove(self.folder)  # what a keeper that was killed has left
        names = hosts(self.request)
        if self._store is not None:
            self.request = self._store.bring(self.request, lambda: self._cancelled)
        if self._cancelled:
            return Status(State.CANCELLED)
        self._said["image"] = docker.image(str(self.request["AlgorithmSpecification"]["TrainingImage"]))
        docker.connect(self.folder, self.attempt_id)
        for name in names:
            self._hosts.append(_Host(self, name, names))
        self._say("RUNNING")
        over = self._watch()
        ended = [host for host in self._hosts if host.code]
        failed = min(ended, key=lambda host: host.ended_at, default=None)
        found: dict[str, Any] = {"TrainingJobStatus": "Completed"}
        if over:
            found = {"TrainingJobStatus": "Stopped", "SecondaryStatus": over}
        elif failed is not None:
            said = failed.failure()
            reason = f"AlgorithmError: {said + ', ' if said else ''}exit code: {failed.code}"
            found = {"TrainingJobStatus": "Failed", "FailureReason": reason}
        return status.status_of(found)

    def _take(self, status: Status) -> Status:
        """Bring results to S3; without them a job that ended well has not succeeded."""
        assert self._store is not None
        try:
            if self._hosts:
                self._store.take(self.request, run_folder(self.request))
        except Exception as error:
            said = f"the output is not complete: {error.message if isinstance(error, CloudtrainError) else repr(error)}"
            if status.state is State.SUCCEEDED:
                return Status(State.FAILED, EXIT_OUTPUT, said)
            return Status(status.state, status.exit_code, f"{status.reason}; {said}" if status.reason else said)
        finally:
            self._store.clear()
        return status

    def _watch(self) -> str:
        """Wait until all hosts have ended; return how the job was stopped, "" where it ended by itself."""
        limit = time.monotonic() + float(self.request["StoppingCondition"]["MaxRuntimeInSeconds"])
        over, patience = "", float("inf")
        while any(host.running for host in self._hosts):
            now = time.monotonic()
            if not over and (self._cancelled or now >= limit):
                over = "Stopped" if self._cancelled else "MaxRuntimeExceeded"
                patience = now + STOP_S
                self._say("STOPPING")
            elif not over and patience == float("inf") and any(host.code for host in self._hosts):
                patience = now + LINGER_S
            elif now >= patience:
                patience = now + LINGER_S
                for host in self._hosts:
                    docker.send(host.container, "KILL")
            if over:
                for host in self._hosts:
                    host.ask()
            time.sleep(TICK_S)
        return over

    def _say(self, state: str, **fields: Any) -> None:
        self._said |= {"state": state, "at": _now(), **fields}
        files.write(self.folder / "status.json", json.dumps(self._said).encode())


class _Host:
    """One container, from its start on."""

    def __init__(self, keeper: Keeper, name: str, names: list[str]) -> None:
        self.folder = keeper.folder / name
        self.ended_at = float("inf")
        self.code: int | None = None
        self._spoke = self._told = False
        self.container = f"{docker.name(keeper.folder, keeper.attempt_id)}-{name}"
        request = keeper.request
        mounts = lay(self.folder / "ml", name, names, request)
        self._log = (self.folder / "log").open("ab", buffering=0)
        command = docker.command(keeper.folder, keeper.attempt_id, name, request, mounts)
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        if self.code is not None:
            return False
        found = self._process.poll()
        if found is None:
            return True
        self._reader.join()  # what it printed is in the log before its end is known
        code, error = docker.exit_code(self.container)
        self.code, self.ended_at = (found if code is None else code), time.monotonic()
        if error and not self.failure():
            (self.folder / "ml/output/failure").write_text(error)
        return False

    def ask(self) -> None:
        """Ask the launcher to leave, until it has heard.

        Before its first line it may not be there, or listen: a first process that does not listen to a signal never
        gets it. Afterwards once only, since a second request ends its patience.
        """
        if self.running and not self._told:
            spoke = self._spoke
            self._told = docker.send(self.container, "TERM") and spoke

    def failure(self) -> str:
        """Return what the container left in /opt/ml/output/failure."""
        try:
            return (self.folder / "ml/output/failure").read_text(errors="replace")[:900]
        except OSError:
            return ""

    def close(self) -> None:
        """Wait for the last line; the container is gone."""
        self._process.wait()
        self._reader.join()
        self._log.close()

    def _read(self) -> None:
        """Write lines as the launcher has numbered them; those of others get the numbers between."""
        assert self._process.stdout is not None
        foreign = following = 0
        for line in self._process.stdout:
            text = line.rstrip(b"\n")
            if found := _OURS.fullmatch(text):
                seq, rest, self._spoke = int(found[1]) + foreign, found[2], True
            else:
                seq, rest, foreign = following, b"-1 %b %b" % (_now().encode(), text.rstrip(b"\r")), foreign + 1
            following = seq + 1
            try:
                self._log.write(b"%d %b\n" % (seq, rest))
            except OSError:
                continue  # a full disk: training goes on


def lay(ml: Path, host: str, names: list[str], request: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """Make what SageMaker lays below /opt/ml and return the mounts: source, target, whether it may be written."""
    for inner in ("input/config", "input/data", "output"):
        (ml / inner).mkdir(parents=True, exist_ok=True)
    config = {
        "hyperparameters": request["HyperParameters"],
        "resourceconfig": {
            "current_host": host,
            "hosts": names,
            "network_interface_name": "eth0",
            "current_instance_type": request["ResourceConfig"]["InstanceType"],
        },
        "inputdataconfig": {
            channel["ChannelName"]: {"TrainingInputMode": channel.get("InputMode", "File")}
            for channel in request["InputDataConfig"]
        },
    }
    for name, value in config.items():
        (ml / f"input/config/{name}.json").write_text(json.dumps(value))
    run = run_folder(request)
    results = (("model", "model"), ("outputs", "output/data"), ("checkpoints", "checkpoints"))
    mounts = [(str(ml), BASE, True), *((str(run / name), f"{BASE}/{inner}", True) for name, inner in results)]
    for name, _ in results:
        (run / name).mkdir(parents=True, exist_ok=True)
    for channel in request["InputDataConfig"]:
        path = Path(_path(channel["DataSource"]["FileDataSource"]["FileUri"]))
        if not path.exists():
            raise BackendError(f"the input {channel['ChannelName']} does not exist on this machine: {path}")
        target = f"{BASE}/input/data/{channel['ChannelName']}"
        mounts.append((str(path), target if path.is_dir() else f"{target}/{path.name}", False))
    return mounts


def _path(uri: str) -> str:
    return uri.removeprefix("file://")


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


if __name__ == "__main__":
    Keeper(Path(sys.argv[1])).run()
