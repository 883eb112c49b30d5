"""Write the IAM bindings that a target's options need: of who submits, and of the account that a job runs as. Pure data.

Roles (https://cloud.google.com/vertex-ai/docs/general/access-control, https://cloud.google.com/storage/docs/access-control/iam-roles,
https://cloud.google.com/secret-manager/docs/access-control, 2026-11-25). The custom role holds those of docs/vertex.md alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cloudtrain.errors import BadRequest

JOBS = tuple(f"aiplatform.customJobs.{verb}" for verb in ("create", "get", "list", "cancel", "delete"))
LOG = ("logging.logEntries.list",)


def build_permissions(options: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a custom role for who submits, and bindings on the project, the bucket, the job's account and its secrets.

    `job` is a planned job, whose inputs and secrets its account reads, and whose output it writes.

    Raises BadRequest where the project or the bucket is not named.
    """
    for name in ("project", "bucket"):
        if not options.get(name):
            raise BadRequest(
                f"options.vertex.{name} is not set",
                f"write {name} = ... in the target: the permissions are granted on it",
            )
    submitter, bucket = ["group:TEAM@EXAMPLE.COM"], f"gs://{options['bucket']}"
    account = str(options.get("service_account") or "")
    own = (
        f"serviceAccount:{account}"
        if account
        else "serviceAccount:service-NUMBER@gcp-sa-aiplatform-cc.iam.gserviceaccount.com"
    )
    role = f"projects/{options['project']}/roles/cloudtrain"
    folder = f"projects/_/buckets/{options['bucket']}/objects/{options.get('prefix') or 'cloudtrain'}/"
    bindings = [
        _binding(f"projects/{options['project']}", role, submitter),
        _binding(bucket, "roles/storage.objectUser", [*submitter, own]),
    ]
    bindings += _buckets(job or {}, bucket, submitter, own)
    if account:
        bindings.append(_binding(f"serviceAccounts/{account}", "roles/iam.serviceAccountUser", submitter))
    parts = str(options.get("image") or "").split("/")
    if parts[0].endswith("-docker.pkg.dev") and len(parts) > 3:
        repository = f"projects/{parts[1]}/locations/{parts[0].removesuffix('-docker.pkg.dev')}/repositories/{parts[2]}"
        bindings.append(_binding(repository, "roles/artifactregistry.reader", [*submitter, own]))
    for name in _secrets(job or {}):
        secret = name if name.startswith("projects/") else f"projects/{options['project']}/secrets/{name}"
        bindings.append(_binding(secret.partition("/versions/")[0], "roles/secretmanager.secretAccessor", [own]))
    return {
        "role": {"title": "cloudtrain", "stage": "GA", "includedPermissions": [*JOBS, *LOG]},
        "bindings": bindings,
        "folder": folder,
    }


def _buckets(job: Mapping[str, Any], target: str, submitter: list[str], own: str) -> Iterator[dict[str, Any]]:
    """Yield the bindings of a job's buckets beside its target's: it reads the inputs and writes the output."""
    output = _bucket(job.get("output"))
    if output and output != target:
        yield _binding(output, "roles/storage.objectUser", [*submitter * bool(job.get("audit")), own])
        if not job.get("audit"):  # without it, who submits reads results and writes nothing there
            yield _binding(output, "roles/storage.objectViewer", submitter)
    inputs = dict.fromkeys(_bucket(each["uri"]) for each in (job.get("inputs") or {}).values())
    for name in inputs:
        if name not in ("", output, target):
            yield _binding(name, "roles/storage.objectViewer", [own])


def _bucket(uri: Any) -> str:
    """Return the bucket of an address of Cloud Storage, "" for another address."""
    found = re.match("gs://[^/]+", str(uri or ""))
    return found[0] if found else ""


def _secrets(job: Mapping[str, Any]) -> list[str]:
    """Return the names of a job's secrets in Secret Manager, each once."""
    places = [str(place) for places in (job.get("secrets") or {}).values() for place in places]
    return list(dict.fromkeys(name for store, _, name in (place.partition(":") for place in places)
                              if store == "gcp-secretmanager"))  # fmt: skip


def _binding(resource: str, role: str, members: list[str]) -> dict[str, Any]:
    return {"resource": resource, "role": role, "members": members}
