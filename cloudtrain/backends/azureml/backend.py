"""The backend `azureml`: each attempt is a command job of an Azure Machine Learning workspace.

The handle is the job's name, which is the attempt's id: a workspace has one job of a name. Bundles and results lie in Azure
Blob Storage, or where the job's `output` says.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import (
    FETCHABLE,
    Backend,
    BackendError,
    Facts,
    FoundAttempt,
    Plan,
    Problem,
    TimeLimit,
    Traits,
)
from cloudtrain.backends.azureml import request
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.events import LogLine, Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.backends.azureml.jobs import Jobs
    from cloudtrain.backends.price_lists import Downloads, Offer
    from cloudtrain.backends.shell import Shell
    from cloudtrain.backends.store.blob import Blob
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S, FOLLOW_S = 10.0, 5.0


class AzuremlBackend(Backend):
    """Sends command jobs to a workspace of Azure Machine Learning."""

    name = request.NAME
    traits = Traits(
        keys={
            "num_nodes": "instanceCount",
            "image": "environmentId",
            "resources.accelerators": "instanceType",
            "resources.cpus": "instanceType",
            "resources.memory": "instanceType",
            "resources.instance_type": "instanceType",
            "resources.use_spot": "jobTier",
        },
        client="azure-identity>=1.25",
        ci=Path(__file__).with_name("ci.yml"),
        account="subscription",
        shell=True,
        prices="eastus",
        machines=Path(__file__).with_name("machines.csv"),
        fixes={"disk-full": "choose a larger machine (resources.instance_type), or keep fewer checkpoints"},
    )
    poll_s, follow_s = POLL_S, FOLLOW_S
    variables = ("AZURE_*", "MSI_*", "IDENTITY_*")

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options, self._clock = dict(options), clock
        place = (str(options.get(name) or "") for name in ("endpoint", "subscription", "resource_group", "workspace"))
        self.group = f"{self.name} {' '.join(place)} {self._experiment}"
        if options.get("endpoint"):  # a simulator answers at once
            self.poll_s, self.follow_s = 0.5, 0.2

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.azureml.options import AzuremlOptions

        return AzuremlOptions

    @property
    def _experiment(self) -> str:
        return self._options.get("experiment") or request.EXPERIMENT

    @cached_property
    def _jobs(self) -> Jobs:
        from cloudtrain.backends.azureml.client import Workspace
        from cloudtrain.backends.azureml.jobs import Jobs

        return Jobs(Workspace(self._options, self._clock), self.follow_s or FOLLOW_S, self._clock)

    @cached_property
    def _bundles(self) -> Blob:
        from cloudtrain.backends.store.blob import Blob

        return Blob(request.bundles(self._options), clock=self._clock)

    @classmethod
    def convert(cls, path: Path, backend: str) -> tuple[dict[str, Any], list[str]] | None:
        from cloudtrain.backends.azureml.command_job import convert_file

        return convert_file(path)

    # -- plan and submit -----------------------------------------------------------------------------------------------

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        return request.build(job, bundle, run_id, attempt, self._options)

    def time_limit(self, plan: Plan) -> TimeLimit:
        seconds = request.time_limit_s(plan.manifest["max_runtime_s"], plan.manifest["grace_s"])
        note = (
            "Azure may begin its count again when it starts a spot job again"
            if plan.job["resources"].get("use_spot")
            else ""
        )
        return TimeLimit(seconds, note, f"{request.SETUP_S} s for the image and the inputs")

    def machine(self, plan: Plan) -> str:
        kind = plan.request["job"]["properties"]["resources"].get("instanceType", "")
        return f"{self.name}/{self._options['region']}/{kind}" if kind and self._options.get("region") else ""

    @classmethod
    def read_prices(cls, provider: str, region: str, key: str, downloads: Downloads) -> Offer:
        from cloudtrain.backends.azureml import prices

        return prices.read_prices(downloads, region)

    def facts(self, plan: Plan) -> Facts:
        own = plan.request["job"]["properties"]
        kinds = (own["resources"]["instanceType"],) if "instanceType" in own["resources"] else ()
        environment = plan.request["environment"]
        images = (environment["body"]["properties"]["image"],) if environment else ()
        account, region = self._options["subscription"], self._options.get("region", "")
        return Facts(account, region, kinds, images, gpus=plan.requested_gpus)

    def preflight(self, plan: Plan) -> None:
        from cloudtrain.errors import Unreachable

        self._bundles.check_credentials()
        with suppress(Unreachable):  # then the submit finds out
            self._jobs.check_place(str(plan.request["job"]["properties"].get("computeId") or "").rpartition("/")[2])

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        from cloudtrain.errors import before_sending

        with before_sending():
            self._bundles.add(request.bundle_name(bundle), bundle.path)
        return self._jobs.create(plan)

    def find(self, attempt_id: str) -> str | None:
        return attempt_id if self._jobs.read(attempt_id) else None

    # -- a job that exists ---------------------------------------------------------------------------------------------

    def status(self, handle: str) -> Status:
        return self._jobs.status(handle)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        return self._jobs.statuses(self._experiment, handles)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        return self._jobs.logs(handle, follow, after)

    def cancel(self, handle: str) -> None:
        self._jobs.cancel(handle)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        from cloudtrain.backends.manifest import sent_record
        from cloudtrain.backends.store.open import opened

        own = (self._jobs.read(handle) or {}).get("properties", {})
        sent = sent_record(own.get("environmentVariables") or {}).get("manifest")
        if sent is None:
            raise BackendError(f"the workspace has no job {handle}: where its results are is not known")
        into.mkdir(parents=True, exist_ok=True)
        place = str((own.get("outputs") or {}).get(request.RESULTS, {}).get("uri") or "")
        files = opened(self._jobs.place(place) if place else f"{sent['output'].rstrip('/')}/{sent['run_id']}")
        for name in what:
            files.bring(name, into / name)
        return into

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        from cloudtrain.backends.azureml import ssh

        return ssh.shell(self._jobs.read(handle), handle, node, self._options)

    def labels(self, handle: str) -> dict[str, str] | None:
        from cloudtrain.backends.azureml.jobs import labels_of

        job = self._jobs.read(handle)
        return labels_of(job) if job else None

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        return (found for found in self._jobs.tagged(name, value) if found.attempt_id not in known)

    # -- what people ask before ----------------------------------------------------------------------------------------

    def check(self) -> list[Problem]:
        from cloudtrain.backends.azureml.doctor import check

        return check(self._options, self._clock)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        from cloudtrain.backends.azureml.doctor import discover

        return discover()

    @classmethod
    def ci_values(cls, options: Mapping[str, Any]) -> Mapping[str, str]:
        return {name: str(options.get(name) or "") for name in ("subscription", "resource_group", "workspace")}

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        from cloudtrain.backends.azureml.permissions import role

        return {"azure-role.json": role(self._options)}
