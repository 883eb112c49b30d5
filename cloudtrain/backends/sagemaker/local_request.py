"""Build the request of SageMaker's local mode: CreateTrainingJob with file:// instead of s3://; pure data.

<runs>/<run>/a<N>/code/source.tar.gz    the bundle; the channel `cloudtrain`
<runs>/<run>/model, outputs             /opt/ml/model and /opt/ml/output/data of all hosts (local mode shares them too)
<runs>/<run>/checkpoints                of the run, at /opt/ml/checkpoints; the SDK's local mode has no such mount
<runs>/<run>/a<N>/inputs/<name>         an input in S3 while the attempt lives (options.sagemaker-local.s3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.manifest import Manifest, chosen_gpus, gpus_of_nodes
from cloudtrain.backends.sagemaker import limits
from cloudtrain.backends.sagemaker.channels import CHANNEL, s3_channel, split_prefix
from cloudtrain.backends.sagemaker.hyperparameters import (
    TOOLKIT_NOTES,
    build_hyperparameters,
    distribution_hyperparameters,
    distribution_problems,
    toolkit_hyperparameters,
)
from cloudtrain.backends.sagemaker.request import (
    MARGIN_S,
    OBJECT,
    BuiltRequest,
    container_command,
)
from cloudtrain.backends.traits import HONOURED, NO_EFFECT
from cloudtrain.errors import Problem
from cloudtrain.job import rules
from cloudtrain.nodes import paths

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

IMAGE = "cloudtrain-train:cpu"  # built by images/build.sh
S3_HINT = "options.sagemaker-local.s3: true lets this machine download and upload it with its own credentials"


KEYS = {
    "num_nodes": "InstanceCount",
    "image": "TrainingImage",
    "resources.accelerators": "CLOUDTRAIN_GPUS",
    "resources.cpus": NO_EFFECT,
    "resources.memory": NO_EFFECT,
    "resources.disk_gb": NO_EFFECT,
    "resources.use_spot": NO_EFFECT,
    "resources.instance_type": NO_EFFECT,
    "roles.resources": HONOURED,
}


def build_request(
    job: Job,
    run_id: str,
    attempt: int,
    sha256: str,
    options: Mapping[str, Any],
    workdir: Path,
    about: Mapping[str, Any] | None = None,
) -> BuiltRequest:
    """Return the request for an attempt of a job; its folders are below `workdir`."""
    problems: list[Problem] = []
    output, found_problems = paths.output_path(job.output)
    output_is_s3 = _is_s3(job.output)
    if output is None and job.output is not None and not found_problems and not (output_is_s3 and options.get("s3")):
        message = f"sagemaker-local writes to folders of this machine, not to {job.output!r}"
        found_problems = [
            Problem(message, "output", S3_HINT if output_is_s3 else "remove it, or set a folder or s3://bucket/...")
        ]
    problems += found_problems
    run = Path(output or workdir) / run_id
    folder = workdir / run_id / f"a{attempt}"
    manifest = Manifest.of(job, run_id, attempt, about)
    channels, inputs, found_problems = _build_channels(job, options)
    problems += found_problems
    manifest = replace(manifest, output=None, inputs=inputs, hyperparameters=dict(job.hyperparameters))
    of_hosts = [asked or 0 for asked in gpus_of_nodes(job)]
    divided = "roles.resources" in rules.keys_in_use(job)
    gpus = sum(of_hosts)
    if gpus and job.num_nodes > 1 and not divided:
        message = "local mode runs one host when GPUs are used, because all GPUs belong to this machine"
        problems.append(Problem(message, "num_nodes", "num_nodes: 1, no accelerators, or resources of each role"))
    code = _file_channel(CHANNEL, f"{folder}/code/{OBJECT}")
    if bucket := options.get("bucket"):
        code = s3_channel(CHANNEL, f"s3://{bucket}/{options.get('prefix') or 'cloudtrain'}/code/{sha256}/")
        if not options.get("s3"):
            problems.append(
                Problem("needs options.sagemaker-local.s3: true", "options.sagemaker-local.bucket", S3_HINT)
            )
        elif not re.fullmatch(limits.BUCKET, bucket):
            problems.append(Problem(f"is not a valid bucket name: {bucket!r}", "options.sagemaker-local.bucket"))
    image = str(job.image or options.get("image") or IMAGE)
    instance_type = "local_gpu" if gpus else "local"
    problems += distribution_problems(job, options, "sagemaker-local")
    added = toolkit_hyperparameters(options, f"{CHANNEL}/{OBJECT}") | distribution_hyperparameters(
        options, instance_type
    )
    hyperparameters, notes = build_hyperparameters(manifest, manifest.encode(), added)
    request: dict[str, Any] = {
        "TrainingJobName": manifest.attempt_id,
        "HyperParameters": hyperparameters,
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            **container_command(options),
        },
        "InputDataConfig": [*channels, code],
        "OutputDataConfig": {
            "S3OutputPath": f"{str(job.output).rstrip('/')}/{run_id}" if output_is_s3 else f"file://{run}",
        },
        "CheckpointConfig": {"S3Uri": f"file://{run}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceCount": job.num_nodes, "InstanceType": instance_type},
        "StoppingCondition": {"MaxRuntimeInSeconds": job.limits.max_runtime_s + MARGIN_S},
    }
    if divided:  # not a field of SageMaker's
        request["Gpus"] = [chosen_gpus(asked, of_hosts[:rank]) for rank, asked in enumerate(of_hosts)]
    elif gpus:
        request["Environment"] = {"CLOUDTRAIN_GPUS": chosen_gpus(gpus)}
    if options.get("image") is None and job.image is None:
        notes.append(
            f"the image is {IMAGE}; build it once with images/build.sh of cloudtrain's repository, or set image to another one"
        )
    if bucket or output_is_s3 or any(_is_s3(item.uri) and item.mode != "stream" for item in job.inputs.values()):
        notes.append("this machine downloads from S3 and uploads to it, with its own credentials")
    notes += TOOLKIT_NOTES if options.get("entry") == "toolkit" else ()
    return BuiltRequest(request, manifest, tuple(notes), tuple(problems), None)


def run_folder(request: Mapping[str, Any]) -> Path:
    """Return the run's folder on this machine, also where its results go to S3."""
    return Path(str(request["CheckpointConfig"]["S3Uri"]).removeprefix("file://")).parent


def _build_channels(
    job: Job, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], list[Problem]]:
    """Return the input channels, the inputs as the launcher's manifest describes them, and problems.

    A `stream` input has no channel.
    """
    channels, launcher_inputs, problems = [], {}, []
    for name, item in job.inputs.items():
        if item.mode == "stream":
            launcher_inputs[name] = {"uri": item.uri, "mode": "stream"}
            continue
        path = Path(item.uri.removeprefix("file://"))
        if name.lower() == CHANNEL:
            problems.append(
                Problem(
                    "is reserved for the channel that carries the source: use another name",
                    f"inputs.{name}",
                    "choose another",
                )
            )
        elif _is_s3(item.uri) and options.get("s3"):
            uri, file = split_prefix(item.uri)
            channels.append(s3_channel(name, uri))
            launcher_inputs[name] = {"uri": item.uri, "mode": "channel"} | ({"file": file} if file else {})
        elif "://" in str(item.uri.removeprefix("file://")) or not path.is_absolute():
            message = f"a channel of sagemaker-local is a path of this machine, not {item.uri!r}"
            hint = S3_HINT if _is_s3(item.uri) else "a path or file://; use mode: stream and open the URI in the script"
            problems.append(Problem(message, f"inputs.{name}.uri", hint))
        else:
            channels.append(_file_channel(name, str(path)))
            may_be_file = not item.uri.endswith("/")  # the launcher decides whether it is a file or a folder
            launcher_inputs[name] = {"uri": item.uri, "mode": "channel"} | ({"file": path.name} if may_be_file else {})
    return channels, launcher_inputs, problems


def _is_s3(uri: str | None) -> bool:
    """Return whether a URI names an S3 bucket."""
    return bool(uri and uri.startswith("s3://") and paths.OBJECT_STORE.match(uri))


def _file_channel(name: str, path: str) -> dict[str, Any]:
    source = {"FileDataDistributionType": "FullyReplicated", "FileUri": f"file://{path}"}
    return {"DataSource": {"FileDataSource": source}, "ChannelName": name}
