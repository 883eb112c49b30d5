"""Make the `HuggingFace` estimator of sagemaker<3 for a planned request, and submit the job with its `fit`.

Every argument of the estimator comes from the request. The SDK builds its own request from them, which is compared with the
planned one before it is sent: a configuration file of the SDK cannot change a job unnoticed.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.aws import AwsNoService
from cloudtrain.backends.sagemaker.client import require_sdk
from cloudtrain.backends.sagemaker.hyperparameters import ENABLED, INSTANCE_TYPE, TORCHRUN, script_mode
from cloudtrain.errors import BackendError

if TYPE_CHECKING:
    from cloudtrain.backends.aws import Aws

# Of Hugging Face's training images: 2.6.0-transformers4.51.3-gpu-py312-cu124-ubuntu22.04
TAG = re.compile(r":(?P<torch>[\d.]+)-transformers(?P<transformers>[\d.]+)-(?:gpu|cpu)-(?P<python>py\d+)")
# What a Session makes of its own where it is not given; `fit` uses none of them.
CLIENTS = ("sagemaker_runtime_client", "sagemaker_featurestore_runtime_client", "sagemaker_metrics_client")

NOTICE = "SAGEMAKER_SUPPRESS_V2_WARNING"
REFUSALS = (ValueError, TypeError, RuntimeError)  # of the SDK, which checks its arguments and defaults


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the SDK, whose errors are also raised as exceptions; the process is as before afterwards."""
    loggers = [logging.getLogger(name) for name in ("sagemaker", "sagemaker.config")]
    levels, notice = [logger.level for logger in loggers], os.environ.get(NOTICE)
    os.environ[NOTICE] = "1"
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if notice is None:
            os.environ.pop(NOTICE, None)
        else:
            os.environ[NOTICE] = notice


@_quiet()
def build_estimator(aws: Aws, request: Mapping[str, Any], *, deploys: bool = True) -> Any:
    """Return the estimator of a request, attached to its job: `.deploy()` finds the job's model.

    Without `deploys` it can only submit: it lacks the clients of endpoints, which take long to make. Blocking (imports take
    seconds).
    """
    HuggingFace, TrainingJob, Session = _import_sdk()
    client = aws.client("sagemaker")
    others = {} if deploys else dict.fromkeys(CLIENTS, client)
    session = Session(boto_session=aws.session, sagemaker_client=client, **others)
    session.planned, session.defaults = request, dict(session.sagemaker_config)
    resources, stopping = request["ResourceConfig"], request["StoppingCondition"]
    specification, output = request["AlgorithmSpecification"], request["OutputDataConfig"]
    network, checkpoints = request.get("VpcConfig") or {}, request.get("CheckpointConfig") or {}
    registry = specification.get("TrainingImageConfig") or {}
    hyperparameters = {name: json.loads(text) for name, text in request["HyperParameters"].items()}
    code = {}
    if "sagemaker_job_name" in hyperparameters:  # else the containers are isolated, or an older version has planned it
        code = {"source_dir": hyperparameters["sagemaker_submit_directory"],
                "entry_point": hyperparameters["sagemaker_program"]}  # fmt: skip
        for name in script_mode("", "", ""):  # added by the estimator
            del hyperparameters[name]
    hyperparameters.pop(INSTANCE_TYPE, None)
    built = HuggingFace(
        **{"entry_point": None, **code},
        image_uri=specification["TrainingImage"],
        role=request["RoleArn"],
        instance_count=resources.get("InstanceCount"),
        instance_type=resources.get("InstanceType"),
        instance_groups=_instance_groups(resources),
        instance_placement_config=resources.get("InstancePlacementConfig"),
        training_plan=resources.get("TrainingPlanArn"),
        volume_size=resources["VolumeSizeInGB"],
        volume_kms_key=resources.get("VolumeKmsKeyId"),
        keep_alive_period_in_seconds=resources.get("KeepAlivePeriodInSeconds"),
        max_run=stopping["MaxRuntimeInSeconds"],
        max_wait=stopping.get("MaxWaitTimeInSeconds"),
        use_spot_instances=bool(request.get("EnableManagedSpotTraining")),
        checkpoint_s3_uri=checkpoints.get("S3Uri"),
        checkpoint_local_path=checkpoints.get("LocalPath"),
        input_mode=specification["TrainingInputMode"],
        output_path=output["S3OutputPath"],
        output_kms_key=output.get("KmsKeyId"),
        disable_output_compression=output.get("CompressionType") == "NONE",
        code_location=output["S3OutputPath"],
        subnets=network.get("Subnets"),
        security_group_ids=network.get("SecurityGroupIds"),
        enable_network_isolation=bool(request.get("EnableNetworkIsolation")),
        encrypt_inter_container_traffic=bool(request.get("EnableInterContainerTrafficEncryption")),
        enable_infra_check=(request.get("InfraCheckConfig") or {}).get("EnableInfraCheck"),
        enable_remote_debug=(request.get("RemoteDebugConfig") or {}).get("EnableRemoteDebug"),
        enable_session_tag_chaining=(request.get("SessionChainingConfig") or {}).get("EnableSessionTagChaining"),
        container_entry_point=specification.get("ContainerEntrypoint"),
        container_arguments=specification.get("ContainerArguments"),
        training_repository_access_mode=registry.get("TrainingRepositoryAccessMode"),
        training_repository_credentials_provider_arn=(registry.get("TrainingRepositoryAuthConfig") or {}).get(
            "TrainingRepositoryCredentialsProviderArn"
        ),
        metric_definitions=specification["MetricDefinitions"],
        max_retry_attempts=(request.get("RetryStrategy") or {}).get("MaximumRetryAttempts"),
        environment=request.get("Environment"),
        tags=request["Tags"],
        distribution=TORCHRUN if hyperparameters.pop(ENABLED, None) else None,
        hyperparameters=hyperparameters,
        enable_sagemaker_metrics=specification["EnableSageMakerMetricsTimeSeries"],
        debugger_hook_config=False,
        disable_profiler=request["ProfilerConfig"]["DisableProfiler"],
        py_version="py3",  # required by the SDK, although the image decides
        sagemaker_session=session,
    )
    if deploys:
        session.opt_out_of_telemetry()
    built._current_job_name = request["TrainingJobName"]
    built.latest_training_job = TrainingJob(session, request["TrainingJobName"])
    return built


@_quiet()
def submit(aws: Aws, request: Mapping[str, Any]) -> str:
    """Send a request through its estimator's `fit` and return the job's ARN, "" where the answer has none; blocking.

    Raises AwsError, and BackendError where the SDK refuses the job or would send another request than the planned one.
    """
    name, arns = str(request["TrainingJobName"]), []

    def note_arn(parsed: Mapping[str, Any], **_: Any) -> None:  # `fit` keeps no ARN
        arn = str(parsed.get("TrainingJobArn"))
        if arn.endswith(f"/{name}"):  # threads share the client
            arns.append(arn)

    events, event = aws.client("sagemaker").meta.events, "after-call.sagemaker.CreateTrainingJob"
    events.register(event, note_arn)
    try:
        built = build_estimator(aws, request, deploys=False)
        # Without the decorators of `fit`, which send telemetry. To opt out takes longer than to build the request.
        fit = partial(inspect.unwrap(type(built).fit), built, fit_inputs(request), wait=False, job_name=name)
        fit = partial(fit, experiment_config=request.get("ExperimentConfig"))
        aws.explained(fit, "sagemaker:CreateTrainingJob", other=REFUSALS)
    except AwsNoService:
        if not arns:  # else it was a call after the one that sends the job
            raise
    except REFUSALS as error:
        message = f"the SageMaker SDK refuses the job: {error}".partition("\n")[0]
        raise BackendError(
            message, "options.sagemaker.client: set options.sagemaker.client: boto3 to submit without the SDK"
        ) from None
    finally:
        events.unregister(event, note_arn)
    return next(iter(arns), "")


def fit_inputs(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the channels of a request as the `inputs` argument of `fit`."""
    from sagemaker.inputs import FileSystemInput, ShuffleConfig, TrainingInput

    channels: dict[str, Any] = {}
    for channel in request["InputDataConfig"]:
        name, mode = channel["ChannelName"], channel.get("InputMode")
        if files := channel["DataSource"].get("FileSystemDataSource"):
            channels[name] = FileSystemInput(
                files["FileSystemId"], files["FileSystemType"], files["DirectoryPath"], files["FileSystemAccessMode"]
            )
        else:
            source = channel["DataSource"]["S3DataSource"]
            channels[name] = TrainingInput(
                source["S3Uri"],
                distribution=source["S3DataDistributionType"],
                s3_data_type=source["S3DataType"],
                instance_groups=source.get("InstanceGroupNames"),
                attribute_names=source.get("AttributeNames"),
                input_mode=mode,
                content_type=channel.get("ContentType"),
                compression=channel.get("CompressionType"),
                record_wrapping=channel.get("RecordWrapperType"),
                shuffle_config=ShuffleConfig(channel["ShuffleConfig"]["Seed"]) if "ShuffleConfig" in channel else None,
            )
    return channels


def differences(planned: Any, built: Any, at: str = "") -> Iterator[str]:
    """Yield where two requests differ, as dotted paths."""
    if isinstance(planned, Mapping) and isinstance(built, Mapping):
        for name in sorted({*planned, *built}):
            yield from differences(planned.get(name), built.get(name), f"{at}.{name}" if at else str(name))
    elif planned != built:
        yield at


def _instance_groups(resources: Mapping[str, Any]) -> list[Any] | None:
    from sagemaker.instance_group import InstanceGroup

    groups = resources.get("InstanceGroups") or []
    names = ("InstanceGroupName", "InstanceType", "InstanceCount")
    return [InstanceGroup(*(group[name] for name in names)) for group in groups] or None


def use_inference_image(estimator: Any) -> None:
    """Give an estimator the versions by which the SDK chooses an inference image; raises BackendError where it lists none.

    The image itself is chosen later, by the endpoint's instance type.
    """
    from sagemaker import image_uris

    found = TAG.search(str(estimator.image_uri))
    hint = "pass your own image: deploy(..., image_uri=...)"
    if found is None:
        raise BackendError(
            f"{estimator.image_uri} does not record versions of transformers and torch, so no inference image can be chosen",
            hint,
        )
    wanted = {"version": found["transformers"], "py_version": found["python"]}
    region = estimator.sagemaker_session.boto_region_name
    given = {"base_framework_version": f"pytorch{found['torch']}", "image_scope": "inference"}
    try:
        image_uris.retrieve("huggingface", region, instance_type="ml.m5.xlarge", **wanted, **given)
    except ValueError:
        message = (
            f"the SDK lists no inference image with transformers {found['transformers']} and torch {found['torch']}"
        )
        raise BackendError(message, hint) from None
    estimator.framework_version, estimator.pytorch_version = found["transformers"], found["torch"]
    estimator.py_version = found["python"]


@cache
def _import_sdk() -> tuple[Any, Any, Any]:
    """Import the SDK; raises MissingExtra."""
    require_sdk("sagemaker")
    import sagemaker
    from sagemaker import huggingface
    from sagemaker.estimator import _TrainingJob

    class HuggingFace(huggingface.HuggingFace):  # type: ignore[misc]
        """An estimator whose models run in an inference image; the SDK's takes the training image."""

        def create_model(self, *args: Any, **values: Any) -> Any:
            if not values.get("image_uri"):
                use_inference_image(self)
                values["image_uri"] = None
            return super().create_model(*args, **values)

    class CheckedSession(sagemaker.Session):  # type: ignore[misc]
        """A session that sends a training job only if the SDK's request is the planned one."""

        planned: Mapping[str, Any]
        defaults: Mapping[str, Any]
        sagemaker_config: Any

        def opt_out_of_telemetry(self) -> None:
            """Send no telemetry from now on: its requests have no timeout.

            The SDK validates its defaults with each value that it looks up, where it has any. The option therefore is
            set after the constructor of an estimator, and not while a request is built: both look up hundreds.
            """
            self.sagemaker_config = json.loads(json.dumps({"SchemaVersion": "1.0", **self.defaults}))
            modules = self.sagemaker_config.setdefault("SageMaker", {}).setdefault("PythonSDK", {})
            modules.setdefault("Modules", {})["TelemetryOptOut"] = True

        def get_train_request(self, *args: Any, **values: Any) -> Any:
            opted_out, self.sagemaker_config = self.sagemaker_config, dict(self.defaults)
            try:
                request = super().get_train_request(*args, **values)
            finally:
                self.sagemaker_config = opted_out
            if found := list(differences(self.planned, request)):
                message = f"the SageMaker SDK would send a different {', '.join(found)} than the plan shows"
                hint = "check the SDK's configuration files, or set options.sagemaker.client: boto3"
                raise BackendError(message, hint)
            return request

    return HuggingFace, _TrainingJob, CheckedSession
