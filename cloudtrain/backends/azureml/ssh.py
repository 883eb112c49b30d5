"""The command that opens a shell in a container of a job: SSH, which a job of a cluster offers where it names a key.

learn.microsoft.com/azure/machine-learning/how-to-interactive-jobs (2026-11-30).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.shell import Shell
from cloudtrain.errors import BackendError

KEY = "PRIVATE_KEY_FILE"
NEEDS = (
    f"it needs the Azure CLI with its extension ml, openssh-server in the image, and for {KEY} the private key"
    " of options.azureml.ssh_public_key; only who submitted the job may use it"
)


def shell(job: Mapping[str, Any] | None, name: str, node: int, options: Mapping[str, Any]) -> Shell:
    """Return the command for a node of a job, or what must be written first. Raises BackendError without such a node."""
    if job is None:
        raise BackendError(f"the workspace has no job {name}")
    own = job["properties"]
    nodes = int((own.get("resources") or {}).get("instanceCount") or 1)
    if node >= nodes:
        raise BackendError(f"there is no node {node}: they are counted from 0, and the last is {nodes - 1}")
    if "ssh" not in (own.get("services") or {}):
        return Shell(
            note="Azure opens shells only on clusters, with options.azureml.ssh_public_key; submit it again with both"
        )
    words = ("--name", name, "--node-index", str(node), "--private-key-file-path", KEY)
    place = {"--subscription": "subscription", "--resource-group": "resource_group", "--workspace-name": "workspace"}
    where = (word for flag, option in place.items() for word in (flag, str(options[option])))
    return Shell(address=shlex.join(["az", "ml", "job", "connect-ssh", *words, *where]), note=NEEDS)
