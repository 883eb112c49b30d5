"""Choose the machine type of a training job and the container image that runs on it; pure data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cloudtrain.backends import machines
from cloudtrain.backends.machines import Machine
from cloudtrain.backends.sagemaker import images
from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

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
        message = f"is missing, and cloudtrain's list of instance types (2026-11-20) does not say what GPUs {instance_type} has"
        return (
            None,
            [],
            [
                Problem(
                    message,
                    "resources.accelerators",
                    "write them, as in H100:8, or run cloudtrain doctor, which asks EC2",
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
    default_image = images.default_image(options.get("region") or "")
    if default_image is None:
        if not (region := options.get("region")):
            message = "is missing: the region of Hugging Face's training image is not known"
            return "", [Problem(message, "image", "set options.sagemaker.region, or image")]
        message = f"is missing: Hugging Face has no training image in {region}"
        return "", [Problem(message, "image", "name one")]
    return default_image, []
