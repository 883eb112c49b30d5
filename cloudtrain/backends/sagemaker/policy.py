"""Write IAM policies for the options of a job or a target: the role's trust, the role itself, and who submits. Pure data.

Sources (2026-11-23), below https://docs.aws.amazon.com/sagemaker/latest/dg/: sagemaker-roles.html for the role, its VPC and
its keys; train-remote-debugging.html; docker-containers-adapt-your-own-private-registry-authentication.html; session tags:
model-access-training-data-abac.html. Training plans and file systems: AWS' policy AmazonSageMakerFullAccess, which
training-plan-iam-permissions.html names; a test compares. AWS lists none for experiments: these are the operations that
SageMaker does for a job with ExperimentConfig, each one of botocore's model.
What who submits needs is recorded from the backend's calls (docs/iam.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.images import parse_reference
from cloudtrain.backends.sagemaker.channels import split_prefix
from cloudtrain.backends.sagemaker.doctor import SERVICE
from cloudtrain.backends.sagemaker.ecr import REGISTRY
from cloudtrain.backends.sagemaker.request import build_request
from cloudtrain.errors import BadRequest
from cloudtrain.job.job import Job

if TYPE_CHECKING:
    from cloudtrain.backends.api import Plan

Statement = dict[str, Any]
JOBS = "CreateTrainingJob AddTags DescribeTrainingJob StopTrainingJob DeleteTrainingJob ListTags"
QUEUED_JOBS = "DescribeTrainingJob DeleteTrainingJob ListTags"  # of jobs in a queue of AWS Batch
SHELL = "CreateControlChannel CreateDataChannel OpenControlChannel OpenDataChannel"
VPC = """CreateNetworkInterface CreateNetworkInterfacePermission DeleteNetworkInterface DeleteNetworkInterfacePermission
    DescribeNetworkInterfaces DescribeVpcs DescribeDhcpOptions DescribeSubnets DescribeSecurityGroups"""


def build_policy(kind: str, plan: Plan | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the IAM policy "trust", "role" or "submit" of a planned job, or of any plain job with these options.

    Raises BadRequest where the bucket, or the role that a submitter passes on, is not named.
    """
    for name in ("bucket", "role") if kind == "submit" else ("bucket",):
        if not options.get(name) and kind != "trust":
            raise BadRequest(
                f"options.sagemaker.{name} is not given", "set it in the target: the policy must contain it"
            )
    if plan is None:
        job = Job.from_dict({"name": "any", "source": ".", "entrypoint": "train.py"})
        needs = _Needs(build_request(job, "any", 1, "0" * 64, options).request, job.to_dict(), options)
    else:
        needs = _Needs(plan.request, plan.job, options)
    statements = {"trust": needs.trust, "role": needs.role, "submit": needs.submit}[kind]()
    return {"Version": "2012-10-17", "Statement": [each for each in statements if each.get("Resource") != []]}


@dataclass(frozen=True)
class _Needs:
    """What a request needs of IAM."""

    request: Mapping[str, Any]
    job: Mapping[str, Any]
    options: Mapping[str, Any]

    def trust(self) -> list[Statement]:
        """Return by what SageMaker may take the role."""
        actions = ["sts:AssumeRole", *["sts:TagSession"] * ("SessionChainingConfig" in self.request)]
        return [{"Effect": "Allow", "Principal": {"Service": SERVICE}, "Action": actions}]

    def role(self) -> list[Statement]:
        """Return what the job itself may do; a statement without resources is not needed."""
        inputs = [str(item["uri"]) for item in (self.job.get("inputs") or {}).values()]
        read = [
            f"{self._own}*",
            self._output,
            *(f"{split_prefix(uri)[0]}*" for uri in inputs if uri.startswith("s3://")),
        ]
        registry = self.request["AlgorithmSpecification"].get("TrainingImageConfig") or {}
        login = registry.get("TrainingRepositoryAuthConfig", {}).get("TrainingRepositoryCredentialsProviderArn")
        return [
            _allow("Read", "s3:GetObject", *map(self._s3, read)),
            _allow("Write", "s3:PutObject DeleteObject", self._s3(self._output)),
            self._list(read),
            _allow("Log", "logs:CreateLogGroup CreateLogStream PutLogEvents DescribeLogStreams", self._log),
            _allow("Metrics", "cloudwatch:PutMetricData", "*"),
            _allow("Image", "ecr:BatchGetImage GetDownloadUrlForLayer BatchCheckLayerAvailability", *self._repository),
            _allow("Registry", "ecr:GetAuthorizationToken", *["*"] * (not registry)),
            _allow("RegistryCredentials", "lambda:InvokeFunction", *[login] * bool(login)),
            self._key("ResultsKey", "kms:Decrypt Encrypt GenerateDataKey", "OutputDataConfig", "KmsKeyId"),
            self._key("DiskKey", "kms:CreateGrant", "ResourceConfig", "VolumeKmsKeyId"),
            _allow("Vpc", f"ec2:{VPC}", *["*"] * ("VpcConfig" in self.request)),
            _allow(
                "Efs",
                "elasticfilesystem:DescribeFileSystems DescribeMountTargets",
                *["*"] * any(uri.startswith("efs://") for uri in inputs),
            ),
            _allow("Fsx", "fsx:DescribeFileSystems", *["*"] * any(uri.startswith("fsx://") for uri in inputs)),
            _allow("Secrets", "secretsmanager:GetSecretValue", *self._secrets()),
            _allow("Shell", f"ssmmessages:{SHELL}", *["*"] * ("RemoteDebugConfig" in self.request)),
        ]

    def submit(self) -> list[Statement]:
        """Return what the credentials need that submit, follow, cancel, fetch and remove jobs."""
        named = f"arn:{self._partition}:iam::{self._account}:role/{self._role}"
        role = self._role if self._role.startswith("arn:") else named
        plan = self.request["ResourceConfig"].get("TrainingPlanArn")
        reserved = [plan, self._arn("sagemaker", "reserved-capacity/*")] * bool(plan)
        experiments = [self._arn("sagemaker", f"experiment{kind}/*") for kind in ("", "-trial", "-trial-component")]
        return [
            _allow(
                "Jobs", f"sagemaker:{QUEUED_JOBS if self._name else JOBS}", self._arn("sagemaker", "training-job/*")
            ),
            *self._queue,
            _allow("ListJobs", "sagemaker:ListTrainingJobs", "*"),
            _allow("PassRole", "iam:PassRole", role) | _when("StringEquals", "iam:PassedToService", SERVICE),
            _allow("ReadRole", "iam:GetRole", role),
            _allow("MachineTypes", "ec2:DescribeInstanceTypes", "*"),
            _allow("Upload", "s3:PutObject", self._s3(f"{self._own}*")),
            _allow("Audit", "s3:PutObject", *[self._s3(f"{self._output}/audit/*")] * bool(self.job.get("audit"))),
            _allow("Fetch", "s3:GetObject", *map(self._s3, [f"{self._own}*", self._output])),
            self._list([self._own, self._output]),
            _allow("ReadLog", "logs:DescribeLogStreams GetLogEvents", self._log),
            _allow("ImageDigest", "ecr:BatchGetImage", *self._repository),
            self._key("Key", "kms:Decrypt GenerateDataKey", "OutputDataConfig", "KmsKeyId"),
            _allow("TrainingPlan", "sagemaker:CreateTrainingJob DescribeTrainingPlan", *reserved),
            _allow(
                "Experiment",
                "sagemaker:CreateTrial CreateTrialComponent AssociateTrialComponent",
                *experiments * ("ExperimentConfig" in self.request),
            ),
        ]

    @property
    def _name(self) -> str:
        """The name or ARN of the queue of AWS Batch, "" without one."""
        return str(self.options.get("queue") or "")

    @property
    def _queue(self) -> list[Statement]:
        """What a queue needs; its training jobs are created and stopped by AWS Batch's own role."""
        name = self._name
        queue = name if name.startswith("arn:") else self._arn("batch", f"job-queue/{name}")
        jobs = self._arn("batch", "service-job/*")
        return [
            _allow("QueueJobs", "batch:SubmitServiceJob TagResource", queue, jobs),
            _allow("QueuedJobs", "batch:DescribeServiceJob TerminateServiceJob", jobs),
            _allow("Queue", "batch:ListServiceJobs DescribeJobQueues", "*"),
        ] * bool(name)

    @property
    def _role(self) -> str:
        return str(self.options.get("role") or "")

    @property
    def _partition(self) -> str:
        return self._role.split(":")[1] if self._role.startswith("arn:") else "aws"

    @property
    def _account(self) -> str:
        return str(self.options.get("account") or "") or (
            self._role.split(":")[4] if self._role.startswith("arn:") else "*"
        )

    def _arn(self, service: str, resource: str) -> str:
        return f"arn:{self._partition}:{service}:{self.options.get('region') or '*'}:{self._account}:{resource}"

    def _s3(self, uri: str) -> str:
        return uri.replace("s3://", f"arn:{self._partition}:s3:::")

    @property
    def _own(self) -> str:
        return f"s3://{self.options['bucket']}/{self.options.get('prefix') or 'cloudtrain'}/"

    @property
    def _output(self) -> str:
        return f"{self.request['OutputDataConfig']['S3OutputPath'].rpartition('/')[0]}/*"

    @property
    def _log(self) -> str:
        return self._arn("logs", "log-group:/aws/sagemaker/TrainingJobs*")

    @property
    def _repository(self) -> list[str]:
        """The image's repository in ECR, any where no image is named yet; [] for a registry in the VPC."""
        specification = self.request["AlgorithmSpecification"]
        image = parse_reference(specification["TrainingImage"])
        found = REGISTRY.fullmatch(image.registry)
        place, name = (f"{found['region']}:{found['account']}", image.name) if found else ("*:*", "*")
        return [f"arn:{self._partition}:ecr:{place}:repository/{name}"] * ("TrainingImageConfig" not in specification)

    def _secrets(self) -> Iterator[str]:
        for place in (one for sources in (self.job.get("secrets") or {}).values() for one in sources):
            store, _, name = place.partition(":")
            if store == "aws-secretsmanager":  # it adds a dash and six characters to the name of a secret in its ARN
                yield name if name.startswith("arn:") else self._arn("secretsmanager", f"secret:{name}-??????")

    def _list(self, uris: list[str]) -> Statement:
        return _allow("List", "s3:ListBucket", *(self._s3("/".join(uri.split("/")[:3])) for uri in uris))

    def _key(self, name: str, actions: str, section: str, field: str) -> Statement:
        """Return the statement on a KMS key that is an ARN, an id or an alias; IAM knows aliases by a condition only."""
        key = str(self.request[section].get(field) or "")
        alias = key.rpartition(":")[2]
        if alias.startswith("alias/"):
            of_alias = _when("ForAnyValue:StringEquals", "kms:ResourceAliases", alias)
            return _allow(name, actions, self._arn("kms", "key/*")) | of_alias
        arn = key if key.startswith("arn:") else self._arn("kms", f"key/{key}")
        return _allow(name, actions, *[arn] * bool(key))


def _allow(name: str, actions: str, *resources: str) -> Statement:
    """Return a statement; `actions` are those of one service: "s3:PutObject DeleteObject"."""
    service, _, operations = actions.partition(":")
    wide = tuple(arn[:-1] for arn in resources if arn.endswith("*"))
    narrow = [arn for arn in resources if not any(arn.startswith(start) and arn != f"{start}*" for start in wide)]
    return {
        "Sid": name,
        "Effect": "Allow",
        "Action": [f"{service}:{operation}" for operation in operations.split()],
        "Resource": list(dict.fromkeys(narrow)),
    }


def _when(test: str, key: str, value: str) -> Statement:
    return {"Condition": {test: {key: value}}}
