"""Build and push the image of the shared trainer: images/build.sh and docker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cloudtrain.backends import docker
from cloudtrain.backends.images import ImageRegistry, parse_reference
from cloudtrain.errors import BadRequest

NAME = "cloudtrain-train"
SCRIPT = Path(__file__).parents[2] / "images" / "build.sh"
_PUSHED = re.compile(r"digest: (sha256:[0-9a-f]{64}) size: \d+")


def build(kind: str, *, toolkit: bool = False) -> str:
    """Build the image of this checkout and return its name; blocking, many minutes. A current image is left as it is.

    Args:
        kind: cpu or gpu, chooses the lock file of images/.
        toolkit: With SageMaker's training toolkit.

    Raises:
        BadRequest: cloudtrain was installed from a wheel, which holds no images/.
        EngineError: Docker is not installed, does not answer, or the build failed.
    """
    if not SCRIPT.is_file():
        raise BadRequest(
            f"{SCRIPT} does not exist: the image can only be built in a checkout of cloudtrain",
            "clone cloudtrain and run the command there, or push an image of yours with --image NAME",
        )
    docker.call("version", "--format", "{{.Server.Version}}")
    name = f"{NAME}:{kind}" + "-toolkit" * toolkit
    environment = {**os.environ, "KIND": kind, "PYTHON": sys.executable}
    environment.pop("TOOLKIT", None)
    if toolkit:
        environment["TOOLKIT"] = "1"
    done = subprocess.run(
        ["bash", str(SCRIPT), name], env=environment, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False
    )
    if done.returncode:
        raise docker.EngineError(
            f"{SCRIPT} failed with exit code {done.returncode}",
            "read its output above; the head of the script lists its variables",
        )
    return name


def push(image: str, to: str, login: ImageRegistry | None, report: Callable[[str], None]) -> str:
    """Tag an image, push it, and return registry/name@sha256:...; blocking, minutes.

    Args:
        image: An image on this machine.
        to: registry/name:tag.
        login: Passed to `docker login` first; None where docker is logged in already, or need not be.
        report: Called with each line of docker's progress.

    Raises:
        EngineError: Docker is not installed or does not answer, the image does not exist, or the registry refuses it.
    """
    docker.call("tag", image, to)
    if login:
        docker.call("login", "--username", login.user, "--password-stdin", login.host, text=login.password)
    pushed = _PUSHED.findall(docker.stream("push", to, report=report))
    if not pushed:
        raise docker.EngineError(
            f"docker push {to} printed no digest", "run docker push yourself, and write the digest into the target"
        )
    reference = parse_reference(to)
    return f"{reference.registry}/{reference.name}@{pushed[-1]}"
