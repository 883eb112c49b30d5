"""A job as a complete CreateTrainingJob request: pure data, shared by `sagemaker` and its local twin.

    s3://<bucket>/<prefix>/code/<sha256>/source.tar.gz    bundles, by their digest; the channel `cloudtrain`
    <output>/<run>/checkpoints/                           the run's, brought to /opt/ml/checkpoints at every start
    <output>/<run>/<attempt>/output/model.tar.gz          /opt/ml/model of all nodes, and output.tar.gz: /opt/ml/output/data

The container's command unpacks the channel and becomes launch.py: PID 1 is ours, so that SIGTERM, exit codes and argv work
on any image with Python. The orders travel as hyperparameters, each in JSON's quotes, as the SDK's estimators write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.machines import Machine
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import images, limits, toolkit
from cloudtrain.errors import Problem
from cloudtrain.job import units

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

CHANNEL = "cloudtrain"
OBJECT = "source.tar.gz"
DISK_GB = 100  # where the job names none; SageMaker's own default, 30, does not hold a model and its checkpoints
MARGIN_S = 900  # over max_runtime, which the launcher keeps itself: staging before, the last checkpoint behind it
WAIT_S = 24 * 3600  # for spot capacity, where max_wait is not given
STOP_S = 120  # SageMaker's time between SIGTERM and SIGKILL
EMITTED = ("loss", "eval_loss", "learning_rate", "grad_norm")  # of metric events, for SageMaker's own charts
# Arguments of at most 256 characters each: Python without its warnings about tarfile's filters, and this program.
UNPACK = (
    "import os,sys,tarfile as t;b=os.environ.get('SAGEMAKER_BASE_DIR','/opt/ml');s=b+'/cloudtrain';"
    f"t.open(b+'/input/data/{CHANNEL}/{OBJECT}').extractall(s);os.chdir(s);"
    "os.execv(sys.executable,[sys.executable,'.cloudtrain/launch.py'])"
)


@dataclass(frozen=True)
class Made:
    """A request with what is to be said about it; `problems` come with a request that must not be sent."""

    request: dict[str, Any]
    manifest: Manifest
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    price: dict[str, Any] | None


def create_training_job(
    job: Job,
    run_id: str,
    attempt: int,
    sha256: str,
    options: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
) -> Made:
    """Return the request for an attempt of a job; `options` is the backend's own model as a dictionary."""
    machine, notes, problems = _machine(job)
    if machine and machine.accelerators and not job.resources.accelerators:
        gpus = f"{machine.accelerator}:{machine.accelerators}"  # ranks and their number follow from what is there
        job = job.replace(resources={**job.resources.model_dump(exclude_unset=True), "accelerators": gpus})
        notes.append(f"{machine.name} has {gpus.replace(':', ' x ')}: each node has {job.processes} ranks")
    bucket, prefix = options.get("bucket") or "", options.get("prefix") or "cloudtrain"
    output = (job.output or f"s3://{bucket}/{prefix}/runs").rstrip("/")
    run = f"{output}/{run_id}"
    manifest = Manifest.of(job, run_id, attempt, about)
    channels, inputs, wrong = _inputs(job, options)
    problems += wrong
    manifest = replace(manifest, output=None, inputs=inputs)  # SageMaker brings the folders home itself
    image, wrong = _image(job, machine, options)
    problems += wrong + _missing(job, options)
    code = channel(CHANNEL, f"s3://{bucket}/{prefix}/code/{sha256}/")
    metrics, said = _metrics(job)
    notes += said
    request: dict[str, Any] = {
        "TrainingJobName": manifest.attempt_id,
        "HyperParameters": orders(manifest, options),
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            **command(options),
            "MetricDefinitions": metrics,
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "RoleArn": options.get("role") or "",
        "InputDataConfig": [*channels, code],
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
    _settings(request, job, machine, options)
    problems += limits.problems(request, job)
    notes += toolkit.NOTES if options.get("entry") == "toolkit" else ()
    if job.limits.grace_s > STOP_S - 20:
        notes.append(f"SageMaker kills a job {STOP_S} s after it is asked to stop: limits.grace is longer")
    if job.resources.use_spot:
        notes.append("interrupted spot machines are replaced by SageMaker until max_wait is over (retries: platform)")
    price = machine.price if machine else None
    if price:
        price = {**price, "usd_per_hour": round(price["usd_per_hour"] * job.num_nodes, 4)}
        notes.append(f"the price is for {job.num_nodes} x {machine.name if machine else ''} on demand in us-east-1")
    return Made(request, manifest, tuple(notes), tuple(problems), price)


def orders(manifest: Manifest, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the hyperparameters: the manifest's pieces, and what the toolkit reads where that starts the launcher."""
    pieces = {f"ct_manifest_{n}": json.dumps(piece) for n, piece in enumerate(manifest.encode())}
    archive = f"/opt/ml/input/data/{CHANNEL}/{OBJECT}"
    return pieces | (toolkit.hyperparameters(archive) if options.get("entry") == "toolkit" else {})


def command(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the container's command; empty where the image's own, the toolkit's, is to run."""
    if options.get("entry") == "toolkit":
        return {}
    return {"ContainerEntrypoint": [options.get("python") or "python3", "-W", "ignore", "-c", UNPACK]}


def _settings(request: dict[str, Any], job: Job, machine: Machine | None, options: Mapping[str, Any]) -> None:
    """Add what only some requests have."""
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
        asked = options.get("max_wait")
        wait_s = units.duration_s(asked) if asked else stopping["MaxRuntimeInSeconds"] + WAIT_S
        stopping["MaxWaitTimeInSeconds"] = min(wait_s, limits.MAX_RUNTIME_S) if not asked else wait_s
    if job.retry.max_attempts > 1 and "lost" in job.retry.on_events:
        request["RetryStrategy"] = {"MaximumRetryAttempts": job.retry.max_attempts - 1}


def _machine(job: Job) -> tuple[Machine | None, list[str], list[Problem]]:
    """Return the machine type of a job, None where the catalogue does not know it, with notes and problems."""
    table, asked = machines.load("sagemaker"), job.resources.instance_type
    said = "Trainium needs Neuron's own torch, images and launcher, which this trainer and its ranks are not made for"
    if (asked or "").startswith("ml.trn") or (job.resources.accelerator or "").lower().startswith(("trn", "trainium")):
        path = "resources.instance_type" if asked else "resources.accelerators"
        return None, [], [Problem(said, path, "choose GPUs: L40S, A100, H100")]
    if not asked:
        found = machines.choose(table, job.resources)
        return (found, [], []) if isinstance(found, Machine) else (None, [], [found])
    if not asked.startswith("ml."):
        hint = f"write ml.{asked}"
        return None, [], [Problem(f"{asked!r} is no instance type of SageMaker", "resources.instance_type", hint)]
    machine = machines.named(table, asked)
    if machine is None:
        note = f"{asked} is not in the catalogue of 2026-11-20: SageMaker decides whether it exists, and what it has"
        return None, [note], []
    wanted = job.resources
    right = machines.matches(wanted.accelerator, machine.accelerator) if wanted.accelerator else True
    if wanted.accelerators and not (right and machine.accelerators == wanted.gpus):
        has = f"{machine.accelerators} x {machine.accelerator}" if machine.accelerators else "no accelerator"
        return machine, [], [Problem(f"{asked} has {has}, not {wanted.accelerators}", "resources.accelerators")]
    return machine, [], []


def _image(job: Job, machine: Machine | None, options: Mapping[str, Any]) -> tuple[str, list[Problem]]:
    """Return the image: the job's, the target's, or Hugging Face's for a user's own script on GPUs."""
    if named := job.image or options.get("image"):
        return str(named), []
    if job.entrypoint is None:
        said = "is not named, and the shared trainer needs one with its torch and transformers"
        return "", [Problem(said, "image", "see docs/sagemaker.md; options.sagemaker.image names it for a target")]
    if machine is not None and not machine.accelerators:
        said = "is not named, and Hugging Face's training images are for GPUs only"
        return "", [Problem(said, "image", "name one with Python 3.9 or newer")]
    found = images.image(options.get("region") or "")
    if found is None:
        where = options.get("region") or "no region (options.sagemaker.region)"
        said = f"is not named, and there is no image of Hugging Face's in {where}"
        return "", [Problem(said, "image", "name one")]
    return found, []


def _missing(job: Job, options: Mapping[str, Any]) -> list[Problem]:
    """Return what the account's options lack, and what they exclude."""
    found = []
    for name, what in (("role", "the ARN of a role that SageMaker may take"), ("bucket", "a bucket for the source")):
        if not options.get(name):
            hint = "cloudtrain init -t sagemaker looks for one; docs/sagemaker.md"
            found.append(Problem(f"is not given: {what}", f"options.sagemaker.{name}", hint))
    spot = job.resources.use_spot
    if spot and options.get("keep_alive_s"):
        said = "machines of a spot job cannot be kept warm"
        found.append(Problem(said, "options.sagemaker.keep_alive_s", "leave it out, or resources.use_spot"))
    if options.get("max_wait") and not spot:
        said = "is for spot jobs only"
        found.append(Problem(said, "options.sagemaker.max_wait", "set resources.use_spot: true"))
    if options.get("isolate"):
        if job.environment.requirements:
            said = "cannot be installed without a network (options.sagemaker.isolate)"
            found.append(Problem(said, "environment.requirements", "none, with everything in the image"))
        if job.secrets:
            found.append(Problem("cannot be read without a network (options.sagemaker.isolate)", "secrets"))
    if job.output and not job.output.startswith("s3://"):
        found.append(Problem(f"SageMaker writes to s3:// only, not to {job.output!r}", "output"))
    return found


def _inputs(
    job: Job, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], list[Problem]]:
    """Return the channels, the launcher's own view of the inputs, and problems.

    copy is a File channel and mount a FastFile one; what is streamed the script opens by its URI.
    """
    channels, seen, problems = [], {}, []
    shard = list(options.get("shard") or [])
    for name in shard:
        if name not in job.inputs:
            problems.append(Problem(f"{name} is none of the job's inputs", "options.sagemaker.shard"))
    for name, item in job.inputs.items():
        if item.mode == "stream":
            if options.get("isolate"):
                said = "cannot be streamed without a network (options.sagemaker.isolate)"
                problems.append(Problem(said, f"inputs.{name}.mode", "copy or mount"))
            seen[name] = {"uri": item.uri, "mode": "stream"}
            continue
        if name.lower() == CHANNEL:
            problems.append(Problem("is the name of the source's own channel", f"inputs.{name}", "choose another"))
        if not item.uri.startswith("s3://"):
            said = f"a channel of SageMaker reads s3:// only, not {item.uri!r}"
            problems.append(Problem(said, f"inputs.{name}.uri", "stream: the script opens it itself"))
            continue
        uri, file = prefix(item.uri)
        mode = "FastFile" if item.mode == "mount" else None
        channels.append(channel(name, uri, mode, "ShardedByS3Key" if name in shard else "FullyReplicated"))
        seen[name] = {"uri": item.uri, "mode": "channel"} | ({"file": file} if file else {})
    return channels, seen, problems


def prefix(uri: str) -> tuple[str, str]:
    """Return an input's S3Prefix, and the object's name where it is a single one: its last part has a dot."""
    last = uri.rstrip("/").rpartition("/")[2]
    if not uri.endswith("/") and "." in last and uri.count("/") > 2:
        return uri, last
    return uri.rstrip("/") + "/", ""  # without its slash it would take in what only begins like it: train2 beside train


def channel(name: str, uri: str, mode: str | None = None, spread: str = "FullyReplicated") -> dict[str, Any]:
    """Return a channel that reads from S3; `mode` None is that of the job, File."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": spread}
    made: dict[str, Any] = {"DataSource": {"S3DataSource": source}, "ChannelName": name}
    return made | ({"InputMode": mode} if mode else {})


def _metrics(job: Job) -> tuple[list[dict[str, str]], list[str]]:
    """Return the metric definitions for SageMaker's own charts, and notes on those it cannot have."""
    made = [{"Name": name, "Regex": pattern} for name, pattern in job.metrics.items() if "(?P" not in pattern]
    named = [name for name, pattern in job.metrics.items() if "(?P" in pattern]
    notes = [f"metrics with named groups are heard here, not in SageMaker's charts: {', '.join(named)}"] * bool(named)
    for name in EMITTED:
        if name not in job.metrics:
            made.append({"Name": name, "Regex": f'::cloudtrain::.*"{name}":([0-9.eE+-]+)'})
    return made, notes


def _tags(job: Job, manifest: Manifest) -> list[dict[str, str]]:
    found = {**job.labels, "cloudtrain:run": manifest.run_id, "cloudtrain:attempt": str(manifest.attempt)}
    return [{"Key": name, "Value": text} for name, text in found.items()]
