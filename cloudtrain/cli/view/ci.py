"""The CI file that `cloudtrain init --ci` writes: a plan for each change, a run for each commit on main.

The files are in cloudtrain/cli/ci: lines between `#? policy` and `#?` count with a policy, `#+ NAME` stands for the lines
below `#? SYSTEM NAME` in the file of the backend (Traits.ci), and `@NAME@` is a value. In a backend's file it is one of
`Backend.ci_values`; `@NAME|DEFAULT@` may be none of them, and a line with another name that is none is left out.
Actions are pinned to commits (2026-11-25), each with its version behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cloudtrain.backends import registry
from cloudtrain.errors import BadRequest

PATHS = {"github": ".github/workflows/cloudtrain.yml", "gitlab": ".gitlab-ci.yml"}
TEMPLATES = Path(__file__).parents[1] / "ci"
_VALUE = re.compile(r"@([a-z_]+)(?:\|([^@]*))?@")


@dataclass(frozen=True)
class Place:
    """What a CI file says of the target: its backend and options, what pip installs, and whether there is a policy."""

    backend: str
    options: Mapping[str, object] = field(default_factory=dict)
    wheel: str = ""  # what pip installs as cloudtrain
    pinned_policy: bool = False  # an organisation's policy, which doctor fetches

    @property
    def todo(self) -> str:
        """What a person does so that the CI file can log in; "" for nothing."""
        return "".join(self._login.get("todo", []))

    def build(self, system: str, job: str, branch: str = "main") -> str:
        """Return the file for "github" or "gitlab"; `job` is the job file's path in the repository. Raises BadRequest."""
        client, login = registry.traits(self.backend).client, self._login
        values = {
            "job": job,
            "branch": branch,
            "wheel": json.dumps(self.wheel)[1:-1],
            "client": f" {client}" if client else "",
            "identity": ", id-token: write" if login.get("github login") else "",
        }
        lines: list[str] = []
        shown = True
        for line in (TEMPLATES / f"{system}.yml").read_text("utf-8").splitlines():
            if line.startswith("#?"):
                shown = line == "#?" or self.pinned_policy
            elif line.startswith("#+"):
                lines += login.get(f"{system} {line[3:]}", [])
            elif shown:
                lines.append(_VALUE.sub(lambda match: values[match[1]], line))
        return "\n".join(lines) + "\n"

    @cached_property
    def _login(self) -> dict[str, list[str]]:
        """The parts of the backend's own file by their names; raises BadRequest."""
        parts: dict[str, list[str]] = {}
        kind = registry.backend_class(self.backend)
        values = kind.ci_values(self.options)
        part: list[str] = []
        for line in kind.traits.ci.read_text("utf-8").splitlines() if kind.traits.ci else ():
            if line.startswith("#?"):
                part = parts.setdefault(line[2:].strip(), [])
            elif all(match[1] in values or match[2] is not None for match in _VALUE.finditer(line)):
                part.append(_VALUE.sub(lambda match: _checked(match[1], values.get(match[1]) or match[2]), line))
        return parts


def _checked(name: str, value: str) -> str:
    if not re.fullmatch(r"[\w.:/@\[\]-]+", value):
        raise BadRequest(f"a CI file cannot name the {name} {value}", "rename it: letters, digits, . _ : / @ [ ] -")
    return value
