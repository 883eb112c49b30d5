"""The options of the backend `akash`, as a pydantic model; imported where options are validated."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class PersistentStorage(BaseModel):
    """A persistent volume of every node, beside its ephemeral disk."""

    model_config = ConfigDict(extra="forbid")
    size: str = Field(pattern=r"^[1-9]\d*(Ki|Mi|Gi|Ti)$", description="100Gi")
    mount: str = Field("/data", pattern="^/", description="folder in the container")
    storage_class: Literal["beta1", "beta2", "beta3", "default"] = Field(
        "beta3", description="beta1: hard disk, beta2: SSD, beta3: NVMe"
    )


class AkashOptions(BaseModel):
    """Options of the backend `akash`."""

    model_config = ConfigDict(extra="forbid")
    store: str = Field(
        pattern=r"^s3://[^/]+(/.+)?$",
        description="S3 or S3-compatible store for source, log and results: s3://bucket/prefix",
    )
    store_endpoint: str | None = Field(None, description="address of an S3-compatible store; nodes use it too")
    store_region: str = Field("us-east-1", min_length=1, description="region of the bucket")
    profile: str | None = Field(None, description="AWS profile of this machine for the store")
    node_keys: dict[str, str] = Field(
        {"AWS_ACCESS_KEY_ID": "env:AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY": "env:AWS_SECRET_ACCESS_KEY"},
        description="secrets with which nodes reach the store: variable of the node -> source",
    )
    api_key: str = Field(
        "env:AKASH_API_KEY",
        pattern=r"^(env:AKASH_\w+|file:.+)$",  # the watcher gets variables of these names
        description="where the Console API key is: env:AKASH_..., or file:PATH",
    )
    deposit_usd: float | None = Field(
        None, gt=0, description="deposit in USD, for accounts of which Console demands one with each deployment"
    )
    image: str | None = Field(None, description="container image of jobs that name none")
    python: str = Field("python3", description="interpreter in the image, 3.9 or newer")
    max_usd_per_hour: float | None = Field(
        None, gt=0, description="highest price of a node; resources.usd_per_hour of the job goes before it"
    )
    gpu_interface: Literal["pcie", "sxm"] | None = Field(None, description="how GPUs are attached; left out: any")
    cpus: int = Field(4, ge=1, description="cores of a node, for jobs that name none")
    memory: str = Field(
        "16Gi", pattern=r"^[1-9]\d*(Mi|Gi|Ti)$", description="memory of a node, for jobs that name none"
    )
    disk_gb: int = Field(50, ge=1, description="ephemeral disk of a node, for jobs that name none")
    shm: str | None = Field(None, pattern=r"^[1-9]\d*(Mi|Gi)$", description="size of /dev/shm: 8Gi")
    persistent: PersistentStorage | None = Field(None, description="a persistent volume of every node")
    attributes: dict[str, str] = Field({}, description="attributes that a provider must have: region, ...")
    auditors: list[str] = Field([], description="addresses of auditors, of which one must have signed the provider")
    min_uptime: float = Field(0.9, ge=0, le=1, description="lowest uptime of a provider in the last 7 days")
    avoid: list[str] = Field([], description="addresses of providers whose bids are not taken")
    reclamation_window: str | None = Field(
        None, pattern=r"^[1-9]\d*(s|m|h)$", description="shortest notice before capacity is taken back: 24h (SDL 2.1)"
    )
    bid_wait: str = Field("2m", description="how long bids are waited for")
    lost_after: str = Field("5m", description="a provider that does not answer for so long, with a silent job, is lost")
    settle_s: float = Field(
        45.0, ge=0, description="how long the last lines and the end of a closed job are waited for"
    )
    console: str = Field("https://console-api.akash.network", description="address of the Console API")
    simulated: bool = Field(False, description="the Console is a simulator: it is asked often")
