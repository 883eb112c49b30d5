"""Write IAM policies for the options of a job or a target: the role's trust, the role itself, and who submits.

The statements are in iam.yaml.

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
from pathlib import Path
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
# name in iam.yaml -> section and field of the request
KEYS = {"results_key": ("OutputDataConfig", "KmsKeyId"), "disk_key": ("ResourceConfig", "VolumeKmsKeyId")}


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
    if kind == "trust":
        actions = ["sts:AssumeRole", *["sts:TagSession"] * ("SessionChainingConfig" in needs.request)]
        statements = [{"Effect": "Allow", "Principal": {"Service": SERVICE}, "Action": actions}]
    else:
        import yaml

        written = yaml.safe_load((Path(__file__).parent / "iam.yaml").read_text("utf-8"))[kind]
        resources = needs.resources()
        statements = [filled for each in written if (filled := needs.fill(each, resources))["Resource"]]
    return {"Version": "2012-10-17", "Statement": statements}


@dataclass(frozen=True)
class _Needs:
    """What a request needs of IAM."""

    request: Mapping[str, Any]
    job: Mapping[str, Any]
    options: Mapping[str, Any]

    def fill(self, statement: Statement, resources: Mapping[str, list[str]]) -> Statement:
        """Return a statement of iam.yaml with the resources that its names stand for, each once."""
        arns = [arn for name in statement["Resource"] for arn in resources.get(name, [name])]
        wide = tuple(arn[:-1] for arn in arns if arn.endswith("*"))
        narrow = [arn for arn in arns if not any(arn.startswith(start) and arn != f"{start}*" for start in wide)]
        made = {"Sid": statement["Sid"], "Effect": "Allow", **statement, "Resource": list(dict.fromkeys(narrow))}
        for name in statement["Resource"]:  # IAM knows a key's alias by a condition only
            if name in KEYS and (alias := self._key(name).rpartition(":")[2]).startswith("alias/"):
                made["Condition"] = {"ForAnyValue:StringEquals": {"kms:ResourceAliases": alias}}
        return made

    def resources(self) -> dict[str, list[str]]:
        """Return what the names of iam.yaml stand for, nothing for what the request does not need."""
        inputs = [str(item["uri"]) for item in (self.job.get("inputs") or {}).values()]
        read = [f"{split_prefix(uri)[0]}*" for uri in inputs if uri.startswith("s3://")]
        registry = self.request["AlgorithmSpecification"].get("TrainingImageConfig") or {}
        login = registry.get("TrainingRepositoryAuthConfig", {}).get("TrainingRepositoryCredentialsProviderArn")
        plan = self.request["ResourceConfig"].get("TrainingPlanArn")
        checkpoints = f"{self.request['CheckpointConfig']['S3Uri'].rstrip('/')}/*"
        name = str(self.options.get("queue") or "")  # or ARN, of a queue of AWS Batch
        jobs, queued = self._arn("sagemaker", "training-job/*"), self._arn("batch", "service-job/*")
        experiments = [self._arn("sagemaker", f"experiment{kind}/*") for kind in ("", "-trial", "-trial-component")]
        return {
            "own": [self._s3(f"{self._own}*")],
            "output": [self._s3(self._output), self._s3(checkpoints)],
            "inputs": [*map(self._s3, read)],
            "audit": [self._s3(f"{self._output}/audit/*")] * bool(self.job.get("audit")),
            "buckets": [*map(self._bucket, (self._own, self._output, checkpoints))],
            "input_buckets": [*map(self._bucket, read)],
            "log": [self._arn("logs", "log-group:/aws/sagemaker/TrainingJobs*")],
            "repository": self._repository,
            "own_registry": ["*"] * (not registry),
            "registry_login": [login] * bool(login),
            "results_key": self._key_arns("results_key"),
            "disk_key": self._key_arns("disk_key"),
            "vpc": ["*"] * ("VpcConfig" in self.request),
            "efs": ["*"] * any(uri.startswith("efs://") for uri in inputs),
            "fsx": ["*"] * any(uri.startswith("fsx://") for uri in inputs),
            "secrets": [*self._secrets()],
            "shell": ["*"] * ("RemoteDebugConfig" in self.request),
            "jobs": [jobs] * (not name),
            "jobs_of_queue": [jobs] * bool(name),
            "queue": [name if name.startswith("arn:") else self._arn("batch", f"job-queue/{name}")] * bool(name),
            "queued": [queued] * bool(name),
            "queues": ["*"] * bool(name),
            "role": [
                self._role
                if self._role.startswith("arn:")
                else f"arn:{self._partition}:iam::{self._account}:role/{self._role}"
            ],
            "training_plan": [plan, self._arn("sagemaker", "reserved-capacity/*")] * bool(plan),
            "experiments": experiments * ("ExperimentConfig" in self.request),
        }

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

    def _bucket(self, uri: str) -> str:
        return self._s3("/".join(uri.split("/")[:3]))

    @property
    def _own(self) -> str:
        return f"s3://{self.options['bucket']}/{self.options.get('prefix') or 'cloudtrain'}/"

    @property
    def _output(self) -> str:
        return f"{self.request['OutputDataConfig']['S3OutputPath'].rpartition('/')[0]}/*"

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

    def _key(self, name: str) -> str:
        """Return a KMS key of the request: an ARN, an id or an alias, "" without one."""
        section, field = KEYS[name]
        return str(self.request[section].get(field) or "")

    def _key_arns(self, name: str) -> list[str]:
        key = self._key(name)
        if key.rpartition(":")[2].startswith("alias/"):
            return [self._arn("kms", "key/*")]
        return [key if key.startswith("arn:") else self._arn("kms", f"key/{key}")] * bool(key)
