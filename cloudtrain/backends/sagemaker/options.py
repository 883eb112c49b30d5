"""The options of `sagemaker` and `sagemaker-local`, as pydantic models; imported where options are validated."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from cloudtrain.job import units
from cloudtrain.job.fields import bucket_name

ENTRY = (
    "first process of the container: cloudtrain's launcher, or the image's sagemaker-training toolkit, "
    "which starts the launcher"
)
DISTRIBUTION = "with entry: toolkit, the image's torchrun starts the ranks: {torch_distributed: {enabled: true}}"


def _folder(value: str) -> str:
    if not value.strip("/") or {"", ".", ".."} & set(value.strip("/").split("/")):
        raise ValueError(f"must be a folder's name such as team/cloudtrain, not {value!r}")
    return value.strip("/")


Bucket = Annotated[str, AfterValidator(bucket_name)]
Folder = Annotated[str, AfterValidator(_folder)]


class InstanceGroup(BaseModel):
    """Machines of one type in a job with several."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=64)
    instance_type: str = Field(pattern=r"^ml\.")
    count: int = Field(ge=1, le=10_000)


class SagemakerLocalOptions(BaseModel):
    """Options of the backend `sagemaker-local`."""

    model_config = ConfigDict(extra="forbid")
    image: str | None = Field(
        None, description="container image for jobs that do not set image; default: cloudtrain-train:cpu"
    )
    python: str = Field("python3", max_length=256, description="interpreter in the image, 3.9 or newer")
    entry: Literal["launcher", "toolkit"] = Field("launcher", description=ENTRY)
    distribution: dict[str, Any] = Field({}, description=DISTRIBUTION)
    s3: bool = Field(False, description="allow s3:// for inputs and output: this machine downloads and uploads them")
    bucket: Bucket | None = Field(None, description="with s3: upload the source to this bucket too, as on SageMaker")
    prefix: Folder = Field("cloudtrain", description="folder in that bucket")
    region: str | None = Field(None, description="region of S3; default: that of the AWS configuration")
    profile: str | None = Field(None, description="profile of the AWS configuration")
    endpoint: str | None = Field(
        None, pattern=r"^https?://", description="endpoint of S3 instead of AWS, such as a simulator"
    )


class SagemakerOptions(BaseModel):
    """Options of the backend `sagemaker`; what an account has belongs in a target of cloudtrain.toml."""

    model_config = ConfigDict(extra="forbid")
    role: str | None = Field(None, description="ARN of the role that the job runs with")
    bucket: Bucket | None = Field(None, description="bucket of sources, checkpoints and results")
    prefix: Folder = Field("cloudtrain", description="folder in that bucket")
    region: str | None = Field(None, description="region; default: that of the AWS configuration")
    profile: str | None = Field(None, description="profile of the AWS configuration")
    account: str | None = Field(
        None,
        pattern=r"^\d{12}$",
        description="AWS account id that the credentials must have; cloudtrain refuses any other account",
    )
    endpoint: str | None = Field(
        None, pattern=r"^https?://", description="endpoint of all services instead of AWS, such as a simulator"
    )
    client: Literal["auto", "sdk", "boto3"] = Field(
        "auto",
        description="sdk: submit with the SDK's HuggingFace estimator; boto3: send the same request without "
        "the SDK; auto: sdk if installed and able to set all fields",
    )
    image: str | None = Field(None, description="container image for jobs that do not set image")
    python: str = Field("python3", max_length=256, description="interpreter in the image, 3.9 or newer")
    entry: Literal["launcher", "toolkit"] = Field("launcher", description=ENTRY)
    distribution: dict[str, Any] = Field({}, description=DISTRIBUTION)
    subnets: list[str] = Field([], description="subnets of the VPC, together with security_groups")
    security_groups: list[str] = Field([], description="security groups in the VPC")
    kms_key: str | None = Field(None, description="ID or ARN of the KMS key that encrypts sources and results in S3")
    volume_kms_key: str | None = Field(None, description="KMS key of the nodes' disks")
    isolate: bool = Field(
        False, description="run the containers without a network: no pip, no Hugging Face Hub, no secrets at run time"
    )
    encrypt_traffic: bool = Field(False, description="encrypt traffic between the nodes")
    max_wait: str | None = Field(
        None,
        description="deadline of a spot job: running and waiting together, such as 48h; limits.max_wait is the waiting alone",
    )
    keep_alive_s: int | None = Field(
        None, ge=0, le=21600, description="seconds that machines stay warm for the next job"
    )
    shard: list[str] = Field([], description="inputs whose files are split over the nodes instead of copied to each")
    pipe: list[str] = Field([], description="inputs in Pipe mode: the script reads /opt/ml/input/data/NAME_EPOCH")
    instance_groups: list[InstanceGroup] = Field(
        [], max_length=5, description="machines of several types: name, instance_type and count of each group"
    )
    training_plan: str | None = Field(
        None, pattern=r"^arn:aws[a-z\-]*:sagemaker:[a-z0-9\-]*:[0-9]{12}:training-plan/", description="its ARN"
    )
    queue: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="name or ARN of an AWS Batch queue of type SAGEMAKER_TRAINING that the jobs wait in",
    )
    queue_share: str | None = Field(
        None, max_length=255, pattern=r"^[A-Za-z0-9]+$", description="share identifier in a queue with fair shares"
    )
    queue_priority: int | None = Field(None, ge=0, le=9999, description="scheduling priority in the queue")
    max_pending: str | None = Field(
        None, description="maximum wait in SageMaker's queue, 30m to 28d; needs client: boto3"
    )
    compress: bool = Field(True, description="model and outputs as tar.gz; false: as files, for large models")
    experiment: dict[Literal["name", "trial", "display_name", "run"], str] = Field(
        {}, description="SageMaker experiment that the job belongs to"
    )
    remote_debug: bool = Field(False, description="allow shells in the containers through Systems Manager")
    infra_check: bool = Field(False, description="let SageMaker check the machines before the job starts")
    session_chaining: bool = Field(False, description="pass the tags of your AWS session on to the job's sessions")
    private_registry: bool = Field(False, description="pull the image from a private registry in the VPC")
    registry_credentials: str | None = Field(
        None,
        pattern=r"^arn:[\w-]+:lambda:",
        description="ARN of the Lambda function that returns that registry's credentials",
    )
    raw: dict[str, Any] = Field({}, description="fields merged into CreateTrainingJob that no other key sets")

    @field_validator("account", mode="before")
    @classmethod
    def _account(cls, value: Any) -> Any:
        return f"{value:012d}" if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("max_wait", "max_pending")
    @classmethod
    def _max_wait(cls, value: str | None) -> str | None:
        if value is not None:
            units.duration_s(value)
        return value

    @model_validator(mode="after")
    def _vpc(self) -> SagemakerOptions:
        if bool(self.subnets) != bool(self.security_groups):
            raise ValueError("subnets and security_groups belong together: give both, or neither")
        return self
