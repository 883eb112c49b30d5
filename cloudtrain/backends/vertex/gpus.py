"""Count the GPUs of the worker pools of a request. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cloudtrain.backends import machines

# Families without GPUs of their own, N1 with attached ones: https://cloud.google.com/compute/docs/machine-resource (2026-11-26)
_WITHOUT = re.compile(r"(e2|n1|n2|n2d|n4|c2|c2d|c3|c3d|c4|c4a|c4d|t2a|t2d|m1|m2|m3)-")


def count_gpus(pools: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the GPUs of all replicas, None where a machine type is not in the catalog and the pool names no count."""
    total = 0
    for pool in pools:
        spec, replicas = pool["machineSpec"], int(pool.get("replicaCount") or 1)
        name, count = str(spec.get("machineType") or ""), int(spec.get("acceleratorCount") or 0)
        machine = machines.find_machine(machines.load("vertex"), name)
        if not count and not _WITHOUT.match(name):
            if machine is None:
                return None
            count = machine.accelerators
        total += count * replicas
    return total
