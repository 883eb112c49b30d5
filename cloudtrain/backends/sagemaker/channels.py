"""Build the channels by which SageMaker brings a job's source and inputs onto its hosts; pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cloudtrain.backends.sagemaker.fields import channel_fields
from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

# EFS: any folder. FSx for Lustre: /MOUNT_NAME/FOLDER (API_FileSystemDataSource, 2026-11-23).
FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,18})(/.*)")
CHANNEL = "cloudtrain"  # of the source bundle
MANIFEST_CHANNEL = "cloudtrain-manifest"  # of a manifest that is too long for hyperparameters


def build_channels(
    job: Job, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]], list[Problem]]:
    """Return the input channels, the inputs as the launcher's manifest describes them, and problems.

    `copy` becomes a File channel and `mount` a FastFile channel. A script opens a `stream` input by its URI.
    """
    channels, launcher_inputs, problems = [], {}, []
    shard, added = list(options.get("shard") or []), channel_fields(options.get("raw") or {})
    for option in ("shard", "pipe"):
        for name in options.get(option) or ():
            if name not in job.inputs:
                message = (
                    f"names the input {name!r}, which the job does not have (inputs: {', '.join(job.inputs) or 'none'})"
                )
                hint = "correct the name, or add it to inputs of the job"
                problems.append(Problem(message, f"options.sagemaker.{option}", hint))
    for name, item in job.inputs.items():
        if item.mode == "stream":
            if options.get("isolate"):
                message = "cannot be streamed: the job has no network (options.sagemaker.isolate)"
                problems.append(Problem(message, f"inputs.{name}.mode", "copy or mount"))
            launcher_inputs[name] = {"uri": item.uri, "mode": "stream"}
            continue
        if name.lower() in (CHANNEL, MANIFEST_CHANNEL):
            problems.append(
                Problem(
                    "is reserved for the channel that carries the source: use another name",
                    f"inputs.{name}",
                    "choose another",
                )
            )
        if system := FILE_SYSTEM.fullmatch(item.uri):
            if not options.get("subnets"):
                message, hint = (
                    "can be read only from inside its VPC",
                    "set options.sagemaker.subnets and security_groups",
                )
                problems.append(Problem(message, f"inputs.{name}.uri", hint))
            channels.append(file_system_channel(name, *system.groups()))
            launcher_inputs[name] = {"uri": item.uri, "mode": "channel"}
            continue
        if not item.uri.startswith("s3://"):
            message = f"a channel of SageMaker reads s3://, efs://fs-ID/FOLDER or fsx://fs-ID/FOLDER, not {item.uri!r}"
            problems.append(Problem(message, f"inputs.{name}.uri", "use mode: stream and open the URI in the script"))
            continue
        uri, file = split_prefix(item.uri)
        data_type: Any = added.get(name)
        for key in ("DataSource", "S3DataSource", "S3DataType"):
            data_type = data_type.get(key) if isinstance(data_type, Mapping) else None
        if data_type not in (None, "S3Prefix"):  # the URI is a manifest's, and the channel has its objects
            uri, file = item.uri, ""
        if name in (options.get("pipe") or ()):  # a named pipe for each epoch, no folder
            channels.append(s3_channel(name, uri, "Pipe", "ShardedByS3Key" if name in shard else "FullyReplicated"))
            launcher_inputs[name] = {"uri": item.uri, "mode": "stream"}
            continue
        mode = "FastFile" if item.mode == "mount" else None
        channels.append(s3_channel(name, uri, mode, "ShardedByS3Key" if name in shard else "FullyReplicated"))
        launcher_inputs[name] = {"uri": item.uri, "mode": "channel"} | ({"file": file} if file else {})
        if item.run:
            launcher_inputs[name]["run"] = item.run
    return channels, launcher_inputs, problems


def file_system_channel(name: str, kind: str, system: str, folder: str) -> dict[str, Any]:
    """Return a channel that reads a folder of EFS or FSx for Lustre."""
    source = {
        "FileSystemId": system,
        "FileSystemAccessMode": "ro",
        "FileSystemType": {"efs": "EFS", "fsx": "FSxLustre"}[kind],
        "DirectoryPath": folder,
    }
    return {"DataSource": {"FileSystemDataSource": source}, "ChannelName": name}


def split_prefix(uri: str) -> tuple[str, str]:
    """Return an input's S3Prefix, and the file's name if it is one file: its last part has a dot."""
    last = uri.rstrip("/").rpartition("/")[2]
    if not uri.endswith("/") and "." in last and uri.count("/") > 2:
        return uri, last
    return uri.rstrip("/") + "/", ""  # without the slash, train would match train2 too


def s3_channel(name: str, uri: str, mode: str | None = None, distribution: str = "FullyReplicated") -> dict[str, Any]:
    """Return a channel that reads from S3; `mode` None means the job's mode, File."""
    source = {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": distribution}
    channel: dict[str, Any] = {"DataSource": {"S3DataSource": source}, "ChannelName": name}
    return channel | ({"InputMode": mode} if mode else {})
