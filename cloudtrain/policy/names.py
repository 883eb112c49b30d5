"""Names in rules that match nothing known here: a typo in `on` would switch its rule off."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase

from cloudtrain.backends import machines, registry
from cloudtrain.job.problems import nearest
from cloudtrain.policy.files import BadPolicy, Policy, Rule

# An account of AWS: https://docs.aws.amazon.com/accounts/latest/reference/manage-acct-identifiers.html (2026-11-29). A project:
# https://cloud.google.com/resource-manager/docs/creating-managing-projects (2026-11-29), before it the domain of an old one.
# Last a subscription of Azure, which is a UUID.
ACCOUNT = r"\d{12}|([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]|[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"


def check(policies: Sequence[Policy], targets: Collection[str]) -> list[str]:
    """Return what matches nothing known, one sentence each.

    Args:
        policies: those of a job.
        targets: the targets that the configuration names.

    Raises:
        BadPolicy: all names of a rule's `on` match nothing, so that the rule would be for no job.
    """
    notes: list[str] = []
    for rule in (rule for policy in policies for rule in policy.rules):
        off = list(_unknown(rule, "on", rule.on, {*targets, *registry.names()})) if rule.on else []
        if off and len(off) == len(rule.on):
            name = rule.on[0].replace("*", "")
            raise BadPolicy(
                "; ".join(off),
                "correct the name there; where it is right and a target of other machines, make it known here: "
                f'[targets.{name}] with backend = "..." in cloudtrain.toml',
            )
        notes += off
        for key, known in _lists(rule, targets):
            notes += _unknown(rule, key, rule.requires[key], known)
        for account in rule.requires.get("accounts", ()):
            if not re.fullmatch(ACCOUNT, account) and not set(account) & set("*?["):
                notes.append(
                    f'accounts of {rule.place("accounts")}: "{account}" is no AWS account (12 digits), no Google project'
                    " and no Azure subscription"
                )
    return notes


def _lists(rule: Rule, targets: Collection[str]) -> Iterator[tuple[str, Collection[str]]]:
    """Yield the requirements whose names are known, each with these names."""
    if "targets" in rule.requires:
        yield "targets", {*targets, *registry.names()}
    if "backends" in rule.requires:
        yield "backends", registry.names()
    if "instance_types" in rule.requires:
        yield "instance_types", {machine.name for table in machines.TABLES for machine in machines.load(table)}


def _unknown(rule: Rule, key: str, patterns: Sequence[str], known: Collection[str]) -> Iterator[str]:
    kinds = {"on": "target or backend", "targets": "target or backend", "backends": "backend"}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            near = nearest(pattern, known)
            meant = f" (did you mean {near}?)" if near else ""
            what = kinds.get(key, "machine in cloudtrain's lists")
            yield f'{key} of {rule.place(key)}: "{pattern}" matches no {what} that is known here{meant}'
