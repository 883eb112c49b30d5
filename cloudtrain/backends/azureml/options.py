"""The options of the backend azureml."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# Names and lengths: azure-rest-api-specs, machinelearningservices stable/2024-10-01; storage: Blob service REST reference
# ("Naming and referencing containers, blobs, and metadata") (2026-11-30).
STORE = r"az://[a-z0-9](?:-?[a-z0-9]){2,62}@[a-z0-9]{3,24}(?:/[A-Za-z0-9._/-]*)?"


class AzuremlOptions(BaseModel):
    """Options of the backend azureml."""

    model_config = ConfigDict(extra="forbid")

    subscription: str = Field(pattern=r"^[0-9a-fA-F-]{36}$", description="Subscription id that pays.")
    resource_group: str = Field(min_length=1, max_length=90, description="Resource group of the workspace.")
    workspace: str = Field(
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{2,32}$", description="Workspace of Azure Machine Learning."
    )
    store: str = Field(
        pattern=f"^{STORE}$",
        description="az://CONTAINER@ACCOUNT or a folder there: bundles, and results of jobs without `output`.",
    )
    compute: str = Field("", pattern=r"^(|[a-zA-Z][a-zA-Z0-9-]{1,31})$", description="Cluster; without: serverless.")
    image: str = Field("", description="Container image of jobs that name none.")
    environment: str = Field(
        "", description="Environment instead of `image`: azureml:NAME:VERSION, azureml:NAME@latest or an id."
    )
    experiment: str = Field(
        "cloudtrain", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_-]{0,254}$", description="Experiment of the jobs."
    )
    identity: Literal["", "managed", "user"] = Field(
        "", description="What a job's nodes are: a managed identity, or you."
    )
    client_id: str = Field("", description="The user-assigned identity among several; with identity: managed.")
    priority: Literal["", "low", "medium", "high"] = Field("", description="Priority in the serverless queue.")
    ssh_public_key: str = Field(
        "",
        pattern=r"^(|[a-z0-9@.-]+ [A-Za-z0-9+/=]+( [^\n]*)?)$",
        description="Who may open shells in jobs of a cluster.",
    )
    shm_gb: int | None = Field(None, ge=1, le=2048, description="Shared memory of a container, in GiB.")
    python: str = Field("python", description="Python of the image, 3.9 or newer.")
    region: str = Field("", description="Region of the workspace, for prices and policies.")
    endpoint: str = Field("", description="Address of a simulator instead of Azure's.")

    @model_validator(mode="after")
    def _check(self) -> AzuremlOptions:
        if self.client_id and self.identity != "managed":
            raise ValueError("client_id names a managed identity: write identity: managed")
        if self.priority and self.compute:
            raise ValueError("priority is of the serverless queue: remove it, or compute")
        if self.ssh_public_key and not self.compute:
            raise ValueError("ssh_public_key is of jobs on a cluster: name it with compute")
        return self
