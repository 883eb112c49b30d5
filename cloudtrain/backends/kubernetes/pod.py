"""The pod of a Kubernetes Job: where it is scheduled, its two containers, their environment, resources and volumes.

The init container unpacks the source; the launcher's container trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import fetch_program
from cloudtrain.backends.kubernetes import security
from cloudtrain.backends.kubernetes.kinds import KINDS, RUNTIME_IMAGE
from cloudtrain.backends.kubernetes.names import ATTEMPT, CONTAINER, INSTANCE_TYPE, UNPACK
from cloudtrain.backends.kubernetes.overlay import merge_manifest
from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.manifest import Manifest
    from cloudtrain.job.job import Job

SOURCE, WORK = "/cloudtrain/source", "/cloudtrain/work"
SHM = "/dev/shm"  # noqa: S108 - where ranks on one node share tensors
UPLOAD_S = 90  # added to limits.grace for the upload of results, before a pod is killed
BEGIN_S = 900  # added to max_runtime for a pod's deadline: image pulls and unpacking
JOIN_S = 1800  # and the wait for other nodes, as entrypoints/launcher/world/channel.py has it
SECRET = re.compile(r"k8s:([a-z0-9]([-a-z0-9.]*[a-z0-9])?)/([-._a-zA-Z0-9]+)")
# Extended resources that are accelerators, or parts of one: nvidia.com/gpu, nvidia.com/mig-1g.10gb, google.com/tpu.
_ACCELERATOR = re.compile(r"^(?>[^/]*/).*gpu|^(?>.*?gpu).*/|/mig-|/tpu|/neuron|/gaudi|/npu")


KEYS = {
    "num_nodes": "completions",
    "image": "image",
    "resources.accelerators": "nvidia.com/gpu",
    "resources.use_spot": "nodeSelector",
    "resources.disk_gb": "ephemeral-storage",
    "resources.cpus": "cpu",
    "resources.memory": "memory",
    "resources.instance_type": "node.kubernetes.io/instance-type",
    "roles.resources": "replicatedJobs",
    "roles.image": "replicatedJobs",
    "roles.colocate": "containers",
    "secrets.k8s": "secretKeyRef",
    "limits.max_runtime": "activeDeadlineSeconds",
    "limits.max_wait": "activeDeadlineSeconds",
    "retry.max_attempts": "backoffLimit",
    "retry.by": "failurePolicy",
}


@dataclass
class Pod:
    """Builds the pod's spec."""

    job: Job
    options: Mapping[str, Any]
    manifest: Manifest
    output_path: str | None  # the output's folder on a volume, where it is no object store
    source: str | None  # the bundle's URI, None for the ConfigMap of the attempt's name
    digest: str  # the bundle's
    problems: list[Problem]  # what is wrong with the job is added
    first_node: int = 0  # the rank of its role's first node, where roles have other pods
    pods: int = 0  # of the attempt; 0: as many as nodes
    beside: Sequence[tuple[str, Job, int]] = ()  # roles that share it: name, job and first rank of each
    role: str = ""  # of those the one whose container this is

    def spec(self) -> dict[str, Any]:
        return {
            **self._fields(),
            **({} if self._kind == "trainjob" else {"initContainers": [self._unpack_container()]}),
            "containers": [self._launcher_container(), *(own._launcher_container() for own in self._others())],
            "volumes": self._volumes(),
        }

    @property
    def name(self) -> str:
        return self.manifest.attempt_id

    def _others(self) -> Iterator[Pod]:
        for role, job, first in self.beside:
            # A resource of options.kubernetes is the pod's: the first container has it.
            options = {**self.options, "extended_resources": None}
            yield replace(self, job=job, options=options, first_node=first, role=role, beside=())

    @property
    def _work(self) -> str:
        return f"work-{self.role}" if self.role else "work"

    @property
    def _has_peers(self) -> bool:
        return (self.pods or self.manifest.nodes) > 1

    @property
    def _begin_s(self) -> int:
        """Seconds before training begins: images, unpacking, and other nodes, which may come late."""
        return BEGIN_S + (self.manifest.join_s or JOIN_S if self.manifest.nodes > 1 else 0)

    def _fields(self) -> dict[str, Any]:
        options = self.options
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            # The kubelet counts from the pod's start on a node: waiting for one is not in it.
            "activeDeadlineSeconds": self.job.limits.max_runtime_s + self.job.limits.grace_s + UPLOAD_S + self._begin_s,
            "terminationGracePeriodSeconds": self.job.limits.grace_s + UPLOAD_S,
        }
        if self._restricted:
            pod["securityContext"] = security.pod_context(int(options.get("run_as_user") or 1000))
            if options.get("ipc_lock"):
                hint = "remove one of the two, or use a namespace with a less strict Pod Security level"
                self._add_problem("options.kubernetes.ipc_lock", "is not allowed in a restricted pod", hint)
        for role, job in (("", self.job), *((role, job) for role, job, _ in self.beside)):
            if options.get("cpu_limits") and not job.resources.cpus:
                key = f"roles.{role}.resources.cpus" if role else "resources.cpus"
                self._add_problem("options.kubernetes.cpu_limits", f"needs {key}", f"{key}: 8")
        if self._has_peers:
            pod["subdomain"] = self.name
        if options.get("service_account"):
            pod["serviceAccountName"] = options["service_account"]
        if options.get("pull_secrets"):
            pod["imagePullSecrets"] = [{"name": name} for name in options["pull_secrets"]]
        if options.get("priority_class"):
            pod["priorityClassName"] = options["priority_class"]
        selector = dict(options.get("node_selector") or {})
        tolerations = [dict(item) for item in options.get("tolerations") or ()]
        resources = self.job.resources
        if resources.instance_type:
            selector[INSTANCE_TYPE] = resources.instance_type
        if resources.use_spot:
            spot = dict(options.get("spot_selector") or {})
            if not spot:
                hint = (
                    "name the label of your cluster's spot nodes; on GKE `options: {kubernetes: {spot_selector:"
                    " {cloud.google.com/gke-spot: 'true'}}}`, on EKS `options: {kubernetes: {spot_selector:"
                    " {eks.amazonaws.com/capacityType: SPOT}}}`"
                )
                self._add_problem("options.kubernetes.spot_selector", "is needed for resources.use_spot", hint)
            selector |= spot
            tolerations += [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in sorted(spot)]
        if resources.gpus:
            key = str(options.get("gpu_resource") or "nvidia.com/gpu")
            tolerations.append({"key": key, "operator": "Exists", "effect": "NoSchedule"})
        if selector:
            pod["nodeSelector"] = selector
        if tolerations:
            pod["tolerations"] = tolerations
        affinity = dict(options.get("affinity") or {})
        if options.get("topology"):
            near = {
                "topologyKey": options["topology"],
                "labelSelector": {"matchLabels": {ATTEMPT: self.name}},
            }
            affinity = merge_manifest(
                affinity, {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [near]}}
            )
        if affinity:
            pod["affinity"] = affinity
        return pod

    @property
    def _kind(self) -> str:
        return str(self.options.get("kind") or "job")

    @property
    def _restricted(self) -> bool:
        return self.options.get("security") == "restricted"

    def _security(self, **capabilities: list[str]) -> dict[str, Any]:
        """Return a container's `securityContext`, with capabilities to add; {} where it needs none."""
        if self._restricted:
            return {"securityContext": security.container_context()}
        return {"securityContext": {"capabilities": capabilities}} if capabilities else {}

    @property
    def _image(self) -> str:
        return str(
            self.job.image or self.options.get("image") or (RUNTIME_IMAGE if self._kind == "trainjob" else "none")
        )

    @property
    def _python(self) -> str:
        return str(self.options.get("python") or "python3")

    def _unpack_container(self) -> dict[str, Any]:
        """Return the init container that unpacks the source before the launcher starts. It gets no secrets."""
        # The same as the launcher's, which starts later: a quota may require limits for every container.
        resources = {
            kind: {name: value for name, value in values.items() if name in ("cpu", "memory", "ephemeral-storage")}
            for kind, values in self._resources().items()
        }
        return {
            "name": UNPACK,
            "image": self._image,
            "command": [self._python, "-c", fetch_program.UNPACK],
            "env": [{"name": name, "value": value} for name, value in self._source_env().items()],
            "resources": {kind: values for kind, values in resources.items() if values},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [*self._source_mount(), {"name": "work", "mountPath": WORK}],
            **self._security(),
        }

    def _source_env(self) -> dict[str, str]:
        place = self.source or f"{SOURCE}/source.tar.gz"
        return {fetch_program.SOURCE: place, fetch_program.DIGEST: self.digest, fetch_program.WORK: WORK}

    def _source_mount(self) -> list[dict[str, Any]]:
        return [] if self.source else [{"name": "source", "mountPath": SOURCE, "readOnly": True}]

    def _launcher_container(self) -> dict[str, Any]:
        if self._image == "none":
            self._add_problem(
                "image",
                "is missing: pods need a container image",
                "set image: registry/name:tag in the job or the target",
            )
        # A TrainJob has no init containers of its own; the one of a pod has unpacked the folder of its first container.
        alone = self._kind == "trainjob" or bool(self.role)
        program = ["-c", fetch_program.START] if alone else [f"{WORK}/{fetch_program.LAUNCHER}"]
        return {
            "name": container_name(self.role),
            "image": self._image,
            "command": [self._python, *program],
            "env": self._env(),
            "resources": self._resources(),
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [*(self._source_mount() if alone else ()), *self._mounts()],
            **self._security(**({"add": ["IPC_LOCK"]} if self.options.get("ipc_lock") else {})),
        }

    def _env(self) -> list[dict[str, Any]]:
        manifest = self.manifest
        try:
            env = manifest.environment()
        except BadRequest as error:
            self._add_problem("args", error.message, error.hint)
            env = {}
        job_name = KINDS[self._kind].job_name(self.name)
        env |= self._source_env() if self._kind == "trainjob" or self.role else {}
        env |= {
            "CLOUDTRAIN_NUM_NODES": str(manifest.nodes),
            **({"CLOUDTRAIN_FIRST_NODE": str(self.first_node)} if self.first_node else {}),
        }
        if self._has_peers or manifest.nodes == 1:
            env["MASTER_ADDR"] = f"{job_name}-0.{self.name}" if self._has_peers else "127.0.0.1"
        if self.output_path is not None:
            env["CLOUDTRAIN_RUN_DIR"] = f"{self.output_path.rstrip('/')}/{manifest.run_id}"
            env["CLOUDTRAIN_RUN_DIR_SHARED"] = "1"
        elif manifest.output is not None:
            env["CLOUDTRAIN_KEEP_LOG"] = "1"  # in the output: a pod that is deleted takes its log along
        if self._restricted:  # the image knows no such user, and its home may not be written
            env |= {"HOME": WORK, "USER": "cloudtrain", "LOGNAME": "cloudtrain"}
        variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in env.items()]
        if manifest.nodes > 1:
            variables.append(_pod_field_env("CLOUDTRAIN_POD_IP", "status.podIP"))
            if not self._has_peers:  # all nodes are in one pod
                variables.append(_pod_field_env("MASTER_ADDR", "status.podIP"))
        variables.append(_pod_field_env("CLOUDTRAIN_NODE_NAME", "spec.nodeName"))
        variables.append(_pod_field_env("CLOUDTRAIN_START", "metadata.uid"))  # tells the logs of several starts apart
        return [*variables, *self._secrets()]

    def _secrets(self) -> Iterator[dict[str, Any]]:
        """Yield environment variables that refer to secrets; the kubelet fills in the values."""
        seen = set()
        for name, sources in self.job.secrets.items():
            for source in sources:
                match = SECRET.fullmatch(source)
                if source.startswith("k8s:") and match is None:
                    self._add_problem(f"secrets.{name}", f"does not name a key of a secret: {source}", "k8s:name/key")
                elif match is not None and source not in seen:
                    seen.add(source)
                    reference = {"name": match[1], "key": match[3], "optional": True}  # the launcher says what lacks
                    yield {"name": f"CLOUDTRAIN_SECRET_{match[1]}_{match[3]}", "valueFrom": {"secretKeyRef": reference}}

    def _resources(self) -> dict[str, Any]:
        wanted, options = self.job.resources, self.options
        requests: dict[str, Any] = {}
        limits: dict[str, Any] = {}
        if wanted.cpus:
            requests["cpu"] = str(wanted.cpus)
        if options.get("cpu_limits") and wanted.cpus:
            limits["cpu"] = str(wanted.cpus)
        if wanted.memory_bytes:
            requests["memory"] = limits["memory"] = str(wanted.memory_bytes)
        if wanted.disk_gb:
            requests["ephemeral-storage"] = limits["ephemeral-storage"] = f"{wanted.disk_gb}G"
        extended = dict(options.get("extended_resources") or {})
        if wanted.gpus:
            extended[str(options.get("gpu_resource") or "nvidia.com/gpu")] = wanted.gpus
        for name, count in extended.items():
            requests[name] = limits[name] = str(count)
        return {kind: values for kind, values in (("requests", requests), ("limits", limits)) if values}

    def _mounts(self) -> list[dict[str, Any]]:
        mounts: list[dict[str, Any]] = [{"name": self._work, "mountPath": WORK}, {"name": "shm", "mountPath": SHM}]
        for number, volume in enumerate(self.options.get("volumes") or ()):
            mount = {"name": f"claim-{number}", "mountPath": volume["path"]}
            mounts.append({**mount, "readOnly": True} if volume.get("read_only") else mount)
        return mounts

    def _volumes(self) -> list[dict[str, Any]]:
        shm: dict[str, Any] = {"medium": "Memory"}
        if size := self.options.get("shm"):
            try:
                shm["sizeLimit"] = str(units.size_bytes(str(size)))
            except ValueError as error:
                self._add_problem("options.kubernetes.shm", f"is not a size: {size}", str(error))
        volumes: list[dict[str, Any]] = [{"name": "work", "emptyDir": {}}, {"name": "shm", "emptyDir": shm}]
        volumes += ({"name": own._work, "emptyDir": {}} for own in self._others())
        if self.source is None:
            volumes.insert(0, {"name": "source", "configMap": {"name": self.name}})
        for number, volume in enumerate(self.options.get("volumes") or ()):
            volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": volume["claim"]}})
        return volumes

    def _add_problem(self, path: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, path, hint))


def container_name(role: str) -> str:
    """Return the name of the container of a role that shares the pods of another; of "", the pod's first."""
    return f"{CONTAINER}-{role}" if role else CONTAINER


def _pod_field_env(name: str, path: str) -> dict[str, Any]:
    """Return an environment variable that the kubelet fills from a field of the pod."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def with_other_nodes(pod: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return a pod's spec that no node of these names is chosen for: each of its terms must exclude them."""
    affinity = dict(pod.get("affinity") or {})
    nodes = dict(affinity.get("nodeAffinity") or {})
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    # One value each: https://kubernetes.io/docs/reference/generated/kubernetes-api/ (NodeSelectorTerm, 2026-11-29)
    other = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in names]
    terms = (nodes.get(required) or {}).get("nodeSelectorTerms") or [{}]
    terms = [{**term, "matchFields": [*term.get("matchFields", ()), *other]} for term in terms]
    affinity["nodeAffinity"] = {**nodes, required: {"nodeSelectorTerms": terms}}
    return {**pod, "affinity": affinity}


def count_gpus(pod: Mapping[str, Any], gpu_resource: str) -> int | None:
    """Return the GPUs of one pod, each part of a shared GPU counted as one; None where claims or odd quantities ask for them."""
    if pod.get("resourceClaims"):
        return None
    long: list[int] = []
    first = [0]
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        resources = container.get("resources") or {}
        wanted = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        counts = [str(count) for name, count in wanted.items() if name == gpu_resource or _ACCELERATOR.search(name)]
        if not all(count.isdigit() for count in counts):
            return None
        ends = container in pod.get("initContainers", ()) and container.get("restartPolicy") != "Always"
        (first if ends else long).append(sum(map(int, counts)))
    return max(sum(long), *first)
