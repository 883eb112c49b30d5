"""The Kubernetes backend: runs each attempt as an Indexed Job, without an operator; the client starts the next attempt.

request.py builds the manifests (pod.py: the pod), jobs.py creates and watches the Jobs.
"""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import (
    FETCHABLE,
    Backend,
    Facts,
    FoundAttempt,
    Paths,
    Plan,
    Requirement,
    Shell,
    TimeLimit,
    Traits,
)
from cloudtrain.backends.aws import Aws
from cloudtrain.backends.kubernetes import channel
from cloudtrain.backends.kubernetes.client import KubeApi
from cloudtrain.backends.kubernetes.doctor import KubeDoctor
from cloudtrain.backends.kubernetes.jobs import SIMULATED_S, KubeJobs, parse_handle
from cloudtrain.backends.kubernetes.kinds import as_job, specs_of, templates_of
from cloudtrain.backends.kubernetes.kubeconfig import SERVICE_ACCOUNT_DIR
from cloudtrain.backends.kubernetes.listing import CALLS_PER_S, LOGS_PER_S, KubeList
from cloudtrain.backends.kubernetes.logs import KubeLogs
from cloudtrain.backends.kubernetes.names import CONTAINER, INSTANCE_TYPE, OUTPUT
from cloudtrain.backends.kubernetes.permissions import build_role
from cloudtrain.backends.kubernetes.pod import KEYS, count_gpus, with_other_nodes
from cloudtrain.backends.kubernetes.request import Request, kubectl_manifests, time_limit
from cloudtrain.backends.kubernetes.status import container_state, get_annotations, newest_by_node
from cloudtrain.backends.kubernetes.volumes import KubeVolumes
from cloudtrain.backends.store.open import Clients, s3_endpoint
from cloudtrain.clock import SYSTEM, Clock
from cloudtrain.errors import BackendError, BadJob, BadRequest, CloudtrainError, Problem, before_sending
from cloudtrain.events import LogLine, Status
from cloudtrain.nodes.files import write

if TYPE_CHECKING:
    from pydantic import BaseModel

    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

POLL_S = 2.0
DISK_FULL = "raise resources.disk_gb (of the pods), or the size of the volume that is full, or keep fewer checkpoints"


class KubernetesBackend(KubeJobs, Backend):
    """Runs jobs as Indexed Jobs of a namespace, or as objects that make one (kinds.py)."""

    name = "kubernetes"
    traits = Traits(
        Paths.NODES, KEYS, ci=Path(__file__).with_name("ci.yml"), shell=True, fixes={"disk-full": DISK_FULL}
    )
    poll_s = follow_s = POLL_S
    calls_per_s, logs_per_s = CALLS_PER_S, LOGS_PER_S
    # A credential plugin of the kubeconfig (gke-gcloud-auth-plugin, aws) sees them all.
    variables = (
        "KUBECONFIG", "KUBERNETES_*", "AWS_*", "BOTO_*", "GOOGLE_*", "GCLOUD_*", "CLOUDSDK_*", "AZURE_*",
        "STORAGE_EMULATOR_HOST", "*_PROXY", "*_proxy", "*_CA_BUNDLE", "SSL_CERT_*", "HOME", "PATH",
    )  # fmt: skip

    def __init__(self, options: Mapping[str, Any], workdir: Path, clock: Clock = SYSTEM) -> None:
        self._options, self._workdir = {"namespace": "default", **options}, workdir
        if options.get("poll_s"):
            self.poll_s = self.follow_s = float(options["poll_s"])
            if self.poll_s < SIMULATED_S:
                self.calls_per_s = self.logs_per_s = 100.0
        cluster = [str(options.get(name) or "") for name in ("kubeconfig", "context", "server", "ca")]
        self.group = f"kubernetes {'/'.join([*cluster, self._options['namespace']])}"
        connection_options = (options.get(name) for name in ("kubeconfig", "context", "server", "ca"))
        api = KubeApi(*connection_options, clock=clock)
        super().__init__(api, self.poll_s, str(options.get("kind") or "job"), str(self._options["namespace"]))
        self._stores = Clients(Aws("kubernetes", None, None, s3_endpoint(), clock), clock)
        self._list = KubeList(api, self)
        self._doctor = KubeDoctor(api, self._options)
        self._volumes = KubeVolumes(api, self, self.poll_s)
        self._logs = KubeLogs(api, self, self._stores, self._volumes, self.poll_s)

    @classmethod
    def options(cls) -> type[BaseModel]:
        from cloudtrain.backends.kubernetes.options import KubernetesOptions

        return KubernetesOptions

    def plan(self, job: Job, bundle: Bundle, run_id: str, attempt: int = 1) -> Plan:
        pinned = self._api.pin()  # later attempts and status calls go to the same cluster
        options = {**job.options, self.name: {**job.options.get(self.name, {}), **pinned}}
        job = job.model_copy(update={"options": options})
        request = Request(job, bundle, run_id, attempt, self._options)
        if request.problems:
            raise BadJob(request.problems)
        notes = list(request.notes)
        if not pinned and not self._options.get("server"):
            notes.append(
                "no cluster was found: no kubeconfig, or none with a current-context (set $KUBECONFIG, or "
                "options.kubernetes.kubeconfig and context)"
            )
        notes += request.manifest.notes()
        retries = "client" if request.starts == 1 else "platform"
        return Plan.of(self.name, job, bundle, request.manifest.to_dict(), request.to_dict(), notes, retries)

    def manifests(self, plan: Plan, packed: bytes) -> str:
        """Return the objects of a plan as YAML for `kubectl apply --server-side`; raises BadRequest where the source is too
        large for a ConfigMap."""
        if plan.request["source"]:
            raise BadRequest(
                "the source is too large for a ConfigMap (1 MiB), so no manifest can hold it; `cloudtrain submit` uploads it",
                "exclude files in .cloudtrainignore",
            )
        import yaml

        return yaml.safe_dump_all(kubectl_manifests(plan.request, packed), sort_keys=False)

    def facts(self, plan: Plan) -> Facts:
        jobs = specs_of(plan.request["manifests"][0])
        pods = [job["template"]["spec"] for job in jobs]
        named = [str((pod.get("nodeSelector") or {}).get(INSTANCE_TYPE) or "") for pod in pods]
        containers = [each for pod in pods for each in (*pod.get("initContainers", ()), *pod["containers"])]
        key = str(self._options.get("gpu_resource") or "nvidia.com/gpu")
        nodes = [max(int(job["completions"]), int(job.get("parallelism") or 0)) for job in jobs]
        gpus = [count_gpus(pod, key) for pod in pods]
        return Facts(
            instance_types=tuple(dict.fromkeys(filter(None, named))),
            images=tuple(dict.fromkeys(str(each.get("image") or "") for each in containers)),
            gpus=None if None in gpus else sum(map(mul, gpus, nodes)),
        )

    def avoid(self, plan: Plan, names: Sequence[str]) -> Plan:
        manifests = copy.deepcopy(list(plan.request["manifests"]))
        for job in templates_of(manifests[0]):
            job["template"]["spec"] = with_other_nodes(job["template"]["spec"], names)
        return replace(plan, request={**plan.request, "manifests": manifests})

    def permissions(self, plan: Plan | None, *, inside: bool = False) -> Mapping[str, Any]:
        return {"role.yaml": build_role(self._options, inside=inside)}

    def enforcement(self, rules: Sequence[Requirement]) -> tuple[Mapping[str, Any], list[str]]:
        from cloudtrain.backends.kubernetes.admission import build_policy

        objects, notes = build_policy(rules, self._options)
        return ({"rules.yaml": objects} if objects else {}), notes

    def time_limit(self, plan: Plan) -> TimeLimit:
        return time_limit(plan)

    def preflight(self, plan: Plan) -> None:
        self._api.access  # noqa: B018 - raises BackendError without a kubeconfig
        if plan.request["source"]:
            self._stores.bucket(str(plan.request["source"])).check_credentials()

    def submit(self, plan: Plan, bundle: Bundle) -> str:
        bundle_base64 = ""
        if plan.request["source"]:
            with before_sending():
                self._stores.bucket(str(plan.request["source"])).add("", bundle.path)
        else:
            bundle_base64 = base64.b64encode(bundle.path.read_bytes()).decode()
        return self.create(plan.request, bundle_base64)

    def statuses(self, handles: Sequence[str]) -> dict[str, Status]:
        return self._list.statuses(handles)

    def labelled(self, name: str, value: str, known: Container[str]) -> Iterator[FoundAttempt]:
        return self._list.labelled(self._namespace, name, value, known)

    def logs(self, handle: str, *, follow: bool = False, after: str | None = None) -> Iterator[LogLine]:
        return self._logs.follow(handle, follow=follow, after=after)

    def shell(self, handle: str, node: int, words: Sequence[str], *, stdin: bool, terminal: bool) -> Shell:
        argv = [str(self._options.get("python") or "python3"), *words]
        namespace, pod = self._running_pod(handle, node)
        name, container = str(pod["metadata"]["name"]), pod.get("container", CONTAINER)
        path = channel.exec_path(namespace, name, container, argv, stdin=stdin, terminal=terminal)
        return Shell(stream=partial(channel.run, self._api, path))

    def connect(self, handle: str, node: int, port: int) -> Shell:
        namespace, pod = self._running_pod(handle, node)
        path = channel.port_path(namespace, str(pod["metadata"]["name"]), port)
        return Shell(stream=partial(channel.connect_port, self._api, path))

    def _running_pod(self, handle: str, node: int) -> tuple[str, dict[str, Any]]:
        """Return the namespace of a node's pod, and the pod; raises BackendError where it does not run."""
        pods = newest_by_node(self.pods(handle))
        if node not in pods:
            raise BackendError(f"there is no node {node}: pods of these run: {', '.join(map(str, pods)) or 'none'}")
        if not container_state(pods[node]).get("startedAt") or pods[node]["status"].get("phase") != "Running":
            raise BackendError(f"node {node} does not run now: its pod is {pods[node]['status'].get('phase')}")
        return parse_handle(handle).namespace, pods[node]

    def fetch(self, handle: str, into: Path, what: tuple[str, ...] = FETCHABLE) -> Path:
        job = self.job(handle) or self._deleted_job(handle)
        if job is None:
            raise BackendError(
                f"the Kubernetes Job {handle} no longer exists",
                "its results may still be in the output folder of the job",
            )
        base = get_annotations(job).get(OUTPUT, "")
        if not base:
            raise BackendError(
                "the job had no `output`: its results were deleted with its pods",
                "set output in the job file, to a bucket or to a mount path of options.kubernetes.volumes, and run the job again",
            )
        if "://" in base:
            into.mkdir(parents=True, exist_ok=True)
            for folder in what:
                self._stores.bucket(base).bring(folder, into / folder)
        else:
            self._volumes.download(job, base, what, into)
        return into

    def delete_cancelled(self, handle: str) -> None:
        job = self.job(handle)
        if job is not None:
            del job["metadata"]["uid"]  # nothing is owned by it from now on
            path = self._deleted_path(handle)
            try:
                write(path, json.dumps(job).encode())
            except OSError as error:
                raise BackendError(f"{path} cannot be written: {error.strerror or error}") from None
            self.delete(handle)

    def _deleted_path(self, handle: str) -> Path:
        """Where a deleted Job's manifest is kept: `fetch` needs its image, volumes and output."""
        name = parse_handle(handle).name
        return self._workdir / name.rpartition("-a")[0] / f"{name}.json"

    def _deleted_job(self, handle: str) -> dict[str, Any] | None:
        try:
            return dict(json.loads(self._deleted_path(handle).read_bytes()))
        except (OSError, ValueError):
            return None

    def check(self) -> list[Problem]:
        return self._doctor.check()

    def probe(self, plan: Plan) -> list[Problem]:
        return self._doctor.probe(as_job(plan.request["manifests"][0]))

    def capacity(self) -> str:
        return self._doctor.capacity()

    @classmethod
    def discover(cls) -> dict[str, Any]:
        try:
            if (SERVICE_ACCOUNT_DIR / "namespace").exists() and not os.environ.get("KUBECONFIG"):
                return {"namespace": (SERVICE_ACCOUNT_DIR / "namespace").read_text().strip()}
            return KubeApi(None, None).pin()
        except (CloudtrainError, OSError):
            return {}
