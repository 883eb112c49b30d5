"""The options of the backends `vertex` and `vertex-local`, as pydantic models; imported where options are validated."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from cloudtrain.job.fields import bucket_name
from cloudtrain.job.problems import wrong

_DIGITS = "0123456789"


def _region(name: str) -> str:
    """Refuse a mistyped region; one that Google has opened since the list of prices was written is taken."""
    rows = Path(__file__).with_name("prices.csv").read_text("utf-8").splitlines()
    regions = {row.split(",")[0][len("gcp/") :] for row in rows if row.startswith("gcp/")}
    if name.rstrip(_DIGITS) in {region.rstrip(_DIGITS) for region in regions}:
        return name
    if near := get_close_matches(name, sorted(regions), 1, 0.9):
        raise wrong(f'"{name}" is no region of Google Cloud', f"did you mean {near[0]}?")
    return name


class VertexOptions(BaseModel):
    """Options of the backend `vertex`."""

    model_config = ConfigDict(extra="forbid")
    project: str = Field(min_length=1, description="project id")
    region: Annotated[str, AfterValidator(_region)] = Field(
        "us-central1", min_length=1, description="region that the job runs in"
    )
    bucket: Annotated[str, AfterValidator(bucket_name)] = Field(
        min_length=3, description="Cloud Storage bucket for source and results, in that region"
    )
    prefix: str = Field("cloudtrain", description="folder in the bucket")
    client: Literal["sdk", "rest"] = Field(
        "sdk",
        description="sdk: submit with google-cloud-aiplatform, where it is installed; rest: with google-auth alone",
    )
    image: str | None = Field(None, description="container image for jobs that do not set image")
    python: str = Field("python3", description="interpreter in the image, 3.9 or newer")
    service_account: str | None = Field(None, description="service account of the job: name@project.iam...")
    network: str | None = Field(
        None, description="VPC network peered with Vertex AI: projects/NUMBER/global/networks/NAME"
    )
    network_attachment: str | None = Field(None, description="Private Service Connect attachment, instead of a network")
    kms_key: str | None = Field(None, description="customer-managed key: projects/.../cryptoKeys/NAME, same region")
    reservations: list[str] = Field([], description="reservations to use: projects/P/zones/Z/reservations/NAME")
    strategy: Literal["STANDARD", "SPOT", "FLEX_START"] | None = Field(
        None, description="scheduling strategy; default: SPOT with resources.use_spot, else Vertex AI's default"
    )
    disk_type: str | None = Field(None, description="boot disk: pd-ssd (the platform's default), pd-standard, ...")
    accelerator_type: str | None = Field(
        None, description="the platform's accelerator name, for a machine that cloudtrain's table lacks"
    )
    tensorboard: str | None = Field(None, description="projects/P/locations/R/tensorboards/ID; needs service_account")
    web_access: bool = Field(False, description="allow interactive shells in the containers")
    persistent_resource: str | None = Field(None, description="id of a persistent resource to run on")
    raw: dict[str, Any] = Field({}, description="fields merged into the CustomJob, named as in Vertex AI's JSON API")
    settle_s: float = Field(20.0, ge=0, le=3600, description="seconds to wait at the end for late log lines")
    endpoint: str | None = Field(None, description="endpoint of a simulator instead of Google: http://127.0.0.1:PORT")


class VertexLocalOptions(BaseModel):
    """Options of the backend `vertex-local`."""

    model_config = ConfigDict(extra="forbid")
    python: str = Field(
        "python3", description="Python interpreter of the replicas; python3: the one that runs cloudtrain"
    )
    image: str = Field("local/none:latest", description="image name in the request; it is not pulled")
    raw: dict[str, Any] = Field({}, description="fields merged into the CustomJob, named as in Vertex AI's JSON API")
