"""The platforms that come with cloudtrain, named here and in their packages alone, and what installed packages add to them."""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# name -> "module:class", and the pip extra that installs what the module needs
BUILT_IN: dict[str, tuple[str, str | None]] = {
    "akash": ("cloudtrain.backends.akash.backend:AkashBackend", "akash"),
    "azureml": ("cloudtrain.backends.azureml.backend:AzuremlBackend", None),
    "kubernetes": ("cloudtrain.backends.kubernetes.backend:KubernetesBackend", None),
    "local": ("cloudtrain.backends.local.backend:LocalBackend", None),
    "sagemaker": ("cloudtrain.backends.sagemaker.backend:SagemakerBackend", "sagemaker"),
    "sagemaker-local": ("cloudtrain.backends.sagemaker.local:SagemakerLocalBackend", None),
    "slurm": ("cloudtrain.backends.slurm.backend:SlurmBackend", None),
    "ssh": ("cloudtrain.backends.ssh.backend:SshBackend", "ssh"),
    "vertex": ("cloudtrain.backends.vertex.backend:VertexBackend", "vertex"),
    "vertex-local": ("cloudtrain.backends.vertex.local:VertexLocalBackend", None),
}
DEFAULT_TARGET = "local"  # of a job that names none
EXTRAS = {
    "boto3": "sagemaker",
    "google-auth": "vertex",
    "azure-identity": "azure",
}  # a package that several backends use -> what installs it
JOB_FILES = {"sbatch": "cloudtrain.backends.slurm.sbatch"}  # as cloudtrain.job.forms describes
EXAMPLE = "sagemaker"  # the backend that help texts show
WHERE = f"a backend ({DEFAULT_TARGET}, {EXAMPLE}, ...) or a target of cloudtrain.toml"


def installed(group: str) -> list[EntryPoint]:
    """Return the entry points of a group by name; of two with one name, the one that is first on sys.path.

    Args:
        group: a group of cloudtrain's, such as "cloudtrain.backends".
    """
    points = [point for point in _entry_points(tuple(sys.path)) if point.group == group]
    return sorted({point.name: point for point in reversed(points)}.values(), key=lambda point: point.name)


@cache
def _entry_points(folders: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of packages that name a group of cloudtrain's, read once in a process.

    importlib.metadata reads the metadata of every package, some 20 ms a call.
    """
    found: list[EntryPoint] = []
    for folder in dict.fromkeys(folders):
        try:
            with os.scandir(folder or ".") as entries:
                packages = [each.path for each in entries if each.name.endswith((".dist-info", ".egg-info"))]
        except OSError:
            continue
        for package in packages:
            try:
                with open(f"{package}/entry_points.txt", "rb") as file:
                    named = b"[cloudtrain." in file.read()
            except OSError:
                continue
            if named:
                from importlib.metadata import Distribution

                found += Distribution.at(package).entry_points
    return found
