"""Fetch an organisation's policy and keep a copy of it, which plans read without a network.

<home>/policies/<digest of the address>/policy.toml
                                        pin.json      address, commit, digest of the file, when it was fetched
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path

from cloudtrain.clock import SYSTEM
from cloudtrain.errors import BackendError
from cloudtrain.job.homes import new_file
from cloudtrain.policy import files
from cloudtrain.policy.files import POLICY_FILE, BadPolicy, Policy

OLD_DAYS = 30
MAX_BYTES = 256 << 10


def pin(url: str, home: Path, sha256: str = "") -> Policy:
    """Fetch a policy and replace the pinned copy; blocking. One that is wrong leaves the old copy.

    Args:
        url: git+https://host/repo@rev, git+ssh://..., or https://host/policy.toml.
        sha256: what the file's digest must be; "" for any.

    Raises:
        BadPolicy: it is no policy, or has another digest.
        BackendError: it cannot be read. BadSource: git cannot get it.
    """
    content, commit = _read(url, home)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 and digest != sha256:
        raise BadPolicy(
            f"the policy of {url} has the digest {digest}, and [policy] names {sha256}", "ask who changed it"
        )
    folder = _folder(url, home)
    folder.mkdir(parents=True, exist_ok=True)
    trial = folder / f"new-{POLICY_FILE}"
    trial.write_bytes(content)
    try:
        files.read(trial)
    finally:
        trial.unlink()
    with new_file(folder / POLICY_FILE) as file:
        file.write(content)
    as_of = SYSTEM.utc().isoformat(timespec="seconds")
    with new_file(folder / "pin.json") as file:
        file.write(json.dumps({"from": url, "commit": commit, "sha256": digest, "as_of": as_of}, indent=1).encode())
    return load(url, home, sha256)


def load(url: str, home: Path, sha256: str = "") -> Policy:
    """Return the pinned copy of a policy; raises BadPolicy where there is none, or it was changed since."""
    folder = _folder(url, home)
    try:
        about = json.loads((folder / "pin.json").read_text("utf-8"))
        found = files.read(folder / POLICY_FILE, url, str(about["as_of"]))
    except (OSError, ValueError, KeyError, TypeError):
        raise BadPolicy(f"the policy of {url} is not pinned here: nothing is planned without it",
                        "cloudtrain doctor fetches it") from None  # fmt: skip
    if found.sha256 != about["sha256"] or (sha256 and found.sha256 != sha256):
        raise BadPolicy(f"{found.file} is not the policy that was pinned", "cloudtrain doctor fetches it again")
    return found


def age_days(policy_as_of: str) -> int:
    """Return how old a pinned copy is, in whole days."""
    return (SYSTEM.utc() - datetime.fromisoformat(policy_as_of)).days


def _folder(url: str, home: Path) -> Path:
    return home / "policies" / hashlib.sha256(url.encode()).hexdigest()[:16]


def _read(url: str, home: Path) -> tuple[bytes, str]:
    """Return the policy's bytes, and the commit that they are from, "" without one."""
    if url.startswith("git+"):
        from cloudtrain.source.clone import fetch_git

        folder, commit = fetch_git(url, home / "sources")
        path = folder / POLICY_FILE
        if not path.is_file() or path.is_symlink():
            raise BadPolicy(f"{url} has no {POLICY_FILE} at {commit[:12]}", f"it must hold {POLICY_FILE}")
        content = path.read_bytes()[: MAX_BYTES + 1]
    else:
        from cloudtrain.forecast import download

        commit = ""
        content = download.within(download.SILENCE_S, lambda: download.content(url, MAX_BYTES), url)
    if len(content) > MAX_BYTES:
        raise BackendError(f"the policy file at {url} is larger than {MAX_BYTES >> 10} KiB")
    return content, commit
