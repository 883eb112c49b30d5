"""Memory of GPUs as the driver reports it, which is less than the name says."""

from __future__ import annotations

import re

MIB = 1 << 20
_SMI = "nvidia-smi, https://github.com/modal-labs/modal-client/pull/2797 (2025-01-23)"
# MiB and where they were read, on 2026-11-23; names as in resources.accelerators.
SIZES: dict[str, tuple[int, str]] = {
    "A100-40GB": (40960, _SMI),
    "A100-80GB": (81920, _SMI),
    "A10": (23028, _SMI),
    "A10G": (23028, _SMI),
    "H100": (81559, _SMI),
    "L4": (22888, "EC2 DescribeInstanceTypes, https://github.com/aws/aws-cli/issues/8970; nvidia-smi shows 23034"),
    "L40S": (46068, _SMI),
    "T4": (15360, _SMI),
    "H200": (143771, "nvidia-smi of an H200"),
    "B200": (182630, "cudaGetDeviceProperties, https://github.com/pytorch/ao/pull/4002 (2026-03-05)"),
}


def size_bytes(accelerator: str) -> int | None:
    """Return the memory of a GPU that is named as in a job file, of the smallest one that is meant; None: not known."""
    name = re.sub(r"-MEGA$|-SXM\d?|-PCIE", "", accelerator.upper())
    sizes = [mib for known, (mib, _) in SIZES.items() if known == name or known.startswith(f"{name}-")]
    return min(sizes) * MIB if sizes else None
