"""Convert the channels that a call of the SageMaker SDK gives: TrainingInput (SDK 2), InputData and Channel (SDK 3).

An object is the mapping of its arguments. What a job has no key for becomes a field of the channel in `raw`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Argument -> the channel's field in CreateTrainingJob (sagemaker 2.257.7, inputs.py; sagemaker-core 2.27.0, shapes.py)
FIELDS = {
    "content_type": "ContentType",
    "compression": "CompressionType",
    "compression_type": "CompressionType",
    "record_wrapping": "RecordWrapperType",
    "record_wrapper_type": "RecordWrapperType",
}
SOURCE_FIELDS = {
    "s3_data_type": "S3DataType",
    "attribute_names": "AttributeNames",
    "instance_groups": "InstanceGroupNames",
    "instance_group_names": "InstanceGroupNames",
}
NESTED = ("data_source", "s3_data_source", "file_system_data_source")
URIS = ("s3_data", "s3_uri", "data_source")
SCHEMES = {"EFS": "efs", "FSxLustre": "fsx"}
IGNORED = {"channel_name", "distribution", "s3_data_distribution_type", "input_mode", "shuffle_config", *URIS,
           "file_system_id", "file_system_type", "directory_path", "file_system_access_mode"}  # fmt: skip


def convert_channels(given: Any, mode: str | None = None) -> tuple[dict[str, Any], dict[str, Any], list[str]] | None:
    """Return a job's inputs, its options of SageMaker, and notes on arguments without a key; None for computed values.

    Args:
        given: a URI, channel -> URI or object, or a list of objects with `channel_name`.
        mode: input mode of channels that name none: File, FastFile or Pipe.
    """
    if isinstance(given, list):
        given = {each.get("channel_name") if isinstance(each, Mapping) else None: each for each in given}
    if not isinstance(given, Mapping) or "s3_data" in given:
        given = {"training": given}  # the channel's name where `fit` gets one input
    inputs: dict[str, Any] = {}
    options: dict[str, Any] = {}
    notes = []
    for name, each in given.items():
        item = _flatten(each) if isinstance(each, Mapping) else {"s3_uri": each}
        computed = [argument for argument, value in item.items() if not isinstance(value, str | int | list | Mapping)]
        item = {argument: value for argument, value in item.items() if argument not in computed}
        notes += [f"inputs.{name}: write {argument} yourself, because the script computes it" for argument in computed]
        uri = _uri(item)
        if not isinstance(name, str) or not isinstance(uri, str):
            return None
        used = (item.get("input_mode") or mode) if uri and uri.startswith("s3:") else None
        inputs[name] = {"uri": uri, "mode": "mount"} if used == "FastFile" else uri
        if used == "Pipe":
            options.setdefault("pipe", []).append(name)
        if "ShardedByS3Key" in (item.get("distribution"), item.get("s3_data_distribution_type")):
            options.setdefault("shard", []).append(name)
        if fields := _fields(item):
            channels = options.setdefault("raw", {}).setdefault("InputDataConfig", [])
            channels.append({"ChannelName": name, **fields})
        unknown = sorted(item.keys() - IGNORED - FIELDS.keys() - SOURCE_FIELDS.keys())
        notes += [f"inputs.{name}: {argument} has no key; write the field of the API into raw" for argument in unknown]
    return inputs, options, notes


def _flatten(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object's arguments with those of the objects in it."""
    flat = {key: value for key, value in item.items() if value is not None}
    for name in NESTED:
        if isinstance(flat.get(name), Mapping):
            flat |= _flatten(flat.pop(name))
    return flat


def _uri(item: Mapping[str, Any]) -> Any:
    if "file_system_id" in item:
        scheme = SCHEMES.get(str(item.get("file_system_type")))
        return f"{scheme}://{item['file_system_id']}{item.get('directory_path')}" if scheme else None
    return next((item[name] for name in URIS if name in item), None)


def _fields(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a channel that a job has no key for."""
    fields = {field: item[name] for name, field in FIELDS.items() if name in item}
    shuffle = item.get("shuffle_config")
    if isinstance(shuffle, Mapping):
        fields["ShuffleConfig"] = {"Seed": shuffle.get("seed")}
    source = {field: item[name] for name, field in SOURCE_FIELDS.items() if name in item}
    if source.get("S3DataType") == "S3Prefix":
        del source["S3DataType"]
    return fields | ({"DataSource": {"S3DataSource": source}} if source else {})
