"""Vertex AI, Cloud Storage and Cloud Logging on one port of this machine; what is submitted really runs.

    with Simulator(folder) as simulator: ...          in this process: tests
    python -m cloudtrain.simulators.vertex FOLDER     a process of its own, which ends when it is idle: vertex-local

What it is: real HTTP, real processes, the states, limits and traps that are documented or were reported. What it is
not: containers, identities, quotas of an account, the mount /gcs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cloudtrain.nodes.process import Process, detach
from cloudtrain.simulators.gcs import Storage
from cloudtrain.simulators.http import Answer, Route, Server
from cloudtrain.simulators.vertex.jobs import CustomJobs
from cloudtrain.simulators.vertex.lifecycle import Pace
from cloudtrain.simulators.vertex.logs import Entries

PROJECT, REGION, BUCKET = "local", "us-central1", "local"
IDLE_S = 60.0
START_S = 60.0


class Simulator:
    """One project with a bucket; `url` is the address of all of its services, and of `more`."""

    def __init__(
        self,
        folder: Path,
        *,
        project: str = PROJECT,
        bucket: str = BUCKET,
        word: str = "",
        pace: Pace | None = None,
        more: Sequence[Route] = (),
    ) -> None:
        self.pace = pace or Pace()
        self.storage = Storage(folder / "storage")
        self.storage.create_bucket(bucket)
        self.entries = Entries(folder / "logs", project)
        self.jobs = CustomJobs(folder / "jobs", project, self.entries, self.pace)
        alive = ("GET", "/", lambda _: Answer({"pid": os.getpid()}))
        self.server = Server(
            [alive, *self.jobs.routes, *self.storage.routes, *self.entries.routes, *more],
            word=word,
        )
        self.url = self.server.url
        self.faults = self.server.faults
        self.jobs.serve(self.url)

    def close(self) -> None:
        """End every job and the server; blocking."""
        self.jobs.close()
        self.server.close()

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address(folder: Path) -> str | None:
    """Return the address of the simulator that serves a folder, None where none runs."""
    try:
        known = json.loads((folder / "server.json").read_text())
    except (OSError, ValueError):
        return None
    process = Process.parse(known["process"])
    return str(known["url"]) if process is not None and process.alive else None


def opened(folder: Path) -> str:
    """Return the address of the simulator of a folder, started as a detached process if none runs; blocking.

    Raises TimeoutError, OSError.
    """
    deadline = time.monotonic() + START_S
    started = 0.0
    while time.monotonic() < deadline:
        if (url := address(folder)) is not None:
            return url
        if time.monotonic() - started > 10:
            started = time.monotonic()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            command = [sys.executable, "-m", "cloudtrain.simulators.vertex", str(folder)]
            detach(command, given=b"", log=folder / "simulator.log", env=dict(os.environ), cwd=Path("/"))
        time.sleep(0.02)
    raise TimeoutError(f"the simulator of {folder} did not start within {START_S:g} s")


def main() -> int:
    """Serve a folder until nobody has asked for anything, and nothing has run, for a minute."""
    folder = Path(sys.argv[1])
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0  # another one serves it
        with Simulator(folder, word=secrets.token_urlsafe(16)) as simulator:
            known = folder / "server.json"
            half = folder / f"server.json.{os.getpid()}"
            half.touch(mode=0o600)
            half.write_text(json.dumps({"url": simulator.url, "process": str(Process.here())}))
            half.replace(known)
            while known.exists():
                time.sleep(0.5)
                if simulator.jobs.running:
                    simulator.server.busy_at = time.monotonic()
                elif time.monotonic() - simulator.server.busy_at > IDLE_S:
                    break
            with contextlib.suppress(OSError):
                known.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
