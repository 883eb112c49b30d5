"""What a platform enforces of rules: each backend writes it in the platform's own words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cloudtrain.backends.api import Backend, Requirement
from cloudtrain.policy.checks import holds
from cloudtrain.policy.files import Policy


def build(policies: Sequence[Policy], target: str, backend: Backend) -> tuple[dict[str, Any], list[str]]:
    """Return file name -> document for the rules of a target, and what the platform cannot hold, one sentence each."""
    documents, notes = backend.enforcement(list(requirements(policies, target, backend.name)))
    return dict(documents), notes


def requirements(policies: Sequence[Policy], target: str, backend: str) -> Iterator[Requirement]:
    """Yield what the rules for a target require and set."""
    for policy in policies:
        for rule in policy.rules:
            if holds(rule, target, backend):
                for key, wanted in rule.requires.items():
                    yield Requirement(rule.name, rule.why, key, wanted)
                for key, value in rule.sets.items():
                    yield Requirement(rule.name, rule.why, f"set {key}", value)
