"""Parse policy.toml, the rules of one file.

[rules.machines]                        # a name, which refusals print
why = "small machines first"
on = ["prod"]                           # backends or targets; left out: everywhere
instance_types = ["ml.g5.*"]            # patterns as in a shell
max_runtime = "24h"
set = {"resources.use_spot" = true}     # written into each job
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloudtrain.errors import BadRequest, Problem
from cloudtrain.job import configfile, units
from cloudtrain.job.problems import nearest, quote
from cloudtrain.job.providers import EXAMPLE

if TYPE_CHECKING:
    from cloudtrain.job.document import Document

POLICY_FILE = "policy.toml"
PATTERNS = ("targets", "backends", "accounts", "regions", "instance_types", "images", "output")
FLAGS = ("image_by_digest", "spot", "network_isolation")
AMOUNTS = {"max_runtime": units.duration_s, "max_cost": units.usd}
NUMBERS = ("max_usd_per_hour",)
COUNTS = ("max_gpus",)
REQUIREMENTS = ("labels", *PATTERNS, *FLAGS, *AMOUNTS, *NUMBERS, *COUNTS)
# What a policy may set: not what a run trains.
SETTABLE = (
    "audit",
    "labels",
    "resources",
    "limits",
    "options",
    "output",
    "env",
    "image",
    "retry",
    "checkpoint",
    "environment",
)


class BadPolicy(BadRequest):
    """A policy file cannot be used; no job is planned under it."""


@dataclass(frozen=True)
class Rule:
    """One named rule: what it requires, and what it sets."""

    name: str
    why: str
    on: tuple[str, ...]  # backends or targets, as patterns; () for all
    requires: Mapping[str, Any]  # by the names in REQUIREMENTS
    sets: Mapping[str, Any]  # dotted key of a job file -> value
    file: str
    lines: Mapping[str, int | None]  # of each requirement

    def place(self, requirement: str) -> str:
        """Return the rule's name and where it says this, for a message."""
        line = self.lines.get(requirement)
        return f"rule {self.name}, {self.file}" + (f":{line}" if line else "")

    @property
    def reason(self) -> str:
        return f": {self.why}" if self.why else ""


@dataclass(frozen=True)
class Policy:
    """The rules of one file."""

    file: str  # its path, as messages name it
    sha256: str
    rules: tuple[Rule, ...]
    origin: str = ""  # the address of an organisation's policy
    as_of: str = ""  # when it was pinned, ISO 8601

    def to_dict(self) -> dict[str, Any]:
        """Return what a plan keeps of it."""
        return {"file": self.file, "sha256": self.sha256, "rules": len(self.rules), "from": self.origin,
                "as_of": self.as_of}  # fmt: skip


def read(path: Path, origin: str = "", as_of: str = "") -> Policy:
    """Return the policy of a file; raises BadPolicy with all that is wrong in it."""
    document = configfile.load(path)
    problems: list[Problem] = []
    rules = tuple(_rules(document, problems))
    if problems:
        raise BadPolicy("\n  ".join([f"{path} is not a policy:", *map(str, problems)]), "docs: reference/policy.md")
    return Policy(str(path), hashlib.sha256(path.read_bytes()).hexdigest(), rules, origin, as_of)


def _rules(document: Document, problems: list[Problem]) -> list[Rule]:
    def add(message: str, path: tuple[str, ...], hint: str) -> None:
        mark = document.mark(path)
        problems.append(Problem(message, ".".join(path), hint, mark.file, mark.line))

    for name in document.value:
        if name != "rules":
            add("is not a known table", (name,), "a policy holds [rules.NAME]")
    tables = document.value.get("rules", {})
    if not isinstance(tables, dict) or not tables:
        add("holds no rule", ("rules",), "write [rules.NAME] and what it requires")
        return []
    made = []
    for name, table in tables.items():
        at = ("rules", name)
        if not isinstance(table, dict):
            add("must be a table", at, f"write [rules.{name}]")
            continue
        before = len(problems)
        requires: dict[str, Any] = {}
        for key, value in table.items():
            if key in ("why", "on", "set"):
                continue
            try:
                requires[key] = _requirement(key, value)
            except ValueError as error:
                message, _, hint = str(error).partition("; ")
                add(message, (*at, key), hint)
        sets = table.get("set", {})
        for problem in _wrong_sets(sets):
            add(problem, (*at, "set"), f"a policy sets keys of {', '.join(SETTABLE)}")
        if not isinstance(table.get("why", ""), str):
            add("must be a text", (*at, "why"), 'why = "small machines first"')
        try:
            on = _patterns(table.get("on", []))
        except ValueError:
            add("must be names of backends or targets", (*at, "on"), f'on = ["{EXAMPLE}"]')
        if len(problems) == before and not requires and not sets:
            add("requires nothing", at, f"use {', '.join(REQUIREMENTS)} and set")
        if len(problems) > before:
            continue
        lines = {key: document.mark((*at, key)).line for key in table} | {"": document.mark(at).line}
        made.append(Rule(name, table.get("why", ""), tuple(on), requires, sets, document.mark(()).file, lines))
    return made


def _requirement(key: str, value: Any) -> Any:
    """Return a requirement as `checks` takes it; raises ValueError with "what is wrong; hint"."""
    if key == "labels":
        if not isinstance(value, dict) or not value:
            raise ValueError('must name labels; labels = {team = ["nlp", "vision"], project = "*"}')
        return {name: _patterns(allowed) for name, allowed in value.items()}
    if key in PATTERNS:
        if not (found := _patterns(value)):
            raise ValueError(f'allows nothing; {key} = ["..."], with * for any characters')
        return found
    if key in FLAGS:
        if value is not True:
            raise ValueError(f"can only be true; leave {key} out where it is not required")
        return True
    if key in AMOUNTS:
        try:
            AMOUNTS[key](value if isinstance(value, str) else "")
        except ValueError as error:
            raise ValueError(f"is not such an amount; {error}") from None
        return value
    if key in NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ValueError(f"is not such an amount; write a number above 0: {key} = 20")
        return value
    if key in COUNTS:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ValueError(f"is not such a count; write a whole number, 0 for none: {key} = 16")
        return value
    near = nearest(key, [*REQUIREMENTS, "why", "on", "set"])
    raise ValueError(
        "is not known; "
        + (f"did you mean {near}?" if near else f"use {', '.join([*REQUIREMENTS, 'on', 'why', 'set'])}")
    )


def _patterns(value: Any) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError('must be a list of texts; ["ml.g5.*"]')
    return items


def _wrong_sets(sets: Any) -> list[str]:
    if not isinstance(sets, dict):
        return ["must be a table"]
    return [f"cannot set {quote(key)}" for key in sets if key.partition(".")[0] not in SETTABLE]
