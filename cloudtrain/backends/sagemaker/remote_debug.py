"""The command that opens a shell in a container of a training job: AWS Systems Manager, with SageMaker's remote debugging.

https://docs.aws.amazon.com/sagemaker/latest/dg/train-remote-debugging.html (2026-11-23).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.shell import Shell
from cloudtrain.errors import BackendError

NEEDS = (
    "it needs the AWS CLI with session-manager-plugin, and ssm:StartSession and ssm:TerminateSession;"
    " the job's role needs ssmmessages:* (cloudtrain doctor --policy)"
)


def shell(job: Mapping[str, Any], node: int, region: str, profile: str | None) -> Shell:
    """Return the command for a node of a described job, or what must be switched on first."""
    groups = job["ResourceConfig"].get("InstanceGroups") or [job["ResourceConfig"]]
    count = sum(int(group["InstanceCount"]) for group in groups)
    if node >= count:
        raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {count - 1}")
    if not (job.get("RemoteDebugConfig") or {}).get("EnableRemoteDebug"):
        return Shell(
            note="SageMaker opens shells only with options.sagemaker.remote_debug: true; submit it again with it"
        )
    name, phase = str(job["TrainingJobName"]), str(job.get("SecondaryStatus") or "")
    if phase != "Training":
        return Shell(note=f"SageMaker opens shells only in the phase Training; it is in the phase {phase or 'Pending'}")
    argv = [
        "aws",
        "ssm",
        "start-session",
        "--target",
        f"sagemaker-training-job:{name}_algo-{node + 1}",
        "--region",
        region,
    ]
    return Shell(address=shlex.join([*argv, *(["--profile", profile] if profile else [])]), note=NEEDS)
