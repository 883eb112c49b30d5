"""The options of the backend `akash`, as a pydantic model; imported where options are validated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from cloudtrain.source.secrets import SAFE_ADDRESS


class PersistentStorage(BaseModel):
    """A persistent volume of every node, beside its ephemeral disk."""

    model_config = ConfigDict(extra="forbid")
    size: str = Field(pattern=r"^[1-9]\d*(Ki|Mi|Gi|Ti)$", description="100Gi")
    mount: str = Field("/data", pattern="^/", description="mount path in the container")
    storage_class: Literal["beta1", "beta2", "beta3", "default"] = Field(
        "beta3", description="beta1: hard disk, beta2: SSD, beta3: NVMe"
    )


class AkashOptions(BaseModel):
    """Options of the backend `akash`."""

    model_config = ConfigDict(extra="forbid")
    store: str = Field(
        pattern=r"^s3://[^/]+(/.+)?$",
        description="S3 or S3-compatible bucket for source, log and results: s3://bucket/prefix",
    )
    store_endpoint: str | None = Field(
        None,
        pattern=SAFE_ADDRESS,
        description="endpoint URL of an S3-compatible store, for this machine and the nodes, which gets secrets: https; "
        "default: AWS",
    )
    store_region: str = Field("us-east-1", min_length=1, description="region of the bucket")
    profile: str | None = Field(None, description="AWS profile that this machine uses for the bucket of store")
    node_keys: dict[str, str] = Field(
        {"AWS_ACCESS_KEY_ID": "env:AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY": "env:AWS_SECRET_ACCESS_KEY"},
        description="credentials that nodes use for the bucket of store, as variable: source of its value",
    )
    api_key: str = Field(
        "env:AKASH_API_KEY",
        pattern=r"^(env:AKASH_\w+|file:.+)$",  # the watcher gets variables of these names
        description="source of the Akash Console API key: env:AKASH_..., or file:PATH",
    )
    deposit_usd: float | None = Field(
        None, gt=0, le=1_000_000, description="deposit in USD for each deployment, for accounts that must pay one"
    )
    image: str | None = Field(None, description="container image for jobs that do not set image")
    python: str = Field("python3", description="interpreter in the image, 3.9 or newer")
    max_usd_per_hour: float | None = Field(
        None,
        gt=0,
        le=100_000,
        description="highest accepted price of a node in USD per hour; the job's resources.usd_per_hour overrides it",
    )
    gpu_interface: Literal["pcie", "sxm"] | None = Field(
        None, description="interface of the GPUs, pcie or sxm; default: any"
    )
    cpus: int = Field(4, ge=1, le=100_000, description="CPU cores of a node, for jobs that do not set resources.cpus")
    memory: str = Field(
        "16Gi",
        pattern=r"^[1-9]\d*(Mi|Gi|Ti)$",
        description="memory of a node, for jobs that do not set resources.memory",
    )
    disk_gb: int = Field(
        50, ge=1, le=1_000_000, description="ephemeral disk of a node in GB, for jobs that do not set resources.disk_gb"
    )
    shm: str | None = Field(None, pattern=r"^[1-9]\d*(Mi|Gi)$", description="size of /dev/shm: 8Gi")
    persistent: PersistentStorage | None = Field(None, description="a persistent volume of every node")
    attributes: dict[str, str] = Field({}, description="attributes that a provider must have: region, ...")
    auditors: list[Annotated[str, Field(pattern=r"^akash1[02-9ac-hj-np-z]{38}$")]] = Field(
        [], description="addresses of auditors, akash1...; only providers that one of them has signed are used"
    )
    min_uptime: float = Field(
        0.9, ge=0, le=1, description="minimum uptime of a provider in the last 7 days, from 0 to 1"
    )
    avoid: list[str] = Field([], description="addresses of providers that are not used")
    reclamation_window: str | None = Field(
        None,
        pattern=r"^[1-9]\d*(s|m|h)$",
        description="minimum notice that a provider gives before it takes capacity back: 24h (SDL 2.1)",
    )
    bid_wait: str = Field("2m", description="maximum wait for bids of providers")
    lost_after: str = Field(
        "5m",
        description="an attempt counts as lost after this time without an answer of its provider and without output of its job",
    )
    settle_s: float = Field(
        45.0,
        ge=0,
        le=3600,
        description="seconds to wait for the last log lines and the result after a lease was closed",
    )
    console: str = Field(
        "https://console-api.akash.network",
        pattern=SAFE_ADDRESS,
        description="URL of the Akash Console API, which gets the API key: https, or http on this machine",
    )
