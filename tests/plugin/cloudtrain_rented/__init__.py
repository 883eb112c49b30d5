"""The backend `rented`: each attempt is a machine that is rented over an HTTP API (create, status, log, delete).

The handle is the machine's name, which is the attempt's id: the API refuses a second machine of one name. Machines of an
account share a volume, where the runs keep their files.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from cloudtrain import events
from cloudtrain.backends.api import FETCHABLE, Backend, Facts, Plan, TimeLimit, Traits
from cloudtrain.backends.http import RETRYABLE, Answer, Http, HttpError
from cloudtrain.backends.manifest import Manifest
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, NoCapacity, Problem, Unreachable
from cloudtrain.events import LogLine, State, Status
from cloudtrain.nodes.logs import merge
from cloudtrain.source.folder_writer import copy_tree

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

KEY = "RENTED_API_KEY"
USD_PER_HOUR = {"": 0.1, "A10G": 0.75, "A100": 1.6, "H100": 2.4}  # of one machine without, or of one GPU
TAIL_BYTES = 20_000  # of a log, in which the launcher's last state is
STATES = {"waiting": State.QUEUED, "running": State.RUNNING, "stopping": State.STOPPING}


class RentedError(HttpError):
    """The API refused a request."""


class RentedUnreachable(RentedError, Unreachable):
    """The API failed: the request may have been carried out."""


class RentedBackend(Backend):
    """Rents a machine for each attempt."""

    name = "rented"
    traits = Traits(
        keys={"resources.accelerators": "gpu", "resources.disk_gb": "disk_gb", "image": "image"},
        shared_files=True,
        ci=Path(__file__).with_name("ci.yml"),
    )
    poll_s, follow_s = 1.0, 0.2
    variables = ("RENTED_*",)

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options, self._clock = {"volume": "/workspace", "python": "python3", **options}, clock
        self._http = Http(self._target, _error, lambda _: "check the network and options.rented.address", clock=clock)
        self.group = f"rented {options.get('address')}"

    @classmethod
    def options(cls) -> type[BaseModel]:
        from pydantic import BaseModel, ConfigDict, Field

        class RentedOptions(BaseModel):
            """Options of the backend `rented`."""

            model_config = ConfigDict(extra="forbid")
            address: str = Field(description="URL of the API")
            volume: str = Field("/workspace", description="where machines see the account's volume")
            python: str = Field("python3", description="Python of the image")

        return RentedOptions

    @classmethod
    def discover(cls) -> dict[str, Any]:
        return {"address": os.environ["RENTED_ADDRESS"]} if os.environ.get("RENTED_ADDRESS") else {}

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        gpu, count = job.resources.accelerator or "", job.resources.gpus
        if gpu not in USD_PER_HOUR:
            known = ", ".join(filter(None, USD_PER_HOUR))
            raise BadJob([Problem(f"is {gpu}, and the machines have {known}", "resources.accelerators")])
        manifest = Manifest.of(job, run_id, attempt)
        environment = {
            "CLOUDTRAIN_NODE_RANK": "0",
            "CLOUDTRAIN_RUN_DIR": f"{self._options['volume']}/{run_id}",
            "CLOUDTRAIN_GPUS": ",".join(map(str, range(count))),
        }
        request = {
            "name": manifest.attempt_id,
            "gpu": f"{count}x{gpu}" if gpu else "",
            "disk_gb": job.resources.disk_gb or 50,
            "image": job.image or "python:3.12",
            "labels": dict(job.labels),
            "argv": [self._options["python"], ".cloudtrain/launch.py"],
            "env": {**manifest.environment(), **environment},
        }
        price = {"usd_per_hour": USD_PER_HOUR[gpu] * (count or 1), "as_of": "2026-11-28", "source": "the price page"}
        described = {"bundle": bundle.to_dict(), "manifest": manifest.to_dict(), "job": job.to_dict()}
        return Plan(self.name, run_id, attempt, request, **described, price=price, notes=tuple(manifest.notes()))

    def time_limit(self, plan: Plan) -> TimeLimit:
        return TimeLimit.of_launcher(plan)

    def facts(self, plan: Plan) -> Facts:
        return Facts("", "", (plan.request["gpu"],), (plan.request["image"],), gpus=int(plan.manifest["gpus_per_node"]))

    def check(self) -> list[Problem]:
        try:
            self._http.call("GET", "/machines", "machines cannot be listed")
        except BackendError as error:
            return [Problem(error.message, "options.rented", error.hint)]
        return []

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        archive = base64.b64encode(bundle.path.read_bytes()).decode()
        body = json.dumps({**plan.request, "archive": archive}).encode()
        self._http.call("POST", "/machines", "the machine was not rented", data=body, accept=(409,))  # 409: it is there
        return plan.attempt_id

    def find(self, attempt_id: str) -> str | None:
        return attempt_id if self._machine(attempt_id) else None

    def status(self, handle: str) -> Status:
        machine = self._machine(handle)
        return self._status(handle, machine) if machine else Status(State.LOST, reason="there is no such machine")

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        answer = self._http.call("GET", "/machines", "machines cannot be listed")
        listed = {machine["name"]: machine for machine in answer.json}
        return {handle: self._status(handle, listed[handle]) for handle in handles if handle in listed}

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        def read(offsets: Sequence[int]) -> list[Iterable[bytes] | None]:
            return [[self._log(handle, f"from={offsets[0]}")]]

        ended = lambda: self.status(handle).state.final  # noqa: E731
        return merge(read, 1, after=after, follow=follow, ended=ended, pause_s=self.follow_s, clock=self._clock)

    def cancel(self, handle: str) -> None:
        self._http.call("DELETE", f"/machines/{handle}", "the machine cannot be deleted", accept=(404,))

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        into.mkdir(parents=True, exist_ok=True)
        for name in what:
            path = f"{handle.rpartition('-a')[0]}/{name}"
            answer = self._http.call("GET", f"/volume?path={quote(path)}", "files cannot be read", accept=(404,))
            if answer.status == 404:
                continue
            with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(answer.data)) as tar:
                tar.extractall(folder, filter="data")
                copy_tree(Path(folder), into / name)
        return into

    def labels(self, handle: str) -> dict[str, str] | None:
        return (self._machine(handle) or {}).get("labels")

    def _status(self, handle: str, machine: Mapping[str, Any]) -> Status:
        times = machine["started_at"], machine["ended_at"]
        if machine["state"] != "ended":
            return Status(STATES[machine["state"]], started_at=times[0])
        if machine["deleted"]:
            return Status(State.CANCELLED, None, "", *times)
        for line in reversed(self._log(handle, f"last={TAIL_BYTES}").decode("utf-8", "replace").splitlines()):
            event = events.parse(line.split(" ", 3)[-1])
            if event and event[0] == "result":
                state = State(event[1]["state"])
                ended = state in (State.SUCCEEDED, State.FAILED)
                return Status(state, machine["exit_code"] if ended else None, event[1].get("reason") or "", *times)
        return Status(State.LOST, None, "the machine ended before the launcher did", *times)

    def _machine(self, name: str) -> dict[str, Any] | None:
        answer = self._http.call("GET", f"/machines/{name}", "the machine cannot be read", accept=(404,))
        return None if answer.status == 404 else dict(answer.json)

    def _log(self, name: str, where: str) -> bytes:
        answer = self._http.call("GET", f"/machines/{name}/log?{where}", "the log cannot be read", accept=(404,))
        return b"" if answer.status == 404 else answer.data

    def _target(self, path: str) -> tuple[str, Mapping[str, str]]:
        if not (key := os.environ.get(KEY)):
            raise BackendError(f"the environment variable {KEY} is not set", "copy the key from your account's page")
        return str(self._options["address"]).rstrip("/") + path, {"Authorization": f"Bearer {key}"}


def _error(answer: Answer, failure: str) -> HttpError:
    message = f"{failure}: {answer.data[:200].decode('utf-8', 'replace')}"
    if answer.status == 507:
        raise NoCapacity(message)
    return (RentedUnreachable if answer.status in RETRYABLE else RentedError)(message, "", answer)
