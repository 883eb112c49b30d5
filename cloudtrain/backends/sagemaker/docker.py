"""A container engine through its command line, `docker`: hosts of an attempt as containers in a network of their own.

All that is made for an attempt bears its folder as a label, so that it can be found and removed by whoever comes later.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.backends import images
from cloudtrain.errors import BackendError

PROGRAM = "docker"
LABEL = "cloudtrain.attempt"
ASK_S = 120.0  # how long one question may take; a busy machine's engine is slow to remove what was large
INSTALL = "install Docker (Debian: docker.io) and start its engine; docs/sagemaker.md"


class EngineError(BackendError):
    """The engine refused, or there is none."""


def ask(*words: str) -> str:
    """Run a command of the engine and return what it printed; blocking. Raises EngineError."""
    try:
        done = subprocess.run(
            [PROGRAM, *words], capture_output=True, text=True, timeout=ASK_S, stdin=subprocess.DEVNULL, check=False
        )
    except FileNotFoundError:
        raise EngineError("there is no docker on this machine", INSTALL) from None
    except subprocess.TimeoutExpired:
        raise EngineError(f"docker {words[0]} has not answered for {ASK_S:.0f} s") from None
    if done.returncode == 0:
        return done.stdout
    said = (done.stderr.strip() or done.stdout.strip() or str(done.returncode)).splitlines()[-1]
    if "daemon" in said and ("connect" in said or "running" in said):
        raise EngineError("Docker's engine does not answer", f"start it: {INSTALL}")
    if "permission denied" in said:
        raise EngineError("this user may not use Docker's engine", "add the user to the group docker")
    raise EngineError(f"docker {words[0]} failed: {said.removeprefix('Error response from daemon: ')}")


def missing(image: str) -> str:
    """Return why an image cannot be run, "" when it is here; raises EngineError where there is no engine."""
    ask("version", "--format", "{{.Server.Version}}")
    if not shutil.which(PROGRAM):
        return "there is no docker"
    try:
        ask("image", "inspect", "--format", "{{.Id}}", image)
    except EngineError:
        return f"the image {image} is not on this machine"
    return ""


def image(named: str) -> str:
    """Return the image that a name stands for on this machine, "" where that cannot be found out; blocking."""
    try:
        found = json.loads(ask("image", "inspect", "--format", "{{json .}}", named))
    except (EngineError, ValueError):
        return ""
    return identity(named, found) if isinstance(found, dict) else ""


def identity(named: str, found: Mapping[str, Any]) -> str:
    """Return the digest that an inspected image has in its name's own registry, else in another, else its id here.

    One that was built here and never pushed has an id alone. Of several digests the one that the name itself says is taken.
    """
    wanted = images.reference(named)
    known = [said for said in map(str, found.get("RepoDigests") or ()) if images.exact(said)]
    own = [said for said in known if images.reference(said)[:2] == wanted[:2]]
    asked = [said for said in own if images.reference(said).digest == wanted.digest]
    return images.exact(next(iter([*asked, *own, *known]), str(found.get("Id") or "")))


def name(folder: Path, attempt_id: str) -> str:
    """Return the name of an attempt's network and the beginning of its containers': two homes may have the same run."""
    return f"{attempt_id}-{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"


def containers(folder: Path) -> list[str]:
    """Return the ids of an attempt's containers, whatever they do."""
    return ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={LABEL}={folder}").split()


def connect(folder: Path, attempt_id: str) -> str:
    """Make an attempt's network and return its name."""
    made = name(folder, attempt_id)
    ask("network", "create", "--label", f"{LABEL}={folder}", made)
    return made


def command(
    folder: Path,
    attempt_id: str,
    host: str,
    request: Mapping[str, Any],
    mounts: Sequence[tuple[str, str, bool]],  # source, target, whether it may be written
) -> list[str]:
    """Return the command that runs a host's container in the foreground."""
    specification = request["AlgorithmSpecification"]
    # Without a command of ours SageMaker gives the image's own one argument, `train`.
    words = [*specification.get("ContainerEntrypoint", ()), *specification.get("ContainerArguments", ())]
    network = name(folder, attempt_id)
    made = [PROGRAM, "run", "--pull", "never", "--name", f"{network}-{host}", "--label", f"{LABEL}={folder}"]
    made += ["--network", network, "--hostname", host, "--network-alias", host, "--log-driver", "none"]
    made += ["--shm-size", "1g", "--stop-signal", "SIGTERM"]
    if request["ResourceConfig"]["InstanceType"] == "local_gpu":
        made += ["--gpus", "all"]
    for variable, value in {"TRAINING_JOB_NAME": attempt_id, **request.get("Environment", {})}.items():
        made += ["--env", f"{variable}={value}"]
    for source, target, writable in mounts:
        made += ["--mount", _mount(source, target, writable)]
    if not words:
        return [*made, specification["TrainingImage"], "train"]
    return [*made, "--entrypoint", words[0], specification["TrainingImage"], *words[1:]]


def send(container: str, number: str) -> bool:
    """Send a signal to a container's first process; False where it does not run, not yet or no more."""
    try:
        ask("kill", "--signal", number, container)
    except EngineError:
        return False
    return True


def exit_code(container: str) -> tuple[int | None, str]:
    """Return a container's exit code and what the engine says of its start; None for one that is not there."""
    try:
        state = json.loads(ask("inspect", "--type", "container", "--format", "{{json .State}}", container))
    except EngineError:
        return None, ""
    return int(state["ExitCode"]), str(state.get("Error") or "")


def remove(folder: Path) -> None:
    """Remove all that was made for an attempt; blocking. Raises EngineError."""
    if left := containers(folder):
        try:
            ask("rm", "--force", "--volumes", *left)
        except EngineError:
            if containers(folder):
                raise
    for network in ask("network", "ls", "--quiet", "--filter", f"label={LABEL}={folder}").split():
        try:
            ask("network", "rm", network)
        except EngineError:
            if network in ask("network", "ls", "--quiet"):
                raise


def _mount(source: str, target: str, writable: bool) -> str:
    """Return a bind mount as docker reads it: comma-separated values, quoted where a path holds a comma."""
    fields = ["type=bind", f"source={source}", f"target={target}", *([] if writable else ["readonly"])]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(fields)
    return text.getvalue()
