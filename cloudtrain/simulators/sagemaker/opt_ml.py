"""The files of /opt/ml that SageMaker writes and reads, for the simulator's processes and sagemaker-local's containers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.source import untrusted

LINGER_S = 20.0  # time for the other hosts to end after one has failed
FOLDERS = ("input/config", "input/data", "model", "output/data", "checkpoints")


def write_config(base: Path, host: str, names: Sequence[str], request: Mapping[str, Any], interface: str) -> None:
    """Write the folders and files that a host of a training job has below /opt/ml; `base` is that folder."""
    for folder in FOLDERS:
        (base / folder).mkdir(parents=True, exist_ok=True)
    config = {
        "hyperparameters": request.get("HyperParameters", {}),
        "resourceconfig": {
            "current_host": host,
            "hosts": names,
            "network_interface_name": interface,
            **_instances(host, names, request["ResourceConfig"]),
        },
        "inputdataconfig": {
            channel["ChannelName"]: {"TrainingInputMode": channel.get("InputMode", "File")}
            for channel in request.get("InputDataConfig", [])
        },
    }
    for name, value in config.items():
        (base / f"input/config/{name}.json").write_text(json.dumps(value))


def _instances(host: str, names: Sequence[str], resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return what resourceconfig.json has of a host's machine type, and of instance groups where there are some."""
    groups, left = [], list(names)
    for group in resources.get("InstanceGroups") or ():
        hosts, left = left[: group["InstanceCount"]], left[group["InstanceCount"] :]
        about = {"instance_group_name": group["InstanceGroupName"], "instance_type": group["InstanceType"]}
        groups.append({**about, "hosts": hosts})
    if not groups:
        return {"current_instance_type": resources["InstanceType"]}
    own = next(group for group in groups if host in group["hosts"])
    current = {"current_instance_type": own["instance_type"], "current_group_name": own["instance_group_name"]}
    return {**current, "instance_groups": groups}


def failure_reason(base: Path, code: int | None) -> str:
    """Return the FailureReason of a job whose host ended with a code, with what it wrote to /opt/ml/output/failure."""
    failure = read_failure(base)
    return f"AlgorithmError: {failure + ', ' if failure else ''}exit code: {code}"[-1024:]


def read_failure(base: Path) -> str:
    """Return the start of /opt/ml/output/failure, "" without one."""
    try:
        return untrusted.read_file(base, "output/failure", 900).decode(errors="replace")
    except OSError:
        return ""
