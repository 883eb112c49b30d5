"""The limits of a cluster's partitions, as doctor saw them last: a plan compares its job with them and asks nobody."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cloudtrain.job.homes import new_file
from cloudtrain.job.units import format_duration, now

# Name, longest time, sizes of a job in nodes, generic resources of nodes: a line for each kind of node (man sinfo, 22.05)
SINFO = ("sinfo", "--noheader", "--format=%P|%l|%s|%G")
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")  # of a node: gpu:2, gpu:a100:8(S:0-1)
_ASKED = re.compile(r"--(?:gpus-per-node=|gres=gpu:)(?:[^:,=]+:)?(\d+)")
_TIME = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # days-hours:minutes:seconds


def parse(out: str) -> dict[str, dict[str, Any]]:
    """Return name -> seconds, nodes (None: no limit), the most GPUs of a node and whether it is the default, as SINFO says."""
    partitions: dict[str, dict[str, Any]] = {}
    for line in out.splitlines():
        name, time, sizes, gres = [*(part.strip() for part in line.split("|")), "", "", ""][:4]
        most, known = sizes.rpartition("-")[2], partitions.get(name.rstrip("*"), {})
        partitions[name.rstrip("*")] = {
            "seconds": _seconds(time),
            "nodes": int(most) if most.isdigit() else None,
            "gpus": max(sum(map(int, _GPUS.findall(gres))), known.get("gpus", 0)),
            "default": name.endswith("*"),
        }
    return partitions


def store(workdir: Path, cluster: str, partitions: Mapping[str, Any]) -> None:
    """Store what was seen of a cluster, with the time."""
    with new_file(_path(workdir, cluster)) as file:
        file.write(json.dumps({"seen_at": now(), "partitions": partitions}, indent=1).encode())


class Limits(NamedTuple):
    """What doctor saw of one partition: None is no limit, or not known."""

    name: str
    day: str = ""
    seconds: int | None = None
    nodes: int | None = None
    gpus: int | None = None  # the most of a node
    others: tuple[str, ...] = ()  # the cluster's partitions, where this one was not among them


def limits_of(workdir: Path, cluster: str, partition: str) -> Limits:
    """Return the limits of a partition, of the first of several, of the cluster's default where "" is given."""
    asked = partition.split(",")[0]
    try:
        seen = json.loads(_path(workdir, cluster).read_text("utf-8"))
        partitions, day = dict(seen["partitions"]), str(seen["seen_at"])[:10]
    except (OSError, ValueError, KeyError, TypeError):
        return Limits(asked)
    name = asked or next((name for name, limits in partitions.items() if limits["default"]), "")
    if name not in partitions:
        return Limits(name, day, others=tuple(sorted(partitions)) if asked else ())
    found = partitions[name]
    return Limits(name, day, found["seconds"], found["nodes"], found.get("gpus"))


def notes(limits: Limits, sbatch: Sequence[str], margin_s: int) -> Iterator[str]:
    """Yield why a job would wait without end, by what doctor saw; nothing where it has seen nothing."""
    name, day = limits.name, limits.day
    if limits.others:
        yield f"doctor found no partition {name} on {day}, but {', '.join(limits.others)}"
    arguments = dict(text[2:].partition("=")[::2] for text in sbatch if text.startswith("--") and "=" in text)
    seconds = int(arguments["time"]) * 60
    fewest = (text[8:].partition("-")[0] for text in sbatch if text.startswith("--nodes="))  # of each component
    nodes = max(map(int, fewest), default=1)
    if limits.seconds is not None and seconds > limits.seconds:
        minutes = (limits.seconds - margin_s) // 60
        margin = (
            f"choose another options.slurm.partition: beside limits.max_runtime a job needs {format_duration(margin_s)}"
        )
        yield (
            f"partition {name} allows {format_duration(limits.seconds)} (seen by doctor on {day}) and the job asks for "
            f"{format_duration(seconds)}: it would never start; "
            + (f"lower limits.max_runtime to {minutes}m" if minutes > 0 else margin)
        )
    if limits.nodes is not None and nodes > limits.nodes:
        seen = f"partition {name} gives a job at most {limits.nodes} nodes (seen by doctor on {day})"
        yield f"{seen}, not {nodes}: it would never start"
    gpus = max((int(found[1]) for text in sbatch if (found := _ASKED.match(text))), default=0)
    if limits.gpus is not None and gpus > limits.gpus:
        seen = f"no node of partition {name} has more than {limits.gpus} GPUs (seen by doctor on {day})"
        yield f"{seen}, and the job asks for {gpus} on one: it would never start"


def _seconds(text: str) -> int | None:
    if found := _TIME.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return None  # infinite, n/a


def _path(workdir: Path, cluster: str) -> Path:
    return workdir.parent / "profiles" / f"slurm-{hashlib.sha256(cluster.encode()).hexdigest()[:16]}.json"
