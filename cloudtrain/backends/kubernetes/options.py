"""The options of the backend `kubernetes` (`options.kubernetes` in a job file), as a pydantic model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Volume(BaseModel):
    """A persistent volume claim that the pods mount."""

    model_config = ConfigDict(extra="forbid")
    claim: str = Field(min_length=1, description="name of the claim; ReadWriteMany for several nodes")
    path: str = Field(pattern=r"^/[^:]+$", description="where it is mounted; inputs and output may lie below")
    read_only: bool = Field(False, description="mount it for reading only")


class KubernetesOptions(BaseModel):
    """Options of the backend `kubernetes`."""

    model_config = ConfigDict(extra="forbid")
    kubeconfig: str | None = Field(None, description="default: $KUBECONFIG, ~/.kube/config, or the pod we run in")
    context: str | None = Field(None, description="context of the kubeconfig; default: its current one")
    server: str | None = Field(None, description="address that the context must lead to: no job goes to another one")
    ca: str | None = Field(
        None, description="digest of the cluster's authority, as plans have it: another cluster is refused there too"
    )
    namespace: str = Field("default", min_length=1, description="namespace that the job runs in")
    image: str | None = Field(None, description="container image of jobs that name none")
    python: str = Field("python3", description="interpreter in the image, 3.9 or newer")
    kind: Literal["job", "jobset"] = Field(
        "job", description="jobset: each attempt is a JobSet, where that operator is installed (jobset.x-k8s.io)"
    )
    queue: str | None = Field(None, description="Kueue's local queue: the job is suspended until it is admitted")
    service_account: str | None = Field(None, description="account that the pods run as")
    pull_secrets: list[str] = Field([], description="names of secrets for the image's registry")
    priority_class: str | None = Field(None, description="priority class of the pods")
    node_selector: dict[str, str] = Field({}, description="labels that a node must have, such as the kind of its GPUs")
    spot_selector: dict[str, str] = Field(
        {}, description="labels of spot nodes here, for resources.use_spot: karpenter.sh/capacity-type: spot"
    )
    tolerations: list[dict[str, Any]] = Field([], description="taints that the pods tolerate, as in a pod's spec")
    affinity: dict[str, Any] = Field({}, description="affinity, as in a pod's spec")
    topology: str | None = Field(None, description="label of nodes that lie near each other; all pods go to one value")
    gpu_resource: str = Field("nvidia.com/gpu", description="the resource that counts GPUs")
    extended_resources: dict[str, int | str] = Field(
        {}, description="other resources of a node, as quantities: vpc.amazonaws.com/efa: 4, hugepages-2Mi: 1Gi"
    )
    ipc_lock: bool = Field(False, description="let the pods lock memory (IPC_LOCK), which RDMA needs")
    cpu_limits: bool = Field(False, description="limit the CPUs to resources.cpus too, where a quota asks for it")
    security: Literal["restricted"] | None = Field(
        None, description="restricted: the pods fit a namespace that enforces this Pod Security standard"
    )
    run_as_user: int = Field(1000, ge=1, description="user and group of the processes, with security: restricted")
    network_policy: bool = Field(False, description="only the job's own pods may connect to its pods, at every port")
    shm: str | None = Field(None, description="size of /dev/shm, part of the memory: 16GiB; default: the node's limit")
    volumes: list[Volume] = Field([], description="persistent volume claims to mount")
    wait: str = Field(
        "24h", description="older name of limits.max_wait: how long pods may wait for nodes and for each other"
    )
    ttl: str = Field("7d", description="how long the ended job is kept, with its pods and their logs")
    poll_s: float = Field(2.0, gt=0, description="seconds between two looks at a job")
    allow_host_paths: list[Annotated[str, Field(pattern="^/")]] = Field(
        [], description="host folders (and their subfolders) that hostPath volumes of the overlay may mount"
    )
    overlay: dict[str, Any] = Field({}, description="merged into the Job: any field of it, as kubectl takes it")
