"""The backend `vertex-local`: sends the same custom job to a simulator that runs its replicas on this machine.

The simulator is a detached process with a folder below CLOUDTRAIN_HOME, which holds its jobs, logs and objects. The first
request starts it, and it ends when it is idle.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Paths, Plan, Shell, Traits
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.vertex.backend import CustomJobsBackend
from cloudtrain.backends.vertex.request import KEYS
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, Problem
from cloudtrain.simulators.vertex import server
from cloudtrain.source.folder_writer import copy_tree

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S = 0.1
KEYS_HERE = {key: field for key, field in KEYS.items() if key != "limits.max_wait"}  # it has no FLEX_START


class VertexLocalBackend(CustomJobsBackend):
    """Runs custom jobs as processes of this machine, through the simulator's HTTP API."""

    name = "vertex-local"
    traits = Traits(Paths.OUTPUT_HERE, KEYS_HERE, own_machines=True, script_variables="aip_env", shell=True)
    poll_s = POLL_S
    calls_per_s = logs_per_s = 100.0

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self.folder = workdir.parent / "simulators" / "vertex"
        simulator_options = {"project": server.PROJECT, "region": server.REGION, "bucket": server.BUCKET}
        api = GoogleApi(server.REGION, self._address, clock)
        # A replica's output is in the log before its end is reported, so nothing has to settle.
        options = {"image": "local/none:latest", **options, **simulator_options, "client": "rest"}
        super().__init__(options, api, settle_s=0.0, pause_s=POLL_S, look_s=POLL_S, console=False)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.vertex.options import VertexLocalOptions

        return VertexLocalOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        plan = super().plan(job, bundle, run_id, attempt)
        note = f"{plan.manifest['nodes']} replicas run as processes on this machine; no image is pulled"
        return replace(plan, price=None, notes=(*plan.notes, note))

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        job = self.get(handle)
        container = job["jobSpec"]["workerPoolSpecs"][0]["containerSpec"] if job else {}
        run = next((item["value"] for item in container.get("env", ()) if item["name"] == "CLOUDTRAIN_RUN_DIR"), "")
        if not run:
            return super().fetch(handle, into, what)
        for name in what:
            if Path(run, name).is_dir():
                copy_tree(Path(run, name), into / name)
        return into

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        job = self.get(handle)
        count = sum(int(pool.get("replicaCount") or 1) for pool in job["jobSpec"]["workerPoolSpecs"]) if job else 0
        if node >= count:
            raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {count - 1}")
        return Shell((sys.executable, *words))  # its replicas are processes of this machine

    def check(self) -> list[Problem]:
        parent = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        return (
            [] if os.access(parent, os.W_OK) else [Problem(f"{parent} cannot be written", hint="set CLOUDTRAIN_HOME")]
        )

    def _address(self) -> str:
        try:
            return server.ensure_started(self.folder)
        except OSError as error:  # TimeoutError is one
            raise BackendError(
                f"the simulator cannot be started: {error}", f"see {self.folder}/simulator.log"
            ) from None
