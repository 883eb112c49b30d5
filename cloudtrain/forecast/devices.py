"""Memory of GPUs as the driver reports it, which is less than the name says."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cloudtrain.source.node_code import module

MIB = 1 << 20
_SMI = "nvidia-smi, https://github.com/modal-labs/modal-client/pull/2797 (2025-01-23)"
_SHOWN = "nvidia-smi in several public notebooks and logs"
# MiB and where they were read, on 2026-11-23 and 2026-11-29; names as in resources.accelerators.
SIZES: dict[str, tuple[int, str]] = {
    "A100-40GB": (40960, _SMI),
    "A100-80GB": (81920, _SMI),
    "A10": (23028, _SMI),
    "A10G": (23028, _SMI),
    "H100": (81559, _SMI),
    "L4": (22888, "EC2 DescribeInstanceTypes, https://github.com/aws/aws-cli/issues/8970; nvidia-smi shows 23034"),
    "L40S": (46068, _SMI),
    "T4": (15360, _SMI),
    "H200": (143771, "memory that nvidia-smi showed on an H200"),
    "V100-16GB": (16160, "nvidia-smi, transformers' page perf_train_gpu_one at v4.21.0"),
    "V100-32GB": (32510, _SHOWN),
    "P100": (16280, _SHOWN),
    "P4": (7611, _SHOWN),
    "K80": (11441, _SHOWN),
    "RTX-PRO-6000": (97887, _SHOWN),
    "B200": (182630, "cudaGetDeviceProperties, https://github.com/pytorch/ao/pull/4002 (2026-03-05)"),
}
_OLD = ("T4", "V100", "P100", "P4", "K80")  # before Ampere, so without bfloat16 (that page); torch emulates it


def named(accelerator: str, known: Iterable[str]) -> str | None:
    """Return the first of the known names that a job file's means: A100 means any A100; None where there is none."""
    name = re.sub(r"-MEGA$|-SXM\d?", "", accelerator.upper())
    return next((each for each in known if each == name or each.startswith(f"{name}-")), None)


def size_bytes(accelerator: str) -> int | None:
    """Return the memory of a GPU that is named as in a job file, of the smallest one that is meant; None: not known."""
    found = named(accelerator.upper().removesuffix("-PCIE"), SIZES)
    return SIZES[found][0] * MIB if found else None


def has_bf16(accelerator: str) -> bool:
    """Whether a GPU that is named as in a job file computes in bfloat16."""
    return accelerator.upper().partition("-")[0] not in _OLD


# The device's name, by which entrypoints/trainer/peaks.py has its data sheet.
_DEVICES = {
    "A100-40GB": "A100-SXM4-40GB",
    "A100-80GB": "A100-SXM4-80GB",
    "A6000": "RTX A6000",
    "H100": "H100 80GB HBM3",
    "V100-16GB": "V100-SXM2-16GB",
    "V100-32GB": "V100-SXM2-32GB",
}


def peak_flops(accelerator: str, precision: str) -> float | None:
    """Return the FLOP/s that a GPU promises for no (TF32), and for bf16 and fp16, mixed or pure; None where it is not known."""
    kind = "tf32" if precision == "no" else precision.removeprefix("pure ")
    found: float | None = module("trainer.peaks").peak(_DEVICES.get(accelerator, accelerator), kind)
    return found
