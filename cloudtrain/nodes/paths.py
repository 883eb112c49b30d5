"""Where a job's inputs and output lie, for backends whose nodes are plain machines: paths there, or object stores."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

STORED = re.compile(r"(s3|gs)://[^/]+(/|$)")
SHARDED = ("fsdp", "hsdp", "zero1", "zero2", "zero3")  # every rank writes its part of a checkpoint


def output_path(output: str | None) -> tuple[str | None, list[Problem]]:
    """Return the folder that an output names, or the problem with it; (None, []) for a store: the launcher copies."""
    if output is None or STORED.match(output):
        return None, []
    text = output.removeprefix("file://")
    if "://" in text or not PurePosixPath(text).is_absolute():
        said = f"{output!r} is neither an absolute path nor s3://bucket/... or gs://bucket/..."
        return None, [Problem(said, "output")]
    return text, []


def inputs(job: Job) -> list[Problem]:
    """Return what a plain machine cannot do with the job's inputs."""
    problems = []
    for name, item in job.inputs.items():
        if "://" not in item.uri or item.uri.startswith("file://") or item.mode == "stream":
            continue
        if item.mode == "mount":
            said = "nothing mounts an object store on this machine"
            problems.append(Problem(said, f"inputs.{name}.mode", "write copy or stream"))
        elif not STORED.match(item.uri):
            said = f"{item.uri!r} names no bucket that can be copied from"
            problems.append(Problem(said, f"inputs.{name}.uri", "s3:// or gs://"))
    return problems


def unshared(job: Job) -> list[Problem]:
    """Return why a job may not run on several nodes that share no folder: parts of its checkpoints would be apart."""
    split = job.parallelism.tp_size * job.parallelism.pp_size > 1
    if job.output is not None or job.num_nodes == 1 or not (job.parallelism.strategy in SHARDED or split):
        return []
    what = job.parallelism.strategy if job.parallelism.strategy in SHARDED else "tp_size and pp_size"
    said = f"{what} over {job.num_nodes} nodes writes a part of every checkpoint on each, and they share no folder"
    hint = "set output: to a path that all nodes see, or to s3://bucket/... or gs://bucket/..."
    return [Problem(said, "parallelism.strategy" if job.parallelism.strategy in SHARDED else "parallelism", hint)]
