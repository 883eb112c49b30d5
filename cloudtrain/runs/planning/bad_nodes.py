"""Nodes that ended an attempt by their hardware, as the history of this home has them: later attempts avoid them for a week."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from cloudtrain.events import PLATFORM, State

if TYPE_CHECKING:
    from cloudtrain.backends.api import Backend, Plan
    from cloudtrain.history.records import AttemptRecord
    from cloudtrain.history.store import Store

DAYS = 7
CLEARED = "node-cleared"  # event of an attempt: a person uses its node again
_FAILED = re.compile(r"^node \d+ \((?P<name>[\w@.:\[\]-]{1,253})\) failed the health check: (?P<why>.*)", re.MULTILINE)


class BadNode(NamedTuple):
    """A node by the name that its platform, or the target's list of hosts, has for it."""

    target: str
    name: str
    why: str
    at: str
    attempt_id: str


def bad_nodes(store: Store) -> list[BadNode]:
    """Return the nodes that failed in the last 7 days and were not cleared since, one row for each, the newest first."""
    return list({(node.target, node.name): node for node in _failures(store)}.values())[::-1]


def avoid(store: Store, backend: Backend, plan: Plan) -> Plan:
    """Return the plan of an attempt that avoids the bad nodes of its target, where the platform gives a choice."""
    names = [node.name for node in bad_nodes(store) if node.target == (plan.target or plan.backend)]
    return backend.avoid(plan, names) if names else plan


def clear(store: Store, name: str) -> int:
    """Use a node again; return on how many targets it was avoided."""
    nodes = [node for node in _failures(store) if node.name == name]
    for node in nodes:
        store.add_event(node.attempt_id, CLEARED, {"name": name})
    return len({node.target for node in nodes})


def _failures(store: Store) -> Iterator[BadNode]:
    """Yield each failure of the last 7 days that was not cleared, the oldest first."""
    since = (store.clock.utc() - timedelta(days=DAYS)).strftime("%Y-%m-%dT%H:%M:%SZ")
    for attempt in store.ended_since(since, (State.LOST, State.FAILED)):
        node = _of_attempt(store, attempt)
        if node is not None and not store.latest(attempt.attempt_id, PLATFORM, CLEARED):
            yield node


def _of_attempt(store: Store, attempt: AttemptRecord) -> BadNode | None:
    """Return the node whose hardware ended an attempt: by the check before its start, or by what a rank printed."""
    place, at = attempt.plan.target or attempt.plan.backend, attempt.status.ended_at or ""
    if match := _FAILED.search(attempt.status.reason):
        return BadNode(place, match["name"], match["why"], at, attempt.attempt_id)
    from cloudtrain.diagnosis.record import load_verdict

    verdict = load_verdict(store, attempt) if attempt.status.state is State.FAILED else None
    if verdict is None or verdict.label != "gpu-hardware" or verdict.node is None or not verdict.certain:
        return None
    world = store.latest(attempt.attempt_id, verdict.node, "world")
    name = str(world.data.get("name") or "") if world else ""
    return BadNode(place, name, verdict.deciding, at, attempt.attempt_id) if name else None
