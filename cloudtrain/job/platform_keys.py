"""The keys of a job that its platform must carry out; the launcher carries out all others.

Each backend names in `Traits.keys` those that it takes. A job that uses another one is refused before anything is sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloudtrain.job.model import JobModel

_PRICES = {"usd_per_hour", "priced_as"}  # keys of `resources` that no platform reads
# Keys that cloudtrain itself carries out where a platform does not.
SHARED = ("limits.max_runtime", "limits.max_wait", "retry.max_attempts")
# What messages call a key; others are called as a job file writes them.
_WORDS = {
    "num_nodes": "more than one node",
    "min_nodes": "fewer nodes than asked for (min_nodes)",
    "image": "container images (image)",
    "resources.use_spot": "spot capacity (resources.use_spot)",
    "resources.instance_type": "instance types (resources.instance_type)",
    "roles.resources": "other machines for each role (roles.NAME.resources)",
    "roles.image": "another image for a role (roles.NAME.image)",
    "secrets.env": "secrets from the client's environment (env:NAME)",
    "secrets.file": "secrets from a file on the node (file:PATH)",
    "secrets.k8s": "secrets of a Kubernetes cluster (k8s:SECRET/KEY)",
}


def describe(key: str) -> str:
    """Return what a message calls a key."""
    return _WORDS.get(key, key)


def every() -> list[str]:
    """Return all platform keys, in the order of the job file."""
    from cloudtrain.job.sections import Resources

    resources = [f"resources.{name}" for name in Resources.model_fields if name not in _PRICES]
    return [
        "num_nodes",
        "min_nodes",
        "image",
        *resources,
        "roles.resources",
        "roles.image",
        "secrets.env",
        "secrets.file",
        "secrets.k8s",
    ]


def in_use(job: JobModel) -> list[str]:
    """Return the platform keys that a job uses."""
    sources = {source.partition(":")[0] for secret in job.secrets.values() for source in secret}
    only_k8s = any(all(source.startswith("k8s:") for source in secret) for secret in job.secrets.values())
    used = {
        "num_nodes": job.num_nodes > 1,
        "min_nodes": job.min_nodes is not None,
        "image": job.image is not None,
        "resources.accelerators": job.resources.gpus > 0,  # "0" hides those that are there
        "roles.resources": any(r.resources not in (None, job.resources) for r in job.roles.values()),
        "roles.image": any(r.image not in (None, job.image) for r in job.roles.values()),
        "secrets.env": "env" in sources,
        "secrets.file": "file" in sources,
        "secrets.k8s": only_k8s,
    }
    for name, field in type(job.resources).model_fields.items():
        if name not in _PRICES:
            used.setdefault(f"resources.{name}", getattr(job.resources, name) != field.default)
    return [key for key, uses in used.items() if uses]
