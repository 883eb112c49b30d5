"""Check a job's input and output locations for backends whose nodes are plain machines: paths or object stores."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from cloudtrain.errors import Problem

if TYPE_CHECKING:
    from cloudtrain.job.job import Job

OBJECT_STORE = re.compile(r"(s3|gs|az)://[^/]+(/|$)")
SHARDED = ("fsdp", "hsdp", "zero1", "zero2", "zero3")  # every rank writes a shard of the checkpoint


def umask(share: str | None) -> str:
    """Return the umask of a run's processes, in octal: its files are for this user alone, or for the group to read."""
    return "027" if share == "group" else "077"


def folder_mode(umask: str) -> int:
    """Return the mode of a run's folders."""
    return 0o777 & ~int(umask, 8)


def output_path(output: str | None) -> tuple[str | None, list[Problem]]:
    """Return the folder of an output path and the problems with it; (None, []) for an object store (the launcher uploads)."""
    if output is None or OBJECT_STORE.match(output):
        return None, []
    text = output.removeprefix("file://")
    if "://" in text or not PurePosixPath(text).is_absolute():
        message = (
            f"{output!r} is neither an absolute path nor s3://bucket/..., gs://bucket/... or az://container@account/..."
        )
        return None, [Problem(message, "output")]
    return text, []


def check_inputs(job: Job, where: str = "this machine") -> list[Problem]:
    """Return the problems with inputs that a plain machine, or a pod, cannot read."""
    problems = []
    for name, item in job.inputs.items():
        if "://" not in item.uri or item.uri.startswith("file://") or item.mode == "stream":
            continue
        if item.mode == "mount":
            message = f"nothing mounts an object store on {where}"
            problems.append(Problem(message, f"inputs.{name}.mode", "write copy or stream"))
        elif not OBJECT_STORE.match(item.uri):
            message = f"{item.uri!r} is not a bucket that cloudtrain can copy from"
            problems.append(Problem(message, f"inputs.{name}.uri", "s3://, gs:// or az://"))
    return problems


def check_shared_output(job: Job) -> list[Problem]:
    """Return a problem for sharded checkpoints on several nodes without a shared output: the shards would be scattered."""
    model_parallel = job.parallelism.tp_size * job.parallelism.pp_size > 1
    if job.output is not None or job.main_nodes == 1 or not (job.parallelism.strategy in SHARDED or model_parallel):
        return []
    feature = job.parallelism.strategy if job.parallelism.strategy in SHARDED else "tp_size and pp_size"
    message = (
        f"{feature} over {job.main_nodes} nodes writes a part of every checkpoint on each, and they share no folder"
    )
    hint = (
        "set output: to a path that all nodes see, or to s3://bucket/..., gs://bucket/... or az://container@account/..."
    )
    return [Problem(message, "parallelism.strategy" if job.parallelism.strategy in SHARDED else "parallelism", hint)]
