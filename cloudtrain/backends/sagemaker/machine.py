"""The machine type of a training job, types that doctor has seen beside the catalogue, and the image that runs on it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.aws import Aws, AwsError
from cloudtrain.backends.machines import Machine
from cloudtrain.errors import Problem
from cloudtrain.job import roles, rules
from cloudtrain.job.homes import new_file

if TYPE_CHECKING:
    from cloudtrain.job.job import Job


MAX_GROUPS = 5  # InstanceGroups of botocore 1.43.117's model
# Families without accelerators: general, compute, memory, burstable (EC2's instance type names, seen 2026-11-23:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-types.html).
WITHOUT_ACCELERATORS = r"ml\.[mcrt]\d"


def choose_machine(
    job: Job, options: Mapping[str, Any], seen: Sequence[Machine] = ()
) -> tuple[Machine | None, list[str], list[Problem]]:
    """Return a job's machine type with notes and problems; None for a type that is not in the catalogue.

    `seen` are types that a job may name beside those of the catalogue. Of instance groups it is the first one's: all have
    the same accelerators, because each node has as many ranks.
    """
    groups = [group["instance_type"] for group in options.get("instance_groups") or ()]
    found = [_choose_machine(job, name, seen) for name in groups or [job.resources.instance_type]]
    problems = [problem for _, _, found_problems in found for problem in found_problems]
    if len({(machine.accelerator, machine.accelerators) for machine, _, _ in found if machine}) > 1:
        message, hint = (
            "have different accelerators, but each node must run the same number of ranks",
            "choose instance types with the same accelerators",
        )
        problems.append(Problem(message, "options.sagemaker.instance_groups", hint))
    machine = found[0][0]
    nvme = next((each.name for each, _, _ in found if each and float(each.more.get("local_nvme_gb") or 0)), None)
    if nvme and options.get("volume_kms_key"):
        message = f"{nvme} has local NVMe disks, which SageMaker cannot encrypt with your KMS key"
        problems.append(Problem(message, "options.sagemaker.volume_kms_key", "remove it, or choose another type"))
    return machine, [note for _, notes, _ in found for note in notes], problems


def groups_of_roles(
    job: Job, machine: Machine | None, options: Mapping[str, Any], seen: Sequence[Machine] = ()
) -> tuple[Job, list[dict[str, Any]], list[Problem]]:
    """Return an instance group of each role where roles have other resources, else []; and the job with their GPUs.

    Args:
        machine: of the main role.
    """
    if "roles.resources" not in rules.keys_in_use(job):
        return job, [], []
    problems = []
    if options.get("instance_groups"):
        message = "have resources of their own, which exclude options.sagemaker.instance_groups"
        problems.append(Problem(message, "roles", "remove one of the two"))
    if len(job.roles) > MAX_GROUPS:
        message = f"are {len(job.roles)} with resources of their own; SageMaker has at most {MAX_GROUPS} instance groups for them"
        problems.append(Problem(message, "roles"))
    main_type = machine.name if machine else job.resources.instance_type or ""
    groups = [{"name": job.main_role, "instance_type": main_type, "count": job.main_nodes}]
    for name in roles.services(job):
        path, one = f"roles.{name}.resources", roles.on_own_machine(job, name)
        chosen, _, found = _choose_machine(one, one.resources.instance_type, seen)
        problems += [replace(problem, path=f"roles.{name}.{problem.path}") for problem in found]
        if one.resources.disk_gb not in (None, job.resources.disk_gb):
            hint = "write resources.disk_gb at the top, for all roles"
            problems.append(Problem("is the same for all instance groups", f"{path}.disk_gb", hint))
        job = machines.with_gpus_of(job, name, chosen)
        type_name = chosen.name if chosen else one.resources.instance_type or ""
        groups.append({"name": name, "instance_type": type_name, "count": job.roles[name].num_nodes})
    return job, groups, problems


def total_price(machine: Machine | None, nodes: int, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the price of all machines of a job as in a plan, None if one of them has none."""
    table, groups = machines.load("sagemaker"), options.get("instance_groups") or ()
    counted = [(machines.find_machine(table, group["instance_type"]), group["count"]) for group in groups]
    usd = 0.0
    for each, count in counted or [(machine, nodes)]:
        if each is None or each.usd_per_hour is None:
            return None
        usd += each.usd_per_hour * count
    first = counted[0][0] if counted else machine
    return {**first.price, "usd_per_hour": round(usd, 4)} if first and first.price else None


def _choose_machine(
    job: Job, instance_type: str | None, seen: Sequence[Machine]
) -> tuple[Machine | None, list[str], list[Problem]]:
    table = machines.load("sagemaker")
    message = "Trainium needs the Neuron SDK's torch, images and launcher, which cloudtrain does not support"
    if (instance_type or "").startswith("ml.trn") or (job.resources.accelerator or "").lower().startswith(
        ("trn", "trainium")
    ):
        path = "resources.instance_type" if instance_type else "resources.accelerators"
        return None, [], [Problem(message, path, "choose GPUs: L40S, A100, H100")]
    if not instance_type:
        choice = machines.choose(table, job.resources, job.num_nodes)
        return (choice, [], []) if isinstance(choice, Machine) else (None, [], [choice])
    if not instance_type.startswith("ml."):
        hint = f"write ml.{instance_type}"
        return (
            None,
            [],
            [Problem(f"{instance_type!r} is not a SageMaker instance type", "resources.instance_type", hint)],
        )
    machine = machines.find_machine((*table, *seen), instance_type)
    if machine is None:
        note = f"{instance_type} is not in cloudtrain's list of instance types (2026-11-20): SageMaker decides whether it exists"
        if job.resources.accelerators or re.match(WITHOUT_ACCELERATORS, instance_type):
            return None, [note], []
        near = get_close_matches(instance_type, [each.name for each in table], 1, 0.9)
        meant = f"did you mean {near[0]}? else " if near else ""
        message = f"is missing, and cloudtrain's list of instance types (2026-11-20) does not say what GPUs {instance_type} has"
        return (
            None,
            [],
            [
                Problem(
                    message,
                    "resources.accelerators",
                    f"{meant}write them, as in H100:8, or run cloudtrain doctor, which asks EC2",
                )
            ],
        )
    resources = job.resources
    same_accelerator = machines.matches(resources.accelerator, machine.accelerator) if resources.accelerator else True
    if resources.accelerators and not (same_accelerator and machine.accelerators == resources.gpus):
        offered = f"{machine.accelerators} x {machine.accelerator}" if machine.accelerators else "no accelerator"
        return (
            machine,
            [],
            [Problem(f"{instance_type} has {offered}, not {resources.accelerators}", "resources.accelerators")],
        )
    return machine, [], []


def choose_image(job: Job, machine: Machine | None, options: Mapping[str, Any]) -> tuple[str, list[Problem]]:
    """Return the container image: the job's, the target's, or Hugging Face's on GPUs."""
    if image := job.image or options.get("image"):
        return str(image), []
    if job.trainer and machine is not None and not machine.accelerators:
        message = "is missing: the shared trainer needs an image with torch and transformers"
        return "", [
            Problem(message, "image", "`cloudtrain image push -t TARGET` builds one and writes it into the target")
        ]
    if machine is not None and not machine.accelerators:
        message = "is missing: Hugging Face's training images are for GPUs only"
        return "", [Problem(message, "image", "add --gpus A10G:1, or set image: to one with Python 3.9 or newer")]
    stock = default_image(options.get("region") or "")
    if stock is None:
        if not (region := options.get("region")):
            message = "is missing: the region of Hugging Face's training image is not known"
            return "", [Problem(message, "image", "set options.sagemaker.region, or image")]
        message = f"is missing: Hugging Face has no training image in {region}"
        near = get_close_matches(region, REGISTRIES, 2, 0.8)
        meant = f"did you mean options.sagemaker.region: {' or '.join(near)}? else " if near else ""
        return "", [Problem(message, "image", f"{meant}name one")]
    return stock, []


# -- the default image: Hugging Face's newest training image, for jobs with a script but no `image`

# Copied 2026-11-21 from sagemaker 2.257.7 (image_uri_config/huggingface.json); a test compares both. These images are for
# GPUs only, and that SDK adds no newer ones: set `image` for a newer one.
# transformers, torch, tag
NEWEST = ("4.56.2", "2.8.0", "2.8.0-transformers4.56.2-gpu-py312-cu129-ubuntu22.04")
REPOSITORY = "huggingface-pytorch-training"
_MOST = "763104351884"
_IN_MOST = """ap-northeast-1 ap-northeast-2 ap-south-1 ap-southeast-1 ap-southeast-2 ca-central-1 eu-central-1 eu-north-1
eu-west-1 eu-west-2 eu-west-3 sa-east-1 us-east-1 us-east-2 us-west-1 us-west-2"""
REGISTRIES = dict.fromkeys(_IN_MOST.split(), _MOST) | {
    "af-south-1": "626614931356",
    "ap-east-1": "871362719292",
    "ap-northeast-3": "364406365360",
    "ap-southeast-3": "907027046896",
    "ca-west-1": "204538143572",
    "cn-north-1": "727897471807",
    "cn-northwest-1": "727897471807",
    "eu-south-1": "692866216735",
    "il-central-1": "780543022126",
    "me-central-1": "914824155844",
    "me-south-1": "217643126080",
    "us-gov-east-1": "446045086412",
    "us-gov-west-1": "442386744353",
    "us-iso-east-1": "886529160074",
    "us-isob-east-1": "094389454867",
}
_SUFFIXES = {"cn": "amazonaws.com.cn", "us-iso": "c2s.ic.gov", "us-isob": "sc2s.sgov.gov"}


def default_image(region: str) -> str | None:
    """Return the URI of Hugging Face's newest training image in a region, None if the region has none."""
    account = REGISTRIES.get(region)
    if account is None:
        return None
    suffix = _SUFFIXES.get(region.rsplit("-", 2)[0], "amazonaws.com")
    return f"{account}.dkr.ecr.{region}.{suffix}/{REPOSITORY}:{NEWEST[2]}"


# -- types with GPUs that EC2 has and the catalogue lacks, as doctor saw them last: a plan asks no service

# SageMaker's types are EC2's with `ml.` before them; whether it has a type that EC2 has, it says itself.
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
