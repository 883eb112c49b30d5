"""Machine types with GPUs that EC2 has and the catalogue lacks, as doctor saw them last: a plan asks no service.

SageMaker's types are EC2's with `ml.` before them; whether it has a type that EC2 has, it says itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cloudtrain.backends import machines
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.machines import Machine
from cloudtrain.source.atomic import new_file

# Families with GPUs (https://docs.aws.amazon.com/ec2/latest/instancetypes/ac.html, 2026-11-23).
FAMILIES = {"Name": "instance-type", "Values": ["p*", "g*"]}


def note_types(aws: Aws, workdir: Path) -> None:
    """Ask EC2 for a region's types and store those that the catalogue lacks; blocking. Nothing where that is denied."""
    found: list[Mapping[str, Any]] = []
    token: dict[str, str] = {}
    with suppress(AwsError):
        while True:
            page = aws.call("ec2", "describe_instance_types", Filters=[FAMILIES], **token)
            found += page["InstanceTypes"]
            if not page.get("NextToken"):
                break
            token = {"NextToken": page["NextToken"]}
        with new_file(_path(workdir, aws.region)) as file:
            file.write(json.dumps(list(new_types(found)), indent=1).encode())


def new_types(found: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the machines that the catalogue lacks, of EC2's InstanceTypeInfo; parts of a GPU are left out."""
    known = {machine.name for machine in machines.load("sagemaker")}
    for each in found:
        name, gpus = f"ml.{each['InstanceType']}", list((each.get("GpuInfo") or {}).get("Gpus") or [])
        if len(gpus) == 1 and gpus[0].get("GpuPartitionSize", 1) == 1 and name not in known:
            yield {
                "name": name,
                "accelerator": gpus[0]["Name"].replace(" ", "-"),
                "accelerators": gpus[0]["Count"],
                "accelerator_memory_gb": gpus[0]["MemoryInfo"]["SizeInMiB"] / 1024,
                "vcpus": each["VCpuInfo"]["DefaultVCpus"],
                "memory_gb": each["MemoryInfo"]["SizeInMiB"] / 1024,
                "more": {
                    "local_nvme_gb": str((each.get("InstanceStorageInfo") or {}).get("TotalSizeInGB") or 0),
                    "efa": str(int(bool((each.get("NetworkInfo") or {}).get("EfaSupported")))),
                },
            }


def seen_types(workdir: Path, region: str) -> tuple[Machine, ...]:
    """Return the types that doctor stored for a region; () where it has stored none."""
    try:
        return tuple(Machine(**each) for each in json.loads(_path(workdir, region).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return ()


def _path(workdir: Path, region: str) -> Path:
    return workdir.parent / "profiles" / f"sagemaker-{region}.json"
