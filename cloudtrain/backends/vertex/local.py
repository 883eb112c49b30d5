"""The backend `vertex-local`: sends the same custom job to a simulator that runs its replicas on this machine.

The simulator is a detached process with a folder below CLOUDTRAIN_HOME, which holds its jobs, logs and objects. The first
request starts it, and it ends when it is idle.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.vertex.jobs import CustomJobs
from cloudtrain.backends.vertex.request import Request
from cloudtrain.errors import BackendError, BadJob, Problem
from cloudtrain.events import LogLine, Status
from cloudtrain.simulators.vertex import server

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S = 0.1


class VertexLocalBackend:
    """Runs custom jobs as processes of this machine, through the simulator's HTTP API."""

    name = "vertex-local"
    poll_s = POLL_S
    features = frozenset(
        {
            Feature.MULTI_NODE,
            Feature.SPOT,
            Feature.OBJECT_STORES,
            Feature.IMAGES,
            Feature.INSTANCE_TYPES,
        }
    )

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self.folder = workdir.parent / "simulators" / "vertex"
        simulator_options = {"project": server.PROJECT, "region": server.REGION, "bucket": server.BUCKET}
        self._options = {"image": "local/none:latest", **options, **simulator_options}
        self._jobs = CustomJobs(
            GoogleApi(server.REGION, self._address),
            server.PROJECT,
            server.REGION,
            settle_s=0.0,  # a replica's output is in the log before its end is reported
            pause_s=POLL_S,
            look_s=POLL_S,
        )

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.vertex.options import VertexLocalOptions

        return VertexLocalOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        request = Request(job, bundle, run_id, attempt, self._options, self.name)
        if request.problems:
            raise BadJob(request.problems)
        notes = [*request.notes, f"{request.manifest.nodes} replicas are processes of this machine; no image is pulled"]
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request=request.to_dict(),
            bundle=bundle.to_dict(),
            manifest=request.manifest.to_dict(),
            job=job.to_dict(),
            retries="platform",
            notes=tuple(notes),
        )

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        return self._jobs.submit(plan.request, bundle, "rest")

    def find(self, attempt_id: str) -> str | None:
        return self._jobs.find(attempt_id)

    def status(self, handle: str) -> Status:
        return self._jobs.status(handle)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        return self._jobs.logs(handle, follow=follow, after=after)

    def labels(self, handle: str) -> dict[str, str]:
        return self._jobs.labels(handle)

    def cancel(self, handle: str) -> None:
        self._jobs.cancel(handle)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        return self._jobs.fetch(handle, into, what)

    def check(self) -> list[Problem]:
        parent = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return (
            [] if os.access(parent, os.W_OK) else [Problem(f"{parent} cannot be written", hint="set CLOUDTRAIN_HOME")]
        )

    @classmethod
    def discover(cls) -> dict[str, Any]:
        return {}

    def _address(self) -> str:
        try:
            return server.ensure_started(self.folder)
        except OSError as error:  # TimeoutError is one
            raise BackendError(
                f"the simulator cannot be started: {error}", f"look at {self.folder}/simulator.log"
            ) from None
