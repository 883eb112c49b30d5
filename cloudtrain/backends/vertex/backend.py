"""The backend `vertex`: runs every job as a Vertex AI custom job; the platform itself restarts it.

The handle is the job's resource name. request.py builds the job, jobs.py calls the API.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.api import (
    Backend,
    Facts,
    Plan,
    Requirement,
    TimeLimit,
    Traits,
)
from cloudtrain.backends.google import GoogleApi
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.store.gcs import Gcs
from cloudtrain.backends.vertex.jobs import CustomJobs, has_sdk
from cloudtrain.backends.vertex.permissions import build_permissions
from cloudtrain.backends.vertex.request import KEYS, Request
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BadJob, CloudtrainError, Problem, install_command

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.backends.price_lists import Downloads, Offer
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

STOP_S = 30  # between SIGTERM and SIGKILL at the timeout: the default of Kubernetes, Vertex AI documents none
# Families without GPUs of their own, N1 with attached ones: https://cloud.google.com/compute/docs/machine-resource (2026-11-26)
_WITHOUT_GPUS = re.compile(r"(e2|n1|n2|n2d|n4|c2|c2d|c3|c3d|c4|c4a|c4d|t2a|t2d|m1|m2|m3)-")
# Cloud Logging allows 60 requests a minute to read entries, for a whole project
# (https://cloud.google.com/logging/quotas, 2026-11-23). Half of that where nobody follows.
POLL_S, LOGS_PER_S = 5.0, 0.5
SIMULATED_S = 0.1
LOOK_S = 2.0  # between looks for a job whose create had no answer


class CustomJobsBackend(CustomJobs, Backend):
    """What the backends of custom jobs share: the request, and the calls of the API."""

    name: str
    # Half of the 600 requests a minute to list and get resources, for a project and region
    # (https://cloud.google.com/vertex-ai/docs/quotas, 2026-11-23).
    calls_per_s = 5.0
    # AWS_* are read by credentials that are federated with AWS.
    variables = (
        "GOOGLE_*", "GCLOUD_*", "CLOUDSDK_*", "GCE_*", "AWS_*", "STORAGE_EMULATOR_HOST", "*_PROXY", "*_proxy",
        "*_CA_BUNDLE", "SSL_CERT_*", "HOME",
    )  # fmt: skip

    def __init__(self, options: Mapping[str, Any], api: GoogleApi, **jobs: Any) -> None:
        project, region = str(options.get("project")), str(options["region"])
        super().__init__(api, project, region, client=str(options.get("client") or "sdk"), **jobs)
        self._options = options
        place = [str(options.get(name) or "") for name in ("endpoint", "project", "region")]
        self.group = f"{self.name} {'/'.join(place)}"

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        request = Request(job, bundle, run_id, attempt, self._options, self.name)
        if request.problems:
            raise BadJob(request.problems)
        retries = "client" if job.limits.capped else "platform"
        sent = request.to_dict()
        return Plan.of(self.name, job, bundle, request.manifest.to_dict(), sent, request.notes, retries, request.price)

    def time_limit(self, plan: Plan) -> TimeLimit:
        scheduling = plan.request["customJob"]["jobSpec"]["scheduling"]
        timeout = scheduling.get("timeout")
        if not timeout or not scheduling.get("disableRetries"):
            why = "Vertex AI restarts a job, and does not document whether that resets its timeout"
            return TimeLimit(None, f"{why}; limits.max_cost, or retry.max_attempts: 1, bounds the cost")
        seconds = int(timeout.removesuffix("s")) + STOP_S
        return TimeLimit(seconds, "the price of boot disks and the fee for spot machines are not included")


class VertexBackend(CustomJobsBackend):
    """Runs jobs as custom jobs of a Google Cloud project."""

    name = "vertex"
    traits = Traits(keys=KEYS, script_variables="aip_env", client="google-auth",
                    ci=Path(__file__).with_name("ci.yml"),
                    account="project", prices="us-central1",
                    machines=Path(__file__).with_name("machines.csv"), rents="gcp", shell=True)  # fmt: skip
    poll_s = follow_s = POLL_S
    logs_per_s = LOGS_PER_S

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        options = {"region": "us-central1", "prefix": "cloudtrain", **options}
        endpoint = options.get("endpoint")
        if endpoint:
            self.poll_s = self.follow_s = SIMULATED_S
            self.calls_per_s = self.logs_per_s = 100.0
        api = GoogleApi(str(options["region"]), (lambda: str(endpoint).rstrip("/")) if endpoint else None, clock)
        settle_s, look_s = float(options.get("settle_s", 20.0)), SIMULATED_S if endpoint else LOOK_S
        super().__init__(options, api, settle_s=settle_s, pause_s=self.poll_s, look_s=look_s)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.vertex.options import VertexOptions

        return VertexOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        missing = [name for name in ("project", "bucket") if not self._options.get(name)]
        if missing:
            raise BadJob(Problem("is needed", f"options.{self.name}.{name}") for name in missing)
        plan = super().plan(job, bundle, run_id, attempt)
        return replace(plan, notes=(*plan.notes, *Manifest.from_dict(plan.manifest).notes()))

    @classmethod
    def read_prices(cls, provider: str, region: str, key: str, downloads: Downloads) -> Offer:
        from cloudtrain.backends.vertex import prices

        if provider == cls.name:
            return prices.read_prices(downloads, region, key)
        return prices.read_compute_engine(downloads, region)

    def preflight(self, plan: Plan) -> None:
        self._api.check_credentials()

    def images(self, handle: str) -> dict[int, str]:
        """Return node -> its image with the digest that the tag stands for now.

        The watcher calls this when the run starts. If the tag has moved since the image was pulled, the digest is the
        later one.
        """
        return self.pinned_images(handle)

    def machine(self, plan: Plan) -> str:
        first, *others = plan.request["customJob"]["jobSpec"]["workerPoolSpecs"]
        spec = first["machineSpec"]
        if plan.manifest.get("roles") and any(pool["machineSpec"] != spec for pool in others):
            return ""  # services have other machines, with other prices
        gpus = f"+{spec['acceleratorType']}:{spec['acceleratorCount']}" if spec.get("acceleratorType") else ""
        name = str(spec["machineType"])
        return f"vertex/{self._options.get('region')}/{name}{gpus if name.startswith('n1-') else ''}"

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        found = build_permissions(
            {**self._options, **({"image": plan.job["image"]} if plan and plan.job["image"] else {})},
            plan.job if plan else None,
        )
        return {"role.json": found["role"], "bindings.json": found["bindings"]}

    def enforcement(self, rules: Sequence[Requirement]) -> tuple[Mapping[str, Any], list[str]]:
        from cloudtrain.backends.vertex.constraints import build_constraints

        return build_constraints(rules, self._options)

    def facts(self, plan: Plan) -> Facts:
        pools = [pool for pool in plan.request["customJob"]["jobSpec"]["workerPoolSpecs"] if pool]  # {} is skipped
        return Facts(
            account=str(self._options.get("project") or ""),
            region=str(self._options.get("region") or ""),
            instance_types=tuple(dict.fromkeys(str(pool.get("machineSpec", {}).get("machineType")) for pool in pools)),
            images=tuple(dict.fromkeys(str(pool.get("containerSpec", {}).get("imageUri")) for pool in pools)),
            gpus=count_gpus(pools),
        )

    def check(self) -> list[Problem]:
        problems = [
            Problem("is not set", f"options.vertex.{name}", "set it in a target of cloudtrain.toml or in the job file")
            for name in ("project", "bucket")
            if not self._options.get(name)
        ]
        if self._client == "sdk" and not has_sdk():
            message = "google-cloud-aiplatform is not installed: cloudtrain submits jobs with google-auth"
            problems.append(
                Problem(
                    message,
                    "options.vertex.client",
                    f"set client: rest, or run {install_command('cloudtrain[vertex]')}",
                )
            )
        if not problems:
            problems = [problem for look in (self._can_list, self._has_bucket) if (problem := _problem_of(look))]
        return problems

    def _can_list(self) -> object:
        return self.find("doctor-a1")

    def _has_bucket(self) -> object:
        return Gcs(self._api, f"gs://{self._options['bucket']}").look_up("doctor")

    @classmethod
    def discover(cls) -> dict[str, Any]:
        options: dict[str, Any] = {}
        try:
            import google.auth

            _, project = google.auth.default()
            options = {"project": project} if project else {}
        except Exception:
            pass  # no google-auth, or no credentials
        region = os.environ.get("CLOUDSDK_AI_REGION") or os.environ.get("CLOUDSDK_COMPUTE_REGION")
        return {**options, **({"region": region} if region else {})}


def _problem_of(check: Any) -> Problem | None:
    try:
        check()
    except CloudtrainError as error:
        return Problem(error.message, "", error.hint)
    return None


def count_gpus(pools: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the GPUs of all replicas, None where a machine type is not in the catalog and the pool names no count."""
    total = 0
    for pool in pools:
        spec, replicas = pool.get("machineSpec", {}), int(pool.get("replicaCount") or 1)
        name, count = str(spec.get("machineType") or ""), int(spec.get("acceleratorCount") or 0)
        machine = machines.find_machine(machines.load("vertex"), name)
        if not count and not _WITHOUT_GPUS.match(name):
            if machine is None:
                return None
            count = machine.accelerators
        total += count * replicas
    return total
