"""Build the complete CreateTrainingJob request of a job: pure data; `sagemaker-local` shares its parts.

    s3://<bucket>/<prefix>/code/<sha256>/source.tar.gz    source bundles, by digest; the channel `cloudtrain`
    s3://<bucket>/<prefix>/manifests/<sha256>/manifest    a manifest over 64 KiB; the channel `cloudtrain-manifest`
    <output>/<run>/checkpoints/                           of the run; SageMaker copies it to /opt/ml/checkpoints at every start
    <output>/<run>/<attempt>/output/model.tar.gz          /opt/ml/model of all nodes, and output.tar.gz: /opt/ml/output/data

The container's command unpacks the channel and execs launch.py. The launcher is PID 1, so that SIGTERM, exit codes and argv
work on any image with Python. The request is the one that the SDK's HuggingFace estimator sends for the same job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import client, limits, toolkit
from cloudtrain.backends.sagemaker.channels import CHANNEL, MANIFEST_CHANNEL, build_channels, s3_channel
from cloudtrain.backends.sagemaker.hyperparameters import (
    build_hyperparameters,
    encode_manifest,
    object_folder,
    script_mode,
)
from cloudtrain.backends.sagemaker.machine import choose_image, choose_machine
from cloudtrain.errors import BadJob, Problem
from cloudtrain.events import OFF
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.backends.machines import Machine
    from cloudtrain.job.job import Job
    from cloudtrain.source.bundle import Bundle

OBJECT = "source.tar.gz"
DISK_GB = 100  # default of resources.disk_gb; SageMaker's default, 30, is too small for a model and its checkpoints
MARGIN_S = 900  # added to max_runtime, which the launcher enforces: for downloads before and the last checkpoint after
WAIT_S = 24 * 3600  # default wait for spot capacity (options.sagemaker.max_wait)
EMITTED = ("loss", "eval_loss", "learning_rate", "grad_norm")  # metrics of our events that SageMaker's charts show
# The program of `python -W ignore -c`; SageMaker takes at most 256 characters for each argument.
UNPACK = (
    "import os,sys,tarfile as t;b=os.environ.get('SAGEMAKER_BASE_DIR','/opt/ml');s=b+'/cloudtrain';"
    f"t.open(b+'/input/data/{CHANNEL}/{OBJECT}').extractall(s);os.chdir(s);"
    "os.execv(sys.executable,[sys.executable,'.cloudtrain/launch.py'])"
)


@dataclass(frozen=True)
class BuiltRequest:
    """A request with its notes, problems and price; a request with problems must not be sent."""

    request: dict[str, Any]
    manifest: Manifest
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    price: dict[str, Any] | None

    def plan(self, name: str, options: Mapping[str, Any], job: Job, bundle: Bundle, retries: str) -> Plan:
        """Return the plan of the backend `name`; raises BadJob."""
        problems = list(self.problems)
        if options.get("entry") == "toolkit":
            problems += toolkit.find_problems((file.path for file in bundle.files), f"options.{name}.entry")
        if problems:
            raise BadJob(problems)
        return Plan(
            backend=name,
            run_id=self.manifest.run_id,
            attempt=self.manifest.attempt,
            request=self.request,
            bundle=bundle.to_dict(),
            manifest=self.manifest.to_dict(),
            job=job.to_dict(),
            retries=retries,
            price=self.price,
            notes=self.notes,
        )


def build_request(
    job: Job,
    run_id: str,
    attempt: int,
    sha256: str,
    options: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> BuiltRequest:
    """Return the CreateTrainingJob request for an attempt of a job; `options` are those of the backend `sagemaker`."""
    machine, notes, problems = choose_machine(job)
    if machine and machine.accelerators and not job.resources.accelerators:
        gpus = f"{machine.accelerator}:{machine.accelerators}"  # the number of ranks follows from the machine's GPUs
        job = job.replace(resources=job.resources.model_copy(update={"accelerators": gpus}))
        notes.append(f"{machine.name} has {gpus.replace(':', ' x ')}: each node has {job.processes} ranks")
    bucket, prefix = options.get("bucket") or "", options.get("prefix") or "cloudtrain"
    output = (job.output or f"s3://{bucket}/{prefix}/runs").rstrip("/")
    run = f"{output}/{run_id}"
    manifest = Manifest.of(job, run_id, attempt, about)
    channels, inputs, found_problems = build_channels(job, options)
    problems += found_problems
    manifest = replace(
        manifest, output=None, inputs=inputs, hyperparameters=dict(job.hyperparameters)
    )  # SageMaker itself copies output and inputs
    image, found_problems = choose_image(job, machine, options)
    problems += found_problems + _check_options(job, options)
    code_uri = f"s3://{bucket}/{prefix}/code/{sha256}/"
    pieces, content = encode_manifest(manifest)
    if content:
        channels.append(s3_channel(MANIFEST_CHANNEL, object_folder(f"s3://{bucket}/{prefix}", content)))
    # With an isolated container the estimator would add a second channel for the source: it gets no entry point then.
    added = toolkit_hyperparameters(options)
    if not options.get("isolate"):
        added = script_mode(code_uri + OBJECT, manifest.attempt_id, options.get("region") or "")
    hyperparameters, found_notes = build_hyperparameters(manifest, pieces, added)
    notes += found_notes
    metrics, metric_notes = _metric_definitions(job)
    notes += metric_notes
    request: dict[str, Any] = {
        "TrainingJobName": manifest.attempt_id,
        "HyperParameters": hyperparameters,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            **container_command(options),
            "MetricDefinitions": metrics,
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "RoleArn": options.get("role") or "",
        "InputDataConfig": [*channels, s3_channel(CHANNEL, code_uri)],
        "OutputDataConfig": {"S3OutputPath": run},
        "ResourceConfig": {
            "InstanceCount": job.num_nodes,
            "InstanceType": machine.name if machine else job.resources.instance_type or "",
            "VolumeSizeInGB": job.resources.disk_gb or DISK_GB,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": job.limits.max_runtime_s + MARGIN_S},
        "CheckpointConfig": {"S3Uri": f"{run}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": _tags(job, manifest),
    }
    _add_options(request, job, machine, options)
    problems += limits.find_problems(request, job) + client.find_problems(request, options)
    notes += toolkit.NOTES if options.get("entry") == "toolkit" else ()
    if job.limits.grace_s > limits.STOP_S - 20:
        notes.append(f"SageMaker kills a job {limits.STOP_S} s after it is asked to stop: limits.grace is longer")
    if job.resources.use_spot:
        notes.append("interrupted spot machines are replaced by SageMaker until max_wait is over (retries: platform)")
        if job.limits.capped:
            notes.append("under a cap the wait for spot machines counts as running: SageMaker limits both together")
    elif job.limits.max_wait:
        notes.append("SageMaker limits the wait for spot machines only (limits.max_wait)")
    price = machine.price if machine else None
    if price:
        price = {**price, "usd_per_hour": round(price["usd_per_hour"] * job.num_nodes, 4)}
    return BuiltRequest(request, manifest, tuple(notes), tuple(problems), price)


def toolkit_hyperparameters(options: Mapping[str, Any]) -> dict[str, str]:
    """Return what `entry: toolkit` needs where no estimator adds it."""
    archive = f"/opt/ml/input/data/{CHANNEL}/{OBJECT}"
    return toolkit.hyperparameters(archive) if options.get("entry") == "toolkit" else {}


def container_command(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the container's command that starts the launcher; {} with `entry: toolkit`, which keeps the image's command."""
    if options.get("entry") == "toolkit":
        return {}
    return {"ContainerEntrypoint": [options.get("python") or "python3", "-W", "ignore", "-c", UNPACK]}


def _add_options(request: dict[str, Any], job: Job, machine: Machine | None, options: Mapping[str, Any]) -> None:
    """Add the fields that depend on options: encryption, network, warm pools, EFA, spot, retries."""
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


def _check_options(job: Job, options: Mapping[str, Any]) -> list[Problem]:
    """Return the problems of the options: missing ones, and combinations that exclude each other."""
    problems = []
    for name, what in (("role", "the ARN of a role that SageMaker may take"), ("bucket", "a bucket for the source")):
        if not options.get(name):
            hint = "cloudtrain init -t sagemaker looks for one; docs/sagemaker.md"
            problems.append(Problem(f"is not given: {what}", f"options.sagemaker.{name}", hint))
    spot = job.resources.use_spot
    if spot and options.get("keep_alive_s"):
        message = "machines of a spot job cannot be kept warm"
        problems.append(Problem(message, "options.sagemaker.keep_alive_s", "leave it out, or resources.use_spot"))
    if options.get("max_wait") and not spot:
        message = "is for spot jobs only"
        problems.append(Problem(message, "options.sagemaker.max_wait", "set resources.use_spot: true"))
    if job.limits.capped:
        for name, value, why in (
            ("keep_alive_s", options.get("keep_alive_s"), "machines that are kept warm are billed after the job"),
            ("max_wait", options.get("max_wait"), "SageMaker limits the wait and the job together"),
        ):
            if value:
                hint = "leave it out, or limits.max_cost and max_total_runtime"
                problems.append(Problem(f"cannot be held under a cap: {why}", f"options.sagemaker.{name}", hint))
    if options.get("isolate"):
        if job.environment.requirements:
            message = "cannot be installed without a network (options.sagemaker.isolate)"
            problems.append(Problem(message, "environment.requirements", "none, with everything in the image"))
        if job.secrets:
            problems.append(Problem("cannot be read without a network (options.sagemaker.isolate)", "secrets"))
    if job.output and not job.output.startswith("s3://"):
        problems.append(Problem(f"SageMaker writes to s3:// only, not to {job.output!r}", "output"))
    return problems


def _metric_definitions(job: Job) -> tuple[list[dict[str, str]], list[str]]:
    """Return the metric definitions for SageMaker's charts, and notes on metrics that they cannot show."""
    patterns = [entry for entry in job.metrics.items() if entry[1] != OFF]
    definitions = [{"Name": name, "Regex": pattern} for name, pattern in patterns if "(?P" not in pattern]
    skipped = [name for name, pattern in patterns if "(?P" in pattern]
    notes = [
        f"metrics with named groups are collected here, and not in SageMaker's charts: {', '.join(skipped)}"
    ] * bool(skipped)
    for name in EMITTED:
        if name not in job.metrics:
            definitions.append({"Name": name, "Regex": f'::cloudtrain::.*"{name}":([0-9.eE+-]+)'})
    return definitions, notes


def _tags(job: Job, manifest: Manifest) -> list[dict[str, str]]:
    tags = {**job.labels, "cloudtrain:run": manifest.run_id, "cloudtrain:attempt": str(manifest.attempt)}
    return [{"Key": name, "Value": text} for name, text in tags.items()]
