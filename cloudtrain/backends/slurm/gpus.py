"""Count the GPUs that the arguments of sbatch ask for. Pure.

Options: https://slurm.schedmd.com/sbatch.html (2026-11-26). sbatch takes the name of an option cut short, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_COUNTED = ("gpus", "gpus-per-node", "gres")
_HARMLESS = ("gpu-bind", "gpu-freq", "gres-flags")
# Whatever may ask for GPUs, shortened names included. --exclusive gives all GPUs of a node.
_MAY_COUNT = re.compile(r"--(gp|gr|tr|exclus)")


def count_gpus(arguments: Sequence[str], nodes: int) -> int | None:
    """Return how many GPUs a batch job gets on all of its nodes, None where its arguments do not say it."""
    total = 0
    for text in arguments:
        if text.startswith("-G"):
            text = f"--gpus={text[2:].strip(' =')}"
        if not _MAY_COUNT.match(text):
            continue
        name, _, value = text[2:].partition("=")
        if name in _HARMLESS or text in ("--exclusive=user", "--exclusive=mcs"):
            continue
        if name not in _COUNTED:
            return None
        for item in value.split(","):
            counted = _count(item) if name == "gres" else _typed(item)
            if counted is None:
                return None
            total += counted * (1 if name == "gpus" else nodes)
    return total


def _count(item: str) -> int | None:
    """Return the GPUs of one entry of --gres, None for a part of a GPU; other resources have none."""
    name, *rest = (
        (item.partition("(")[0] if item.endswith(")") else item).removeprefix("gres/").removeprefix("gres:").split(":")
    )
    if name in ("shard", "mps"):
        return None
    if name != "gpu":
        return 0
    if not rest or not rest[-1].isdigit():
        return 1 if len(rest) < 2 else None
    return int(rest[-1])


def _typed(item: str) -> int | None:
    """Return the GPUs of one entry of --gpus: 4, or a100:4."""
    last = item.rpartition(":")[2]
    return int(last) if last.isdigit() else None
