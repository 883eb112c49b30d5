"""Build the complete CreateTrainingJob request of a job: pure data; `sagemaker-local` shares its parts.

    s3://<bucket>/<prefix>/code/<sha256>/source.tar.gz    source bundles, by digest; the channel `cloudtrain`
    s3://<bucket>/<prefix>/manifests/<sha256>/manifest    a manifest over 64 KiB; the channel `cloudtrain-manifest`
    <output>/<run>/checkpoints/                           of the run; SageMaker copies it to /opt/ml/checkpoints at every start
    <output>/<run>/<attempt>/output/model.tar.gz          /opt/ml/model of all nodes, and output.tar.gz: /opt/ml/output/data

The container's command unpacks the channel and execs launch.py. The launcher is PID 1, so that SIGTERM, exit codes and argv
work on any image with Python. The request is the one that the SDK's HuggingFace estimator sends for the same job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.api import Plan
from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.plan import Fact, Note
from cloudtrain.backends.sagemaker import client, limits, queue
from cloudtrain.backends.sagemaker.channels import CHANNEL, MANIFEST_CHANNEL, build_channels, s3_channel
from cloudtrain.backends.sagemaker.fields import add_options, check_options, merge_raw
from cloudtrain.backends.sagemaker.hyperparameters import (
    TOOLKIT_NOTES,
    build_hyperparameters,
    distribution_hyperparameters,
    encode_manifest,
    object_folder,
    script_mode,
    source_problems,
    toolkit_hyperparameters,
)
from cloudtrain.backends.sagemaker.machine import choose_image, choose_machine, groups_of_roles, total_price
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
EMITTED = ("loss", "eval_loss", "learning_rate", "grad_norm")  # metrics that SageMaker's charts show without `metrics`
# Of our marked lines, of a Trainer's {'loss': 0.5} or {'loss': '0.5'}, of loss=0.5 and loss: 0.5.
PRINTED = r"""(?:^|[\s,{{(\[|])["']?{}["']?\s*[:=]\s*["']?([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)"""
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
            problems += source_problems((file.path for file in bundle.files), f"options.{name}.entry")
        if problems:
            raise BadJob(problems)
        return Plan.of(name, job, bundle, self.manifest.to_dict(), self.request, self.notes, retries, self.price)


KEYS = {
    "num_nodes": "InstanceCount",
    "image": "TrainingImage",
    "resources.accelerators": "InstanceType",
    "resources.use_spot": "EnableManagedSpotTraining",
    "resources.disk_gb": "VolumeSizeInGB",
    "resources.cpus": "InstanceType",
    "resources.memory": "InstanceType",
    "resources.instance_type": "InstanceType",
    "roles.resources": "InstanceGroups",
    "limits.max_runtime": "MaxRuntimeInSeconds",
    "limits.max_wait": "MaxWaitTimeInSeconds",
    "retry.max_attempts": "MaximumRetryAttempts",
}


def build_request(
    job: Job,
    run_id: str,
    attempt: int,
    sha256: str,
    options: Mapping[str, Any],
    about: Mapping[str, Any] | None = None,
    seen: Sequence[Machine] = (),
) -> BuiltRequest:
    """Return the CreateTrainingJob request for an attempt of a job; `options` are those of the backend `sagemaker`.

    `seen` are machine types that the catalogue lacks and doctor has seen.
    """
    machine, notes, problems = choose_machine(job, options, seen)
    job, found_notes = machines.with_gpus(job, machine)
    notes += found_notes
    job, groups, found_problems = groups_of_roles(job, machine, options, seen)
    problems += found_problems
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
    problems += found_problems + check_options(job, options)
    code_uri = f"s3://{bucket}/{prefix}/code/{sha256}/"
    pieces, content = encode_manifest(manifest, queue.PIECES if options.get("queue") else None)
    if content:
        channels.append(s3_channel(MANIFEST_CHANNEL, object_folder(f"s3://{bucket}/{prefix}", content)))
    # With an isolated container the estimator would add a second channel for the source: it gets no entry point then.
    added = toolkit_hyperparameters(options, f"{CHANNEL}/{OBJECT}")
    if not options.get("isolate"):
        added = script_mode(code_uri + OBJECT, manifest.attempt_id, options.get("region") or "")
    instance_type = machine.name if machine else job.resources.instance_type or ""
    added |= distribution_hyperparameters(options, instance_type)
    hyperparameters, found_notes = build_hyperparameters(manifest, pieces, added)
    notes += found_notes
    runtime_s = job.limits.max_runtime_s + MARGIN_S
    if job.limits.max_runtime_s <= limits.MAX_RUNTIME_S < runtime_s:
        runtime_s = limits.MAX_RUNTIME_S
        notes.append(
            "SageMaker runs a job for 28 days at most: less time is added for downloads and the last checkpoint"
        )
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
            "InstanceType": instance_type,
            "VolumeSizeInGB": job.resources.disk_gb or DISK_GB,
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": runtime_s},
        "CheckpointConfig": {"S3Uri": f"{run}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ProfilerConfig": {"DisableProfiler": True},
        "Tags": _tags(job, manifest),
    }
    options = {**options, "instance_groups": groups} if groups else options
    add_options(request, job, machine, options)
    if wrong := merge_raw(request, options.get("raw") or {}):
        problems += wrong  # the request may have values of other kinds than the rest expects
    else:
        problems += limits.find_problems(request, job) + queue.find_problems(request, options)
        problems += [] if options.get("queue") else client.find_problems(request, options)
        if (folder := request["CheckpointConfig"]["S3Uri"]) != f"{run}/checkpoints":
            notes.append(f"checkpoints are read from {folder} and written to it; only one run at a time may use it")
    notes += TOOLKIT_NOTES if options.get("entry") == "toolkit" else ()
    if job.limits.grace_s > limits.STOP_S - 20:
        notes.append(
            f"SageMaker kills a job {limits.STOP_S} s after it receives the stop request, so the "
            "longer limits.grace has no effect"
        )
    if job.resources.use_spot:
        wait_s = int(request["StoppingCondition"].get("MaxWaitTimeInSeconds") or 0)
        notes.append(f"SageMaker itself replaces interrupted spot machines, until {_deadline(wait_s, job, options)}")
        if job.limits.max_wait and options.get("max_wait"):
            text = "limits.max_wait has no effect: options.sagemaker.max_wait, the deadline, goes before it"
            notes.append(Note(text, Fact.WAIT_OVERRULED))
        if job.limits.capped:
            cap = "limits.max_cost" if job.limits.max_cost else "limits.max_total_runtime"
            notes.append(f"under {cap} waiting for spot machines counts as running time")
            if job.limits.max_wait:
                text = f"limits.max_wait ({job.limits.max_wait}) adds nothing to the deadline under {cap}"
                notes.append(Note(text, Fact.WAIT_OVERRULED))
    elif job.limits.max_wait:
        text = "limits.max_wait has no effect: SageMaker supports it for spot jobs only (resources.use_spot)"
        notes.append(Note(text, Fact.WAIT_UNLIMITED))
    price = total_price(machine, job.num_nodes, options)
    return BuiltRequest(request, manifest, tuple(notes), tuple(problems), price)


def _deadline(wait_s: int, job: Job, options: Mapping[str, Any]) -> str:
    """Return when a spot job ends at the latest, by the words of the two settings for it."""
    total = f"running and waiting have taken {units.format_duration(wait_s)} together (MaxWaitTimeInSeconds: "
    if options.get("max_wait"):
        return f"{total}options.sagemaker.max_wait)"
    if job.limits.capped:
        return f"{total}limits.max_runtime and the time that cloudtrain adds; a cap allows no time for waiting besides)"
    waits = "limits.max_wait" if job.limits.max_wait else "the default wait of 24h"
    return f"{total}limits.max_runtime, the time that cloudtrain adds, and {waits})"


def container_command(options: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the container's command that starts the launcher; {} with `entry: toolkit`, which keeps the image's command."""
    if options.get("entry") == "toolkit":
        return {}
    return {"ContainerEntrypoint": [options.get("python") or "python3", "-W", "ignore", "-c", UNPACK]}


def _metric_definitions(job: Job) -> tuple[list[dict[str, str]], list[str]]:
    """Return the metric definitions for SageMaker's charts, and notes on metrics that they cannot show."""
    patterns = [entry for entry in job.metrics.items() if entry[1] != OFF]
    definitions = [{"Name": name, "Regex": pattern} for name, pattern in patterns if "(?P" not in pattern]
    skipped = [name for name, pattern in patterns if "(?P" in pattern]
    notes = [
        f"cloudtrain collects these metrics, but SageMaker's charts do not show them (named groups): {', '.join(skipped)}"
    ] * bool(skipped)
    for name in EMITTED:
        if name not in job.metrics:
            definitions.append({"Name": name, "Regex": PRINTED.format(name)})
    return definitions, notes


def _tags(job: Job, manifest: Manifest) -> list[dict[str, str]]:
    tags = {**job.labels, "cloudtrain:run": manifest.run_id, "cloudtrain:attempt": str(manifest.attempt)}
    return [{"Key": name, "Value": text} for name, text in tags.items()]
