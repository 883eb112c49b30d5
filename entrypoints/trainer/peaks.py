"""Peak FLOP/s of GPUs by their data sheets; imports no torch, so that a client reads it too."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """A GPU's dense TFLOP/s by kind of number, None for what it cannot do; tensor cores with sums in float32."""

    name: str  # of torch.cuda.get_device_name, the whole of it, "NVIDIA " aside: a slice (MIG) or a relative is not it
    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_SHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions/"
_ADA = "https://images.nvidia.com/aem-dam/Solutions/Data-Center/l4/nvidia-ada-gpu-architecture-whitepaper-v2.1.pdf"
_AMPERE = "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"
# By the data sheet that has them. Where one gives tensor cores with sparsity only, it is halved here. The sheets themselves
# could not be opened from where this was written: the figures are those that public pages and code cite from these
# addresses, most of them compared with each other on 2026-11-22; those of V100, T4, the GeForce cards, the NVL ones and B200's
# tf32 rest on fewer such pages.
SOURCES: dict[str, list[Peak]] = {
    _SHEETS + "Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf": [
        Peak("A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe", 312, 312, 156, 19.5),
    ],
    _NVIDIA + "h100/": [
        Peak("H100 80GB HBM3", 989.4, 989.4, 494.7, 66.9),  # SXM
        Peak("H100 NVL", 835.5, 835.5, 417.5, 60),
    ],
    "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet": [
        Peak("H100 PCIe", 756, 756, 378, 51.2),
    ],
    _NVIDIA + "h200/": [
        Peak("H200", 989.4, 989.4, 494.7, 66.9),
        Peak("H200 NVL", 835.5, 835.5, 417.5, 60),
    ],
    _NVIDIA + "hgx/": [Peak("B200", 2250, 2250, 1125, 75)],
    _NVIDIA + "l4/": [Peak("L4", 121, 121, 60, 30.3)],
    "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413": [Peak("L40S", 362.05, 362.05, 183, 91.6)],
    "https://images.nvidia.cn/content/Solutions/data-center/vgpu-L40-datasheet.pdf": [
        Peak("L40", 181.05, 181.05, 90.5, 90.5),
    ],
    _SHEETS + "Data-Center/a10/pdf/a10-datasheet.pdf": [Peak("A10", 125, 125, 62.5, 31.2)],
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf": [
        Peak("A10G", 70, 70, 35, 35),
    ],
    "https://images.nvidia.cn/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf": [
        Peak("A40", 149.7, 149.7, 74.8, 37.4),
    ],
    _SHEETS + "Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf": [Peak("(Tesla )?T4", None, 65, None, 8.1)],
    _VOLTA: [
        Peak("(Tesla )?V100-SXM2-(16|32)GB", None, 125, None, 15.7),
        Peak("(Tesla )?V100-PCIE-(16|32)GB", None, 112, None, 14),
        Peak("(Tesla )?V100S-PCIE-32GB", None, 130, None, 16.4),
    ],
    _ADA: [Peak("GeForce RTX 4090", 165.2, 165.2, 82.6, 82.6)],
    _AMPERE: [
        Peak("GeForce RTX 3090", 71, 71, 35.6, 35.6),
        Peak("RTX A6000", 154.8, 154.8, 77.4, 38.7),
    ],
}


def peak(device: str, kind: str) -> float | None:
    """Return the FLOP/s that a GPU of that name promises for bf16, fp16, tf32 or fp32; None for one that is not known."""
    name = device.removeprefix("NVIDIA ")
    row_of_gpu = next((row for rows in SOURCES.values() for row in rows if re.fullmatch(row.name, name)), None)
    if row_of_gpu is None:
        return None
    if kind == "tf32" and row_of_gpu.tf32 is None:
        kind = "fp32"  # asked for, and replaced by fp32 without a warning
    promised: float | None = getattr(row_of_gpu, kind)
    return promised and promised * 1e12
