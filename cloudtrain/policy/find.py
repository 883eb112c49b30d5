"""Find the policies that hold for a job.

A policy is in force beside each cloudtrain.toml that counts, and where `[policy] from` of one names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cloudtrain.job import configfile, targets
from cloudtrain.policy.files import POLICY_FILE, Policy, read


def find(
    folders: Sequence[Path], home: Path, earlier: Sequence[Mapping[str, Any]] = ()
) -> tuple[list[Policy], list[str]]:
    """Return the policies for a job that concerns some folders, and notes; reads files, opens no connection.

    Args:
        folders: at or above each of them the project's policy.toml is looked for; the nearest of each counts.
        home: where copies of an organisation's policies are pinned.
        earlier: what an older plan of the run keeps of its policies: these hold too.

    Raises:
        BadPolicy: a file is wrong, or an organisation's policy is not pinned here.
    """
    found: dict[str, Policy] = {}
    for folder in folders:
        for path in targets.config_files(folder, POLICY_FILE):
            found.setdefault(str(path), read(path))
    for folder in folders:
        for url, sha256 in configured(folder).items():
            from cloudtrain.policy import pin

            pinned = pin.load(url, home, sha256)
            found[pinned.file] = pinned
    notes = []
    for old in earlier:
        if old.get("code"):  # of an installed package, which is asked at every plan
            continue
        path = Path(old["file"])
        if str(path) in found:
            continue
        if not path.is_file():
            notes.append(f"the policy {path} of an earlier attempt no longer exists: its rules were not checked")
        elif old.get("from"):
            from cloudtrain.policy import pin

            found[str(path)] = pin.load(str(old["from"]), home)
        else:
            found[str(path)] = read(path)
    return list(found.values()), notes


def folders_of(folder: Path, source: str, entrypoint: str | Sequence[str] | None) -> list[Path]:
    """Return where a job's policies are looked for: at its job file, its source and its script.

    Args:
        folder: the job file's, or the current one.
        source: the folder that is packaged; an address names none.
        entrypoint: as in the job file.
    """
    found = [folder.absolute()]
    root = Path(source)
    if "://" not in source and root.is_dir():
        found.append(root.absolute())
        if isinstance(entrypoint, str) and (root / entrypoint).is_file():
            found.append((root / entrypoint).absolute().parent)
    return list(dict.fromkeys(found))


def configured(folder: Path) -> dict[str, str]:
    """Return the addresses of the organisation's policies that a folder's configuration names, with their digests or ""."""
    found = {}
    for path in targets.config_files(folder):
        table = configfile.read(path).value.get("policy") or {}
        if table:
            found[str(table["from"])] = str(table.get("sha256") or "")
    return found
