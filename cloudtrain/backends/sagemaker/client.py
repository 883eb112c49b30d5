"""Choose the client that sends a training job: the SDK's HuggingFace estimator, or boto3 where the estimator cannot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from cloudtrain.errors import MissingExtra, Problem

NAME = "the SDK's HuggingFace estimator"
# The fields of CreateTrainingJob that an estimator of sagemaker 2.257.7 can set (estimator.py and job.py there, 2026-11-23).
_SETTABLE = """TrainingJobName HyperParameters RoleArn InputDataConfig Tags Environment ExperimentConfig EnableNetworkIsolation
    EnableInterContainerTrafficEncryption EnableManagedSpotTraining AlgorithmSpecification.TrainingImage
    AlgorithmSpecification.TrainingInputMode AlgorithmSpecification.ContainerEntrypoint
    AlgorithmSpecification.ContainerArguments AlgorithmSpecification.MetricDefinitions
    AlgorithmSpecification.EnableSageMakerMetricsTimeSeries
    AlgorithmSpecification.TrainingImageConfig.TrainingRepositoryAccessMode
    AlgorithmSpecification.TrainingImageConfig.TrainingRepositoryAuthConfig.TrainingRepositoryCredentialsProviderArn
    OutputDataConfig.S3OutputPath OutputDataConfig.KmsKeyId OutputDataConfig.CompressionType
    ResourceConfig.InstanceCount ResourceConfig.InstanceType ResourceConfig.InstanceGroups ResourceConfig.VolumeSizeInGB
    ResourceConfig.VolumeKmsKeyId ResourceConfig.KeepAlivePeriodInSeconds ResourceConfig.TrainingPlanArn
    ResourceConfig.InstancePlacementConfig StoppingCondition.MaxRuntimeInSeconds StoppingCondition.MaxWaitTimeInSeconds
    CheckpointConfig.S3Uri CheckpointConfig.LocalPath VpcConfig.Subnets VpcConfig.SecurityGroupIds
    ProfilerConfig.DisableProfiler RetryStrategy.MaximumRetryAttempts InfraCheckConfig.EnableInfraCheck
    RemoteDebugConfig.EnableRemoteDebug SessionChainingConfig.EnableSessionTagChaining"""
SETTABLE = frozenset(_SETTABLE.split())
# It sends these only with this value, and leaves them out else.
ONLY = {
    "EnableNetworkIsolation": True,
    "EnableInterContainerTrafficEncryption": True,
    "EnableManagedSpotTraining": True,
    "OutputDataConfig.CompressionType": "NONE",
    "ProfilerConfig.DisableProfiler": True,
}


def unsettable(request: Mapping[str, Any], at: str = "") -> Iterator[str]:
    """Yield the fields of a request that the estimator cannot set, as dotted paths."""
    for name, value in request.items():
        path = f"{at}{name}"
        if path in SETTABLE:
            if value != ONLY.get(path, value):
                yield f"{path}: {value}"
        elif isinstance(value, Mapping) and any(known.startswith(f"{path}.") for known in SETTABLE):
            yield from unsettable(value, f"{path}.")
        else:
            yield path


def find_problems(request: Mapping[str, Any], options: Mapping[str, Any]) -> list[Problem]:
    """Return the problem of a request that names `client: sdk` and has fields that the estimator cannot set."""
    fields = ", ".join(unsettable(request)) if options.get("client") == "sdk" else ""
    message, hint = f"the SageMaker SDK's estimator cannot set {fields}", "boto3, or auto"
    return [Problem(message, "options.sagemaker.client", hint)] if fields else []


def choose_client(request: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[str, str]:
    """Return the client that sends a request, "sdk" or "boto3", and why."""
    choice = options.get("client") or "auto"
    if choice != "auto":
        return choice, f"options.sagemaker.client is {choice}"
    if find_spec("sagemaker") is None:
        return "boto3", "the SageMaker SDK is not installed"
    if fields := ", ".join(unsettable(request)):
        return "boto3", f"the SageMaker SDK's estimator cannot set {fields}"
    return "sdk", "the SageMaker SDK is installed"


def note(request: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """Return a plan's note on the client; "" where only boto3 is installed."""
    if find_spec("sagemaker") is None:
        return ""
    chosen, why = choose_client(request, options)
    return f"sent by {'boto3' if chosen == 'boto3' else NAME}: {why}"


def require_sdk(backend: str) -> None:
    """Raise MissingExtra where the SageMaker SDK is not installed."""
    if find_spec("sagemaker") is None:
        raise MissingExtra("options.sagemaker.client: sdk", backend)
