"""Training on Kubernetes: an Indexed Job for every attempt, no operator, and the client starts the next one.

What a job is stands in request.py, how it is talked to in jobs.py.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import FETCHABLE, Feature, Plan
from cloudtrain.backends.kubernetes.client import KubeApi, KubeError
from cloudtrain.backends.kubernetes.jobs import KubeJobs
from cloudtrain.backends.kubernetes.kubeconfig import POD
from cloudtrain.backends.kubernetes.logs import KubeLogs
from cloudtrain.backends.kubernetes.request import OUTPUT, Request, applicable
from cloudtrain.backends.kubernetes.status import marks
from cloudtrain.backends.kubernetes.store import KubeStore
from cloudtrain.backends.kubernetes.volumes import KubeClaims
from cloudtrain.errors import BackendError, BadJob, BadRequest, CloudtrainError, Problem
from cloudtrain.events import LogLine, Status

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S = 2.0
# what we do: verb, group, resource, and what for
NEEDED = (
    ("create", "batch", "jobs", "to submit"),
    ("patch", "batch", "jobs", "to start and to cancel"),
    ("get", "batch", "jobs", "to look at a job"),
    ("create", "", "services", "for several nodes"),
    ("create", "", "configmaps", "for the source"),
    ("list", "", "pods", "to look at a job"),
    ("get", "", "pods/log", "to read logs"),
)
QUEUED = (("delete", "batch", "jobs", "to cancel what waits in a queue"),)
CLAIMS = (
    ("create", "", "pods", "to fetch from a claim"),
    ("get", "", "pods", "to fetch from a claim"),
    ("delete", "", "pods", "to fetch from a claim"),
    ("get", "", "pods/proxy", "to fetch from a claim"),
)


class KubernetesBackend:
    """Runs jobs as Indexed Jobs of a namespace."""

    name = "kubernetes"
    poll_s = POLL_S
    features = frozenset(
        {
            Feature.MULTI_NODE,
            Feature.SPOT,
            Feature.NATIVE_RETRY,
            Feature.OBJECT_STORES,
            Feature.LOCAL_PATHS,
            Feature.IMAGES,
            Feature.INSTANCE_TYPES,
        }
    )

    def __init__(self, options: Mapping[str, Any], workdir: Path) -> None:
        self._options = {"namespace": "default", **options}
        if options.get("poll_s"):
            self.poll_s = float(options["poll_s"])
        named = (options.get(name) for name in ("kubeconfig", "context", "server", "ca"))
        self._api = KubeApi(*named)
        self._store = KubeStore()
        self._jobs = KubeJobs(self._api)
        self._claims = KubeClaims(self._api, self._jobs, self.poll_s)
        self._logs = KubeLogs(self._api, self._jobs, self._store, self._claims, self.poll_s)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.kubernetes.options import KubernetesOptions

        return KubernetesOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        pinned = self._api.pin()  # the next attempt, and every look, goes where this one goes
        options = {**job.options, self.name: {**job.options.get(self.name, {}), **pinned}}
        job = job.model_copy(update={"options": options})
        request = Request(job, bundle, run_id, attempt, self._options)
        if request.problems:
            raise BadJob(request.problems)
        notes = list(request.notes)
        if not pinned and not self._options.get("server"):
            notes.append("no kubeconfig is found here: the plan names no cluster (options.kubernetes.server)")
        if not request.manifest.gpus_per_node:
            notes.append("no accelerators are asked for: the ranks see no GPU (resources.accelerators)")
        return Plan(
            backend=self.name,
            run_id=run_id,
            attempt=attempt,
            request=request.to_dict(),
            bundle=bundle.to_dict(),
            manifest=request.manifest.to_dict(),
            job=job.to_dict(),
            retries="client" if request.starts == 1 else "platform",
            notes=tuple(notes),
        )

    def manifests(self, plan: Plan, packed: bytes) -> str:
        """Return the objects of a plan as YAML for `kubectl apply`; raises BadRequest where the source is too large."""
        if plan.request["source"]:
            raise BadRequest(
                "the source is too large for a ConfigMap, and only submit uploads it",
                "leave files out of it: .cloudtrainignore",
            )
        import yaml

        return yaml.safe_dump_all(applicable(plan.request, packed), sort_keys=False)

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        packed = ""
        if plan.request["source"]:
            self._store.put(bundle, str(plan.request["source"]))
        else:
            packed = base64.b64encode(bundle.path.read_bytes()).decode()
        return self._jobs.submit(plan.request, packed)

    def find(self, attempt_id: str) -> str | None:
        return self._jobs.find(str(self._options["namespace"]), attempt_id)

    def discard(self, attempt_id: str) -> None:
        self._jobs.discard(str(self._options["namespace"]), attempt_id)

    def status(self, handle: str) -> Status:
        return self._jobs.status(handle)

    def labels(self, handle: str) -> dict[str, str]:
        return self._jobs.labels(handle)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        return self._logs.follow(handle, follow=follow, after=after)

    def images(self, handle: str) -> dict[int, str]:
        return self._jobs.images(handle)

    def cancel(self, handle: str) -> None:
        self._jobs.cancel(handle)

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        job = self._jobs.job(handle)
        if job is None:
            raise BackendError(f"the Job of {handle} is gone", "its results may still lie in the output")
        base = marks(job).get(OUTPUT, "")
        if not base:
            raise BackendError(
                "the job had no output: nothing is kept", "output: gs://bucket/..., or a path on a claim"
            )
        if "://" in base:
            self._store.bring(base, what, into)
        else:
            self._claims.bring(job, base, what, into)
        return into

    def check(self) -> list[Problem]:
        try:
            self._api.get("/version", "the cluster cannot be reached")
            needed = (*NEEDED, *(QUEUED if self._options.get("queue") else ()))
            needed = (*needed, *(CLAIMS if self._options.get("volumes") else ()))
            return [problem for each in needed if (problem := self._may(*each))]
        except CloudtrainError as error:
            return [Problem(error.message, "", error.hint)]

    def capacity(self) -> str:
        """Return what GPUs the nodes have that jobs of this target may go to; raises BackendError."""
        options = self._options
        wanted = dict(options.get("node_selector") or {})
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in wanted.items())} if wanted else None
        try:
            listed = self._api.get("/api/v1/nodes", "nodes cannot be listed", query) or {}
        except KubeError as error:
            if error.status != 403:
                raise
            return "not known: you may not list nodes"
        name = str(options.get("gpu_resource") or "nvidia.com/gpu")
        ready = [node for node in listed.get("items") or () if not (node.get("spec") or {}).get("unschedulable")]
        counts = [int((node["status"].get("allocatable") or {}).get(name, 0)) for node in ready]
        fitting = " that the node_selector takes" if wanted else ""
        largest = f", at most {max(counts)} on one" if any(counts) else ""
        return f"{sum(counts)} of {name} on {len(counts)} nodes{fitting}{largest}; an autoscaler may bring more"

    def _may(self, verb: str, group: str, resource: str, why: str) -> Problem | None:
        space = str(self._options["namespace"])
        name, _, sub = resource.partition("/")
        asked = {
            "namespace": space,
            "verb": verb,
            "group": group,
            "resource": name,
            **({"subresource": sub} if sub else {}),
        }
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        place = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        _, body = self._api.call("POST", place, "permissions cannot be asked for", body=review)
        if json.loads(body)["status"].get("allowed"):
            return None
        hint = f"kubectl auth can-i {verb} {resource} -n {space}; docs/kubernetes.md has a role"
        return Problem(f"you may not {verb} {resource} in {space}, which is needed {why}", "", hint)

    @classmethod
    def discover(cls) -> dict[str, Any]:
        try:
            if (POD / "namespace").exists() and not os.environ.get("KUBECONFIG"):
                return {"namespace": (POD / "namespace").read_text().strip()}
            return KubeApi(None, None).pin()
        except (CloudtrainError, OSError):
            return {}
