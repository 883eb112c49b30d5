"""Merge `options.sagemaker.raw` into a CreateTrainingJob request, and check the result with botocore's own model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from cloudtrain.errors import Problem

PATH = "options.sagemaker.raw"
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
        Problem(f"sets {path}, which cloudtrain sets from {OWNED[path]}", PATH, f"use {OWNED[path]}")
        for path in _owned(raw)
    ]
    if owned or not raw:
        return owned
    added = raw.get("InputDataConfig") or []
    if not (isinstance(added, list) and all(isinstance(channel, Mapping) for channel in added)):
        hint = "InputDataConfig: [{ChannelName: train, ContentType: text/csv}]"
        return [Problem("sets InputDataConfig to something else than a list of channels", PATH, hint)]
    _merge(request, {name: value for name, value in raw.items() if name != "InputDataConfig"})
    channels = {channel["ChannelName"]: channel for channel in request["InputDataConfig"][:-1]}
    problems = []
    for name, fields in channel_fields(raw).items():
        if name in channels:
            _merge(channels[name], fields)
        else:
            message = f"sets fields of the channel {name!r}, and no input has this name"
            problems.append(Problem(message, PATH, f"inputs with a channel: {', '.join(channels) or 'none'}"))
    return problems or [Problem(line, PATH) for line in _report(request)]


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
