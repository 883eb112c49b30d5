"""Run Docker commands for `sagemaker-local`: a network and containers for the hosts of an attempt.

The label of every container and network is the attempt's folder, so that any later process can find and remove them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.backends import images
from cloudtrain.backends.docker import PROGRAM as PROGRAM
from cloudtrain.backends.docker import EngineError as EngineError
from cloudtrain.backends.docker import call as call

LABEL = "cloudtrain.attempt"


def why_unavailable(image: str) -> str:
    """Return why an image cannot be run, "" if it is on this machine; raises EngineError without a running engine."""
    call("ps", "--quiet")  # podman's docker has no server that has a version
    try:
        call("image", "inspect", "--format", "{{.Id}}", image)
    except EngineError:
        return f"the image {image} is not on this machine"
    return ""


def image_digest(image_name: str) -> str:
    """Return the digest or id of the image that a name stands for on this machine, "" if unknown; blocking."""
    try:
        inspected = json.loads(call("image", "inspect", "--format", "{{json .}}", image_name))
    except (EngineError, ValueError):
        return ""
    return digest_of(image_name, inspected) if isinstance(inspected, dict) else ""


def digest_of(image_name: str, inspected: Mapping[str, Any]) -> str:
    """Return an inspected image as NAME@sha256:..., or its local id if it was never pushed.

    It prefers the digest that the name itself has, then one of the same repository, then any other.
    """
    reference = images.parse_reference(image_name)
    digests = [digest for digest in map(str, inspected.get("RepoDigests") or ()) if images.pinned_image(digest)]
    same_repository = [digest for digest in digests if images.parse_reference(digest)[:2] == reference[:2]]
    same_digest = [digest for digest in same_repository if images.parse_reference(digest).digest == reference.digest]
    return images.pinned_image(next(iter([*same_digest, *same_repository, *digests]), str(inspected.get("Id") or "")))


def network_name(folder: Path, attempt_id: str) -> str:
    """Return the name of an attempt's network, the prefix of its containers' names.

    It has a hash of the folder: two CLOUDTRAIN_HOMEs may have runs of the same name.
    """
    return f"{attempt_id}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def list_containers(folder: Path) -> list[str]:
    """Return the ids of an attempt's containers, running or not."""
    return call("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={folder}").split()


def create_network(folder: Path, attempt_id: str, hosts: int) -> None:
    """Create an attempt's network. Raises EngineError, also where several hosts could not find each other by name."""
    network = network_name(folder, attempt_id)
    call("network", "create", "--label", f"{LABEL}={folder}", network)
    if hosts > 1 and '"dns_enabled": false' in call("network", "inspect", network):
        plugin = "aardvark-dns (Debian 12: golang-github-containernetworking-plugin-dnsname)"
        raise EngineError(f"podman's networks have no names on this machine: install {plugin}")


def container_command(
    folder: Path,
    attempt_id: str,
    host: str,
    request: Mapping[str, Any],
    mounts: Sequence[tuple[str, str, bool]],  # source, target, writable
) -> list[str]:
    """Return the command that runs a host's container in the foreground."""
    specification = request["AlgorithmSpecification"]
    # Without ContainerEntrypoint SageMaker runs the image's own command with the argument `train`.
    entrypoint = [*specification.get("ContainerEntrypoint", ()), *specification.get("ContainerArguments", ())]
    network = network_name(folder, attempt_id)
    command_line = [PROGRAM, "run", "--pull", "never", "--name", f"{network}-{host}", "--label", f"{LABEL}={folder}"]
    command_line += ["--network", network, "--hostname", host, "--network-alias", host, "--log-driver", "none"]
    command_line += ["--shm-size", "1g", "--stop-signal", "SIGTERM"]
    environment = {"TRAINING_JOB_NAME": attempt_id, **request.get("Environment", {})}
    if of_hosts := request.get("Gpus"):
        environment["CLOUDTRAIN_GPUS"] = of_hosts[int(host.rpartition("-")[2]) - 1]
    if request["ResourceConfig"]["InstanceType"] == "local_gpu" and environment.get("CLOUDTRAIN_GPUS") != "":
        command_line += ["--gpus", "all"]
    for variable, value in environment.items():
        command_line += ["--env", f"{variable}={value}"]
    for source, target, writable in mounts:
        command_line += ["--mount", _mount(source, target, writable)]
    if not entrypoint:
        return [*command_line, specification["TrainingImage"], "train"]
    return [*command_line, "--entrypoint", entrypoint[0], specification["TrainingImage"], *entrypoint[1:]]


def send_signal(container: str, number: str) -> bool:
    """Send a signal to a container's first process; False if the container is not running."""
    try:
        call("kill", "--signal", number, container)
    except EngineError:
        return False
    return True


def read_exit_code(container: str) -> tuple[int | None, str]:
    """Return a container's exit code and Docker's error about its start; None for a container that does not exist."""
    try:
        state = json.loads(call("inspect", "--type", "container", "--format", "{{json .State}}", container))
    except EngineError:
        return None, ""
    return int(state["ExitCode"]), str(state.get("Error") or "")


def remove_all(folder: Path) -> None:
    """Remove an attempt's containers and network; blocking. Raises EngineError."""
    if remaining := list_containers(folder):
        try:
            call("rm", "--force", "--volumes", *remaining)
        except EngineError:
            if list_containers(folder):
                raise
    for network in call("network", "ls", "--quiet", "--filter", f"label={LABEL}={folder}").split():
        try:
            call("network", "rm", network)
        except EngineError:
            if network in call("network", "ls", "--quiet"):
                raise


def take_over(folder: Path, image: str) -> None:
    """Give this user what containers wrote below a folder as others, so that it can be read and removed; blocking.

    With a rootless engine root's files are this user's already, and those of others become root's. Raises EngineError.
    """
    owners = {path.lstat().st_uid for path in folder.rglob("*")} - {os.getuid()}
    if os.getuid() and owners:
        owner = f"{os.getuid()}:{os.getgid()}" if 0 in owners else "0:0"
        here = ["--user", "0", "--network", "none", "--mount", _mount(str(folder), "/files", True)]
        call("run", "--rm", "--pull", "never", *here, "--entrypoint", "chown", image, "-hR", owner, "/files")


def _mount(source: str, target: str, writable: bool) -> str:
    """Return the value of docker's `--mount`: comma-separated, quoted where a path has a comma."""
    fields = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()
