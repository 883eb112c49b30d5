"""Check an AWS account for SageMaker (`cloudtrain doctor`) and discover options for a target (`cloudtrain init`)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.sagemaker.limits import ROLE
from cloudtrain.backends.sagemaker.machine import note_types
from cloudtrain.errors import CloudtrainError, MissingExtra, Problem, install_command

SERVICE = "sagemaker.amazonaws.com"


def check(aws: Aws, options: Mapping[str, Any], workdir: Path) -> list[Problem]:
    """Return the problems that would stop a submission from this machine, and note new machine types; blocking."""
    try:
        aws.check_credentials()
        region, account = aws.region, aws.account()
    except CloudtrainError as error:
        return [Problem(error.message, "", error.hint)]
    note_types(aws, workdir)
    problems = []
    if options.get("account") not in (None, account):
        message = f"the credentials are those of account {account}, not {options['account']}"
        problems.append(Problem(message, "options.sagemaker.account", "use another AWS profile"))
    if options.get("client") == "sdk" and find_spec("sagemaker") is None:
        message = "the SageMaker SDK is not installed"
        problems.append(
            Problem(
                message, "options.sagemaker.client", f"{install_command('cloudtrain[sagemaker]')}, or set it to boto3"
            )
        )
    if not options.get("bucket"):
        hint = f"usually sagemaker-{region}-{account}"
        problems.append(Problem("no bucket is set", "options.sagemaker.bucket", hint))
    else:
        problems += _bucket(aws, str(options["bucket"]))
    if options.get("queue"):
        problems += _queue(aws, str(options["queue"]))
    return [*problems, *_role(aws, options.get("role"))]


def discover(profile: str | None) -> dict[str, Any]:
    """Return the options that the account's settings show, {} where AWS does not answer; raises MissingExtra."""
    try:
        return _discover(profile)
    except MissingExtra:
        raise
    except CloudtrainError:
        return {}


def _discover(profile: str | None) -> dict[str, Any]:
    aws = Aws("sagemaker", None, profile, None)
    aws.check_credentials()
    options: dict[str, Any] = {"region": aws.region, "account": aws.account()}
    if profile:
        options["profile"] = profile
    bucket = f"sagemaker-{options['region']}-{options['account']}"  # the SDK's own default
    if not _bucket(aws, bucket):
        options["bucket"] = bucket
    try:
        roles = aws.call("iam", "list_roles", MaxItems=1000)["Roles"]
    except AwsError:
        return options
    trusted = [role["Arn"] for role in roles if SERVICE in str(role.get("AssumeRolePolicyDocument"))]
    if trusted:
        options["role"] = min(trusted, key=lambda arn: ("Execution" not in arn, arn))
    return options


def find_role(profile: str | None, name: str) -> str | None:
    """Return the ARN of the role with a name, None where the account does not show it; blocking."""
    try:
        return str(Aws("sagemaker", None, profile, None).call("iam", "get_role", RoleName=name)["Role"]["Arn"])
    except CloudtrainError:
        return None


def _bucket(aws: Aws, name: str) -> list[Problem]:
    try:
        aws.call("s3", "head_bucket", Bucket=name)
    except AwsError as error:
        missing = error.code in ("404", "NoSuchBucket")
        message = f"there is no bucket {name}" if missing else error.message
        return [
            Problem(message, "options.sagemaker.bucket", "create it, or use another bucket" if missing else error.hint)
        ]
    return []


def _queue(aws: Aws, name: str) -> list[Problem]:
    path = "options.sagemaker.queue"
    try:
        found = aws.call("batch", "describe_job_queues", jobQueues=[name])["jobQueues"]
    except AwsError as error:
        return [Problem(error.message, path, error.hint)]
    if not found:
        return [Problem(f"there is no AWS Batch queue {name}", path, "create it, or use another queue or region")]
    kind, state, status = (str(found[0].get(field) or "") for field in ("jobQueueType", "state", "status"))
    if kind != "SAGEMAKER_TRAINING":
        return [
            Problem(f"the queue {name} is of type {kind or 'ECS'}, not SAGEMAKER_TRAINING", path, "use another queue")
        ]
    if state != "ENABLED" or status not in ("VALID", "UPDATING"):
        reason = str(found[0].get("statusReason") or "")
        message = f"the queue {name} takes no jobs: it is {state}, {status}" + (f": {reason}" if reason else "")
        return [Problem(message, path, "enable it, or use another queue")]
    return []


def _role(aws: Aws, role: str | None) -> list[Problem]:
    import re

    path = "options.sagemaker.role"
    if not role:
        return [
            Problem(
                "no role is set",
                path,
                'write role = "ARN OF AN IAM ROLE"; `cloudtrain permissions -t TARGET` prints the policies that it needs',
            )
        ]
    is_arn = re.fullmatch(ROLE, role)
    not_arn = Problem(
        f"{role!r} is not the ARN of a role", path, "cloudtrain doctor TARGET --policy role prints what it needs"
    )
    try:
        details = aws.call("iam", "get_role", RoleName=role.rpartition("/")[2])["Role"]
    except AwsError as error:
        if error.code == "NoSuchEntity":
            return [Problem(f"there is no role {role}", path)]
        return [] if is_arn else [not_arn]  # a user may submit without the permission to read roles
    if not is_arn:
        return [
            Problem(
                not_arn.message, path, f"write {details['Arn']}: plan never calls AWS, so it cannot read the profile"
            )
        ]
    if SERVICE not in str(details.get("AssumeRolePolicyDocument")):
        message = f"SageMaker may not assume the role {role}: {SERVICE} is missing from its trust policy"
        return [Problem(message, path, "cloudtrain doctor TARGET --policy trust prints the policy")]
    return []
