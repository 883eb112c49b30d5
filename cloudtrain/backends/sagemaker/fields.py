"""Add the fields of CreateTrainingJob that options ask for, and check that the options fit together; pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.plan import Facts
from cloudtrain.backends.sagemaker import limits
from cloudtrain.backends.sagemaker.hyperparameters import distribution_problems
from cloudtrain.errors import Problem
from cloudtrain.job import units
from cloudtrain.job.units import format_count

if TYPE_CHECKING:
    from cloudtrain.backends.machines import Machine
    from cloudtrain.job.job import Job


WAIT_S = 24 * 3600  # default wait for spot capacity (options.sagemaker.max_wait)
MIN_PENDING_S, MAX_PENDING_S = 1800, 2419200  # botocore 1.44.5's model; a test compares them
EXPERIMENT = {
    "name": "ExperimentName",
    "trial": "TrialName",
    "display_name": "TrialComponentDisplayName",
    "run": "RunName",
}


def find_facts(request: Mapping[str, Any], options: Mapping[str, Any]) -> Facts:
    """Return where a request goes, and with what; the account is the role's where no other key names it."""
    role = str(request.get("RoleArn") or "").split(":")
    resources = request["ResourceConfig"]
    groups = resources.get("InstanceGroups") or [resources]
    return Facts(
        account=str(options.get("account") or (role[4] if len(role) > 5 else "")),
        region=str(options.get("region") or ""),
        instance_types=tuple(dict.fromkeys(str(each.get("InstanceType") or "") for each in groups)),
        images=(str(request["AlgorithmSpecification"].get("TrainingImage") or ""),),
        isolated=bool(request.get("EnableNetworkIsolation")),
        gpus=machines.count_gpus(
            "sagemaker",
            [(str(each.get("InstanceType") or ""), int(each.get("InstanceCount") or 1)) for each in groups],
        ),
    )


def add_options(request: dict[str, Any], job: Job, machine: Machine | None, options: Mapping[str, Any]) -> None:
    """Add the fields that depend on options, and those of spot jobs and retries."""
    if options.get("kms_key"):
        request["OutputDataConfig"]["KmsKeyId"] = options["kms_key"]
    if options.get("volume_kms_key"):
        request["ResourceConfig"]["VolumeKmsKeyId"] = options["volume_kms_key"]
    if options.get("keep_alive_s") is not None:
        request["ResourceConfig"]["KeepAlivePeriodInSeconds"] = options["keep_alive_s"]
    if options.get("subnets"):
        request["VpcConfig"] = {
            "Subnets": list(options["subnets"]),
            "SecurityGroupIds": list(options["security_groups"]),
        }
    if options.get("isolate"):
        request["EnableNetworkIsolation"] = True
    if options.get("encrypt_traffic"):
        request["EnableInterContainerTrafficEncryption"] = True
    for path, value in _named_fields(options).items():
        at, _, name = path.partition(".")
        request.setdefault(at, {})[name] = value
    if groups := options.get("instance_groups"):
        resources = request["ResourceConfig"]
        del resources["InstanceType"], resources["InstanceCount"]
        resources["InstanceGroups"] = [
            {
                "InstanceGroupName": group["name"],
                "InstanceType": group["instance_type"],
                "InstanceCount": group["count"],
            }
            for group in groups
        ]
    if options.get("private_registry"):
        config: dict[str, Any] = {"TrainingRepositoryAccessMode": "Vpc"}
        if credentials := options.get("registry_credentials"):
            config["TrainingRepositoryAuthConfig"] = {"TrainingRepositoryCredentialsProviderArn": credentials}
        request["AlgorithmSpecification"]["TrainingImageConfig"] = config
    if machine and machine.more.get("efa") == "1" and job.num_nodes > 1:
        request["Environment"] = {"FI_PROVIDER": "efa"}
    stopping = request["StoppingCondition"]
    if job.resources.use_spot:
        request["EnableManagedSpotTraining"] = True
        max_wait = options.get("max_wait")
        # Whether an interruption starts MaxRuntimeInSeconds anew is not documented: a cap is held by the time with waits.
        wait_s = stopping["MaxRuntimeInSeconds"] + (0 if job.limits.capped else WAIT_S)
        if job.limits.max_wait_s is not None and not job.limits.capped:
            wait_s = stopping["MaxRuntimeInSeconds"] + job.limits.max_wait_s
        wait_s = units.duration_s(max_wait) if max_wait else wait_s
        stopping["MaxWaitTimeInSeconds"] = min(wait_s, limits.MAX_RUNTIME_S) if not max_wait else wait_s
    if job.retry.max_attempts > 1 and "lost" in job.retry.on_events:
        request["RetryStrategy"] = {"MaximumRetryAttempts": job.retry.max_attempts - 1}


def _named_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that stand for one option each, as dotted paths."""
    pending = options.get("max_pending")
    fields = {
        "ResourceConfig.TrainingPlanArn": options.get("training_plan"),
        "StoppingCondition.MaxPendingTimeInSeconds": units.duration_s(pending) if pending else None,
        "RemoteDebugConfig.EnableRemoteDebug": options.get("remote_debug") or None,
        "InfraCheckConfig.EnableInfraCheck": options.get("infra_check") or None,
        "SessionChainingConfig.EnableSessionTagChaining": options.get("session_chaining") or None,
        "OutputDataConfig.CompressionType": "NONE" if options.get("compress") is False else None,
        **{f"ExperimentConfig.{EXPERIMENT[name]}": text for name, text in (options.get("experiment") or {}).items()},
    }
    return {path: value for path, value in fields.items() if value is not None}


def check_options(job: Job, options: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the options: missing ones, and combinations that exclude each other."""
    problems = distribution_problems(job, options, "sagemaker")
    for name, what in (("role", "the ARN of a role that SageMaker may assume"), ("bucket", "a bucket for the source")):
        if not options.get(name):
            hint = "cloudtrain init -t sagemaker looks for one in your account"
            problems.append(Problem(f"is not given: {what}", f"options.sagemaker.{name}", hint))
    spot = job.resources.use_spot
    if spot and options.get("keep_alive_s"):
        message = "SageMaker cannot keep the machines of a spot job warm"
        problems.append(Problem(message, "options.sagemaker.keep_alive_s", "remove it, or remove resources.use_spot"))
    if options.get("max_wait") and not spot:
        message = "works for spot jobs only"
        problems.append(Problem(message, "options.sagemaker.max_wait", "set resources.use_spot: true"))
    if options.get("max_pending") and not MIN_PENDING_S <= units.duration_s(options["max_pending"]) <= MAX_PENDING_S:
        problems.append(Problem("must be from 30m to 28d", "options.sagemaker.max_pending"))
    if groups := options.get("instance_groups"):
        count = sum(group["count"] for group in groups)
        if job.num_nodes != count:
            message = f"is {job.num_nodes}, but the instance groups have {format_count(count, 'machine')}"
            problems.append(Problem(message, "num_nodes", "write the sum of options.sagemaker.instance_groups"))
        if job.resources.instance_type:
            message = "cannot be combined with options.sagemaker.instance_groups, which set the type of each group"
            problems.append(Problem(message, "resources.instance_type", "remove it"))
    if options.get("private_registry") and not options.get("subnets"):
        message = "can be read only from inside a VPC"
        problems.append(Problem(message, "options.sagemaker.private_registry", "give subnets and security_groups"))
    if job.limits.capped:
        for name, value, why in (
            ("keep_alive_s", options.get("keep_alive_s"), "warm machines are billed after the job ends"),
            ("max_wait", options.get("max_wait"), "SageMaker limits the wait and the job together"),
        ):
            if value:
                hint = "remove it, or remove limits.max_cost and max_total_runtime"
                problems.append(
                    Problem(
                        f"cannot be combined with limits.max_cost or max_total_runtime: {why}",
                        f"options.sagemaker.{name}",
                        hint,
                    )
                )
    if options.get("isolate"):
        if options.get("remote_debug"):
            message = "opens no shell without a network (options.sagemaker.isolate)"
            problems.append(Problem(message, "options.sagemaker.remote_debug", "leave one of the two out"))
        if job.environment.requirements or any(r.requirements not in (None, "none") for r in job.roles.values()):
            message = "cannot be installed: the job has no network (options.sagemaker.isolate)"
            problems.append(
                Problem(
                    message,
                    "environment.requirements",
                    "set environment.requirements: none and put all packages into the image",
                )
            )
        if job.secrets:
            problems.append(Problem("cannot be read: the job has no network (options.sagemaker.isolate)", "secrets"))
    if job.output and not job.output.startswith("s3://"):
        problems.append(Problem(f"SageMaker writes to s3:// only, not to {job.output!r}", "output"))
    return problems


# -- options.sagemaker.raw: merged into the request, which botocore's own model then checks

RAW = "options.sagemaker.raw"
# The fields that a job or a named option sets, and which.
OWNED = {
    "TrainingJobName": "name",
    "HyperParameters": "hyperparameters",
    "Tags": "labels",
    "RoleArn": "options.sagemaker.role",
    "AlgorithmSpecification.TrainingImage": "image",
    "AlgorithmSpecification.AlgorithmName": "image",
    "AlgorithmSpecification.TrainingInputMode": "inputs.NAME.mode",
    "AlgorithmSpecification.ContainerEntrypoint": "entrypoint",
    "AlgorithmSpecification.ContainerArguments": "args",
    "AlgorithmSpecification.MetricDefinitions": "metrics",
    "AlgorithmSpecification.TrainingImageConfig": "options.sagemaker.private_registry",
    "OutputDataConfig.S3OutputPath": "output",
    "OutputDataConfig.KmsKeyId": "options.sagemaker.kms_key",
    "OutputDataConfig.CompressionType": "options.sagemaker.compress",
    "ResourceConfig.InstanceType": "resources.instance_type",
    "ResourceConfig.InstanceCount": "num_nodes",
    "ResourceConfig.InstanceGroups": "options.sagemaker.instance_groups",
    "ResourceConfig.VolumeSizeInGB": "resources.disk_gb",
    "ResourceConfig.VolumeKmsKeyId": "options.sagemaker.volume_kms_key",
    "ResourceConfig.KeepAlivePeriodInSeconds": "options.sagemaker.keep_alive_s",
    "ResourceConfig.TrainingPlanArn": "options.sagemaker.training_plan",
    "StoppingCondition.MaxRuntimeInSeconds": "limits.max_runtime",
    "StoppingCondition.MaxWaitTimeInSeconds": "options.sagemaker.max_wait",
    "StoppingCondition.MaxPendingTimeInSeconds": "options.sagemaker.max_pending",
    "VpcConfig": "options.sagemaker.subnets",
    "CheckpointConfig.LocalPath": "{checkpoint_dir}",
    "EnableNetworkIsolation": "options.sagemaker.isolate",
    "EnableInterContainerTrafficEncryption": "options.sagemaker.encrypt_traffic",
    "EnableManagedSpotTraining": "resources.use_spot",
    "RetryStrategy": "retry.max_attempts",
    "ExperimentConfig": "options.sagemaker.experiment",
    "RemoteDebugConfig": "options.sagemaker.remote_debug",
    "InfraCheckConfig": "options.sagemaker.infra_check",
    "SessionChainingConfig": "options.sagemaker.session_chaining",
}


def merge_raw(request: dict[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
    """Merge `raw` into a request, objects by key and anything else as a whole, and return the problems with it.

    The result is checked with botocore's model where botocore is installed; blocking then (it reads the model).
    """
    owned = [
        Problem(f"sets {path}, which cloudtrain sets from {OWNED[path]}", RAW, f"use {OWNED[path]}")
        for path in _owned(raw)
    ]
    if owned or not raw:
        return owned
    added = raw.get("InputDataConfig") or []
    if not (isinstance(added, list) and all(isinstance(channel, Mapping) for channel in added)):
        hint = "InputDataConfig: [{ChannelName: train, ContentType: text/csv}]"
        return [Problem("sets InputDataConfig to something else than a list of channels", RAW, hint)]
    _merge(request, {name: value for name, value in raw.items() if name != "InputDataConfig"})
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"][:-1]}
    problems = []
    for name, fields in channel_fields(raw).items():
        if name in channels:
            _merge(channels[name], fields)
        else:
            message = f"sets fields of the channel {name!r}, and no input has this name"
            problems.append(Problem(message, RAW, f"inputs with a channel: {', '.join(channels) or 'none'}"))
    return problems or [Problem(line, RAW) for line in _report(request)]


def channel_fields(raw: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return channel -> the fields that `raw` adds to it: InputDataConfig names those of a channel by ChannelName."""
    channels = raw.get("InputDataConfig")
    found = [channel for channel in channels if isinstance(channel, Mapping)] if isinstance(channels, list) else []
    return {str(channel.get("ChannelName")): channel for channel in found}


def _owned(raw: Any, at: str = "") -> Iterator[str]:
    for name, value in raw.items() if isinstance(raw, Mapping) else ():
        path = f"{at}{name}"
        if path in OWNED:
            yield path
        else:
            yield from _owned(value, f"{path}.")


def _merge(into: dict[str, Any], raw: Mapping[str, Any]) -> None:
    for name, value in raw.items():
        if isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = value


def _report(request: Mapping[str, Any]) -> list[str]:
    """Return what botocore finds wrong with a request: unknown and missing fields, types, minima."""
    if find_spec("botocore") is None:
        return []
    from botocore.validate import ParamValidator

    report = ParamValidator().validate(request, _input_shape())
    return str(report.generate_report()).splitlines()


@cache
def _input_shape() -> Any:
    import botocore.session

    model = botocore.session.get_session().get_service_model("sagemaker")
    return model.operation_model("CreateTrainingJob").input_shape
