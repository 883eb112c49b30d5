"""Find the policies that hold for a job.

A policy is in force beside each cloudtrain.toml that counts, and where `[policy] from` of one names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.job import configfile, targets
from cloudtrain.policy import pin
from cloudtrain.policy.files import POLICY_FILE, Policy, read


def find(folder: Path | None, home: Path, earlier: Sequence[Mapping[str, Any]] = ()) -> tuple[list[Policy], list[str]]:
    """Return the policies for a job file in a folder, and notes; reads files, opens no connection.

    Args:
        folder: the job file's, at or above which the project's policy.toml is looked for; None for no folder.
        home: where copies of an organisation's policies are pinned.
        earlier: what an older plan of the run keeps of its policies: these hold too.

    Raises:
        BadPolicy: a file is wrong, or an organisation's policy is not pinned here.
    """
    paths = targets.config_files(folder, POLICY_FILE) if folder else []
    found = {str(path): read(path) for path in paths}
    for url, sha256 in configured(folder).items() if folder else ():
        pinned = pin.load(url, home, sha256)
        found[pinned.file] = pinned
    notes = []
    for old in earlier:
        path = Path(old["file"])
        if str(path) in found:
            continue
        if not path.is_file():
            notes.append(f"the policy {path} of an earlier attempt no longer exists: its rules were not checked")
        elif old.get("from"):
            found[str(path)] = pin.load(str(old["from"]), home)
        else:
            found[str(path)] = read(path)
    return list(found.values()), notes


def configured(folder: Path) -> dict[str, str]:
    """Return the addresses of the organisation's policies that a folder's configuration names, with their digests or ""."""
    found = {}
    for path in targets.config_files(folder):
        table = configfile.read(path).value.get("policy") or {}
        if table:
            found[str(table["from"])] = str(table.get("sha256") or "")
    return found
