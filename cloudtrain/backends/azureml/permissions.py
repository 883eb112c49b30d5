"""The least that a submitter needs, as one custom role of Azure.

Actions: Microsoft.MachineLearningServices and Microsoft.Storage of the resource provider operations; the built-in roles that
have them are AzureML Data Scientist and Storage Blob Data Contributor (built-in-roles page, 2026-11-30).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.azureml.request import workspace_id

_WORKSPACE = "Microsoft.MachineLearningServices/workspaces"
_BLOBS = "Microsoft.Storage/storageAccounts/blobServices/containers/blobs"


def role(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a role definition as `az role definition create --role-definition FILE` takes it."""
    group = workspace_id(options).partition("/providers/")[0]
    return {
        "Name": f"cloudtrain submitter of {options['workspace']}",
        "Description": "Submits and reads command jobs, and keeps bundles and results in Blob Storage.",
        "Actions": [
            f"{_WORKSPACE}/read",
            f"{_WORKSPACE}/jobs/read",
            f"{_WORKSPACE}/jobs/write",
            f"{_WORKSPACE}/jobs/cancel/action",
            f"{_WORKSPACE}/experiments/runs/read",
            f"{_WORKSPACE}/environments/versions/read",
            f"{_WORKSPACE}/environments/versions/write",
            f"{_WORKSPACE}/computes/read",
            f"{_WORKSPACE}/datastores/read",
        ],
        "DataActions": [f"{_BLOBS}/read", f"{_BLOBS}/write", f"{_BLOBS}/add/action", f"{_BLOBS}/delete"],
        "AssignableScopes": [group],
    }
