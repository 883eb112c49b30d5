"""The CI file that `cloudtrain init --ci` writes: a plan for each change, a run for each commit on main.

The files are in cloudtrain/cli/ci: lines between `#? NAME` and `#?` belong to a backend or a condition, `@NAME@` is a value.
No key is stored: GitHub's or GitLab's identity token takes a role of AWS, or an account of Google. Actions are pinned to
commits (2026-11-25), each with its version behind it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cloudtrain.backends import registry

PATHS = {"github": ".github/workflows/cloudtrain.yml", "gitlab": ".gitlab-ci.yml"}
TEMPLATES = Path(__file__).parents[1] / "ci"


@dataclass(frozen=True)
class Place:
    """What a CI file says of the target: its backend, and where its account is."""

    backend: str
    account: str = ""
    region: str = ""
    project: str = ""
    server: str = ""  # of a Kubernetes cluster
    context: str = ""  # that the target names
    wheel: str = ""  # what pip installs as cloudtrain
    pinned_policy: bool = False  # an organisation's policy, which doctor fetches

    @property
    def role(self) -> str:
        return f"arn:aws:iam::{self.account or 'ACCOUNT'}:role/cloudtrain-ci"


def build(system: str, job: str, place: Place, branch: str = "main") -> str:
    """Return the file for "github" or "gitlab"; `job` is the job file's path in the repository."""
    conditions = {"": True, place.backend: True, "policy": place.pinned_policy}
    conditions[f"{place.backend} account"] = bool(place.account)
    traits = registry.traits(place.backend)
    values = {
        "job": job,
        "branch": branch,
        "wheel": _quoted(place.wheel),
        "client": f" {traits.client}" if traits.client else "",
        "identity": ", id-token: write" if traits.ci else "",
        "role": place.role,
        "account": place.account,
        "region": place.region or "us-east-1",
        "project": place.project or "PROJECT",
        "server": _quoted(place.server or "https://SERVER"),
        "context": place.context or "cluster",
    }
    lines, shown = [], True
    for line in (TEMPLATES / f"{system}.yml").read_text().splitlines():
        if line.startswith("#?"):
            shown = conditions.get(line[2:].strip(), False)
            continue
        for name in values if "@" in line else ():
            line = line.replace(f"@{name}@", values[name])
        if shown:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return a text as it stands between the quotes of a YAML string."""
    return json.dumps(text)[1:-1]
