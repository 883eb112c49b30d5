"""What `doctor` asks of a workspace and its store, and what `init` finds in the environment."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from typing import Any

from cloudtrain.backends.azureml.client import Workspace
from cloudtrain.backends.store.blob import Blob
from cloudtrain.clock import Clock
from cloudtrain.errors import CloudtrainError, Problem

# `az config` keeps them as defaults; --query gives one JSON list
_DEFAULTS = ("az", "config", "get", "defaults", "--query", "[].{name:name,value:value}", "-o", "json")
_ACCOUNT = ("az", "account", "show", "--query", "id", "-o", "json")
CALL_S = 30.0


def check(options: Mapping[str, Any], clock: Clock) -> list[Problem]:
    """Return what would stop a submission: the workspace, the cluster or the store cannot be read. Blocking."""
    workspace, problems = Workspace(options, clock), []
    asked = {"workspace": ("", "the workspace cannot be read")}
    if options.get("compute"):
        asked["compute"] = (f"/computes/{options['compute']}", f"the cluster {options['compute']} cannot be read")
    for option, (path, failure) in asked.items():
        try:
            workspace.call("GET", path, failure)
        except CloudtrainError as error:
            problems.append(Problem(error.message, f"options.azureml.{option}", error.hint))
            break
    try:
        next(Blob(f"{options['store']}/bundles", clock=clock).folders(), None)
    except CloudtrainError as error:
        problems.append(Problem(error.message, "options.azureml.store", error.hint))
    return problems


def discover() -> dict[str, Any]:
    """Return subscription, resource group and workspace as the Azure CLI has them; {} without it. Blocking."""
    found = {str(each.get("name")): str(each.get("value")) for each in _ask(_DEFAULTS) or () if isinstance(each, dict)}
    values = {"subscription": _ask(_ACCOUNT), "resource_group": found.get("group"), "workspace": found.get("workspace")}
    return {name: value for name, value in values.items() if isinstance(value, str) and value}


def _ask(words: tuple[str, ...]) -> Any:
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_S, check=True)
        return json.loads(done.stdout or b"null")
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
