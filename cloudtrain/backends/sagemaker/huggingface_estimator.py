"""Build a `HuggingFace` estimator of sagemaker<3 from a planned request, and submit the job through its `fit`.

Every value of the estimator comes from the request. `fit` sends the planned request itself, so a configuration file of
the SDK cannot change it. A test compares the request with the one that the SDK builds from the estimator alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from cloudtrain.importing import Quickly

if TYPE_CHECKING:
    from cloudtrain.backends.aws import Aws


def build_estimator(aws: Aws, request: Mapping[str, Any], *, send_planned: bool = True) -> Any:
    """Return the estimator of a request, attached to its job: `.deploy()` finds the job's model.

    With `send_planned` its `fit` sends the planned request, else the request that the SDK builds. Blocking (imports take
    seconds).
    """
    HuggingFace, TrainingJob, Session = _import_sdk()
    bucket = request["InputDataConfig"][-1]["DataSource"]["S3DataSource"]["S3Uri"].split("/")[2]
    session = Session(boto_session=aws.session, sagemaker_client=aws.client("sagemaker"), default_bucket=bucket)
    if send_planned:
        session.planned = (aws, dict(request))
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    specification, output = request["AlgorithmSpecification"], request["OutputDataConfig"]
    network, checkpoints = request.get("VpcConfig") or {}, request.get("CheckpointConfig") or {}
    built = HuggingFace(
        entry_point=None,  # the container's command starts the launcher
        image_uri=specification["TrainingImage"],
        role=request["RoleArn"],
        instance_count=resources["InstanceCount"],
        instance_type=resources["InstanceType"],
        volume_size=resources["VolumeSizeInGB"],
        volume_kms_key=resources.get("VolumeKmsKeyId"),
        keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
        max_run=stopping["MaxRuntimeInSeconds"],
        max_wait=stopping.get("MaxWaitTimeInSeconds"),
        use_spot_instances=bool(request.get("EnableManagedSpotTraining")),
        checkpoint_s3_uri=checkpoints.get("S3Uri"),
        checkpoint_local_path=checkpoints.get("LocalPath"),
        output_path=output["S3OutputPath"],
        output_kms_key=output.get("KmsKeyId"),
        code_location=output["S3OutputPath"],
        subnets=network.get("Subnets"),
        security_group_ids=network.get("SecurityGroupIds"),
        enable_network_isolation=bool(request.get("EnableNetworkIsolation")),
        encrypt_inter_container_traffic=bool(request.get("EnableInterContainerTrafficEncryption")),
        container_entry_point=specification.get("ContainerEntrypoint"),
        metric_definitions=specification["MetricDefinitions"],
        max_retry_attempts=(request.get("RetryStrategy") or {}).get("MaximumRetryAttempts"),
        environment=request.get("Environment"),
        tags=request["Tags"],
        hyperparameters={
            name: text[1:-1] for name, text in request["HyperParameters"].items()
        },  # the SDK quotes them again
        enable_sagemaker_metrics=specification["EnableSageMakerMetricsTimeSeries"],
        debugger_hook_config=False,
        disable_profiler=request["ProfilerConfig"]["DisableProfiler"],
        py_version="py3",  # required by the SDK, although the image decides
        sagemaker_session=session,
    )
    # Telemetry would send requests without a timeout. Not set before: the SDK validates its defaults, where it has any,
    # with each value that it looks up there, and the estimator's constructor looks up hundreds.
    defaults = session.sagemaker_config
    defaults.setdefault("SchemaVersion", "1.0")
    modules = defaults.setdefault("SageMaker", {}).setdefault("PythonSDK", {}).setdefault("Modules", {})
    modules["TelemetryOptOut"] = True
    built._current_job_name = request["TrainingJobName"]
    built.latest_training_job = TrainingJob(session, request["TrainingJobName"])
    return built


def submit(aws: Aws, request: Mapping[str, Any]) -> str:
    """Send a request through its estimator's `fit` and return the job's ARN; blocking. Raises AwsError."""
    from botocore.exceptions import BotoCoreError, ClientError

    estimator = build_estimator(aws, request)
    try:
        estimator.fit(fit_inputs(request), wait=False, job_name=request["TrainingJobName"])
    except (BotoCoreError, ClientError) as error:  # from a request that the SDK sends by itself
        if not estimator.sagemaker_session.arn:
            raise aws.explain(error, f"sagemaker:{getattr(error, 'operation_name', None) or 'fit'}") from None
    return str(estimator.sagemaker_session.arn)


def fit_inputs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the channels of a request as the `inputs` argument of `fit`."""
    from sagemaker.inputs import TrainingInput

    channels = {}
    for channel in request["InputDataConfig"]:
        source = channel["DataSource"]["S3DataSource"]
        channels[channel["ChannelName"]] = TrainingInput(
            source["S3Uri"], distribution=source["S3DataDistributionType"], input_mode=channel.get("InputMode")
        )
    return channels


@cache
def _import_sdk() -> tuple[Any, Any, Any]:
    """Import the SDK and turn off its notices."""
    os.environ.setdefault("SAGEMAKER_SUPPRESS_V2_WARNING", "1")
    for name in ("sagemaker", "sagemaker.config"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # its errors are also raised as exceptions
    with Quickly():
        import sagemaker
        from sagemaker.estimator import _TrainingJob
        from sagemaker.huggingface import HuggingFace

    class PlannedSession(sagemaker.Session):  # type: ignore[misc]
        """A session that sends the planned request instead of the one that the SDK has built."""

        planned: tuple[Aws, dict[str, Any]] | None = None
        arn = ""

        def _intercept_create_request(self, request: Any, create: Any, func_name: str | None = None) -> Any:
            if self.planned is None or func_name != "train":
                return super()._intercept_create_request(request, create, func_name)
            aws, exact = self.planned
            self.arn = str(aws.call("sagemaker", "create_training_job", **exact)["TrainingJobArn"])
            return None

    return HuggingFace, _TrainingJob, PlannedSession
