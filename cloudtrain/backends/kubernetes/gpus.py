"""Count the GPUs that the containers of a pod ask for. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# Extended resources that are accelerators, or parts of one: nvidia.com/gpu, nvidia.com/mig-1g.10gb, google.com/tpu.
_ACCELERATOR = re.compile(r"^(?>[^/]*/).*gpu|^(?>.*?gpu).*/|/mig-|/tpu|/neuron|/gaudi|/npu")


def count_gpus(pod: Mapping[str, Any], gpu_resource: str) -> int | None:
    """Return the GPUs of one pod, each part of a shared GPU counted as one; None where claims or odd quantities ask for them."""
    if pod.get("resourceClaims"):
        return None
    long: list[int] = []
    first = [0]
    for container in [*pod.get("initContainers", ()), *pod["containers"]]:
        resources = container.get("resources") or {}
        wanted = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        counts = [str(count) for name, count in wanted.items() if name == gpu_resource or _ACCELERATOR.search(name)]
        if not all(count.isdigit() for count in counts):
            return None
        ends = container in pod.get("initContainers", ()) and container.get("restartPolicy") != "Always"
        (first if ends else long).append(sum(map(int, counts)))
    return max(sum(long), *first)
