"""The options of the backend `kubernetes` (`options.kubernetes` in a job file), as a pydantic model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _refuse_operators(kind: Any) -> Any:
    """Say what to use in place of operators that bring launchers of their own; raises ValueError."""
    instead = {"mpijob": "num_nodes: each node is started by cloudtrain", "rayjob": "ray: true", "raycluster": "ray: true",
               "pytorchjob": "kind: trainjob"}.get(str(kind).lower())  # fmt: skip
    if instead:
        raise ValueError(f"{kind} is not used: {instead}; several programs: roles")
    return kind


class Volume(BaseModel):
    """A persistent volume claim that the pods mount."""

    model_config = ConfigDict(extra="forbid")
    claim: str = Field(
        min_length=1, description="name of the persistent volume claim; with several nodes it needs ReadWriteMany"
    )
    path: str = Field(pattern=r"^/[^:]+$", description="mount path; inputs and output may be paths below it")
    read_only: bool = Field(False, description="mount the claim read-only")


class KubernetesOptions(BaseModel):
    """Options of the backend `kubernetes`."""

    model_config = ConfigDict(extra="forbid")
    kubeconfig: str | None = Field(
        None, description="default: $KUBECONFIG, ~/.kube/config, or the service account of the pod that runs cloudtrain"
    )
    context: str | None = Field(None, description="context of the kubeconfig; default: its current context")
    server: str | None = Field(
        None, description="API server address that the context must have; cloudtrain refuses any other cluster"
    )
    ca: str | None = Field(
        None,
        description="sha256 of the cluster's certificate authority, printed by plan; cloudtrain refuses any other cluster",
    )
    namespace: str = Field("default", min_length=1, description="namespace that the job runs in")
    image: str | None = Field(None, description="container image for jobs that do not set image")
    python: str = Field("python3", description="interpreter in the image, 3.9 or newer")
    kind: Annotated[Literal["job", "jobset", "trainjob"], BeforeValidator(_refuse_operators)] = Field(
        "job", description="what an attempt is, where its operator is installed: a JobSet, or a TrainJob of Kubeflow"
    )
    runtime: str | None = Field(
        None, description="ClusterTrainingRuntime of a TrainJob: its image, network and topology apply"
    )
    queue: str | None = Field(None, description="Kueue LocalQueue: the job stays suspended until Kueue admits it")
    service_account: str | None = Field(None, description="Kubernetes service account of the pods")
    pull_secrets: list[str] = Field([], description="image pull secrets")
    priority_class: str | None = Field(None, description="priority class of the pods")
    node_selector: dict[str, str] = Field({}, description="labels that a node must have, such as the kind of its GPUs")
    spot_selector: dict[str, str] = Field(
        {}, description="labels of this cluster's spot nodes, for resources.use_spot: karpenter.sh/capacity-type: spot"
    )
    tolerations: list[dict[str, Any]] = Field([], description="taints that the pods tolerate, as in a pod's spec")
    affinity: dict[str, Any] = Field({}, description="affinity, as in a pod's spec")
    topology: str | None = Field(
        None,
        description="topology label of nodes near each other, such as a rack; all pods run on nodes with one value",
    )
    gpu_resource: str = Field("nvidia.com/gpu", description="the resource that counts GPUs")
    extended_resources: dict[str, int | str] = Field(
        {}, description="other resources of a node, as quantities: vpc.amazonaws.com/efa: 4, hugepages-2Mi: 1Gi"
    )
    ipc_lock: bool = Field(False, description="let the pods lock memory (IPC_LOCK), which RDMA needs")
    cpu_limits: bool = Field(False, description="limit the CPUs to resources.cpus too, where a quota asks for it")
    security: Literal["restricted"] | None = Field(
        None, description="restricted: the pods fit a namespace that enforces this Pod Security standard"
    )
    run_as_user: int = Field(
        1000, ge=1, le=2**31 - 1, description="user and group of the processes, with security: restricted"
    )
    network_policy: bool = Field(False, description="only the job's own pods may connect to its pods, at every port")
    shm: str | None = Field(None, description="size of /dev/shm, part of the memory: 16GiB; default: the node's limit")
    volumes: list[Volume] = Field([], description="persistent volume claims to mount")
    ttl: str = Field("7d", description="how long Kubernetes keeps the ended job, with its pods and logs")
    poll_s: float = Field(2.0, gt=0, le=3600, description="seconds between two status requests")
    allow_host_paths: list[Annotated[str, Field(pattern="^/")]] = Field(
        [], description="host folders (and their subfolders) that hostPath volumes of the overlay may mount"
    )
    overlay: dict[str, Any] = Field({}, description="fields merged into the Job manifest, named as in kubectl")
