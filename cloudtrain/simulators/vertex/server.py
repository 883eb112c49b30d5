"""Simulates Vertex AI, Cloud Storage and Cloud Logging on one loopback port; submitted jobs really run.

    with Simulator(folder) as simulator: ...          in this process: tests
    python -m cloudtrain.simulators.vertex FOLDER     a process of its own, which ends when it is idle: vertex-local

Simulated: HTTP, processes, and the documented or reported states, limits and pitfalls. Not simulated: containers,
identities, quotas of an account, the mount /gcs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import secrets
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.nodes.process import Process, detach
from cloudtrain.simulators.gcs import Storage
from cloudtrain.simulators.http import Response, Route, Server
from cloudtrain.simulators.vertex.jobs import CustomJobs
from cloudtrain.simulators.vertex.lifecycle import Behavior
from cloudtrain.simulators.vertex.logs import LogEntries

PROJECT, REGION, BUCKET = "local", "us-central1", "local"
IDLE_S = 60.0
START_S = 60.0


class Simulator(AbstractContextManager["Simulator"]):
    """One project with a bucket; `url` serves all services, and the routes `more`."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str = PROJECT,
        bucket: str = BUCKET,
        secret: str = "",
        behavior: Behavior | None = None,
        more: Sequence[Route] = (),
        clock: Clock = SYSTEM,
    ) -> None:
        self.behavior = behavior or Behavior()
        self.storage = Storage(folder / "storage")
        self.storage.create_bucket(bucket)
        self.entries = LogEntries(folder / "logs", project, clock)
        self.jobs = CustomJobs(folder / "jobs", project, self.entries, self.behavior)
        alive = ("GET", "/", lambda _: Response({"pid": os.getpid()}))
        self.server = Server(
            [alive, *self.jobs.routes, *self.storage.routes, *self.entries.routes, *more],
            secret=secret,
        )
        self.url = self.server.url
        self.faults = self.server.faults
        self.jobs.set_storage(self.url, self.storage.has_bucket)

    def close(self) -> None:
        """End every job and the server; blocking."""
        self.jobs.close()
        self.server.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def find_url(folder: Path) -> str | None:
    """Return the URL of the simulator that serves a folder, None where none runs."""
    try:
        server = json.loads((folder / "server.json").read_text())
    except (OSError, ValueError):
        return None
    process = Process.parse(server["process"])
    return str(server["url"]) if process is not None and process.alive else None


def ensure_started(folder: Path) -> str:
    """Return the URL of a folder's simulator, after starting it as a detached process if none runs; blocking.

    Raises TimeoutError, OSError.
    """
    deadline = SYSTEM.monotonic() + START_S
    started = 0.0
    while SYSTEM.monotonic() < deadline:
        if (url := find_url(folder)) is not None:
            return url
        if SYSTEM.monotonic() - started > 10:
            started = SYSTEM.monotonic()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            command = [sys.executable, "-m", "cloudtrain.simulators.vertex", str(folder)]
            detach(command, given=b"", log=folder / "simulator.log", env=dict(os.environ), cwd=Path("/"))
        SYSTEM.sleep(0.02)
    raise TimeoutError(f"the simulator of {folder} did not start within {START_S:g} s")


def main() -> int:
    """Serve a folder until it was idle for a minute: no request, no running job."""
    parser = argparse.ArgumentParser(prog="python -m cloudtrain.simulators.vertex", description=main.__doc__)
    parser.add_argument("folder", type=Path, help="holds its jobs; server.json in it names the address")
    folder = parser.parse_args().folder
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0  # another process serves it
        with Simulator(folder, secret=secrets.token_urlsafe(16)) as simulator:
            address_file = folder / "server.json"
            temporary = folder / f"server.json.{os.getpid()}"
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps({"url": simulator.url, "process": str(Process.here())}))
            temporary.replace(address_file)
            while address_file.exists():
                SYSTEM.sleep(0.5)
                if simulator.jobs.running:
                    simulator.server.active_at = SYSTEM.monotonic()
                elif SYSTEM.monotonic() - simulator.server.active_at > IDLE_S:
                    break
            with contextlib.suppress(OSError):
                address_file.unlink()
    return 0
