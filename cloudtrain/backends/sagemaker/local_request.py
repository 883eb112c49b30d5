"""A job as the request of SageMaker's local mode: CreateTrainingJob with file:// in place of s3://; pure data.

<runs>/<run>/a<N>/code/source.tar.gz    the bundle; the channel `cloudtrain`
<runs>/<run>/model, outputs             /opt/ml/model and /opt/ml/output/data of all hosts (local mode shares them too)
<runs>/<run>/checkpoints                the run's, at /opt/ml/checkpoints, which local mode itself does not know
<runs>/<run>/a<N>/inputs/<name>         an input in S3 while the attempt lives (options.sagemaker-local.s3)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.manifest import Manifest
from cloudtrain.backends.sagemaker import limits, toolkit
from cloudtrain.backends.sagemaker.request import CHANNEL, MARGIN_S, OBJECT, Made, channel, command, orders, prefix
from cloudtrain.errors import Problem
from cloudtrain.nodes import paths

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

IMAGE = "cloudtrain-train:cpu"  # what images/build.sh makes
S3_HINT = "options.sagemaker-local.s3: true lets this machine bring it, with its own credentials"


def create_training_job(
    job: Job,
    run_id: str,
    attempt: int,
    sha256: str,
    options: Mapping[str, Any],
    workdir: Path,
    about: Mapping[str, Any] | None = None,
) -> Made:
    """Return the request for an attempt of a job, whose folders lie below `workdir`."""
    problems, notes = [], []
    output, wrong = paths.output_path(job.output)
    stored = _stored(job.output)
    if output is None and job.output is not None and not wrong and not (stored and options.get("s3")):
        said = f"sagemaker-local writes to folders of this machine, not to {job.output!r}"
        wrong = [Problem(said, "output", S3_HINT if stored else "leave it out, or name a folder or s3://bucket/...")]
    problems += wrong
    run = Path(output or workdir) / run_id
    folder = workdir / run_id / f"a{attempt}"
    manifest = Manifest.of(job, run_id, attempt, about)
    channels, inputs, wrong = _inputs(job, options)
    problems += wrong
    manifest = replace(manifest, output=None, inputs=inputs)
    gpus = manifest.gpus_per_node
    if gpus and job.num_nodes > 1:
        said = "local mode has one host where GPUs are used: all of them are this machine's"
        problems.append(Problem(said, "num_nodes", "num_nodes: 1, or no accelerators"))
    code = _channel(CHANNEL, f"{folder}/code/{OBJECT}")
    if bucket := options.get("bucket"):
        code = channel(CHANNEL, f"s3://{bucket}/{options.get('prefix') or 'cloudtrain'}/code/{sha256}/")
        if not options.get("s3"):
            problems.append(Problem("is for jobs that may use S3", "options.sagemaker-local.bucket", S3_HINT))
        elif not re.fullmatch(limits.BUCKET, bucket):
            problems.append(Problem(f"is no name of a bucket: {bucket!r}", "options.sagemaker-local.bucket"))
    image = str(job.image or options.get("image") or IMAGE)
    request: dict[str, Any] = {
        "TrainingJobName": manifest.attempt_id,
        "HyperParameters": orders(manifest, options),
        "AlgorithmSpecification": {
            "TrainingImage": image,
            "TrainingInputMode": "File",
            **command(options),
        },
        "InputDataConfig": [*channels, code],
        "OutputDataConfig": {
            "S3OutputPath": f"{str(job.output).rstrip('/')}/{run_id}" if stored else f"file://{run}",
        },
        "CheckpointConfig": {"S3Uri": f"file://{run}/checkpoints", "LocalPath": "/opt/ml/checkpoints"},
        "ResourceConfig": {"InstanceCount": job.num_nodes, "InstanceType": "local_gpu" if gpus else "local"},
        "StoppingCondition": {"MaxRuntimeInSeconds": job.limits.max_runtime_s + MARGIN_S},
    }
    if gpus:
        request["Environment"] = {"CLOUDTRAIN_GPUS": ",".join(map(str, range(gpus)))}
    if len(request["HyperParameters"]) > limits.MAX_HYPERPARAMETERS:
        problems.append(Problem("are too long together for SageMaker", "hyperparameters"))
    if job.resources.use_spot:
        notes.append("local mode has no spot machines: use_spot is left out")
    if job.resources.instance_type:
        notes.append(f"the hosts are containers of this machine, not {job.resources.instance_type}")
    if options.get("image") is None and job.image is None:
        notes.append(f"the image is {IMAGE}, which images/build.sh makes")
    if bucket or stored or any(_stored(item.uri) and item.mode != "stream" for item in job.inputs.values()):
        notes.append("what is in S3 is brought and taken there by this machine, with its own credentials")
    notes += toolkit.NOTES if options.get("entry") == "toolkit" else ()
    notes.append("checkpoints go straight into the run's folder: local mode itself refuses checkpoint_s3_uri")
    return Made(request, manifest, tuple(notes), tuple(problems), None)


def run_folder(request: Mapping[str, Any]) -> Path:
    """Return where the run's folders lie on this machine, wherever its results go."""
    return Path(str(request["CheckpointConfig"]["S3Uri"]).removeprefix("file://")).parent


def _inputs(
    job: Job, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], list[Problem]]:
    """Return the channels, the launcher's own view of the inputs, and problems; what is streamed has no channel."""
    channels, seen, problems = [], {}, []
    for name, item in job.inputs.items():
        if item.mode == "stream":
            seen[name] = {"uri": item.uri, "mode": "stream"}
            continue
        path = Path(item.uri.removeprefix("file://"))
        if name.lower() == CHANNEL:
            problems.append(Problem("is the name of the source's own channel", f"inputs.{name}", "choose another"))
        elif _stored(item.uri) and options.get("s3"):
            uri, file = prefix(item.uri)
            channels.append(channel(name, uri))
            seen[name] = {"uri": item.uri, "mode": "channel"} | ({"file": file} if file else {})
        elif "://" in str(item.uri.removeprefix("file://")) or not path.is_absolute():
            said = f"a channel of sagemaker-local is a path of this machine, not {item.uri!r}"
            hint = S3_HINT if _stored(item.uri) else "a path or file://; stream: the script opens it itself"
            problems.append(Problem(said, f"inputs.{name}.uri", hint))
        else:
            channels.append(_channel(name, str(path)))
            single = not item.uri.endswith("/")  # whether it is a file is seen where the launcher runs
            seen[name] = {"uri": item.uri, "mode": "channel"} | ({"file": path.name} if single else {})
    return channels, seen, problems


def _stored(uri: str | None) -> bool:
    """Tell whether a URI names a bucket of S3."""
    return bool(uri and uri.startswith("s3://") and paths.STORED.match(uri))


def _channel(name: str, path: str) -> dict[str, Any]:
    source = {"FileDataDistributionType": "FullyReplicated", "FileUri": f"file://{path}"}
    return {"DataSource": {"FileDataSource": source}, "ChannelName": name}
